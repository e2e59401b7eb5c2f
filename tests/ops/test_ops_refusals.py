"""What the ring's operators refuse: tensors that do not fit, feedback that is none, rings and files that are none."""

import math
import os

import pytest
import torch
from numbered_rings import BETA, OPS, ROWS, filled_buffer, outputs

import torchreplay as tr
from torchreplay.ops import Ring

NO_PLAN = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64))


@pytest.fixture
def buffer():
    with filled_buffer() as buffer:
        yield buffer


@pytest.fixture
def ring(buffer):
    ring = Ring(buffer)
    yield ring
    ring.close()


def spoiled(position, value):
    """Outputs of which one is replaced."""
    given = [BETA, *outputs()]
    given[position] = value
    return given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (spoiled(0, torch.tensor(0.4)), "0-dimensional tensor of Float, expected a scalar of Double"),
        (spoiled(0, BETA.reshape(1)), "1-dimensional tensor of Double"),
        (spoiled(0, -BETA), "beta is -0.4, expected a finite number >= 0"),
        (spoiled(0, BETA * math.nan), "beta is -?nan"),
        (spoiled(1, outputs()[0][:2]), "2 fields were given, the batch has 3"),
        (spoiled(1, []), "0 fields were given"),
        (spoiled(1, outputs()[0][::-1]), r"fields\[0\] is Bool, expected Float"),
        (spoiled(1, outputs(9)[0]), r"fields\[0\] has 27 elements, expected a leading dimension of 8 with 3"),
        (spoiled(1, [torch.empty(3, 8).T, *outputs()[0][1:]]), r"fields\[0\] is not contiguous"),
        (spoiled(1, [torch.empty(()), *outputs()[0][1:]]), r"fields\[0\] has 1 elements"),
        (spoiled(2, torch.empty(0, dtype=torch.int64)), "key is empty"),
        (spoiled(2, torch.empty(8)), "key is Float, expected Long"),
        (spoiled(2, torch.empty(16, dtype=torch.int64)[::2]), "key is not contiguous"),
        (spoiled(3, torch.empty(7)), "weight has 7 elements and probability 8; expected 8"),
        (spoiled(4, torch.empty(2, 4)), "probability has 2 dimensions, expected 1"),
    ],
)
def test_a_draw_into_tensors_that_do_not_fit_is_a_value_error_and_draws_nothing(arguments, message, buffer, ring):
    with pytest.raises(ValueError, match=message):
        OPS.ring_sample(ring.state, *arguments)
    assert buffer.stats().draws == 0
    assert ring.sample(4)["key"].shape == (4,)


@pytest.mark.parametrize(
    ("key", "td", "message"),
    [
        ([1, 2, 3], [1.0, math.nan, math.inf], "2 of 3 TD errors are NaN or infinite, the first at index 1"),
        ([1, 2], [1.0], "td has 1 elements, expected one for each of 2 keys"),
        ([1, 2], [[1.0, 2.0]], "td has 2 dimensions"),
        ([1, 2], [1j, 2j], "td is ComplexFloat, expected a real dtype"),
        ([1.0], [1.0], "key is Float, expected Long"),
        ([1, ROWS], [1.0, 1.0], r"key\[1\] is 100, which this buffer never issued: expected 0 to 99"),
        ([-1], [1.0], r"key\[0\] is -1"),
    ],
)
def test_feedback_that_does_not_fit_is_a_value_error_and_nothing_is_applied(key, td, message, buffer, ring):
    with pytest.raises(ValueError, match=message):
        ring.update_priorities(torch.tensor(key), torch.tensor(td))
    assert buffer.stats().updated == buffer.stats().stale_updates == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state[:3].clone(), "ring has 3 elements, expected 4"),
        (lambda state: state.int(), "ring is Int, expected Long"),
        (lambda state: torch.zeros(4, dtype=torch.int64), "names no buffer that is attached in this process"),
        (lambda state: state.index_fill(0, torch.tensor([2]), -1), r"the stream in ring is -1"),
        (lambda state: state.index_fill(0, torch.tensor([3]), 2**48), r"the step in ring is 281474976710656"),
    ],
)
def test_a_tensor_that_is_no_ring_is_a_value_error(spoil, message, ring):
    with pytest.raises(ValueError, match=message):
        OPS.ring_sample(spoil(ring.state), BETA, *outputs())


@pytest.mark.parametrize("fd", [-1, 2**40, 1_000_000])
def test_attaching_what_is_no_descriptor_is_a_value_error(fd):
    with pytest.raises(ValueError, match=f"fd is {fd}, expected an open descriptor of a replay buffer"):
        OPS.ring_attach(fd, 1, *NO_PLAN)


def test_attaching_another_file_or_another_buffer_is_a_value_error(buffer, tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    with pytest.raises(ValueError, match="not a replay segment"):
        OPS.ring_attach(fd, 1, *NO_PLAN)
    os.close(fd)
    with pytest.raises(ValueError, match="names another buffer"):
        OPS.ring_attach(buffer._segment.fd, buffer._nonce ^ 1, *NO_PLAN)
    with pytest.raises(ValueError, match="no buffer with the nonce 1 is attached"):
        OPS.ring_detach(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "batch_size is 0: expected an int from 1"),
        ((2.5,), "batch_size is 2.5"),
        ((4, tr.LinearSchedule(0.4, 1.0, 10)), "beta is the schedule LinearSchedule.*: pass the number"),
    ],
)
def test_a_bad_batch_size_or_a_schedule_is_a_value_error(arguments, message, ring):
    with pytest.raises(ValueError, match=message):
        ring.sample(*arguments)

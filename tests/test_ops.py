"""The ring's operators against the buffer itself, published formulas, torch's operator checks and its compiler."""

import gc
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked, shared_counters

import torchreplay as tr
from torchreplay.ops import Ring
from torchreplay.spec import ELEMENTS

ROWS = 100
OPS = torch.ops.torchreplay
NO_PLAN = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64))
BETA = torch.tensor(0.4, dtype=torch.float64)


def filled_buffer(rows=ROWS, capacity=128, **arguments):
    """A prioritized buffer whose row with key k holds the number k."""
    spec = {"obs": {"position": tr.Field((3,))}, "number": tr.Field((), torch.int64), "done": tr.Field((), torch.bool)}
    sampler = tr.Prioritized(alpha=0.6, beta=0.4)
    buffer = tr.ReplayBuffer(spec, capacity, sampler=sampler, seed=7, **arguments)
    if rows:
        write(buffer, rows)
    return buffer


def write(buffer, rows):
    number = torch.arange(rows)
    position = number.float()[:, None].expand(rows, 3)
    buffer.extend(obs={"position": position}, number=number, done=number % 2 == 0, priority=number % 10 + 0.5)


@pytest.fixture
def buffer():
    with filled_buffer() as buffer:
        yield buffer


@pytest.fixture
def ring(buffer):
    ring = Ring(buffer)
    yield ring
    ring.close()


def outputs(n=8):
    """Tensors for a batch of `filled_buffer`: fields, key, weight, probability."""
    fields = [torch.empty(n, 3), torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.bool)]
    return fields, torch.empty(n, dtype=torch.int64), torch.empty(n), torch.empty(n)


def leaves():
    return ((torch.arange(ROWS) % 10 + 0.5).double() + 1e-6) ** 0.6


def test_a_batch_holds_the_rows_that_were_written_under_its_keys(ring):
    batch = ring.sample(64)
    assert batch.keys() == {"obs", "number", "done", "key", "weight", "probability"}
    assert torch.equal(batch["number"], batch["key"])
    assert torch.equal(batch["obs"]["position"], batch["key"].float()[:, None].expand(64, 3))
    assert torch.equal(batch["done"], batch["key"] % 2 == 0)
    assert batch["key"].min() >= 0
    assert batch["key"].max() < ROWS


def test_a_row_of_every_dtype_comes_back_as_it_was_written():
    names = [str(dtype).removeprefix("torch.") for dtype in ELEMENTS]
    with tr.ReplayBuffer(dict(zip(names, [tr.Field((2,), d) for d in ELEMENTS], strict=True)), 4) as buffer:
        row = {name: torch.tensor([[0, 1]]).to(dtype) for name, dtype in zip(names, ELEMENTS, strict=True)}
        buffer.extend(**row)
        batch = Ring(buffer).sample(1)
        assert all(torch.equal(batch[name], value) and batch[name].dtype == value.dtype for name, value in row.items())


def test_probability_and_weight_follow_the_formulas_of_prioritized_replay(buffer, ring):
    p = leaves()
    for beta in (None, 1.0, torch.tensor(0.7)):
        batch = ring.sample(32, beta)
        probability = p / p.sum()
        exponent = 0.4 if beta is None else float(beta)
        weight = (ROWS * probability) ** -exponent / ((ROWS * probability) ** -exponent).max()
        torch.testing.assert_close(batch["probability"].double(), probability[batch["key"]], rtol=1e-5, atol=0)
        torch.testing.assert_close(batch["weight"].double(), weight[batch["key"]], rtol=1e-5, atol=0)


def test_a_ring_set_to_the_stream_of_the_buffer_draws_the_batches_of_the_buffer(buffer, ring):
    ring.state[2] = 0
    for _ in range(3):
        theirs, ours = buffer.sample(16), ring.sample(16)
        assert all(torch.equal(ours[name], theirs[name]) for name in ("key", "number", "weight", "probability"))
    assert ring.state[3] == 3


def test_rings_draw_from_streams_of_their_own_and_leave_the_global_generator_alone(buffer, ring):
    generator = torch.get_rng_state()
    other = Ring(buffer)
    ours, theirs = ring.sample(32)["key"], other.sample(32)["key"]
    assert not torch.equal(ours, theirs)
    ring.state[3] = 0
    assert torch.equal(ring.sample(32)["key"], ours)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_td_errors_of_any_real_dtype_and_stride_reach_exactly_their_items(buffer, ring, dtype):
    key = torch.tensor([3, 50, 99])
    ring.update_priorities(key, torch.tensor([[-4, 0], [2, 0], [8, 0]], dtype=dtype)[:, 0])
    expected = leaves()
    expected[key] = (torch.tensor([4.0, 2.0, 8.0]).double() + 1e-6) ** 0.6
    batch = buffer.sample(64)
    torch.testing.assert_close(
        batch["probability"].double(), expected[batch["key"]] / expected.sum(), rtol=1e-5, atol=0
    )
    assert buffer.stats().updated == 3


def test_td_errors_of_overwritten_rows_are_dropped_and_counted():
    with filled_buffer(capacity=50) as buffer:
        Ring(buffer).update_priorities(torch.tensor([10, 60]), torch.tensor([9.0, 9.0]))
        assert (buffer.stats().updated, buffer.stats().stale_updates) == (1, 1)


def test_size_is_the_number_of_rows_held(buffer, ring):
    assert ring.size().item() == len(buffer) == ROWS
    write(buffer, 50)
    assert ring.size().item() == len(buffer) == 128


def test_a_draw_that_would_have_to_wait_says_so_with_the_numbers_and_can_be_made_later():
    with filled_buffer(rows=0, limiter=tr.MinSize(3)) as buffer:
        ring = Ring(buffer)
        with pytest.raises(RuntimeError, match=r"0 items were inserted, 3 are needed .* call buffer.sample\(\) first"):
            ring.sample(4)
        assert ring.state[3] == 0
        write(buffer, 3)
        assert ring.sample(4)["key"].max() < 3
        buffer.stop()
        with pytest.raises(RuntimeError, match="the replay buffer was stopped"):
            ring.sample(4)


def test_the_rings_of_a_process_are_one_learner_until_the_last_is_closed_or_garbage(buffer):
    first, second = Ring(buffer), Ring(buffer)
    assert buffer.stats().learners == 0
    first.sample(1), second.sample(1)
    assert buffer.stats().learners == 1
    first.close(), first.close()
    assert second.sample(1)["key"].shape == (1,)
    second.close()
    assert buffer.stats().learners == 0
    with pytest.raises(ValueError, match=r"make one here with torchreplay\.ops\.Ring"):
        second.sample(1)
    third = Ring(buffer)
    third.sample(1)
    del third
    gc.collect()
    assert buffer.stats().learners == 0


def test_a_ring_outlives_the_buffer_object_it_was_made_of():
    buffer = filled_buffer()
    ring = Ring(buffer)
    buffer.close()
    assert torch.equal((batch := ring.sample(16))["number"], batch["key"])
    with pytest.raises(RuntimeError, match="closed"):
        Ring(buffer)
    with pytest.raises(TypeError, match=r"buffer is 3: expected torchreplay\.ReplayBuffer"):
        Ring(3)


def test_a_forked_child_draws_from_another_stream_and_is_another_learner(buffer, ring):
    drawn = shared_counters(33)
    parent = ring.sample(32)["key"]

    def child():
        ring.state[3] = 0
        for i, key in enumerate(ring.sample(32)["key"].tolist()):
            drawn[i] = key
        drawn[32] = buffer.stats().learners

    with Forked(child) as process:
        assert process.wait() == 0
    assert sorted(drawn[:32].tolist()) != sorted(parent.tolist())
    assert 0 <= min(drawn[:32]) <= max(drawn[:32]) < ROWS
    assert drawn[32] == 2
    assert buffer.stats().learners == 1


def test_the_operators_pass_the_checks_of_torch_library(ring):
    torch.library.opcheck(OPS.ring_sample.default, (ring.state, BETA, *outputs()))
    torch.library.opcheck(OPS.ring_update_priorities.default, (ring.state, torch.arange(4), torch.ones(4)))
    torch.library.opcheck(OPS.ring_size.default, (ring.state,))


def train_step(ring, weights, beta):
    """Draws, computes a loss, feeds back and draws again: the second batch depends on the feedback of the first."""
    batch = ring.sample(16, beta)
    td = batch["obs"]["position"] @ weights - batch["number"]
    loss = (batch["weight"] * td.square()).mean()
    ring.update_priorities(batch["key"], td)
    second = ring.sample(16, beta)
    return loss, batch["key"], second["key"], second["probability"]


def check_compiled_step_does_what_the_plain_step_does(backend):
    torch._dynamo.reset()
    compiled = torch.compile(train_step, fullgraph=True, backend=backend)
    with filled_buffer() as ours, filled_buffer() as theirs:
        ring, plain = Ring(ours), Ring(theirs)
        for i in range(12):  # more than torch.compile's limit of recompilations: beta is annealed
            weights = torch.linspace(0.1, 0.4, 3) * (i + 1)
            for got, expected in zip(
                compiled(ring, weights, 0.4 + 0.05 * i), train_step(plain, weights, 0.4 + 0.05 * i), strict=True
            ):
                torch.testing.assert_close(got, expected)
        assert torch.equal(ring.state[2:], plain.state[2:])
        assert ours.stats().updated == theirs.stats().updated == 12 * 16


def test_a_compiled_step_without_graph_breaks_does_what_the_plain_step_does():
    check_compiled_step_does_what_the_plain_step_does("aot_eager")


def test_a_step_compiled_to_native_code_does_what_the_plain_step_does():
    # In a process of its own: the compiler leaves threads behind.
    program = "import test_ops; test_ops.check_compiled_step_does_what_the_plain_step_does('inductor')"
    arguments = [sys.executable, "-W", "ignore", "-c", program]
    result = subprocess.run(arguments, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=170)
    assert result.returncode == 0, result.stderr


def test_a_compiled_function_keeps_draws_whose_batches_it_ignores_and_merges_none(buffer, ring):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def three_draws():
        first = ring.sample(32)
        ring.sample(32)
        return first["key"], ring.sample(32)["key"]

    first, third = three_draws()
    assert buffer.stats().draws == 3
    ring.state[3] = 0
    assert torch.equal(ring.sample(32)["key"], first)
    ring.state[3] = 2
    assert torch.equal(ring.sample(32)["key"], third)


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
        ((4, tr.Linear(0.4, 1.0, 10)), "beta is the schedule Linear.*: pass the number"),
    ],
)
def test_a_bad_batch_size_or_a_schedule_is_a_value_error(arguments, message, ring):
    with pytest.raises(ValueError, match=message):
        ring.sample(*arguments)


def test_repr_names_fields_stream_and_draws_made(ring):
    ring.sample(4)
    assert repr(ring) == f"Ring(fields: obs/position, number, done, process {os.getpid()}, stream 1, 1 draws made)"
    ring.close()
    assert repr(ring).endswith("1 draws made, closed)")


def linked_buffer(view, **arguments):
    spec = {"obs": tr.Field((2,)), "reward": tr.Field(), "terminated": tr.Field((), torch.bool)}
    buffer = tr.ReplayBuffer(spec | {"truncated": tr.Field((), torch.bool)}, 64, view=view, seed=3, **arguments)
    steps = np.arange(10, dtype=np.float32)
    ends = steps == 9
    buffer.extend(obs=np.arange(22).reshape(11, 2), reward=steps, terminated=ends, truncated=np.zeros(10, bool))
    return buffer


@pytest.mark.parametrize(
    "view",
    [tr.Transitions(n_step=3, gamma=0.5, stack={"obs": 2}), tr.Sequences(4, stride=2), tr.Sequences(2, burn_in=1)],
)
def test_a_ring_draws_the_items_that_gather_finds_under_their_keys(view):
    buffer = linked_buffer(view)
    batch = Ring(buffer).sample(16)
    same = buffer.gather(batch["key"])
    assert batch.keys() == same.keys()
    for name in batch.keys() - {"weight", "probability"}:
        assert torch.equal(batch[name], same[name]), name


def test_a_ring_relabels_goals_as_the_view_says():
    view = tr.Hindsight(
        lambda achieved, desired: desired[:, 0], achieved="obs", desired="goal", share=1.0, observation=("obs", "goal")
    )
    spec = {"obs": tr.Field((1,)), "goal": tr.Field((1,)), "reward": tr.Field(), "terminated": tr.Field((), torch.bool)}
    buffer = tr.ReplayBuffer(spec | {"truncated": tr.Field((), torch.bool)}, 64, view=view)
    flags = np.zeros(3, bool)
    buffer.extend(
        obs=np.arange(4)[:, None],
        goal=np.full((4, 1), 9),
        reward=np.zeros(3),
        terminated=flags,
        truncated=np.array([False, False, True]),
    )
    batch = Ring(buffer).sample(32)
    assert batch["relabelled"].all()
    assert torch.equal(batch["reward"], batch["next_goal"][:, 0])
    assert torch.equal(batch["goal"], batch["next_goal"])
    assert (batch["goal"] > batch["obs"]).all()
    assert (batch["goal"] <= 3).all()

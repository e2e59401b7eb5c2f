"""`extend(casting="unsafe")` casts as `numpy.ndarray.astype` does, and lists are values."""

from itertools import product

import numpy as np
import pytest
import torch
from scalar_steps import STEPS

import torchreplay as tr

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
GIVEN = [
    [0.0, 1.0, 1.9],
    [0, 1, 2],
    np.array([0, 1, 1], np.int8),
    torch.tensor([True, False, True]),
    torch.tensor([1.0, 0.0, 3.7]),
]
WIDER = [dtype for dtype in DTYPES if dtype != torch.int8]
LARGER = [np.array([1.5, 2.5, 200.0])]
"""What an int8 does not hold: C leaves that cast undefined."""


@pytest.mark.parametrize(("dtype", "values"), [*product(DTYPES, GIVEN), *product(WIDER, LARGER)], ids=str)
def test_an_unsafe_cast_is_that_of_numpy(dtype, values):
    with tr.ReplayBuffer({"x": tr.Field((), dtype)}, 4) as buffer:
        buffer.extend(x=values, casting="unsafe")
        found = buffer.gather(buffer.keys())["x"]
        expected = np.asarray(values).astype(str(dtype).removeprefix("torch."), casting="unsafe")
        np.testing.assert_array_equal(found.numpy(), expected)


def test_nested_fields_are_cast_too():
    with tr.ReplayBuffer({"o": {"flag": tr.Field((), torch.bool)}, "n": tr.Field((2,), torch.int64)}, 4) as buffer:
        buffer.extend(o={"flag": [1.0, 0.0]}, n=np.array([[1.0, 2.0], [3.0, 4.0]]), casting="unsafe")
        rows = buffer.gather(buffer.keys())
        assert rows["o"]["flag"].tolist() == [True, False]
        assert rows["n"].tolist() == [[1, 2], [3, 4]]


def test_whole_episodes_are_cast():
    with tr.ReplayBuffer(STEPS, 10, view=tr.Transitions()) as buffer:
        buffer.extend(
            obs=[0.0, 1.0, 2.0], action=[1.0, 1.0], reward=[1, 1], terminated=[0, 1], truncated=[0.0, 0.0],
            casting="unsafe",
        )  # fmt: skip
        assert buffer.gather(buffer.keys())["terminated"].tolist() == [False, True]


@pytest.mark.parametrize("values", [["a", "b"], [[1.0], [1.0, 2.0]], None, object(), [1.0, None], np.array(["x"])])
def test_what_is_no_number_is_refused_all_the_same(values):
    with tr.ReplayBuffer({"x": tr.Field((), torch.int64)}, 4) as buffer:
        with pytest.raises(ValueError, match="field 'x'"):
            buffer.extend(x=values, casting="unsafe")
        assert buffer.next_key == 0


def test_without_it_numpys_rule_of_the_same_kind_holds():
    with tr.ReplayBuffer({"x": tr.Field((), torch.int64)}, 4) as buffer:
        with pytest.raises(ValueError, match="same_kind"):
            buffer.extend(x=[1.0])
        with pytest.raises(ValueError, match="casting"):
            buffer.extend(x=[1.0], casting="safe")
        buffer.extend(x=[1, 2])
        with buffer.writer() as writer:
            writer.append(x=3)
        assert buffer.gather(buffer.keys())["x"].tolist() == [1, 2, 3]


def test_a_writer_takes_lists_and_tuples_of_numbers():
    with tr.ReplayBuffer({"x": tr.Field((2, 2)), "n": tr.Field((3,), torch.uint8)}, 4) as buffer:
        with buffer.writer() as writer:
            writer.append(x=[[1, 2], [3, 4.5]], n=(1, 2, 255))
            with pytest.raises(ValueError, match="256"):
                writer.append(x=[[1, 2], [3, 4]], n=[1, 2, 256])
        row = buffer.gather(buffer.keys())
        assert row["x"].tolist() == [[[1, 2], [3, 4.5]]]
        assert row["n"].tolist() == [[1, 2, 255]]


def test_values_of_any_length_are_cast_each_by_itself():
    spec = {"x": tr.Ragged(torch.uint8), "y": tr.Ragged(torch.int64, (2,)), "b": tr.Ragged(torch.bool, like="x")}
    with tr.ReplayBuffer(spec, 8, ragged_bytes=1 << 16) as buffer:
        ways = (
            {"x": [[1.9, 2.0], [], np.array([3.5])], "y": [np.zeros((0, 2)), [[1.5, 2.5]], []]},
            {"x": (np.array([1.9, 2.0, 3.5]), [2, 0, 1]), "y": (torch.tensor([[1.5, 2.5]]), [0, 1, 0])},
            {"x": [1.9, 2.0, 3.5], "y": [[1.5, 2.5]], "lengths": {"x": [2, 0, 1], "y": [0, 1, 0]}},
        )
        for way in ways:
            flags = [2.0, 0.0, 1.0] if "lengths" in way else [[2.0, 0.0], [], [1.0]]
            batch = buffer.gather(buffer.extend(**way, b=flags, casting="unsafe"))
            assert batch["x"].tolist() == [1, 2, 3]
            assert batch["y"].tolist() == [[1, 2]]
            assert batch["b"].tolist() == [True, False, True]
            assert batch.lengths("x").tolist() == [2, 0, 1]
        with pytest.raises(ValueError, match="does not cast to uint8"):
            buffer.extend(**ways[0], b=flags)

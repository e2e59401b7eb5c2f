"""Batches: plain dicts that remember their buffer and keep their keys on the CPU, wherever they go."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate, default_convert

import torchreplay as tr

SPEC = {"x": tr.Field((3,)), "deep": {"image": tr.Field((2, 2), torch.uint8), "done": tr.Field((), torch.bool)}}


@pytest.fixture
def buffer():
    buffer = tr.ReplayBuffer(SPEC, 10, sampler=tr.Prioritized(), seed=0)
    deep = {"image": np.arange(20, dtype=np.uint8).reshape(5, 2, 2), "done": np.arange(5) > 2}
    buffer.extend(x=np.arange(15.0).reshape(5, 3), deep=deep)
    return buffer


def test_a_dtype_is_no_device(buffer):
    with pytest.raises(TypeError, match=r"device is torch.float16: expected a device"):
        buffer.sample(2).to(torch.float16)


def assert_same(one, other):
    assert type(one) is type(other) is tr.ReplayBatch
    assert one.source == other.source
    assert list(one) == list(other)
    for name in ("x", "key", "weight", "probability"):
        assert torch.equal(one[name], other[name])
    for name in ("image", "done"):
        assert torch.equal(one["deep"][name], other["deep"][name])


def test_a_batch_is_a_dict_of_contiguous_tensors_with_the_batch_dimension_first(buffer):
    batch = buffer.sample(7)
    assert isinstance(batch, dict)
    assert (batch.batch_size, len(batch)) == (7, 5)
    shapes = {name: (batch[name].dtype, tuple(batch[name].shape)) for name in ("x", "key", "weight", "probability")}
    assert shapes == {
        "x": (torch.float32, (7, 3)),
        "key": (torch.int64, (7,)),
        "weight": (torch.float32, (7,)),
        "probability": (torch.float32, (7,)),
    }
    assert (batch["deep"]["image"].dtype, batch["deep"]["image"].shape) == (torch.uint8, (7, 2, 2))
    assert (batch["deep"]["done"].dtype, batch["deep"]["done"].shape) == (torch.bool, (7,))
    assert all(t.is_contiguous() for t in (batch["x"], batch["deep"]["image"], batch["deep"]["done"]))


def test_a_batchs_memory_is_its_own(buffer):
    first, second = buffer.sample(5), buffer.sample(5)
    kept = copy.deepcopy(second)
    first["x"].zero_()
    buffer.storage["x"].zero_()
    assert_same(second, kept)
    second["x"].requires_grad_().sum().backward()
    assert second["x"].grad.eq(1).all()


def test_a_copy_and_a_union_know_where_they_came_from(buffer):
    batch = buffer.sample(7)
    copied, more = batch.copy(), batch | {"advantage": torch.zeros(7)}
    assert_same(copied, batch)
    copied["x"] = more["x"] = None
    assert (type(more), more.source) == (tr.ReplayBatch, batch.source)
    assert "advantage" not in batch
    with pytest.raises(TypeError, match="unsupported operand"):
        batch | 5
    assert batch["x"] is not None
    with tr.ReplayBuffer({"x": tr.Field()}, 10) as other:
        for strange in (copied, more):
            with pytest.raises(ValueError, match="drawn from another buffer"):
                other.update_priorities(strange, torch.ones(7))


def test_a_plain_dict_of_a_batch_gives_feedback_by_its_keys(buffer):
    batch = buffer.sample(7)
    buffer.update_priorities({name: batch[name] for name in ("x", "key")}, torch.ones(7))
    assert buffer.stats().updated == 7
    for keys in ({"x": batch["x"]}, {"key": {"key": batch["key"]}}):
        with pytest.raises(ValueError, match="the keys are a value of type"):
            buffer.update_priorities(keys, torch.ones(7))
    assert buffer.stats().updated == 7


def test_the_items_of_a_batch_are_gathered_by_its_keys(buffer):
    batch = buffer.sample(7)
    for given in (batch, dict(batch), {"key": batch["key"]}):
        again = buffer.gather(given)
        assert again["key"].tolist() == batch["key"].tolist()
        assert torch.equal(again["deep"]["image"], batch["deep"]["image"])
    with pytest.raises(ValueError, match="the keys are a value of type NoneType"):
        buffer.gather({"x": batch["x"]})


def test_to_moves_every_tensor_but_the_keys_and_leaves_the_original(buffer):
    batch = buffer.sample(4)
    batch["note"] = "whatever"
    moved = batch.to("meta")  # a device that every build of torch has
    assert type(moved) is tr.ReplayBatch
    assert moved.source == batch.source
    assert (moved["x"].device.type, moved["deep"]["image"].device.type, moved["weight"].device.type) == ("meta",) * 3
    assert moved["key"] is batch["key"]
    assert moved["note"] == "whatever"
    assert batch["x"].device.type == "cpu"
    for device in ("cpu", torch.device("cpu")):
        assert_same(buffer_batch := buffer.sample(4), buffer_batch.to(device, non_blocking=False))


@pytest.mark.gpu
def test_a_pinned_batch_goes_to_the_gpu_and_its_feedback_comes_back(buffer):
    batch = buffer.sample(4)
    pinned = batch.pin_memory()
    assert pinned["x"].is_pinned()
    assert pinned["deep"]["image"].is_pinned()
    assert not pinned["key"].is_pinned()
    moved = pinned.to("cuda")
    torch.cuda.synchronize()
    assert (moved["x"].is_cuda, moved["weight"].is_cuda, moved["key"].is_cuda) == (True, True, False)
    assert_same(moved.to("cpu", non_blocking=False), batch)
    buffer.update_priorities(moved, moved["x"].sum(1))
    buffer.flush()
    assert buffer.stats().updated == 4


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch)), default_convert],
    ids=["copy", "deepcopy", "pickle", "default_convert"],
)
def test_a_copy_of_a_batch_is_a_batch_of_the_same_buffer(buffer, duplicate):
    batch = buffer.sample(4)
    copied = duplicate(batch)
    assert copied is not batch
    assert_same(copied, batch)
    other = tr.ReplayBuffer(SPEC, 10)
    other.extend(x=np.ones((5, 3)), deep={"image": np.ones((5, 2, 2), np.uint8), "done": np.ones(5, bool)})
    with pytest.raises(ValueError, match="another buffer"):
        other.update_priorities(copied, torch.ones(4))
    buffer.update_priorities(copied, torch.ones(4))
    assert buffer.stats().updated == 4


def test_a_dict_rebuilt_from_a_batch_still_names_its_rows(buffer):
    batch = buffer.sample(4)
    rebuilt = type(batch)(batch.items())  # as libraries do that map over collections
    moved = rebuilt.to("cpu")
    buffer.update_priorities(moved, torch.ones(4))
    buffer.update_priorities(dict(batch)["key"], torch.ones(4))
    assert buffer.stats().updated == 8


def test_batches_collate_like_other_dicts(buffer):
    together = default_collate([buffer.sample(4), buffer.sample(4)])
    assert together["x"].shape == (2, 4, 3)
    assert together["deep"]["done"].shape == (2, 4)


def test_repr_tells_shapes_and_dtypes_and_no_values(buffer):
    assert repr(buffer.sample(4)) == (
        "ReplayBatch(x: float32[4, 3], deep: {image: uint8[4, 2, 2], done: bool[4]}, key: int64[4], "
        "weight: float32[4], probability: float32[4])"
    )


# Names that are not there


@pytest.mark.parametrize(
    ("asked", "meant"), [("weights", "'weight'"), ("keys", "'key'"), ("next_observation", None), (0, None)]
)
def test_a_name_that_a_batch_has_not_is_a_key_error_with_the_nearest_names(asked, meant):
    batch = tr.ReplayBatch(obs=torch.zeros(1), key=torch.zeros(1), weight=torch.zeros(1))
    with pytest.raises(KeyError) as caught:
        batch[asked]
    text = str(caught.value)
    assert repr(asked) in text.replace('"', "'")
    assert "'obs', 'key', 'weight'" in text
    assert (f"did you mean {meant}" in text) == (meant is not None)


def test_asking_otherwise_for_a_name_is_as_with_any_dict():
    batch = tr.ReplayBatch(obs=torch.zeros(1))
    assert "weights" not in batch
    assert batch.get("weights") is None
    assert batch.get("weights", 3) == 3
    assert batch.pop("weights", None) is None
    with pytest.raises(KeyError):
        batch.pop("weights")

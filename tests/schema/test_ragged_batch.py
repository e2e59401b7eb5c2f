"""Values of any length in a batch: packed, with offsets that go wherever it goes, and in other forms when asked for."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, default_convert

import torchreplay as tr
from torchreplay.schema.spec import ELEMENTS

LENGTHS = [3, 0, 5, 1]


def ragged(lengths, shape=(), dtype=torch.float32):
    """Returns the values by themselves: each other, counted on from 1."""
    counted = itertools.count(1)
    return [
        torch.tensor([next(counted) for _ in range(n * torch.Size(shape).numel())]).reshape(n, *shape).to(dtype)
        for n in lengths
    ]


def packed(entries, likes=None, steps=None):
    """Returns a batch as the core makes it, of lists of values by name; `likes`: names of fields with one length."""
    batch, offsets, lengths = tr.ReplayBatch(), {}, {}
    for name, values in entries.items():
        sizes = torch.tensor([len(value) for value in values])
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(torch.int32)
        leader = (likes or {}).get(name)
        level, bounds, sized = batch, offsets, lengths
        *above, last = name.split("/")
        for part in above:
            level, bounds, sized = (d.setdefault(part, {}) for d in (level, bounds, sized))
        level[last] = torch.cat(values)
        bounds[last] = offsets[leader] if leader else ends
        sized[last] = sizes if steps is None else sizes.reshape(-1, steps)
    items = len(values) if steps is None else len(values) // steps
    batch |= {"reward": torch.zeros(items), "offsets": offsets, "lengths": lengths}
    batch |= {"key": torch.arange(items), "weight": torch.ones(items), "probability": torch.ones(items)}
    batch.source = 5
    return batch


def filled_by_hand(values, value, side, multiple_of):
    longest = max((len(v) for v in values), default=0)
    while longest % multiple_of:
        longest += 1
    rows = []
    for v in values:
        padding = torch.full((longest - len(v), *v.shape[1:]), value, dtype=v.dtype)
        rows.append(torch.cat([v, padding] if side == "right" else [padding, v]))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
def test_values_of_every_dtype_are_padded(dtype):
    values = ragged(LENGTHS, (), torch.int64)
    values = [v.to(torch.bool if dtype == torch.bool else dtype) for v in values]
    value = 1 if dtype == torch.bool else 7
    got = packed({"x": values}).padded("x", value=value)
    assert got.dtype == dtype
    # torch compares few unsigned numbers: bytes then.
    assert torch.equal(got.view(torch.uint8), filled_by_hand(values, value, "right", 1).view(torch.uint8))


@pytest.mark.parametrize("lengths", [LENGTHS, [0, 0, 0], [1], [8, 8], [2, 9]], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("multiple_of", [1, 8])
def test_padding_goes_to_either_side_and_up_to_a_multiple(lengths, shape, side, multiple_of):
    values = ragged(lengths, shape)
    got = packed({"x": values}).padded("x", value=-1, side=side, multiple_of=multiple_of)
    assert torch.equal(got, filled_by_hand(values, -1, side, multiple_of))
    assert got.is_contiguous()


def test_a_batch_without_items_is_padded_to_nothing():
    batch = packed({"x": ragged([1])})
    batch |= {"x": torch.empty(0, 3), "offsets": {"x": torch.zeros(1, dtype=torch.int32)}}
    batch["lengths"] = {"x": torch.empty(0, dtype=torch.int64)}
    assert batch.padded("x", multiple_of=8).shape == (0, 0, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"value": -1}, "value is -1: expected a number that torch.uint8 holds"),
        ({"value": 256}, "value is 256"),
        ({"value": 0.5}, "value is 0.5"),
        ({"value": None}, "value is None"),
        ({"side": "both"}, "side is 'both': expected one of 'right', 'left'"),
        ({"multiple_of": 0}, "multiple_of is 0: expected an int of at least 1"),
    ],
    ids=str,
)
def test_padding_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        packed({"x": ragged(LENGTHS, dtype=torch.uint8)}).padded("x", **arguments)


def test_nested_tensors_share_the_values_and_compute_with_those_of_the_same_length():
    tokens, logprob = ragged(LENGTHS), ragged(LENGTHS)
    batch = packed({"tokens": tokens, "logprob": logprob}, likes={"logprob": "tokens"})
    nested = batch.nested("tokens")
    assert nested.layout == torch.jagged
    assert nested.values().data_ptr() == batch["tokens"].data_ptr()
    for got, expected in zip(nested.unbind(), tokens, strict=True):
        assert torch.equal(got, expected)
    both = (nested + batch.nested("logprob")).unbind()
    assert [part.tolist() for part in both] == [(2 * part).tolist() for part in tokens]
    assert torch.equal(nested.to_padded_tensor(-1.0), batch.padded("tokens", value=-1))


def test_the_offsets_are_those_that_flash_attention_takes():
    batch = packed({"tokens": ragged(LENGTHS)})
    assert batch.offsets("tokens").tolist() == [0, 3, 3, 8, 9]
    assert batch.offsets("tokens").dtype == torch.int32
    assert batch.lengths("tokens").tolist() == LENGTHS
    assert batch.lengths("tokens").dtype == torch.int64


def test_a_name_that_is_no_ragged_field_is_refused_with_those_that_are():
    batch = packed({"obs/tokens": ragged(LENGTHS), "points": ragged(LENGTHS, (3,))})
    for call in (batch.offsets, batch.lengths, batch.padded, batch.nested):
        with pytest.raises(
            KeyError, match="'reward' is no ragged field: those of the batch are 'obs/tokens', 'points'"
        ):
            call("reward")
    with pytest.raises(KeyError, match="the batch has none"):
        tr.ReplayBatch(x=torch.zeros(3)).offsets("x")
    assert batch.padded("obs/tokens").shape == (4, 5)


def test_fields_of_one_shape_may_be_called_offsets_and_lengths():
    spec = {"offsets": {"x": tr.Field((), torch.int32)}, "lengths": {"x": tr.Field((), torch.int64)}}
    with tr.ReplayBuffer(spec, 10) as buffer:
        buffer.extend(offsets={"x": [1, 2]}, lengths={"x": [1, 2]})
        for size in (1, 2):
            batch = buffer.sample(size)
            assert batch.to("meta")["lengths"]["x"].device.type == "meta"
            assert "lengths: {x: int64" in repr(batch)
            assert set(batch.to_tensordict()["lengths"].keys()) == {"x"}


def assert_same(one, other, names=("tokens", "obs/points")):
    assert type(one) is type(other) is tr.ReplayBatch
    assert one.source == other.source
    for name in names:
        assert torch.equal(one.offsets(name), other.offsets(name))
        assert torch.equal(one.lengths(name), other.lengths(name))
        assert torch.equal(one.padded(name), other.padded(name))


def test_offsets_and_lengths_go_wherever_a_batch_goes():
    batch = packed({"tokens": ragged(LENGTHS), "obs/points": ragged([1, 2, 0, 4], (3,))})
    for other in (
        batch.copy(),
        batch | {"advantage": torch.zeros(4)},
        copy.copy(batch),
        copy.deepcopy(batch),
        pickle.loads(pickle.dumps(batch)),
        batch.to("cpu"),
        default_convert(batch),
        next(iter(DataLoader([batch], batch_size=None))),
    ):
        assert_same(batch, other)


@pytest.mark.slow
def test_offsets_and_lengths_come_from_a_worker_of_a_loader():
    batch = packed({"tokens": ragged(LENGTHS), "obs/points": ragged([1, 2, 0, 4], (3,))})
    assert_same(batch, next(iter(DataLoader([batch], batch_size=None, num_workers=1))))


def test_lengths_stay_on_the_cpu_and_offsets_go_with_the_values():
    batch = packed({"tokens": ragged(LENGTHS), "logprob": ragged(LENGTHS)}, likes={"logprob": "tokens"})
    moved = batch.to("meta")
    assert (moved["tokens"].device.type, moved.offsets("tokens").device.type) == ("meta", "meta")
    assert moved.lengths("tokens") is batch.lengths("tokens")
    assert moved["key"] is batch["key"]
    assert moved.offsets("logprob") is moved.offsets("tokens"), "one tensor, by which nested ones know each other"
    assert moved.padded("tokens").shape == (4, 5), "without a look at the device"


def test_pinning_leaves_keys_and_lengths_and_keeps_fields_alike(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self.clone())
    batch = packed({"tokens": ragged(LENGTHS), "logprob": ragged(LENGTHS)}, likes={"logprob": "tokens"})
    moved = batch.pin_memory()
    assert type(moved) is tr.ReplayBatch
    assert not any(tensor is batch["key"] or tensor is batch.lengths("tokens") for tensor in pinned)
    assert sum(tensor is batch.offsets("tokens") for tensor in pinned) == 1
    assert moved.offsets("tokens") is moved.offsets("logprob") is not batch.offsets("tokens")
    assert moved.lengths("tokens") is batch.lengths("tokens")
    assert torch.equal(moved.padded("tokens"), batch.padded("tokens"))


@pytest.mark.gpu
def test_a_batch_on_a_gpu_is_padded_and_nested_there():
    batch = packed({"tokens": ragged(LENGTHS), "obs/points": ragged([1, 2, 0, 4], (3,))})
    pinned = batch.pin_memory()
    assert pinned["tokens"].is_pinned()
    assert pinned.offsets("tokens").is_pinned()
    moved = pinned.to("cuda")
    assert torch.equal(moved.padded("tokens", value=2, multiple_of=8).cpu(), batch.padded("tokens", 2, multiple_of=8))
    assert torch.equal(moved.padded("obs/points", side="left").cpu(), batch.padded("obs/points", side="left"))
    assert torch.equal(moved.nested("tokens").to_padded_tensor(0.0).cpu(), batch.padded("tokens"))


def test_a_batch_says_how_many_elements_are_in_how_many_values():
    batch = packed({"tokens": ragged(LENGTHS), "obs/points": ragged([1, 2, 0, 4000], (3,))})
    assert repr(batch).startswith(
        "ReplayBatch(tokens: float32[9 in 4], obs: {points: float32[4,003 in 4, 3]}, reward: float32[4], key: int64[4]"
    )
    assert "offsets" not in repr(batch)
    windows = packed({"tokens": ragged([1, 2, 0, 4, 5, 6])}, steps=3)
    assert repr(windows).startswith("ReplayBatch(tokens: float32[18 in 2 x 3], reward: float32[2]")


def test_windows_are_padded_step_by_step():
    values = ragged([1, 2, 0, 4, 5, 6], (2,))
    batch = packed({"tokens": values}, steps=3)
    assert batch.lengths("tokens").tolist() == [[1, 2, 0], [4, 5, 6]]
    assert torch.equal(batch.padded("tokens"), filled_by_hand(values, 0, "right", 1).reshape(2, 3, 6, 2))
    assert len(batch.nested("tokens").unbind()) == 6


def test_a_tensordict_has_nested_tensors_of_the_items():
    tokens, points = ragged(LENGTHS), ragged([1, 2, 0, 4], (3,))
    batch = packed({"tokens": tokens, "obs/points": points, "next_obs/points": points})
    found = batch.to_tensordict(column=True)
    assert found.batch_size == (4,)
    assert set(found.keys()) == {"tokens", "obs", "next", "key", "weight", "probability"}
    for name, values in (("tokens", tokens), (("obs", "points"), points), (("next", "obs", "points"), points)):
        assert found[name].layout == torch.jagged
        for got, expected in zip(found[name].unbind(), values, strict=True):
            assert torch.equal(got, expected)
    assert found["tokens"].values().data_ptr() == batch["tokens"].data_ptr()
    assert found["next", "reward"].shape == (4, 1)


def test_a_tensordict_of_windows_has_a_nested_tensor_of_items_and_the_lengths_of_their_steps():
    values = ragged([1, 2, 0, 4, 5, 6])
    likes = {"logprob": "tokens"}
    found = packed({"tokens": values, "logprob": values}, likes=likes, steps=3).to_tensordict()
    assert [part.tolist() for part in found["tokens"].unbind()] == [
        torch.cat(values[:3]).tolist(),
        torch.cat(values[3:]).tolist(),
    ]
    assert found["lengths", "tokens"].tolist() == [[1, 2, 0], [4, 5, 6]]
    assert (found["tokens"] + found["logprob"]).values().tolist() == (2 * torch.cat(values)).tolist()

"""`MixedDataset` with shares: TD errors go back to the right rows of the right buffer, and to no others."""

import copy
import pickle

import numpy as np
import pytest
import torch
from mixed_buffers import filled, priorities, rows_of, take
from torch.utils.data import DataLoader, default_convert

import torchreplay as tr
from torchreplay.ray.sharded.shard_keys import as_keys


@pytest.fixture
def pair():
    buffers = filled(0), filled(1)
    yield buffers
    for buffer in buffers:
        buffer.close()


def test_td_errors_reach_exactly_the_rows_of_the_buffer_they_come_from(pair):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 32)
    (batch,) = take(dataset, 1)
    assert set(batch["key"][:16].tolist()) & set(batch["key"][16:].tolist())  # keys coincide
    td = -(2.0 + batch["key"] + 100 * batch["home"])
    dataset.update_priorities(batch, td)
    for home, buffer in enumerate(pair):
        assert buffer.stats().updated == 16
        expected = torch.ones(50, dtype=torch.float64)
        for key in batch["key"][batch["home"] == home].tolist():
            expected[key] = 2 + key + 100 * home
        torch.testing.assert_close(priorities(buffer), expected, rtol=1e-4, atol=0)


def through_loader(batch):
    class One(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield batch

    (out,) = DataLoader(One(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    return out


WAYS = {
    "to": lambda batch: batch.to("cpu"),
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "copy": copy.deepcopy,
    "convert": default_convert,
    "rebuilt": lambda batch: type(batch)(batch.items()),
    "laber": lambda batch: tr.LaBER(16, seed=1)(batch, torch.rand(32)),
    "loader": through_loader,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_keeps_its_way_back_wherever_it_goes(pair, way):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 32)
    batch = WAYS[way](take(dataset, 1)[0])
    for buffer in pair:
        with pytest.raises(ValueError, match=r"mixes items of several buffers.*dataset.update_priorities\(batch, td\)"):
            buffer.update_priorities(batch, torch.ones(batch.batch_size))
    dataset.update_priorities(batch, 2.0 + batch["key"] + 100 * batch["home"])
    for home, buffer in enumerate(pair):
        changed = set(batch["key"][batch["home"] == home].tolist())
        found = priorities(buffer)
        for key in range(50):
            assert float(found[key]) == pytest.approx(2 + key + 100 * home if key in changed else 1, rel=1e-4)


@pytest.mark.parametrize("dtype", [">f4", "longdouble", ">i2"])
def test_td_errors_may_be_of_any_dtype_of_numpys_that_holds_real_numbers(dtype):
    with tr.ReplayBuffer({"x": tr.Field()}, 4, sampler=tr.Prioritized(alpha=1.0, eps=1.0)) as buffer:
        buffer.extend(x=np.zeros(2))
        buffer.update_priorities(np.array([0, 1]), np.array([5, 1]).astype(dtype))
        assert buffer.gather(np.array([0, 1]))["probability"].tolist() == [0.75, 0.25]


def read_only(values):
    values.flags.writeable = False
    return values


LAYOUTS = {
    "backwards": lambda values: values[::-1].copy()[::-1],
    "big-endian": lambda values: values.astype(values.dtype.newbyteorder(">")),
    "long double": lambda values: values.astype(np.longdouble),
    "every second": lambda values: np.repeat(values, 2)[::2],
    "read-only": lambda values: read_only(values.copy()),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_td_errors_may_lie_in_memory_as_they_like(pair, layout):
    td = LAYOUTS[layout](np.arange(1.0, 9.0))
    dataset = tr.MixedDataset({pair[0]: 1}, 8)
    (batch,) = take(dataset, 1)
    batch["key"].copy_(torch.arange(8))
    dataset.update_priorities(batch, td)
    assert priorities(pair[0])[:8].tolist() == pytest.approx(np.arange(1.0, 9.0), rel=1e-4)
    certain = LAYOUTS[layout](np.array([0.0, 1e6] + [0.0] * 6))
    assert (tr.LaBER(4, eps=0.0)(batch, certain)["key"] == 1).all()
    assert as_keys(LAYOUTS[layout](np.arange(8)) if layout != "long double" else range(8)).tolist() == list(range(8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_td_errors_may_be_of_any_real_dtype_with_gradient_or_without(pair, dtype):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8)
    (batch,) = take(dataset, 1)
    dataset.update_priorities(batch, torch.full((8,), 3, dtype=dtype))
    dataset.update_priorities(batch, torch.full((8,), 3.0, requires_grad=True))
    dataset.update_priorities(batch, np.full(8, 3))
    dataset.update_priorities(batch, [3] * 8)
    for buffer in pair:
        assert buffer.stats().updated == 16
        assert buffer.stats().priority_max == 3


@pytest.mark.parametrize(
    ("td", "message"),
    [
        (torch.tensor([1.0, 1, 1, 1, 1, float("nan"), 1, float("inf")]), "2 of 8 of the TD errors are NaN.*index 5"),
        (torch.ones(7), r"the TD errors are torch.float32 \[7\]: expected \[8\]"),
        (torch.ones(8, 1), r"the TD errors are torch.float32 \[8, 1\]"),
        (torch.ones(8, dtype=torch.complex64), "complex64"),
        (None, "the TD errors: got None"),
        ({"red": torch.ones(8)}, "the TD errors: got {'red'"),
    ],
)
def test_bad_td_errors_are_refused_and_nothing_is_applied(pair, td, message):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8)
    (batch,) = take(dataset, 1)
    with pytest.raises(ValueError, match=message):
        dataset.update_priorities(batch, td)
    assert [buffer.stats().updated for buffer in pair] == [0, 0]


def test_batches_that_are_not_of_the_dataset_are_refused(pair):
    dataset, turned = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8), tr.MixedDataset({pair[1]: 1, pair[0]: 1}, 8)
    td = torch.ones(8)
    with pytest.raises(ValueError, match="was drawn from other buffers"):
        dataset.update_priorities(next(iter(turned)), td)
    with pytest.raises(ValueError, match="expected one of this dataset, with 'key' and 'buffer'"):
        dataset.update_priorities(pair[0].sample(8), td)
    with pytest.raises(ValueError, match="expected one of this dataset"):
        dataset.update_priorities(torch.arange(8), td)
    (batch,) = take(dataset, 1)
    for name, values, message in (
        ("buffer", batch["buffer"] + 1, r"has a 2: expected 0 to 1"),
        ("buffer", batch["buffer"][:4], r"has shape \[4\]: expected \[8\], as the keys"),
        ("buffer", batch["buffer"].float(), r"batch\['buffer'\] is torch.float32 \[8\]: expected int64"),
        ("key", batch["key"].int(), r"batch\['key'\] is torch.int32"),
    ):
        changed = copy.copy(batch)
        changed[name] = values
        with pytest.raises(ValueError, match=message):
            dataset.update_priorities(changed, td)
    assert [buffer.stats().updated for buffer in pair] == [0, 0]


@pytest.mark.parametrize("key", [50, -1, 1 << 40])
def test_a_key_that_its_buffer_never_issued_is_named_by_its_place_in_the_batch_and_nothing_is_applied(pair, key):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8)
    (batch,) = take(dataset, 1)
    batch["key"][6] = key
    with pytest.raises(ValueError, match=f"key {key} at index 6 was never issued by buffer 1, .*: nothing was applied"):
        dataset.update_priorities(batch, torch.full((8,), 3.0))
    assert [buffer.stats().updated for buffer in pair] == [0, 0]


def test_with_one_of_the_buffers_closed_nothing_is_applied(pair):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8)
    (batch,) = take(dataset, 1)
    pair[1].close()
    with pytest.raises(RuntimeError, match="closed"):
        dataset.update_priorities(batch, torch.full((8,), 3.0))
    assert pair[0].stats().updated == 0


def test_td_errors_of_rows_overwritten_since_are_dropped_and_counted_where_they_were(pair):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 3}, 16)
    (batch,) = take(dataset, 1)
    for _ in range(3):
        pair[1].extend(**rows_of(1, 50))
    dataset.update_priorities(batch, torch.ones(16))
    assert [buffer.stats().updated for buffer in pair] == [4, 0]
    assert [buffer.stats().stale_updates for buffer in pair] == [0, 12]

"""Datasets over buffers whose values have any length: whole batches, drawn ahead, within a budget, and mixed."""

import numpy as np
import pytest
import torch
from ragged_model import split
from torch.utils.data import DataLoader

import torchreplay as tr

SPEC = {"tokens": tr.Ragged(torch.int32), "logprob": tr.Ragged(torch.float32, like="tokens"), "n": tr.Field()}


def filled(rows, longest=40, seed=0, **options):
    """Returns a buffer whose row n has tokens that are all n."""
    random = np.random.default_rng(seed)
    buffer = tr.ReplayBuffer(SPEC, rows, ragged_bytes=1 << 18, seed=seed, **options)
    lengths = random.integers(0, longest, rows)
    tokens = [np.full(size, n, np.int32) for n, size in enumerate(lengths)]
    buffer.extend(tokens=tokens, logprob=[t + 0.5 for t in tokens], n=np.arange(rows))
    return buffer


def assert_whole(batch, of=None):
    """Checks that each item has its own values."""
    names = batch["n"].tolist()
    for n, tokens, logprob in zip(names, split(batch, "tokens"), split(batch, "logprob"), strict=True):
        assert tokens.tolist() == [n] * len(tokens)
        assert logprob.tolist() == [n + 0.5] * len(tokens)
    assert batch.lengths("tokens").tolist() == [len(tokens) for tokens in split(batch, "tokens")]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_batch_is_whole(prefetch):
    with filled(100) as buffer:
        batches = list(tr.ReplayDataset(buffer, 16, steps=20, prefetch=prefetch))
    assert len(batches) == 20
    for batch in batches:
        assert batch.batch_size == 16
        assert_whole(batch)


def test_batches_that_are_drawn_ahead_are_those_that_sample_draws():
    with filled(100, seed=3) as one, filled(100, seed=3) as other:
        for ahead in tr.ReplayDataset(one, 16, steps=10):
            batch = other.sample(16)
            assert torch.equal(ahead["key"], batch["key"])
            assert torch.equal(ahead["tokens"], batch["tokens"])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_batch_has_more_elements_than_its_budget(prefetch):
    with filled(100) as buffer:
        sizes = set()
        for batch in tr.ReplayDataset(buffer, 16, steps=60, prefetch=prefetch, budget={"logprob": 200}):
            assert 1 <= batch.batch_size <= 16
            assert len(batch["tokens"]) <= 200
            assert_whole(batch)
            sizes.add(batch.batch_size)
        assert len(sizes) > 2
        assert tr.ReplayDataset(buffer, 16, budget={"tokens": 5}).budget == {"tokens": 5}


def test_an_epoch_has_every_item_once_also_within_a_budget():
    with filled(100, sampler=tr.Uniform(replacement=False)) as buffer:
        for budget in (None, {"tokens": 200}):
            batches = list(tr.ReplayDataset(buffer, 16, epochs=1, budget=budget))
            assert sorted(n for batch in batches for n in batch["n"].tolist()) == list(range(100))
            for batch in batches:
                assert_whole(batch)
        assert len(tr.ReplayDataset(buffer, 16, epochs=1)) == 7
        with pytest.raises(TypeError, match="the lengths of values decide"):
            len(tr.ReplayDataset(buffer, 16, epochs=1, budget={"tokens": 200}))


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [({"n": 5}, ValueError, "budget names 'n'"), ({"tokens": 0}, ValueError, "is 0"), (5, TypeError, "budget is 5")],
    ids=str,
)
def test_a_budget_that_cannot_be_is_refused_when_the_dataset_is_made(budget, error, message):
    with filled(4) as buffer, pytest.raises(error, match=message):
        tr.ReplayDataset(buffer, 2, budget=budget)


def test_an_item_that_is_more_than_the_budget_comes_alone_and_is_said():
    with filled(4, longest=2) as buffer:
        buffer.extend(tokens=[[7] * 50] * 4, logprob=[[7.5] * 50] * 4, n=[7.0] * 4)
        with pytest.warns(RuntimeWarning, match="50 elements of 'tokens', and the budget is 20"):
            (batch,) = tr.ReplayDataset(buffer, 4, steps=1, budget={"tokens": 20})
        assert batch.batch_size == 1
        assert_whole(batch)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_hands_batches_on_as_they_are(workers):
    with filled(100) as buffer:
        dataset = tr.ReplayDataset(buffer, 16, steps=6, budget={"tokens": 250})
        batches = list(DataLoader(dataset, batch_size=None, num_workers=workers))
    assert len(batches) == 6
    for batch in batches:
        assert type(batch) is tr.ReplayBatch
        assert len(batch["tokens"]) <= 250
        assert_whole(batch)


def test_buffers_mix_into_one_batch_whose_offsets_go_on():
    with filled(50, seed=1, sampler=tr.Prioritized()) as one, filled(80, sampler=tr.Prioritized()) as other:
        dataset = tr.MixedDataset({one: 0.25, other: 0.75}, 16, steps=5)
        for batch in dataset:
            assert batch.batch_size == 16
            assert_whole(batch)
            assert batch.offsets("tokens") is batch.offsets("logprob")
            dataset.update_priorities(batch, torch.ones(16))


@pytest.mark.parametrize("budget", [None, {"tokens": 200}], ids=str)
def test_a_dataset_goes_on_where_its_state_says(budget):
    with filled(100, seed=5) as one, filled(100, seed=5) as other:
        dataset = tr.ReplayDataset(one, 16, budget=budget)
        stream = iter(dataset)
        for _ in range(3):
            next(stream)
        state = dataset.state_dict()
        assert all(len(drawn["key"]) <= 16 for drawn in state["drawn"])
        expected = [next(stream) for _ in range(4)]
        again = tr.ReplayDataset(other, 16, budget=budget)
        again.load_state_dict(state)
        for batch, wanted in zip(again, expected, strict=False):
            assert torch.equal(batch["key"], wanted["key"])
            assert torch.equal(batch["tokens"], wanted["tokens"])


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_go_to_a_device_with_their_offsets(prefetch):
    with filled(100) as buffer:
        for batch in tr.ReplayDataset(buffer, 16, steps=10, prefetch=prefetch, device="cuda"):
            assert (batch["tokens"].device.type, batch.offsets("tokens").device.type) == ("cuda", "cuda")
            assert batch.lengths("tokens").device.type == "cpu"
            assert_whole(batch.to("cpu"))

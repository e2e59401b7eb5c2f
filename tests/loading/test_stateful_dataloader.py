"""`ReplayDataset` under torchdata's `StatefulDataLoader`, which asks datasets for their state, in workers too."""

import itertools

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import torchreplay as tr

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it

BATCH, STEPS = 8, 20


def filled_buffer():
    buffer = tr.ReplayBuffer({"number": tr.Field((), torch.int64)}, 1024, sampler=tr.Prioritized(alpha=1.0), seed=7)
    buffer.extend(number=torch.arange(256), priority=torch.arange(256) % 13 + 1.0)
    return buffer


def loader_of(buffer, workers):
    dataset = tr.ReplayDataset(buffer, BATCH, steps=STEPS)
    method = "fork" if workers else None
    return StatefulDataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=method)


def mixed_loader_of(workers):
    dataset = tr.MixedDataset({filled_buffer(): 1, filled_buffer(): 1}, BATCH, steps=STEPS)
    method = "fork" if workers else None
    return StatefulDataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=method)


def keys_of(batches):
    return [tuple(batch["key"].tolist()) for batch in batches]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("taken", [1, 7, 19])
def test_a_loader_goes_on_where_its_state_was_taken(workers, taken, tmp_path):
    loader = loader_of(filled_buffer(), workers)
    batches = iter(loader)
    seen = keys_of(itertools.islice(batches, taken))
    torch.save(loader.state_dict(), tmp_path / "state")
    expected = keys_of(batches)
    assert len(seen) + len(expected) == STEPS
    assert len(set(seen + expected)) == STEPS
    resumed = loader_of(filled_buffer(), workers)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=False))
    assert keys_of(resumed) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_loader_can_be_resumed_again_at_any_place(workers):
    buffer = filled_buffer()
    next(iter(tr.ReplayDataset(buffer, BATCH)))  # the parent's own draws are no worker's
    loader = loader_of(buffer, workers)
    batches = iter(loader)
    state = loader.state_dict()
    expected = keys_of(batches)
    for taken in (1, 1, 3):
        resumed = loader_of(filled_buffer(), workers)
        resumed.load_state_dict(state)
        batches = iter(resumed)
        assert keys_of(itertools.islice(batches, taken)) == expected[:taken]
        state, expected = resumed.state_dict(), expected[taken:]
        assert keys_of(batches) == expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_goes_on_where_its_state_was_taken(workers):
    for taken in (1, 2, 5, 8):
        loader = mixed_loader_of(workers)
        batches = iter(loader)
        keys_of(itertools.islice(batches, taken))
        state, expected = loader.state_dict(), keys_of(batches)
        resumed = mixed_loader_of(workers)
        resumed.load_state_dict(state)
        assert keys_of(resumed) == expected

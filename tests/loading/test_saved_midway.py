"""A buffer that is saved within a loop over a dataset which draws ahead: with the dataset's state, and without."""

import itertools

import pytest
import torch
from forked import eventually

import torchreplay as tr

SIZE, AHEAD, HANDED_OUT = 10, 3, 5
SAMPLERS = {
    "uniform": tr.Uniform(),
    "prioritized": tr.Prioritized(),
    "epochs": tr.Uniform(replacement=False),
    "two draws": tr.Uniform(max_draws=2),
}


def fed_back(buffer, batch):
    if isinstance(buffer.sampler, tr.Prioritized):
        buffer.update_priorities(batch, batch["x"] % 17 + 1.0)
    return batch["x"].tolist()


def taken(buffer, batches, n):
    return [fed_back(buffer, batch) for batch in itertools.islice(batches, n)]


def saved_midway(sampler, directory):
    """What a loop got before it saved, its dataset's state, and what it would have got."""
    with tr.ReplayBuffer({"x": tr.Field((), torch.int64)}, 1000, sampler=sampler, seed=5) as buffer:
        buffer.extend(x=torch.arange(200))
        dataset = tr.ReplayDataset(buffer, SIZE, prefetch=AHEAD)
        batches = iter(dataset)
        before = taken(buffer, batches, HANDED_OUT)
        eventually(lambda: dataset.ready == AHEAD)
        buffer.save(directory)
        return before, dataset.state_dict(), taken(buffer, batches, 10)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_with_the_state_the_batches_are_those_of_a_loop_that_was_never_interrupted(kind, tmp_path):
    _, state, after = saved_midway(SAMPLERS[kind], tmp_path)
    with tr.ReplayBuffer.load(tmp_path) as loaded:
        dataset = tr.ReplayDataset(loaded, SIZE, prefetch=AHEAD)
        dataset.load_state_dict(state)
        assert taken(loaded, dataset, 10) == after
        dataset.end()
        assert (loaded.draws, loaded.stats().draws, loaded.stats().sampled) == (15, 15, 15 * SIZE)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_alone_it_goes_on_behind_the_last_batch_and_what_was_drawn_ahead_counts(kind, tmp_path):
    saved_midway(SAMPLERS[kind], tmp_path)
    with tr.ReplayBuffer.load(tmp_path) as loaded:
        assert loaded.draws == HANDED_OUT
        assert loaded.stats().draws == HANDED_OUT + AHEAD
        assert loaded.stats().sampled == (HANDED_OUT + AHEAD) * SIZE


def test_alone_uniform_draws_are_the_same(tmp_path):
    _, _, after = saved_midway(tr.Uniform(), tmp_path)
    with tr.ReplayBuffer.load(tmp_path) as loaded:
        assert taken(loaded, tr.ReplayDataset(loaded, SIZE, prefetch=AHEAD), 10) == after


def test_alone_draws_by_priority_know_all_that_was_fed_back(tmp_path):
    before, _, _ = saved_midway(tr.Prioritized(alpha=1.0), tmp_path)
    fed = torch.tensor(sorted({number for batch in before for number in batch}))
    with tr.ReplayBuffer.load(tmp_path) as loaded:
        known = loaded.priorities(loaded.keys()).double()
        torch.testing.assert_close(known[fed], fed % 17 + 1.0, rtol=1e-5, atol=1e-5, check_dtype=False)
        batch = next(iter(tr.ReplayDataset(loaded, SIZE)))
        expected = (known / known.sum())[batch["key"]]
        torch.testing.assert_close(batch["probability"].double(), expected, rtol=1e-5, atol=0.0)


def test_alone_an_epoch_lacks_what_was_drawn_ahead(tmp_path):
    before, state, after = saved_midway(tr.Uniform(replacement=False), tmp_path)
    ahead = after[:AHEAD]
    with tr.ReplayBuffer.load(tmp_path) as loaded:
        rest = taken(loaded, tr.ReplayDataset(loaded, SIZE, epochs=1), 100)
    assert sorted(itertools.chain(*before, *ahead, *rest)) == list(range(200))
    assert len(state["drawn"]) == AHEAD


def test_alone_items_that_leave_after_so_many_draws_have_had_one_more(tmp_path):
    before, _, after = saved_midway(tr.Uniform(max_draws=2), tmp_path)
    with tr.ReplayBuffer.load(tmp_path) as loaded:
        rest = [x for batch in taken(loaded, tr.ReplayDataset(loaded, 1), 400 - 8 * SIZE) for x in batch]
    assert sorted([*itertools.chain(*before, *after[:AHEAD]), *rest]) == sorted([*range(200)] * 2)

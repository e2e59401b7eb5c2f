"""Resuming a `MixedDataset`: with other shares and sizes, and the refusal of another dataset's state."""

import pytest
import torch
from mixed_buffers import filled, take

import torchreplay as tr
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.loading.mixture import Mixture


@pytest.fixture
def pair():
    buffers = filled(0, seed=1), filled(1, seed=2)
    yield buffers
    for buffer in buffers:
        buffer.close()


def state_of(dataset, taken=2):
    """Its state halfway through an iteration, with batches drawn ahead."""
    iterator = iter(dataset)
    take(iterator, taken)
    state = dataset.state_dict()
    iterator.close()
    assert all(part["drawn"] for part in state.get("parts", [state]))
    return state


@pytest.mark.parametrize(("share", "batch_size"), [(0.5, 8), (0.25, 8), (0.75, 16), (0.5, 4), (0.75, 8)])
def test_a_state_resumes_with_other_shares_and_sizes_and_items_say_whose_they_are(pair, share, batch_size):
    state = state_of(tr.MixedDataset({pair[0]: 0.75, pair[1]: 0.25}, 8))
    dataset = tr.MixedDataset({pair[0]: share, pair[1]: 1 - share}, batch_size)
    dataset.load_state_dict(state)
    for batch in take(dataset, 4):
        assert batch["buffer"].bincount(minlength=2).tolist() == list(dataset.counts)
        assert torch.equal(batch["buffer"], batch["home"])
        dataset.update_priorities(batch, 2.0 + batch["home"])
    assert [buffer.stats().updated for buffer in pair] == [4 * count for count in dataset.counts]
    assert [buffer.stats().priority_max for buffer in pair] == [2, 3]


def test_parts_that_keep_their_size_hand_out_what_they_had_drawn_and_the_steps_done_stay_done():
    buffers = [filled(home, seed=home) for home in range(3)]
    dataset = tr.MixedDataset(dict(zip(buffers, (2, 1, 1), strict=True)), 8, steps=5)
    iterator = iter(dataset)
    take(iterator, 2)
    state = dataset.state_dict()
    expected = [batch["key"][:4].tolist() for batch in iterator]
    changed = tr.MixedDataset(dict(zip(buffers, (2.0, 1.5, 0.5), strict=True)), 8, steps=5)
    changed.load_state_dict(state)
    assert changed.counts == (4, 3, 1)
    assert [batch["key"][:4].tolist() for batch in changed] == expected
    assert len(expected) == 3


def test_a_dataset_of_one_buffer_leaves_out_what_was_drawn_ahead_in_another_size():
    buffer, twin = filled(0, seed=1), filled(0, seed=1)
    dataset = tr.ReplayDataset(buffer, 16)
    dataset.load_state_dict(state_of(tr.ReplayDataset(buffer, 8)))
    twin.draws = 4  # two were handed out, and two are left out
    for batch in take(dataset, 3):
        assert batch["key"].tolist() == twin.sample(16)["key"].tolist()


def test_a_batch_is_not_made_of_parts_of_another_size(pair):
    parts = pair[0].sample(6), pair[1].sample(2)
    with pytest.raises(RuntimeError, match=r"batches have \(6, 2\) items: expected \(4, 4\)"):
        Mixture({pair[0]: 1, pair[1]: 1}, 8, None).batch_of(parts, [TreeSummary(50.0, 50, 1.0, 0.4)] * 2)


# States of other datasets.


@pytest.mark.parametrize(
    "state",
    [
        {"epoch": 1},
        {"parts": []},
        {"form": "shares", "buffers": 2, "parts": [{}, {}]},
        {"form": "shares", "buffers": [[1, 2]], "parts": [{}, {}]},
        None,
    ],
)
def test_what_is_no_state_of_a_mixture_is_refused(pair, state):
    with pytest.raises(ValueError, match="a MixedDataset's state has 'form', 'buffers' and 'parts', a state for each"):
        tr.MixedDataset({pair[0]: 1, pair[1]: 1}).load_state_dict(state)


def test_a_state_of_the_other_form_is_refused(pair):
    by_name = tr.MixedDataset({"red": pair[0], "blue": pair[1]}, 4)
    shared = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8)
    with pytest.raises(ValueError, match="made with 'names', and this one is made with shares"):
        shared.load_state_dict(state_of(by_name))
    with pytest.raises(ValueError, match="made with 'shares', and this one is made with names"):
        by_name.load_state_dict(state_of(shared))


def test_a_state_of_another_number_of_buffers_is_refused(pair):
    state = state_of(tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8))
    with pytest.raises(ValueError, match="the state is of 2 buffers, and this dataset of 1"):
        tr.MixedDataset({pair[0]: 1}, 8).load_state_dict(state)


@pytest.mark.parametrize("marks", [[[1, 2], 3], [[1, 2], [1, 2, 3]], [[1, 2], [1, {}]]])
def test_a_state_that_does_not_say_whose_it_is_is_refused(pair, marks):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8)
    with pytest.raises(ValueError, match=r"'buffers' of the state is .*: expected a list of two numbers for each"):
        dataset.load_state_dict(dataset.state_dict() | {"buffers": marks})


@pytest.mark.parametrize("seeds", [(1, 2), (3, 3)])
def test_a_state_of_the_same_buffers_in_another_order_is_refused(seeds):
    first, second = (filled(home, seed=seed) for home, seed in enumerate(seeds))
    state = state_of(tr.MixedDataset({first: 1, second: 1}, 8))
    with pytest.raises(ValueError, match=r"these buffers in another order: what it has .* are buffers 1, 0 here"):
        tr.MixedDataset({second: 1, first: 1}, 8).load_state_dict(state)


def test_buffers_that_were_saved_and_loaded_are_told_apart_by_their_seeds(pair, tmp_path):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8)
    iterator = iter(dataset)
    take(iterator, 2)
    state = dataset.state_dict()
    loaded = []
    for buffer in pair:
        buffer.save(tmp_path / str(buffer._nonce))
        loaded.append(tr.ReplayBuffer.load(tmp_path / str(buffer._nonce)))
    expected = [batch["key"].tolist() for batch in take(iterator, 3)]
    with pytest.raises(ValueError, match="in another order"):
        tr.MixedDataset({loaded[1]: 1, loaded[0]: 1}, 8).load_state_dict(state)
    resumed = tr.MixedDataset({loaded[0]: 1, loaded[1]: 1}, 8)
    resumed.load_state_dict(state)
    assert [batch["key"].tolist() for batch in take(resumed, 3)] == expected


def test_buffers_made_anew_with_other_seeds_take_the_place_of_those_there_were(pair):
    state = state_of(tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8))
    tr.MixedDataset({filled(0, seed=2): 1, filled(1, seed=3): 1}, 8).load_state_dict(state)


def test_a_state_by_name_finds_its_buffers_in_any_order_and_refuses_other_names(pair):
    dataset = tr.MixedDataset({"red": pair[0], "blue": pair[1]}, 4, steps=5)
    iterator = iter(dataset)
    take(iterator, 2)
    state = dataset.state_dict()
    expected = [batches["blue"]["key"].tolist() for batches in iterator]
    turned = tr.MixedDataset({"blue": pair[1], "red": pair[0]}, 4, steps=5)
    turned.load_state_dict(state)
    assert [batches["blue"]["key"].tolist() for batches in turned] == expected
    other = tr.MixedDataset({"red": pair[0], "green": pair[1]}, 4)
    with pytest.raises(ValueError, match=r"of the buffers \['red', 'blue'\], and this dataset of \['red', 'green'\]"):
        other.load_state_dict(state)

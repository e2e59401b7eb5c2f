"""Copies: what has memory of its own and what is another object over the same, and that a copy goes on as it would."""

import copy
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from kept_items import assert_new_goals_are_rewarded, assert_same_items, buffer_of_episodes, buffer_of_goals
from mixed_buffers import filled as filled_home
from saved_rows import SPEC, assert_rows_are_those_of_their_keys, filled, rows
from torch import nn

import torchreplay as tr
from torchreplay import _C

COUNTERS = ("size", "drawable", "inserted", "sampled", "draws", "updated", "stale_updates", "rows_written")
PRIORITIES = ("priority_total", "priority_max", "priority_min")


def assert_same_draws(buffer, copied, batches=3, size=16):
    """Both draw the same items, feed the same back, and write rows under the same keys, in turn."""
    for turn in range(batches):
        ours, theirs = buffer.sample(size), copied.sample(size)
        assert_rows_are_those_of_their_keys(theirs)
        for name in ("key", "probability", "weight"):
            assert torch.equal(ours[name], theirs[name]), name
        for one, batch in ((buffer, ours), (copied, theirs)):
            one.update_priorities(batch, torch.arange(size) + turn)
        first = buffer.stats().rows_written
        assert torch.equal(buffer.extend(**rows(first, 3)), copied.extend(**rows(first, 3)))


@pytest.mark.parametrize("make", [copy.deepcopy, tr.ReplayBuffer.copy])
def test_a_copy_has_the_same_rows_keys_priorities_and_counters_and_draws_what_the_original_would(make):
    buffer = filled(150, 100, limiter=tr.SamplesPerInsert(2.0, min_size=5, tolerance=1e6))
    buffer.update_priorities(buffer.sample(32), torch.arange(32.0))
    copied = make(buffer)
    before, after = buffer.stats(), copied.stats()
    for name in COUNTERS + PRIORITIES:
        assert getattr(before, name) == getattr(after, name), name
    assert (copied.spec, copied.capacity, copied.nbytes) == (buffer.spec, buffer.capacity, buffer.nbytes)
    assert (copied.sampler, copied.view, copied.limiter) == (buffer.sampler, buffer.view, buffer.limiter)
    assert_same_draws(buffer, copied)
    assert_same_draws(copied, make(copied))


def test_what_is_done_to_a_copy_is_not_seen_in_the_original_nor_the_other_way_round():
    buffer = filled(50, 100)
    copied = copy.deepcopy(buffer)
    copied.extend(**rows(50, 30))
    copied.update_priorities(torch.arange(5), torch.full((5,), 99.0))
    copied.limiter = tr.MinSize(7)
    assert (len(buffer), buffer.stats().updated, buffer.limiter) == (50, 0, tr.MinSize(1))
    buffer.extend(**rows(50, 1))
    buffer.stop()
    assert (len(copied), copied.stats().updated, copied.stopped) == (80, 5, False)
    buffer.close()
    assert_rows_are_those_of_their_keys(copied.sample(64))
    assert copied.extend(**rows(80, 1)).tolist() == [80]


def test_a_copy_of_a_buffer_that_nobody_wrote_to_is_one_too():
    copied = tr.ReplayBuffer(SPEC, 10, seed=3).copy()
    assert (len(copied), copied.stats().rows_written) == (0, 0)
    with pytest.raises(tr.WouldBlockForever):
        copied.sample(1)
    assert copied.extend(**rows(0, 2)).tolist() == [0, 1]
    assert_rows_are_those_of_their_keys(copied.sample(4))


@pytest.mark.parametrize("capacity", [1, 30, 99, 100, 101, 400])
def test_a_copy_of_another_capacity_has_the_newest_rows_that_fit(capacity):
    buffer = filled(170, 100)
    copied = buffer.copy(capacity)
    kept = torch.arange(170 - min(capacity, 100), 170)
    assert (copied.capacity, len(copied)) == (capacity, len(kept))
    assert_rows_are_those_of_their_keys(batch := copied.gather(torch.arange(170)))
    assert torch.equal(batch["key"], kept)
    leaves = (kept % 7 + 1.0 + 1e-6) ** 0.7
    torch.testing.assert_close(batch["probability"].double(), leaves.double() / leaves.double().sum())
    assert copied.extend(**rows(170, 2)).tolist() == [170, 171]
    for wrong in (0, -1, 2.5, 1 << 40):
        with pytest.raises(ValueError, match="capacity is"):
            buffer.copy(wrong)


VIEWS = [
    tr.Transitions(n_step=3, stack={"obs": 2}),
    tr.Sequences(4, stride=2, burn_in=1),
    tr.Sequences(4, across_episodes=True),
]


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_linked_rows_make_the_same_items_in_a_copy(view):
    buffer = buffer_of_episodes(view)
    assert_same_items(buffer, copy.deepcopy(buffer))


def test_a_copy_under_hindsight_keeps_its_functions():
    copied = buffer_of_goals().copy()
    assert_new_goals_are_rewarded(copied.sample(64))


def test_a_schedule_goes_on_in_a_copy():
    schedule = tr.LinearSchedule(0.2, 1.0, 10)
    for beta in (schedule, lambda step: 0.2 + 0.08 * step):
        buffer = tr.ReplayBuffer(SPEC, 50, sampler=tr.Prioritized(beta=beta), seed=1)
        buffer.extend(**rows(0, 50), priority=torch.arange(50) + 1.0)
        for _ in range(4):
            buffer.sample(8)
        assert torch.equal(copy.deepcopy(buffer).sample(8)["weight"], buffer.sample(8)["weight"])


class Derived(tr.ReplayBuffer):
    """A user's own."""


def test_a_copy_is_of_the_same_class_and_in_memory_wherever_the_original_is(tmp_path):
    buffer = Derived(SPEC, 10, path=tmp_path / "rows")
    buffer.extend(**rows(0, 4))
    copied = copy.deepcopy(buffer)
    assert (type(copied), copied.path, len(copied)) == (Derived, None, 4)
    assert os.listdir(tmp_path) == ["rows"]


def test_copy_copy_and_pickle_make_another_object_over_the_same_rows():
    buffer = filled(5, 10)
    for other in (copy.copy(buffer), pickle.loads(pickle.dumps(buffer))):
        before = len(buffer)
        other.extend(**rows(before, 1))
        assert len(buffer) == before + 1


def test_deepcopy_keeps_one_buffer_one_buffer_in_whatever_holds_it_twice():
    buffer = filled(20, 100)
    dataset = tr.ReplayDataset(buffer, 4, steps=3)
    held = {"buffer": buffer, "dataset": dataset, "again": [buffer]}
    copied = copy.deepcopy(held)
    assert copied["buffer"] is copied["dataset"].buffer is copied["again"][0]
    assert copied["buffer"] is not buffer
    memo = {}
    assert copy.deepcopy(buffer, memo) is copy.deepcopy(buffer, memo) is memo[id(buffer)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_copied_dataset_draws_from_a_copied_buffer_what_the_original_draws_next(prefetch):
    dataset = tr.ReplayDataset(filled(50, 100), 8, prefetch=prefetch)
    batches = iter(dataset)
    for _ in range(3):
        next(batches)
    copied = copy.deepcopy(dataset)
    assert copied.buffer is not dataset.buffer
    for ours, theirs, _ in zip(batches, iter(copied), range(4), strict=False):
        assert torch.equal(ours["key"], theirs["key"])
    copied.buffer.extend(**rows(50, 7))
    assert len(dataset.buffer) == 50


def test_a_copied_mixed_dataset_draws_from_copies_of_its_buffers_and_feeds_back_to_them():
    buffers = filled_home(0), filled_home(1, seed=4)
    dataset = tr.MixedDataset(dict.fromkeys(buffers, 0.5), batch_size=16, prefetch=0)
    copied = copy.deepcopy(dataset)
    ours, theirs = next(iter(dataset)), next(iter(copied))
    assert torch.equal(ours["deep"]["number"], theirs["deep"]["number"])
    copied.update_priorities(theirs, torch.ones(16))
    assert [buffer.stats().updated for buffer in buffers] == [0, 0]
    assert sum(buffer.stats().updated for buffer in copied.buffers) == 16
    for one, batch in ((dataset, theirs), (copied, ours)):
        with pytest.raises(ValueError, match="drawn from other buffers"):
            one.update_priorities(batch, torch.ones(16))
    again = tr.MixedDataset(dict.fromkeys(copied.buffers, 0.5), batch_size=16)
    again.update_priorities(theirs, torch.ones(16))


def position_of(dataset):
    state = dataset.state_dict()
    return (state if "position" in state else state["parts"][0])["position"]


@pytest.mark.parametrize(
    "make", [tr.ReplayDataset, lambda buffer, *rest, **options: tr.MixedDataset({buffer: 1}, *rest, **options)]
)
def test_a_copied_dataset_over_the_same_buffers_has_a_place_of_its_own(make):
    dataset = make(filled(50, 100), 8, steps=10)
    batches = iter(dataset)
    next(batches)
    state, copied = dataset.state_dict(), copy.copy(dataset)
    drawn = iter(copied)
    assert len([next(drawn) for _ in range(3)]) == 3
    drawn.close()
    assert position_of(dataset) == 1
    copied.load_state_dict(state)
    assert len(list(copied)) == 9
    assert len(list(batches)) == 9
    assert len(list(dataset)) == 10


def test_copied_weights_have_the_newest_publication_its_version_and_their_own_memory():
    module = nn.Linear(3, 2)
    weights = tr.SharedWeights(module)
    for value in (1.0, 2.0, 3.0):
        nn.init.constant_(module.weight, value)
        weights.publish(module)
    copied = copy.deepcopy([weights, weights])[0]
    assert (copied.version, copied.pulled_version) == (3, -1)
    nn.init.constant_(module.weight, 9.0)
    weights.publish(module)
    pulled = nn.Linear(3, 2)
    assert copied.pull(pulled)
    assert pulled.weight.eq(3.0).all()
    assert not copied.pull(pulled)
    nn.init.constant_(module.weight, 7.0)
    assert copied.publish(module) == 4
    assert copied.pull(pulled)
    assert pulled.weight.eq(7.0).all()
    assert weights.pull(pulled)
    assert pulled.weight.eq(9.0).all()
    attached = pickle.loads(pickle.dumps(copied))
    assert attached.version == 4


class DerivedWeights(tr.SharedWeights):
    """A user's own."""


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda weights: pickle.loads(pickle.dumps(weights))])
def test_weights_of_a_class_of_ones_own_keep_it(way):
    assert type(way(DerivedWeights(nn.Linear(3, 2)))) is DerivedWeights


def test_writers_say_what_to_do_instead_of_copying_them():
    writer = filled(5, 10).writer()
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"neither pickled nor copied: .* call buffer\.writer\(\) there"):
            make(writer)


def test_a_closed_buffer_is_not_copied():
    buffer = filled(5, 10)
    buffer.close()
    for make in (copy.deepcopy, tr.ReplayBuffer.copy):
        with pytest.raises(RuntimeError, match="the replay buffer is closed"):
            make(buffer)


def write_until_killed(buffer, count):
    while True:
        count[0] += len(buffer.extend(**numbered(13)))


NUMBERED = {"a": tr.Field((40,), torch.int64), "b": tr.Field((), torch.int64)}


def numbered(n):
    """Rows whose parts all hold one number, which no other row has."""
    stamp = np.frombuffer(os.urandom(8 * n), np.int64)
    return {"a": np.tile(stamp[:, None], 40), "b": stamp}


@pytest.mark.parametrize("capacity", [None, 700])
def test_copies_made_while_explorers_turn_the_ring_are_full_of_whole_rows(capacity):
    buffer = tr.ReplayBuffer(NUMBERED, 5000)
    buffer.extend(**numbered(5000))
    written = shared_counters(1)
    with Forked(write_until_killed, buffer, written):
        eventually(lambda: written[0] > 0)
        most = 0
        for _ in range(20):
            head = buffer.stats().rows_written
            copied = buffer.copy(capacity)
            after = buffer.stats().rows_written
            # A slot whose ticket was issued and not yet written has the row of the turn before.
            batch = copied.gather(torch.arange(max(0, head - 10_000), after))
            assert batch["a"].eq(batch["b"][:, None]).all()
            assert len(copied) == len(batch["key"]) == copied.stats().drawable
            stayed = head - (after - 5000)  # rows that were there before the copy, and after it
            assert len(copied) >= min(capacity or 5000, stayed) - 13, "13 rows are in one call that is under way"
            most = max(most, len(copied))
            assert head <= copied.stats().rows_written <= after
            assert copied.extend(**numbered(1)).item() == copied.stats().rows_written - 1
        assert most > 0


def test_copies_are_made_in_several_threads_at_once_beside_draws():
    buffer, made = filled(300, 400), []
    threads = [threading.Thread(target=lambda: made.append(buffer.copy())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        buffer.sample(32)
    for thread in threads:
        thread.join()
    assert len(made) == 4
    for copied in made:
        assert_rows_are_those_of_their_keys(copied.gather(torch.arange(300)))
        assert len(copied) == 300


def test_keys_that_others_have_been_given_meanwhile_are_not_issued_to_an_import():
    source, target = filled(20, 30), tr.ReplayBuffer(SPEC, 30)
    columns, _ = source._segment.export_rows(0, 30)
    placing = _C.Import(target._segment)
    placing.begin(5)
    placing.issue(4)
    placing.issue(8)
    assert target.extend(**rows(8, 2)).tolist() == [8, 9]
    with pytest.raises(BufferError, match="the buffer holds rows already"):
        placing.issue(20)
    with pytest.raises(ValueError, match="a key is out of range"):
        placing.place(columns)
    placing.abandon()
    assert_rows_are_those_of_their_keys(batch := target.sample(32))
    assert set(batch["key"].tolist()) == {8, 9}
    assert target.extend(**rows(10, 1)).item() == 10

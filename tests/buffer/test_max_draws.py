"""Items that leave after so many draws, of samplers that draw at random."""

import contextlib
import itertools
import os
import signal
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from torch.utils.data import DataLoader
from worker_errors import raised_by_worker

import torchreplay as tr

SPEC = {"x": tr.Field((), "int64")}
FLAG = tr.Field((), torch.bool)
STEPS = {"obs": tr.Field((), "int64"), "reward": tr.Field(), "terminated": FLAG, "truncated": FLAG}
KINDS = {
    "uniform": tr.Uniform,
    "prioritized": tr.Prioritized,
    "epochs": lambda max_draws: tr.Uniform(replacement=False, max_draws=max_draws),
}


def filled(items, sampler, capacity=None, seed=0, **options):
    buffer = tr.ReplayBuffer(SPEC, capacity or items, sampler=sampler, seed=seed, **options)
    buffer.extend(x=np.arange(items))
    return buffer


def two_batches(dataset, state):
    """Goes on from a state, and returns how often each item came in the first two batches."""
    dataset.load_state_dict(state)
    stream = iter(dataset)
    came = Counter(number for _ in range(2) for number in next(stream)["x"].tolist())
    stream.close()
    return came


def drain(buffer, size):
    """Draws while there are draws, and returns how often each item came."""
    came = Counter()
    while buffer.num_items:
        batch = buffer.sample(size)
        came.update(batch["x"].tolist())
        if isinstance(buffer.sampler, tr.Prioritized):
            buffer.update_priorities(batch, torch.rand(size) ** 8)
    with pytest.raises(tr.WouldBlockForever, match="leaves after"):
        buffer.sample(1)
    return came


@pytest.mark.filterwarnings("ignore:a batch of")  # that holds copies
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("items", "size", "most"), [(100, 10, 1), (100, 10, 3), (20, 30, 3), (1, 7, 7), (64, 64, 2)])
def test_each_item_is_handed_out_so_often_and_leaves(kind, items, size, most):
    with filled(items, KINDS[kind](max_draws=most)) as buffer:
        came = drain(buffer, size)
        assert came == dict.fromkeys(range(items), most)
        assert buffer.num_items == 0
        assert len(buffer) == items
        buffer.extend(x=np.arange(items, 2 * items))
        assert drain(buffer, size) == dict.fromkeys(range(items, 2 * items), most)


@pytest.mark.filterwarnings("ignore:a batch of")
@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_waits_until_as_many_draws_are_left_as_it_takes(kind):
    with filled(10, KINDS[kind](max_draws=2)) as buffer:
        buffer.sample(14)
        with pytest.raises(tr.WouldBlockForever, match=r"10 items were inserted, 11 are needed .* after 2 draws"):
            buffer.sample(7)
        came = Counter(buffer.sample(6)["x"].tolist())
        assert max(came.values()) <= 2
        assert buffer.num_items == 0


def test_items_are_drawn_in_proportion_among_those_that_are_left():
    # One by one without replacement: the order is that of Plackett and Luce, P(i, j) = p_i / S * p_j / (S - p_i).
    priorities = np.array([1.0, 2.0, 3.0, 6.0])
    total, trials, pairs = priorities.sum(), 4000, Counter()
    with tr.ReplayBuffer(SPEC, 4, sampler=tr.Prioritized(alpha=1.0, eps=1e-9, max_draws=1), seed=0) as buffer:
        for _ in range(trials):  # four new items each time, in place of those that are left
            buffer.extend(x=np.arange(4), priority=priorities)
            pairs[buffer.sample(1)["x"].item(), buffer.sample(1)["x"].item()] += 1
    chi2 = 0.0
    for i, j in itertools.permutations(range(4), 2):
        expected = trials * priorities[i] / total * priorities[j] / (total - priorities[i])
        chi2 += (pairs[i, j] - expected) ** 2 / expected
    assert sum(pairs.values()) == trials
    assert chi2 < 35.0  # 11 degrees of freedom: above it in 1 of 4,000 runs; the seed is fixed


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_as_long_as_draws_are_left_of_all_nothing_else_changes(kind):
    with filled(50, KINDS[kind](max_draws=1000)) as bounded, filled(50, KINDS[kind](max_draws=None)) as other:
        for _ in range(20):
            one, two = bounded.sample(16), other.sample(16)
            for name in ("x", "key", "weight", "probability"):
                assert torch.equal(one[name], two[name])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_ahead_and_never_asked_for_counts_for_nothing(kind):
    with filled(64, KINDS[kind](max_draws=2)) as buffer:
        came = Counter()
        for _ in range(3):
            stream = iter(tr.ReplayDataset(buffer, 8, prefetch=4))
            came.update(next(stream)["x"].tolist())
            stream.close()
        assert came + drain(buffer, 8) == dict.fromkeys(range(64), 2)


def test_an_item_that_goes_back_has_its_old_priority():
    with filled(8, tr.Prioritized(alpha=1.0, eps=1e-9, max_draws=1)) as buffer:
        keys = torch.arange(8)
        buffer.update_priorities(keys, torch.arange(1.0, 9.0))
        before = buffer.gather(keys)["probability"]
        stream = iter(tr.ReplayDataset(buffer, 1, prefetch=3))
        taken = next(stream)["key"]
        stream.close()
        left = keys[keys != taken]
        torch.testing.assert_close(buffer.gather(left)["probability"], before[left] / before[left].sum())


def test_td_errors_of_items_that_are_used_up_change_nothing():
    with filled(8, tr.Prioritized(max_draws=1)) as buffer:
        batch = buffer.sample(5)
        buffer.update_priorities(batch, torch.ones(5))
        stats = buffer.stats()
        assert (stats.updated, stats.stale_updates, stats.unready_updates) == (0, 0, 0)
        assert buffer.num_items == 3
        assert not set(buffer.sample(3)["x"].tolist()) & set(batch["x"].tolist())


@pytest.mark.parametrize("goes_back", [True, False])
def test_a_td_error_that_comes_while_the_last_draw_is_ahead_is_the_items_if_that_goes_back(goes_back):
    with filled(1, tr.Prioritized(alpha=1.0, max_draws=2)) as buffer:
        dataset = tr.ReplayDataset(buffer, 1, prefetch=1)
        stream = iter(dataset)
        batch = next(stream)
        eventually(lambda: dataset.ready == 1)
        buffer.update_priorities(batch, [5.0])
        buffer.flush()
        assert buffer.num_items == 0
        if not goes_back:
            next(stream)
        stream.close()
        priority = buffer.priorities(batch).item()
        assert priority == pytest.approx(5.0) if goes_back else np.isnan(priority)
        assert buffer.stats().updated == 0


@pytest.mark.parametrize("kind", KINDS)
def test_items_that_are_discarded_do_not_come_and_new_rows_count_anew(kind):
    with filled(10, KINDS[kind](max_draws=2)) as buffer:
        buffer.discard(torch.tensor([3, 4]))
        assert drain(buffer, 4) == dict.fromkeys(sorted(set(range(10)) - {3, 4}), 2)
        buffer.extend(x=np.arange(10, 16))  # over items that are used up
        assert drain(buffer, 4) == dict.fromkeys(range(10, 16), 2)
        buffer.clear()
        buffer.extend(x=np.arange(20, 24))
        assert drain(buffer, 4) == dict.fromkeys(range(20, 24), 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("view", [tr.Transitions(), tr.Sequences(length=3, stride=1)], ids=str)
def test_items_of_steps_leave_too_while_the_ring_turns(kind, view):
    with tr.ReplayBuffer(STEPS, 30, view=view, sampler=KINDS[kind](max_draws=2), seed=0) as buffer:
        came, step = Counter(), itertools.count()
        with buffer.writer() as writer:
            for _ in range(12):
                writer.reset(obs=next(step))
                for k in range(9):
                    writer.step(obs=next(step), reward=0.0, terminated=k == 8, truncated=False)
                while buffer.num_items >= 4:
                    came.update(buffer.sample(4)["key"].tolist())
        assert came
        assert max(came.values()) <= 2
        stats = buffer.stats()
        assert stats.sampled == sum(came.values())


@pytest.mark.parametrize("kind", ["uniform", "epochs"])
def test_a_checkpoint_counts_on(kind, tmp_path):
    with filled(40, KINDS[kind](max_draws=3)) as buffer:
        came = Counter()
        for _ in range(8):
            came.update(buffer.sample(10)["x"].tolist())
        buffer.save(tmp_path / "saved")
    with tr.ReplayBuffer.load(tmp_path / "saved") as loaded:
        assert came + drain(loaded, 5) == dict.fromkeys(range(40), 3)


def test_a_checkpoint_of_priorities_keeps_what_is_used_up(tmp_path):
    with filled(40, tr.Prioritized(max_draws=2)) as buffer:
        came = Counter()
        for _ in range(6):
            came.update(buffer.sample(10)["x"].tolist())
        buffer.save(tmp_path / "saved")
    left = [item for item in range(40) if came[item] < 2]
    with tr.ReplayBuffer.load(tmp_path / "saved") as loaded:
        assert drain(loaded, 2) == dict.fromkeys(left, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_counts_on(kind, tmp_path):
    path = tmp_path / "rows.replay"
    with filled(40, KINDS[kind](max_draws=3), path=path) as buffer:
        came = Counter(buffer.sample(30)["x"].tolist())
    with tr.ReplayBuffer.open(path) as opened:
        assert came + drain(opened, 5) == dict.fromkeys(range(40), 3)


def test_a_dataset_goes_on_with_what_its_state_says_was_drawn_ahead(tmp_path):
    with filled(64, tr.Uniform(max_draws=1)) as buffer:
        dataset = tr.ReplayDataset(buffer, 8, prefetch=2)
        stream = iter(dataset)
        came = Counter(next(stream)["x"].tolist())
        buffer.save(tmp_path / "saved")
        state = dataset.state_dict()
        stream.close()
    with tr.ReplayBuffer.load(tmp_path / "saved") as loaded:
        came += two_batches(tr.ReplayDataset(loaded, 8, prefetch=2), state)
        assert came + drain(loaded, 8) == dict.fromkeys(range(64), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_processes_share_the_draws(kind):
    with filled(300, KINDS[kind](max_draws=2)) as buffer:
        came = [shared_counters(300) for _ in range(3)]

        def learn(counts):
            for _ in range(20):
                for item in buffer.sample(10)["x"].tolist():
                    counts[item] += 1

        with Forked(learn, came[0]) as one, Forked(learn, came[1]) as two:
            learn(came[2])
            assert one.wait() == two.wait() == 0
        assert (np.sum([list(counts) for counts in came], axis=0) == 2).all()


def test_a_dataset_of_epochs_ends_when_no_draws_are_left():
    with filled(10, tr.Uniform(replacement=False, max_draws=2)) as buffer:
        sizes = [len(batch["x"]) for batch in tr.ReplayDataset(buffer, 4, epochs=5)]
        assert sizes == [4, 4, 2, 4, 4, 2]


@pytest.mark.parametrize("sampler", [tr.Uniform, tr.Prioritized, tr.Fifo])
@pytest.mark.parametrize("bad", [0, -1, 1.5, True, 65_535, "2"])
def test_a_number_of_draws_that_is_none_is_refused(sampler, bad):
    with pytest.raises(ValueError, match="max_draws is"):
        sampler(max_draws=bad)
    with pytest.raises(ValueError, match="max_draws is"):
        tr.Fifo(max_draws=None)


def test_a_learner_that_waits_for_draws_is_not_waited_for():
    limiter = tr.SamplesPerInsert(4.0, min_size=10, tolerance=0.1)
    with tr.ReplayBuffer(SPEC, 1000, sampler=tr.Uniform(max_draws=1), limiter=limiter, seed=0) as buffer:

        def explore():
            with contextlib.suppress(tr.Stopped), buffer.writer() as writer:
                for k in itertools.count():
                    writer.append(x=k)

        explorer = threading.Thread(target=explore, daemon=True)
        explorer.start()
        came = Counter()
        for _ in range(10):
            came.update(buffer.sample(8, timeout=30)["x"].tolist())
        buffer.stop()
        explorer.join()
        assert came.total() == 80
        assert max(came.values()) == 1


def test_draws_of_an_epoch_that_is_over_are_due_in_the_next_when_they_go_back():
    with filled(8, tr.Uniform(replacement=False, max_draws=2), capacity=64) as buffer:
        buffer.sample(8)
        dataset = tr.ReplayDataset(buffer, 2, prefetch=2)
        stream = iter(dataset)
        next(stream)
        eventually(lambda: dataset.ready == 2)
        buffer.sample(2)
        buffer.extend(x=np.arange(8, 12))
        buffer.sample(4)
        in_the_next = buffer.sample(2)["x"].tolist()
        stream.close()
        came = [item for batch in tr.ReplayDataset(buffer, 2, epochs=1) for item in batch["x"].tolist()]
        assert len(came) == 6
        assert not set(came) & set(in_the_next)
        assert buffer.num_items == 0


def test_a_dataset_of_epochs_waits_for_the_first_items_after_a_clear():
    with filled(8, tr.Uniform(replacement=False, max_draws=1), capacity=64) as buffer:
        buffer.sample(8)
        buffer.clear()
        with pytest.raises(tr.WouldBlockForever):
            next(iter(tr.ReplayDataset(buffer, 4, epochs=1)))
        buffer.extend(x=np.arange(8, 12))
        assert [len(batch["x"]) for batch in tr.ReplayDataset(buffer, 4, epochs=1)] == [4]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_state_says_was_drawn_ahead_goes_back_where_it_is_left_out(kind, tmp_path):
    with filled(64, KINDS[kind](max_draws=1)) as buffer:
        dataset = tr.ReplayDataset(buffer, 8, prefetch=2)
        stream = iter(dataset)
        came = Counter(next(stream)["x"].tolist())
        state = dataset.state_dict()
        buffer.save(tmp_path / "saved")
        stream.close()
    with tr.ReplayBuffer.load(tmp_path / "saved") as loaded:
        assert loaded.num_items == 40
        tr.ReplayDataset(loaded, 4).load_state_dict(state)
        assert loaded.num_items == 56
        assert came + drain(loaded, 8) == dict.fromkeys(range(64), 1)


def test_a_checkpoint_keeps_the_priorities_of_what_was_drawn_ahead(tmp_path):
    with filled(8, tr.Prioritized(alpha=1.0, eps=1e-9, max_draws=1)) as buffer:
        buffer.update_priorities(torch.arange(8), torch.arange(1.0, 9.0))
        before = buffer.gather(torch.arange(8))["probability"]
        batch = buffer.sample(8)
        ahead = {"step": 0} | {name: batch[name] for name in ("key", "weight", "probability")}
        buffer.save(tmp_path / "saved")
    with tr.ReplayBuffer.load(tmp_path / "saved") as loaded:
        assert loaded.num_items == 0
        tr.ReplayDataset(loaded, 4).load_state_dict({"draws": 0, "position": 0, "drawn": [ahead]})
        torch.testing.assert_close(loaded.gather(torch.arange(8))["probability"], before)


@pytest.mark.parametrize("kind", KINDS)
def test_the_items_of_a_mix_go_back_when_another_buffer_has_none(kind):
    with filled(16, KINDS[kind](max_draws=1)) as plenty, filled(4, tr.Uniform(max_draws=1)) as few:
        stream = iter(tr.MixedDataset({"plenty": plenty, "few": few}, 4, prefetch=1))
        came = Counter(next(stream)["plenty"]["x"].tolist())
        with pytest.raises(tr.WouldBlockForever):
            next(stream)
        assert came + drain(plenty, 4) == dict.fromkeys(range(16), 1)


def test_what_was_drawn_ahead_and_discarded_since_is_not_handed_out_by_a_state():
    with filled(8, tr.Uniform(max_draws=1)) as buffer:
        batch = buffer.sample(8)
        buffer.discard(batch["key"])
        ahead = {"step": 0, "drawn_from": [8.0, 8, 1.0, 0.0]}
        ahead |= {name: batch[name] for name in ("key", "weight", "probability")}
        dataset = tr.ReplayDataset(buffer, 8)
        dataset.load_state_dict({"draws": 0, "position": 0, "drawn": [ahead]})
        with pytest.raises(tr.WouldBlockForever):
            next(iter(dataset))


def begun(buffer, size=8, prefetch=2):
    """Returns a dataset of the buffer, its stream, what that has handed out, and the state after it."""
    dataset = tr.ReplayDataset(buffer, size, prefetch=prefetch)
    stream = iter(dataset)
    came = Counter(next(stream)["x"].tolist())
    return dataset, stream, came, dataset.state_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("size", [8, 4])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_state_that_is_loaded_over_the_open_buffer_hands_nothing_out_again(kind, most, size, goes_on):
    with filled(64, KINDS[kind](max_draws=most)) as buffer:
        dataset, stream, came, state = begun(buffer)
        if goes_on:
            for _ in range(3):
                came.update(next(stream)["x"].tolist())
        stream.close()
        resumed = dataset if size == 8 else tr.ReplayDataset(buffer, size)
        resumed.load_state_dict(state)
        resumed.load_state_dict(resumed.state_dict())
        stream = iter(resumed)
        for _ in range(3):
            came.update(next(stream)["x"].tolist())
        stream.close()
        assert came + drain(buffer, 4) == dict.fromkeys(range(64), most)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_loaded_beside_the_loop_that_it_is_of_hands_nothing_out_again(kind):
    with filled(64, KINDS[kind](max_draws=1)) as buffer:
        _, stream, came, state = begun(buffer)
        resumed = tr.ReplayDataset(buffer, 8)
        resumed.load_state_dict(state)
        other = iter(resumed)
        for _ in range(3):
            came.update(next(stream)["x"].tolist())
            came.update(next(other)["x"].tolist())
        stream.close()
        other.close()
        assert came + drain(buffer, 4) == dict.fromkeys(range(64), 1)


def resumed_of(loaded, state, size):
    """Returns what a dataset of another process hands out that goes on from a state."""
    dataset = tr.ReplayDataset(loaded, size, prefetch=0)
    dataset.load_state_dict(state | {"drawn_by": "another process"})
    stream = iter(dataset)
    came = Counter()
    for _ in range(2):
        came.update(next(stream)["x"].tolist())
    stream.close()
    return came


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("size", [8, 4])
def test_what_went_back_before_a_file_was_closed_counts_when_a_state_hands_it_out(kind, most, size, tmp_path):
    path = tmp_path / "rows.replay"
    with filled(64, KINDS[kind](max_draws=most), path=path) as buffer:
        _, stream, came, state = begun(buffer)
        ahead = Counter(key for batch in state["drawn"] for key in batch["key"].tolist())
        stream.close()
    with tr.ReplayBuffer.open(path) as opened:
        again = resumed_of(opened, state, size)
        assert size != 8 or again == ahead
        assert came + again + drain(opened, 4) == dict.fromkeys(range(64), most)


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("first", ["save", "close"])
def test_what_a_state_hands_out_after_a_load_counts_whether_the_loop_ended_before_the_save(most, first, tmp_path):
    with filled(64, tr.Uniform(max_draws=most)) as buffer:
        _, stream, came, state = begun(buffer)
        if first == "close":
            stream.close()
        buffer.save(tmp_path / "saved")
        stream.close()
    with tr.ReplayBuffer.load(tmp_path / "saved") as loaded:
        came += resumed_of(loaded, state, 8)
        assert came + drain(loaded, 4) == dict.fromkeys(range(64), most)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_a_killed_process_hands_out_what_that_had_drawn_ahead(kind, tmp_path):
    path = tmp_path / "rows.replay"
    filled(64, KINDS[kind](max_draws=1), path=path).close()

    def learn():
        _, _, came, state = begun(tr.ReplayBuffer.open(path))
        torch.save((came, state), tmp_path / "new")
        os.replace(tmp_path / "new", tmp_path / "state")
        signal.pause()

    with Forked(learn) as learner:
        eventually((tmp_path / "state").exists)
        learner.kill()
    came, state = torch.load(tmp_path / "state", weights_only=False)
    with tr.ReplayBuffer.open(path) as opened:
        came += two_batches(tr.ReplayDataset(opened, 8), state)
        assert came + drain(opened, 4) == dict.fromkeys(range(64), 1)


def test_workers_of_a_dataloader_are_refused_where_items_leave_after_so_many_draws():
    with filled(64, tr.Uniform(max_draws=2)) as buffer:
        loader = DataLoader(tr.ReplayDataset(buffer, 8), batch_size=None, num_workers=1, multiprocessing_context="fork")
        with raised_by_worker(r"max_draws.*leave num_workers at 0.*QueueLoader"):
            next(iter(loader))
        mixed = tr.MixedDataset({buffer: 1}, 8)
        with raised_by_worker(r"max_draws.*leave num_workers at 0"):
            next(iter(DataLoader(mixed, batch_size=None, num_workers=1, multiprocessing_context="fork")))
        came = Counter(number for _ in range(16) for number in buffer.sample(8)["x"].tolist())
        assert came == dict.fromkeys(range(64), 2)

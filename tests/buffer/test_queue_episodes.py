"""Queues whose items have several rows, or whose rows are kept while the ring turns."""

import contextlib
import threading

import numpy as np
import pytest
import torch
from forked import eventually
from small_queues import STEPS, VIEWS, queue, step, values
from torch.utils.data import DataLoader
from worker_errors import raised_by_worker

import torchreplay as tr
from torchreplay.buffer import jams


def episodes(writer, numbers, length):
    """Episodes of that length; `action` counts all steps."""
    step = 0
    for _ in range(numbers):
        writer.reset(obs=step)
        for k in range(length):
            writer.step(obs=step + 1, action=step, reward=1.0, terminated=k == length - 1, truncated=False)
            step += 1


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
@pytest.mark.parametrize("capacity", [24, 61])
def test_items_of_several_rows_come_once_and_in_order(view, capacity):
    everything = tr.ReplayBuffer(STEPS, 1000, view=view)
    episodes(everything.writer(), 20, 13)
    expected = everything.gather(torch.sort(everything.keys()).values)
    count = len(expected["key"])
    with queue(capacity, view=view, spec=STEPS) as buffer:

        def write():
            with buffer.writer() as writer:
                episodes(writer, 20, 13)

        thread = threading.Thread(target=write)
        thread.start()
        got = []
        for batch in tr.ReplayDataset(buffer, 3):
            got += batch["key"].tolist()
            for name in ("obs", "action", "reward"):  # keys may differ: rows that are held take tickets
                part = expected[name][len(got) - len(batch["key"]) : len(got)]
                assert torch.equal(batch[name], part), name
        thread.join()
        assert len(got) == count
        assert got == sorted(set(got))


def test_an_item_that_is_late_is_the_first_as_soon_as_it_is_complete():
    with queue(100, view=tr.Transitions(), spec=STEPS) as buffer:
        slow, fast = buffer.writer(), buffer.writer()
        slow.reset(obs=0)
        episodes(fast, 2, 4)
        assert len(buffer.sample(3)["key"]) == 3
        slow.step(obs=1, action=77, reward=0.0, terminated=False, truncated=False)
        assert buffer.sample(2)["action"].tolist() == [77, 3]


def test_a_window_bounds_how_far_others_overtake():
    with queue(100, view=tr.Transitions(), spec=STEPS, window=0.1) as buffer:
        slow, fast = buffer.writer(), buffer.writer()
        slow.reset(obs=0)
        episodes(fast, 4, 9)  # rows 1 to 40, of which nine in ten are items
        got = buffer.sample(50, at_least=1)["key"]
        assert got.max() < 10
        said = f"0 can be drawn.*; {36 - len(got)} complete items are beyond the window, after an unfinished one"
        with pytest.raises(tr.WouldBlockForever, match=said):
            buffer.sample(1)
        slow.step(obs=1, action=77, reward=0.0, terminated=True, truncated=False)
        assert len(buffer.sample(50, at_least=1)["key"]) > 20


def test_a_ring_that_is_full_behind_a_window_is_found(monkeypatch):
    monkeypatch.setattr(jams, "RETURN_GRACE", 0.1)
    with queue(20, view=tr.Transitions(), spec=STEPS, window=0.5) as buffer:

        def explore_slowly():
            with contextlib.suppress(tr.Stopped), buffer.writer() as writer:
                writer.reset(obs=0)
                eventually(lambda: buffer.next_key == 20)
                step(writer, 0)

        def explore():
            with contextlib.suppress(tr.Stopped), buffer.writer() as writer:
                eventually(lambda: buffer.next_key == 1)
                episodes(writer, 100, 3)

        threads = [threading.Thread(target=body) for body in (explore_slowly, explore)]
        for thread in threads:
            thread.start()
        said = (
            "12 items are asked for, 14 are complete.*beyond the window of 0.5 wait.*leave window out, or choose a "
            "capacity of at least.*room for all rows that are written while the slowest environment completes an item"
        )
        with buffer.expect_writers(), pytest.raises(tr.WouldBlockForever, match=said):
            buffer.sample(12, timeout=20)
        buffer.stop()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("spare", [0, 1])
def test_a_window_takes_room_for_all_that_is_written_until_the_slow_item_is_complete(spare):
    with queue(20 + spare, view=tr.Transitions(), spec=STEPS, window=0.5) as buffer:
        slow, fast = buffer.writer(), buffer.writer()
        slow.reset(obs=0)
        fast.reset(obs=0)
        for number in range(18):
            step(fast, number)
        got = buffer.sample(50, at_least=1)["action"].tolist()
        assert 0 < len(got) < 18
        if not spare:
            slow.timeout = 0.3  # where another test has left a thread, the wait believes that it may draw
            with pytest.raises((tr.WouldBlockForever, tr.ReplayTimeout), match="an unfinished episode"):
                step(slow, 77, terminated=True)
            return
        step(slow, 77, terminated=True)
        got += buffer.sample(50, at_least=1)["action"].tolist()
        assert sorted(got) == [*range(18), 77]


@pytest.mark.parametrize("how", ["reset", "close"])
def test_an_episode_that_is_given_up_keeps_no_room(how):
    with queue(20, view=tr.Transitions(n_step=3), spec=STEPS) as buffer:
        writer = buffer.writer()
        writer.reset(obs=0)
        writer.step(obs=1, action=-1, reward=0.0, terminated=False, truncated=False)
        if how == "close":
            writer.close()
            writer = buffer.writer()

        def write():
            with writer:
                episodes(writer, 10, 9)

        thread = threading.Thread(target=write)
        thread.start()
        got = [action for batch in tr.ReplayDataset(buffer, 5) for action in batch["action"].tolist()]
        thread.join()
        assert got == list(range(90))


def test_workers_of_an_ordinary_loader_are_refused():
    with queue(items=20) as buffer:
        loader = DataLoader(tr.ReplayDataset(buffer, 4), batch_size=None, num_workers=1)
        with raised_by_worker(r"leave num_workers at 0.*QueueLoader"):
            next(iter(loader))
        assert values(buffer.sample(3)) == [0, 1, 2]


@pytest.mark.parametrize("view", [tr.Transitions(), tr.Transitions(n_step=3), tr.Sequences(length=4)], ids=str)
def test_a_slow_episode_stops_nobody_and_comes_first_when_it_is_complete(view):
    with queue(40, view=view, spec=STEPS) as buffer, buffer.writer() as slow, buffer.writer() as fast:
        slow.reset(obs=1000)
        step(slow, 1001)
        fast.reset(obs=0)
        got = []
        for number in range(1, 400):  # ten turns of the ring
            step(fast, number)
            if buffer.num_items >= 4:
                batch = buffer.sample(4)
                got += batch["key"].tolist()
        for number in range(1002, 1006):
            step(slow, number)
        batch = buffer.sample(1)
        first = batch["obs"].flatten()[0].item() if view == tr.Sequences(length=4) else batch["obs"].item()
        assert first == (1001 if view == tr.Transitions() else 1000)  # that was complete at once
        assert got == sorted(got)
        assert len(set(got)) == len(got)
        assert len(got) >= 390 // (4 if view == tr.Sequences(length=4) else 1) - 8


def test_a_learner_that_holds_its_batch_stops_nobody_and_gives_it_back_in_its_place():
    with queue(20, items=20) as buffer:
        with buffer.claim(5) as held:
            assert values(held) == list(range(5))
            for number in range(20, 100, 5):
                batch = buffer.sample(5)
                assert values(batch) == list(range(number - 15, number - 10))
                buffer.commit(batch)
                buffer.extend(x=np.arange(number, number + 5))
            buffer.release(held)
        assert values(buffer.sample(3)) == [0, 1, 2]
        assert values(buffer.sample(4)) == [3, 4, 85, 86]
        assert values(buffer.sample(13)) == list(range(87, 100))
        buffer.commit()
        buffer.extend(x=np.arange(100, 120))
        assert values(buffer.sample(20)) == list(range(100, 120))

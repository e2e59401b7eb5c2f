"""Queues in files, checkpoints, states and copies: what is not done is there, in its order."""

import re
import threading

import numpy as np
import pytest
import torch
from small_queues import SPEC, STEPS, queue, step, values

import torchreplay as tr


def test_a_saved_queue_has_what_is_not_done_in_its_order(tmp_path):
    with queue(items=30, max_draws=2) as buffer:
        buffer.sample(10)
        buffer.sample(10)  # the first ten again
        buffer.sample(5)
        buffer.save(tmp_path / "saved")
        loaded = tr.ReplayBuffer.load(tmp_path / "saved")
        expected = [[*range(10, 20)], [*range(10, 20)], [*range(20, 30)], [*range(20, 30)]]
        assert [values(loaded.sample(10)) for _ in range(4)] == expected
        loaded.commit()
        assert loaded.num_items == 0


def test_a_queue_in_a_file_goes_on_with_what_was_not_committed(tmp_path):
    path = tmp_path / "queue"
    with tr.ReplayBuffer(SPEC, 100, sampler=tr.Fifo(commit="manual"), path=path) as buffer:
        buffer.extend(x=np.arange(50))
        buffer.sample(10)
        buffer.commit()
        buffer.sample(10)
    with tr.ReplayBuffer.open(path) as buffer:
        assert values(buffer.sample(15)) == list(range(10, 25))


def test_a_state_of_what_was_held_ends_it_once_wherever_the_queue_is(tmp_path):
    with queue(items=30, commit="manual", max_draws=2) as buffer:
        dataset = tr.ReplayDataset(buffer, 5, prefetch=0)
        batches = iter(dataset)
        next(batches), next(batches)
        state = dataset.state_dict()
        buffer.save(tmp_path / "saved")
        next(batches)
        loaded = tr.ReplayBuffer.load(tmp_path / "saved")
        for held in (buffer, loaded):
            for _ in range(2):
                tr.ReplayDataset(held, 5).load_state_dict(state)
                assert (held.stats().held_items, held.num_items) == (0, 30)
            assert values(held.sample(10)) == list(range(10))
            assert held.commit() == 10  # for the second time
            tr.ReplayDataset(held, 5).load_state_dict(state)
            assert values(held.sample(20)) == list(range(10, 30))


def test_a_state_of_another_queue_ends_nothing_and_says_so(caplog):
    with queue(items=30) as buffer, queue(items=30) as other, queue() as empty:
        dataset = tr.ReplayDataset(buffer, 5)
        next(iter(dataset))
        buffer.sample(5)
        state = dataset.state_dict()
        tr.ReplayDataset(empty, 5).load_state_dict(state)
        assert not caplog.text
        tr.ReplayDataset(other, 5).load_state_dict(state)
        assert "5 items of a queue are done" in caplog.text
        assert values(other.sample(5)) == list(range(5))


@pytest.mark.parametrize(
    "held",
    [
        7,
        {"queue": 1, "key": torch.arange(3)},
        {"queue": 1, "key": torch.arange(3), "draws": torch.arange(2)},
        {"queue": 1, "key": torch.arange(3.0), "draws": torch.arange(3)},
        {"queue": "x", "key": torch.arange(3), "draws": torch.arange(3)},
    ],
)
def test_a_bad_state_is_refused(held):
    with queue(items=30) as buffer:
        state = tr.ReplayDataset(buffer, 5).state_dict() | {"held": held}
        with pytest.raises(ValueError, match=r"held|queue"):
            tr.ReplayDataset(buffer, 5).load_state_dict(state)


def test_rows_that_were_kept_come_back_from_a_file_and_from_a_checkpoint(tmp_path):
    path = tmp_path / "queue.replay"
    with tr.ReplayBuffer(SPEC, 20, sampler=tr.Fifo(), path=path) as buffer:
        buffer.extend(x=np.arange(20))
        held = buffer.sample(5, at_least=5)
        buffer.commit(held["key"][1:4])  # 0 and 4 are held
        thread_got = []

        def others():
            for number in range(20, 50, 5):
                batch = buffer.sample(5)
                thread_got.extend(values(batch))
                buffer.commit(batch)
                buffer.extend(x=np.arange(number, number + 5))

        thread = threading.Thread(target=others)
        thread.start()
        thread.join()
        assert thread_got == list(range(5, 35))
        buffer.save(tmp_path / "saved")
    left = [0, 4, *range(35, 50)]
    with tr.ReplayBuffer.load(tmp_path / "saved") as loaded:
        assert values(loaded.sample(17)) == left
        loaded.extend(x=np.arange(100, 103))
        loaded.commit()
        loaded.extend(x=np.arange(103, 120))
        assert values(loaded.sample(20)) == list(range(100, 120))
    with tr.ReplayBuffer.open(path) as opened:
        assert values(opened.sample(17)) == left
        opened.extend(x=np.arange(100, 103))
        opened.commit()
        opened.extend(x=np.arange(103, 120))
        assert values(opened.sample(20)) == list(range(100, 120))


def with_kept_rows(view):
    """Returns a queue whose ring went round an episode that is complete by now; and the keys of its items."""
    buffer = queue(40, view=view, spec=STEPS)
    with buffer.writer() as slow, buffer.writer() as fast:
        slow.reset(obs=1000)
        step(slow, 1001)
        fast.reset(obs=0)
        for number in range(1, 137):
            step(fast, number)
            if buffer.num_items >= 4:
                buffer.sample(4)
        for number in range(1002, 1006):
            step(slow, number)
    buffer.commit()
    return buffer, buffer.keys().tolist()


def test_a_queue_has_no_priorities_whatever_rows_were_kept():
    buffer, items = with_kept_rows(tr.Transitions())
    with buffer:
        stats = buffer.stats()
        assert stats.drawable == len(items) > 1
        assert (stats.priority_total, stats.priority_min, stats.priority_max) == (len(items), 1.0, 1.0)
        assert (buffer.priorities(items) == 1).all()
        histogram = buffer.histograms(bins=4)
        assert histogram["priority"].sum() == histogram["priority"].max() == len(items)
        buffer.commit(buffer.sample(len(items)))
        stats = buffer.stats()
        assert (stats.priority_total, stats.priority_min) == (0, 0)


@pytest.mark.parametrize("view", [tr.Transitions(), tr.Transitions(n_step=3, stack={"obs": 2}), tr.Sequences(length=4)])
def test_a_queue_of_another_capacity_has_all_items_or_is_refused(view, tmp_path):
    buffer, items = with_kept_rows(view)
    with buffer:
        expected = buffer.gather(items)
        buffer.save(tmp_path / "saved")
        fits, refused = set(), []
        for capacity in [*range(view.rows_of_an_item, 100), 1_000, 10_000]:
            ways = (
                lambda capacity=capacity: tr.ReplayBuffer.load(tmp_path / "saved", capacity),
                lambda capacity=capacity: buffer.copy(capacity),
            )
            for make in ways:
                try:
                    other = make()
                except ValueError as error:
                    refused.append((capacity, str(error)))
                    continue
                fits.add(capacity)
                with other:
                    assert other.keys().tolist() == items
                    found = other.sample(len(items))
                    for name in set(expected) - {"weight", "probability"}:
                        assert torch.equal(found[name], expected[name]), (capacity, name)
        for capacity, text in refused:
            assert f"capacity is {capacity:,}: of {len(items)} items" in text
            larger = int(re.search(r"Choose a capacity of 40, which it had, or one of (\d+) or more", text)[1])
            assert larger > capacity
        with buffer.copy(larger) as other:
            assert other.keys().tolist() == items
        assert 40 in fits
        assert len(fits) > 20
        assert len(fits) < 90


def test_a_smaller_queue_that_cannot_hold_all_items_is_refused_and_leaves_nothing_behind(tmp_path):
    with queue(100, items=30) as buffer:
        buffer.sample(10)
        buffer.commit()
        buffer.save(tmp_path / "saved")
        lost = r"capacity is 15: of 20 items .* drawn 5 would be lost.*of 100,"
        with pytest.raises(ValueError, match=f"is intact, and does not fit: {lost}") as refused:
            tr.ReplayBuffer.load(tmp_path / "saved", 15, path=tmp_path / "file")
        assert type(refused.value) is ValueError  # no CheckpointError: who drops damaged checkpoints keeps this one
        assert not (tmp_path / "file").exists()
        with queue(15) as other:
            with pytest.raises(ValueError, match="5 would be lost"):
                other.restore(tmp_path / "saved")
            other.extend(x=[100])
            assert values(other.sample(1)) == [100]
        with pytest.raises(ValueError, match="5 would be lost"):
            buffer.copy(15)
        assert values(buffer.copy(20).sample(20)) == list(range(10, 30))
        newest = tr.ReplayBuffer.load(tmp_path / "saved", 15, sampler=tr.Fifo(when_full="drop_oldest"))
        assert values(newest.sample(15)) == list(range(15, 30))

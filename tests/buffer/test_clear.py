"""`clear`: all rows gone for everybody, keys never given twice, writers in flight safe."""

import threading
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from forked import Forked
from saved_rows import tell, told_by
from scalar_steps import STEPS

import torchreplay as tr

SPEC = {"x": tr.Field((2,), torch.int64)}
FORK = get_context("fork")


def write(buffer, n, start=0):
    return buffer.extend(x=np.arange(start, start + n)[:, None].repeat(2, 1))


def test_a_cleared_buffer_holds_nothing_and_its_keys_go_on():
    with tr.ReplayBuffer(SPEC, 10, sampler=tr.Prioritized()) as buffer:
        write(buffer, 15)
        buffer.clear()
        assert (len(buffer), buffer.num_items, buffer.stats().drawable) == (0, 0, 0)
        assert len(buffer.keys()) == len(buffer.keys(rows=True)) == 0
        assert buffer.stats().rows_written == 15
        assert write(buffer, 4).tolist() == [15, 16, 17, 18]
        assert set(buffer.sample(200)["key"].tolist()) == {15, 16, 17, 18}


def test_feedback_for_rows_that_were_cleared_is_stale():
    with tr.ReplayBuffer(SPEC, 10, sampler=tr.Prioritized()) as buffer:
        keys = write(buffer, 5)
        buffer.clear()
        buffer.update_priorities(keys, torch.full((5,), 9.0))
        assert buffer.stats().stale_updates == 5
        assert buffer.stats().priority_max == 1.0


def test_new_rows_of_a_cleared_buffer_have_the_priority_of_those_of_a_new_one():
    with tr.ReplayBuffer(SPEC, 10, sampler=tr.Prioritized(alpha=1.0)) as buffer:
        buffer.update_priorities(write(buffer, 5), torch.full((5,), 9.0))
        buffer.clear()
        assert buffer.priorities(write(buffer, 2)) == pytest.approx([1.0, 1.0])


def test_after_a_clear_the_limiter_asks_for_its_minimum_again():
    with tr.ReplayBuffer(SPEC, 100, limiter=tr.MinSize(20)) as buffer:
        write(buffer, 60)
        buffer.sample(4)
        buffer.clear()
        write(buffer, 19)
        with pytest.raises(tr.WouldBlockForever):
            buffer.sample(4)
        write(buffer, 1)
        assert buffer.sample(4).batch_size == 4


def test_after_a_clear_the_ratio_of_a_limiter_counts_from_there():
    limiter = tr.SamplesPerInsert(1.0, min_size=10, tolerance=0.5)
    with tr.ReplayBuffer(SPEC, 1000, limiter=limiter) as fresh, tr.ReplayBuffer(SPEC, 1000, limiter=limiter) as cleared:
        write(cleared, 12)
        cleared.sample(4)
        cleared.clear()
        assert rows_admitted(cleared) == rows_admitted(fresh) > 0


def rows_admitted(buffer):
    """How many rows can be written before a writer has to wait for a learner."""
    with buffer.writer() as writer:
        while writer._admitted():
            writer.append(x=[0, 0])
            len(buffer)  # shows the limiter what came
        return writer.rows


def test_other_processes_see_the_clear_and_write_on():
    with tr.ReplayBuffer(SPEC, 50) as buffer:
        written, cleared = FORK.Event(), FORK.Event()

        def explore():
            with buffer.writer() as writer:
                for i in range(30):
                    writer.append(x=[i, i])
                written.set()
                assert cleared.wait(60)
                assert len(buffer) == 0
                writer.append(x=[99, 99])

        with Forked(explore) as explorer:
            assert written.wait(60)
            buffer.clear()
            cleared.set()
            assert explorer.wait() == 0
        assert buffer.gather(buffer.keys())["x"].tolist() == [[99, 99]]


def test_clearing_beside_writers_and_a_learner_tears_nothing_and_loses_no_later_row():
    with tr.ReplayBuffer(SPEC, 256, sampler=tr.Prioritized()) as buffer:
        stop = threading.Event()

        def explore():
            with buffer.writer() as writer:
                i = 0
                while not stop.is_set():
                    writer.append(x=[i, i])
                    i += 1

        writers = [threading.Thread(target=explore) for _ in range(2)]
        for writer in writers:
            writer.start()
        for _ in range(100):
            before = buffer.next_key
            buffer.clear()
            batch = buffer.sample(32)
            assert torch.equal(batch["x"][:, 0], batch["x"][:, 1])
            under_way = 2  # one row of each writer may have been under way
            assert (batch["key"] >= before - under_way).all()
            buffer.update_priorities(batch, torch.rand(32))
        stop.set()
        for writer in writers:
            writer.join()
        buffer.clear()
        assert len(buffer) == 0
        write(buffer, 256)
        assert buffer.keys().tolist() == list(range(buffer.next_key - 256, buffer.next_key))


def test_an_episode_under_way_goes_on_without_the_steps_before():
    with tr.ReplayBuffer(STEPS, 50, view=tr.Transitions(n_step=2)) as buffer, buffer.writer() as writer:
        writer.reset(obs=0)
        for i in range(1, 6):
            writer.step(obs=i, action=i, reward=1.0, terminated=False, truncated=False)
        buffer.clear()
        for i in range(6, 10):
            writer.step(obs=i, action=i, reward=1.0, terminated=i == 9, truncated=False)
        items = buffer.gather(buffer.keys())
        assert items["obs"].tolist() == [6, 7, 8]
        assert items["reward"].tolist() == pytest.approx([1.99, 1.99, 1.0])


def test_a_file_that_was_cleared_opens_empty_and_goes_on(tmp_path):
    with tr.ReplayBuffer(SPEC, 20, path=tmp_path / "ring") as buffer:
        write(buffer, 30)
        buffer.clear()
        write(buffer, 3, start=7)
    with tr.ReplayBuffer.open(tmp_path / "ring") as buffer:
        assert buffer.keys().tolist() == [30, 31, 32]
        assert buffer.gather(buffer.keys())["x"][:, 0].tolist() == [7, 8, 9]


@pytest.mark.parametrize("limiter", [tr.MinSize(20), tr.SamplesPerInsert(2.0, min_size=20, tolerance=0.5)])
def test_a_checkpoint_knows_which_items_came_before_the_clear(tmp_path, limiter):
    with tr.ReplayBuffer(SPEC, 100, limiter=limiter) as buffer:
        write(buffer, 30)
        buffer.clear()
        write(buffer, 19)
        buffer.save(tmp_path)
    with tr.ReplayBuffer.load(tmp_path) as buffer:
        with pytest.raises(tr.WouldBlockForever):
            buffer.sample(4)
        write(buffer, 1)
        assert buffer.sample(4).batch_size == 4


def test_a_checkpoint_of_format_5_which_knows_no_clear_is_read(tmp_path):
    with tr.ReplayBuffer(SPEC, 100) as buffer:
        write(buffer, 30)
        buffer.save(tmp_path)
    told = told_by(tmp_path)
    tell(tmp_path, told | {"format": 5, "counts": told["counts"][:15]})
    with tr.ReplayBuffer.load(tmp_path) as buffer:
        assert buffer.keys().tolist() == list(range(30))


def test_a_closed_buffer_cannot_be_cleared():
    buffer = tr.ReplayBuffer(SPEC, 20)
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        buffer.clear()

"""Restores that come to an end of one's choice, and what must hold of the buffer then."""

import os
import signal

import pytest
import torch
from forked import Forked
from saved_rows import assert_rows_are_those_of_their_keys, filled, rows

import torchreplay as tr
from torchreplay.checkpoint import buffer_checkpoint


def save(directory, **sizes):
    """Saves 300 rows. Returns the statistics."""
    with filled(300, 300, **sizes) as saved:
        saved.update_priorities(saved.sample(32), torch.rand(32) + 3.0)
        saved.save(directory)
        return saved.stats()


def assert_nothing_was_restored(buffer, **sizes):
    with filled(0, buffer.capacity, **sizes) as new:
        assert saved_counts(buffer.stats()) == saved_counts(new.stats())
        for name, counts in new.histograms(8).items():
            assert torch.equal(buffer.histograms(8)[name], counts)


def assert_restored(buffer, saved):
    assert saved_counts(buffer.stats()) == saved_counts(saved)
    assert buffer.stats().rows_written == saved.rows_written
    assert buffer.stats().priority_total == pytest.approx(saved.priority_total, rel=1e-6)
    assert_rows_are_those_of_their_keys(buffer.gather(torch.arange(300)))


def saved_counts(stats):
    figures = stats.drawable, stats.inserted, stats.sampled, stats.updated, stats.draws, stats.evicted_unsampled
    return stats.size, *figures, stats.priority_max


def leaves_of(buffer):
    """The leaf of each row, by its key."""
    keys1, leaves = buffer._segment.column(-2), buffer._segment.column(-1)
    return dict(zip((keys1[keys1 > 0] - 1).tolist(), leaves[keys1 > 0].tolist(), strict=True))


def one(number):
    """One row, as append wants it."""
    return {"x": {name: column[0] for name, column in rows(number, 1)["x"].items()}, "reward": float(number)}


def restore_beside(monkeypatch, number, event):
    """A restore calls `event` when it has placed `number` files of rows; -1: all of them."""
    read_shards = buffer_checkpoint._read_shards

    def reading(*args):
        for place, columns in enumerate(read_shards(*args)):
            if place == number:
                event()
            yield columns
        if number < 0:
            event()

    monkeypatch.setattr(buffer_checkpoint, "_read_shards", reading)


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def end_by(end, buffer, directory):
    """Restores, and comes to this end when asked."""
    if end == "killed":
        with Forked(buffer.restore, directory) as process:
            assert process.wait() == -signal.SIGKILL
    else:
        with pytest.raises(ENDS[end]):
            buffer.restore(directory)


def fail():
    raise tr.CheckpointError("damaged")


def interrupt():
    raise KeyboardInterrupt


ENDS = {"killed": None, "failed": tr.CheckpointError, "interrupted": KeyboardInterrupt}
ACTS = {"killed": kill_oneself, "failed": fail, "interrupted": interrupt}
TIMES = [0, 1, 3, -1]

"""Scenes of checkpoints that are loaded and restored."""

import signal
import tempfile

import numpy as np
import pytest
from faulty_lives import INDICES, Fault, await_stop
from forked import Forked
from scene import Scene

import torchreplay as tr
from torchreplay.checkpoint import buffer_checkpoint


class Load(Scene):
    """Of a checkpoint, which stays as it is."""

    def perform(self, start):
        self.turn_the_ring()
        self.directory = tempfile.TemporaryDirectory()
        self.buffer.save(self.directory.name)
        with start(tr.ReplayBuffer.load, self.directory.name) as process:
            return process.wait()

    def check(self):
        view = self.buffer.view  # with the functions that a checkpoint does not hold
        self.buffer = tr.ReplayBuffer.load(self.directory.name, view=view if isinstance(view, tr.Hindsight) else None)
        super().check()


class Restore(Scene):
    """Of a checkpoint, into a buffer that others are attached to."""

    def perform(self, start):
        self.turn_the_ring()
        self.directory = tempfile.TemporaryDirectory()
        self.buffer.save(self.directory.name)
        self.saved, self.buffer = self.buffer, self.lives.buffer()
        return self.play(start)

    def play(self, start):
        with start(self.buffer.restore, self.directory.name) as process:
            return process.wait()

    def check(self):
        if len(self.buffer) == 0:
            assert counts_of(self.buffer) == counts_of(self.lives.buffer()), "something stays of what was not restored"
            self.buffer.restore(self.directory.name)
        assert counts_of(self.buffer) == counts_of(self.saved)
        super().check()


class RestoreInVain(Restore):
    """The last file turns out to be damaged."""

    def play(self, start):
        with start(self.restore_in_vain) as process:
            return process.wait()

    def restore_in_vain(self):
        read_shards = buffer_checkpoint._read_shards

        def reading(*args):
            yield from read_shards(*args)
            raise tr.CheckpointError("the last file is damaged")

        buffer_checkpoint._read_shards = reading
        with pytest.raises(tr.CheckpointError, match="the last file"):
            self.buffer.restore(self.directory.name)

    def check(self):
        assert len(self.buffer) == 0
        super().check()


class RestoreBesideAnExplorer(Restore):
    """Which writes while rows are placed."""

    def play(self, start):
        with start(self.buffer.restore, self.directory.name, faults=[Fault("import.row", nth=5, stop=True)]) as process:
            stopped = await_stop(process)
            with Forked(self.lives.write, self.buffer, self.new_index()) as explorer:
                assert explorer.wait() == 0
            if stopped:
                process.signal(signal.SIGCONT)
            return process.wait()

    def check(self):
        head, capacity = self.saved.stats().rows_written, self.buffer.capacity
        saved, found = keys_of(self.saved), keys_of(self.buffer)
        written = found[found >= head] if found.max() >= head else found  # it was over before they came
        imported = np.setdiff1d(found, written)
        if len(imported):
            assert imported.tolist() == saved[~np.isin(saved % capacity, written % capacity)].tolist()
        assert self.buffer.stats().inserted >= self.buffer.stats().drawable
        Scene.check(self)


class ExplorersAfterARestore(RestoreBesideAnExplorer):
    """As many tickets as the checkpoint has, and more than a turn of the ring, before anybody looks."""

    def play(self, start):
        status = Restore.play(self, start)
        self.write_in_others()
        return status

    def write_in_others(self):
        for index in range(self.new_index(), self.indices - INDICES + 5):
            with Forked(self.lives.write, self.buffer, index) as explorer:
                assert explorer.wait() == 0

    def check(self):
        # One slot stays that of a row which was being placed, until somebody looks.
        assert len(self.buffer) >= self.buffer.capacity - 1
        super().check()


class RestoreTooLate(ExplorersAfterARestore):
    """They take the first ticket just before it does, and as many as it wanted before it looks again."""

    def play(self, start):
        with start(self.restore_too_late, faults=[Fault("import.begun", stop=True)]) as process:
            stopped = await_stop(process)
            self.write_in_others()
            if stopped:
                process.signal(signal.SIGCONT)
            return process.wait()

    def restore_too_late(self):
        for _ in range(2):
            with pytest.raises(tr.CheckpointError, match="holds rows already"):
                self.buffer.restore(self.directory.name)


def counts_of(buffer):
    stats = buffer.stats()
    figures = stats.inserted, stats.sampled, stats.updated, stats.draws, stats.priority_total, stats.priority_max
    return stats.size, *figures


def keys_of(buffer):
    assert len(buffer)
    keys1 = buffer._segment.column(-2).numpy()
    return np.sort(keys1[keys1 > 0]) - 1

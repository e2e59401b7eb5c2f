"""Scenes: what happens to a buffer while a process lives in which a fault is tried, and what must hold afterwards.

Everything here runs in an interpreter whose native module has fault points (`fault_build.py`).
"""

import contextlib
import itertools
import signal
import tempfile

import numpy as np
import pytest
import torch
from faulty_lives import BATCH, DIED, INDICES, Fault, await_stop, faulty, live, live_until_told, lives_of
from forked import Forked, eventually, shared_counters
from torch.utils._pytree import tree_map

import torchreplay as tr
from torchreplay.checkpoint import buffer_checkpoint
from torchreplay.schema.batch_plan import names_of


class Scene:
    """A life in a full buffer that is sound. Every time it is made it goes the same way."""

    LIMITER = None

    def __init__(self, name):
        self.lives = lives_of(name)
        self.buffer = self.lives.buffer(self.LIMITER)
        self.indices = 0

    def new_index(self):
        """The first of some indices that no explorer has had."""
        self.indices += INDICES
        return self.indices - INDICES

    def turn_the_ring(self):
        first = self.new_index()
        for index in range(first, first + 5):
            self.lives.write(self.buffer, index)

    def perform(self, start):
        """`start(body, *args)` starts the process in question. Returns its exit status."""
        self.turn_the_ring()
        len(self.buffer)
        return self.play(start)

    def play(self, start):
        with start(live, self.lives, self.buffer, self.new_index()) as process:
            return process.wait()

    def lose(self, faults):
        """Processes with these faults live beside one that has none. Returns how many died."""
        turns, told = shared_counters(1), shared_counters(1)
        with contextlib.ExitStack() as running:
            survivor = running.enter_context(
                Forked(live_until_told, self.lives, self.buffer, self.new_index(), turns, told)
            )
            victims = [
                running.enter_context(faulty(live, self.lives, self.buffer, self.new_index(), faults=[fault]))
                for fault in faults
            ]
            ends = [victim.wait() for victim in victims]
            assert set(ends) <= {0, DIED}
            later = turns[0] + 2
            eventually(lambda: turns[0] >= later)
            told[0] = 1
            assert survivor.wait() == 0
        return ends.count(DIED)

    def check(self):
        """Nothing is torn, lost or stuck, and the survivors can use all of it."""
        assert self.buffer.stats().writers == 0, "a dead writer counts as alive"
        self.lives.check(self.buffer, self.indices)
        self.lives.check_last(self.buffer, self.indices)


def after_a_death_at(point):
    """What one who died has left, the others have to put right."""

    class AfterADeath(Scene):
        def play(self, start):
            with faulty(live, self.lives, self.buffer, self.new_index(), faults=[Fault(point)]) as dead:
                assert dead.wait() == DIED
            return super().play(start)

    return AfterADeath


def learn_at_other_scales(lives, buffer, first):
    """Feeds back TD errors so large that the sums of priorities need another grid, and then so small that they do."""
    for index, scale in enumerate((1e12, 1e-12)):
        for _ in range(3):
            batch = buffer.sample(BATCH)
            buffer.update_priorities(batch, torch.linspace(0.1, 7.0, BATCH) * scale)
        keys1 = buffer._segment.column(-2)
        keys = keys1[keys1 > 0] - 1
        buffer.update_priorities(keys, torch.full((len(keys),), scale))
        lives.write(buffer, first + index)


class ChangesOfTheGrid(Scene):
    """Priorities become much larger, and then much smaller."""

    def play(self, start):
        with start(learn_at_other_scales, self.lives, self.buffer, self.new_index()) as process:
            return process.wait()


def rewrite_in_vain(buffer):
    """Gives all rows the values that they have."""
    keys = buffer.keys(rows=True)
    slots = keys % buffer.capacity
    values = tree_map(lambda column: column[slots], buffer.storage)
    if not isinstance(buffer.view, tr.Rows):
        values = {name: value for name, value in values.items() if name not in ("terminated", "truncated")}
    buffer.rewrite(keys, **values)


def end_and_clear(lives, buffer, first):
    """Ends an episode by hand, where there are any, discards what there is, takes all rows away, and writes others."""
    lives.write(buffer, first)
    rewrite_in_vain(buffer)
    buffer.discard(buffer.keys(rows=True))
    if not isinstance(buffer.view, tr.Rows):
        values = tree_map(lambda field: torch.zeros(field.shape, dtype=field.dtype), buffer.spec)
        observed = {name: values[name] for name in names_of(buffer.view.observation)}
        with buffer.writer() as writer:
            writer.reset(**observed)
            writer.step(**values)
            writer.step(**values)
            writer.end_episode()
    buffer.clear()
    lives.write(buffer, first + 1)


class EndsAndClears(Scene):
    """It ends an episode by hand, and takes all rows away."""

    def play(self, start):
        with start(end_and_clear, self.lives, self.buffer, self.new_index()) as process:
            return process.wait()

    def check(self):
        self.buffer.clear()  # its own episode is none that the others' numbers know
        assert len(self.buffer) == self.buffer.num_items == 0
        super().check()


class BesideAStoppedExplorer(Scene):
    """It holds a slot for more than a turn of the ring, and writes its row when it goes on."""

    def play(self, start):
        fault = Fault("append.busy", stop=True)
        with faulty(self.lives.write, self.buffer, self.new_index(), faults=[fault]) as explorer:
            assert await_stop(explorer)
            status = super().play(start)
            explorer.signal(signal.SIGCONT)
            assert explorer.wait() == 0
        return status


class OvertakenDraw(Scene):
    """The ring turns between a draw and the copy of its rows."""

    def play(self, start):
        fault = Fault("draw.drawn", stop=True)
        with start(live, self.lives, self.buffer, self.new_index(), faults=[fault]) as process:
            if await_stop(process):
                self.turn_the_ring()
                process.signal(signal.SIGCONT)
            return process.wait()


class RewrittenDraw(Scene):
    """The rows of a batch are rewritten between the draw and their copy."""

    def play(self, start):
        fault = Fault("draw.drawn", stop=True)
        with start(live, self.lives, self.buffer, self.new_index(), faults=[fault]) as process:
            if await_stop(process):
                rewrite_in_vain(self.buffer)
                process.signal(signal.SIGCONT)
            return process.wait()


class OutrunsALearner(Scene):
    """It is a turn of the ring ahead of a learner, gives way, and goes on when that does not come back."""

    def play(self, start):
        with contextlib.suppress(tr.ReplayTimeout):
            self.buffer.sample(BATCH, timeout=0)
        with start(self.turn_the_ring) as process:
            status = process.wait()
        self.new_index()
        return status


class RowsThatComeDuringAnAbsorption(Scene):
    """An explorer's row is committed when its slot has been looked at, and that of the next one has not."""

    def play(self, start):
        index = self.new_index() + 1  # one that writes whole episodes
        fault = Fault("append.busy", stop=True)
        with faulty(self.lives.write, self.buffer, index, faults=[fault]) as explorer:
            assert await_stop(explorer)
            fault = Fault("sync.done", stop=True)
            with start(len, self.buffer, faults=[fault]) as process:
                stopped = await_stop(process)
                explorer.signal(signal.SIGCONT)
                assert explorer.wait() == 0
                if stopped:
                    process.signal(signal.SIGCONT)
                return process.wait()


def wait_for_others(lives, buffer, first):
    """Waits for rows, and then for room."""
    with contextlib.suppress(tr.ReplayTimeout):
        buffer.sample(BATCH, timeout=0)
    buffer._segment.wait_rows(0, 1)
    for index in range(first, first + 2):
        lives.write(buffer, index)


class Waits(Scene):
    """A limiter makes it wait for others."""

    LIMITER = tr.SamplesPerInsert(1.0, 8, 0.5)

    def perform(self, start):
        with start(wait_for_others, self.lives, self.buffer, self.new_index()) as process:
            return self.attend(process)

    def attend(self, process):
        """Draws as long as somebody waits for it."""
        while process.is_running():
            if self.buffer._segment.census(True)["waiting"]:
                with contextlib.suppress(tr.ReplayTimeout):
                    self.buffer.sample(4, timeout=0)
        return process.wait()

    def check(self):
        assert self.buffer.stats().writers == 0, "a dead writer counts as alive"
        self.lives.check(self.buffer, self.indices)
        with Forked(self.lives.write, self.buffer, self.new_index()) as explorer:
            assert self.attend(explorer) == 0
        self.lives.check(self.buffer, self.indices)


class LongAbsorption(Scene):
    """So many rows that others may take the lock in between."""

    ROWS = 5000

    def __init__(self, name):
        self.stamps = np.arange(self.ROWS)
        self.buffer = tr.ReplayBuffer({"stamp": tr.Field((), torch.int64)}, self.ROWS, seed=0)

    def perform(self, start):
        self.buffer.extend(stamp=self.stamps)
        with start(len, self.buffer) as process:
            return process.wait()

    def check(self):
        batch = self.buffer.gather(self.stamps)
        assert torch.equal(batch["stamp"], torch.from_numpy(self.stamps))
        assert self.buffer.stats().drawable == self.ROWS


class Stop(Scene):
    def perform(self, start):
        with start(self.buffer.stop) as process:
            return process.wait()

    def check(self):
        assert self.buffer.stopped
        with pytest.raises(tr.Stopped):
            self.buffer.sample(1)


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


class Publication(Scene):
    """Weights on their way to the explorers."""

    def __init__(self, name):
        self.module = torch.nn.Linear(100, 100)
        self.weights = tr.SharedWeights(self.module)
        self.publish(1.0)

    def publish(self, value):
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(value)
        self.weights.publish(self.module)

    def pulled(self):
        """The weights there are, which are those of one publication."""
        module = torch.nn.Linear(100, 100)
        assert self.weights.pull(module)
        values = torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).unique()
        assert len(values) == 1, "weights of two publications"
        return values.item()

    def perform(self, start):
        with start(self.publish, 2.0) as process:
            return process.wait()

    def check(self):
        assert self.pulled() in (1.0, 2.0)
        self.publish(3.0)
        assert self.pulled() == 3.0


class Epochs(Scene):
    """A process draws without replacement, through the ends of epochs."""

    ITEMS, DRAWN = 40, 16

    def __init__(self, name):
        self.buffer = tr.ReplayBuffer(
            {"x": tr.Field((), "int64")}, self.ITEMS, sampler=tr.Uniform(replacement=False), seed=0
        )
        self.buffer.extend(x=np.arange(self.ITEMS))
        self.got = shared_counters(self.ITEMS)

    def draw(self):
        for _ in range(6):
            for item in self.buffer.sample(self.DRAWN)["x"].tolist():
                self.got[item] += 1

    def perform(self, start):
        with start(self.draw) as process:
            return process.wait()

    def check(self):
        ended, due, items = self.buffer._segment.epoch(False)
        assert items == self.ITEMS
        left = np.zeros(self.ITEMS, int)
        if due:
            for batch in tr.ReplayDataset(self.buffer, self.DRAWN, epochs=1):
                left[batch["x"].numpy()] += 1
        assert left.sum() == due
        assert left.max() <= 1
        owed = ended + 1 - left - np.asarray(self.got[:])  # of what each was to be drawn
        assert (owed >= 0).all(), "an item came twice before others came once"
        assert owed.max() <= 2, "more than a batch was lost"
        assert owed.sum() <= 2 * self.DRAWN, "more than a batch was lost"
        whole = np.zeros(self.ITEMS, int)
        for batch in tr.ReplayDataset(self.buffer, self.DRAWN, epochs=2):
            np.add.at(whole, batch["x"].numpy(), 1)
        assert (whole == 2).all()


class DrawCounts(Scene):
    """A process draws items that leave after so many draws. Another has died in a draw."""

    ITEMS, DRAWN, MOST = 40, 8, 2

    def __init__(self, name):
        kinds = [tr.Uniform(max_draws=self.MOST), tr.Prioritized(max_draws=self.MOST)]
        kinds.append(tr.Uniform(replacement=False, max_draws=self.MOST))
        self.buffers = [tr.ReplayBuffer({"x": tr.Field((), "int64")}, self.ITEMS, sampler=kind) for kind in kinds]
        for buffer in self.buffers:
            buffer.extend(x=np.arange(self.ITEMS))
        self.got = [shared_counters(self.ITEMS) for _ in kinds]

    def draw(self, batches=3):
        for buffer, got in zip(self.buffers, self.got, strict=True):
            for _ in range(batches):
                if self.ITEMS * self.MOST - sum(got[:]) >= 4 * self.DRAWN:
                    stream = iter(tr.ReplayDataset(buffer, self.DRAWN, prefetch=2))
                    for item in next(stream)["x"].tolist():
                        got[item] += 1
                    stream.close()

    def perform(self, start):
        with faulty(self.draw, faults=[Fault("counts.counted")]) as dead:
            assert dead.wait() == DIED
        with start(self.draw) as process:
            return process.wait()

    def check(self):
        for buffer, got in zip(self.buffers, self.got, strict=True):
            while buffer.num_items:
                for item in buffer.sample(1)["x"].tolist():
                    got[item] += 1
            assert max(got[:]) <= self.MOST, "an item came too often"
            assert self.MOST * self.ITEMS - sum(got[:]) <= 6 * self.DRAWN, "more was lost than the dead had drawn"
            stats = buffer.stats()
            assert stats.drawable == 0


class Versions(Scene):
    """A process takes items away that are too old for the learner, and draws others. Another has died in that."""

    ITEMS, DRAWN = 40, 8

    def __init__(self, name):
        spec = {"x": tr.Field((), torch.int64), "policy_version": tr.Field((), torch.int64)}
        kinds = [tr.Fifo(max_age=1), tr.Uniform(max_draws=2, max_age=1), tr.Prioritized(max_age=1)]
        self.buffers = [tr.ReplayBuffer(spec, self.ITEMS, sampler=kind) for kind in kinds]
        for buffer in self.buffers:
            versions = np.arange(self.ITEMS) // (self.ITEMS // 4)  # 0 to 3
            buffer.extend(x=np.arange(self.ITEMS), policy_version=versions)

    def draw(self):
        for buffer in self.buffers:
            version = min(4, buffer.policy_version + 1)
            buffer.policy_version = version
            with buffer.claim(self.DRAWN) if isinstance(buffer.sampler, tr.Fifo) else self.drawn(buffer) as batch:
                assert batch["age"].tolist() == (version - batch["policy_version"]).tolist()
                assert batch["age"].max() <= 1

    @contextlib.contextmanager
    def drawn(self, buffer):
        yield buffer.sample(self.DRAWN)

    def perform(self, start):
        with faulty(self.draw, faults=[Fault("dirty.set")]) as dead:
            assert dead.wait() == DIED
        with faulty(self.draw, faults=[Fault("expire.item", 3)]) as dead:
            assert dead.wait() in (0, DIED)
        with start(self.draw) as process:
            return process.wait()

    def check(self):
        for buffer in self.buffers:
            buffer.policy_version = 4
            with buffer.claim(1) if isinstance(buffer.sampler, tr.Fifo) else self.drawn(buffer) as batch:
                assert batch["policy_version"].tolist() == [3] * len(batch["key"])
            left = buffer.num_items
            assert 0 < left <= self.ITEMS // 4
            buffer.policy_version = 5
            assert buffer.num_items == 0


class Admitted(Scene):
    """A process begins items and writes some, waits for its turn, draws, and publishes. Another has died in that."""

    BATCH, MAX_AGE, CAPACITY, ROWS = 4, 1, 8, 200

    def __init__(self, name):
        limiter = tr.Admission(self.BATCH, self.MAX_AGE)
        self.queue = tr.ReplayBuffer(
            {"x": tr.Field((), torch.int64)}, self.CAPACITY, sampler=tr.Fifo(), limiter=limiter
        )
        self.next, self.came = shared_counters(1), shared_counters(self.ROWS)

    def write(self, writer, n, rows):
        with contextlib.suppress(tr.ReplayTimeout, tr.WouldBlockForever), writer.admit(n, timeout=0.01):
            for _ in range(rows):
                self.next[0] += 1
                writer.append(x=self.next[0])

    def draw(self):
        if self.queue.num_items:
            for number in self.queue.sample(self.BATCH, at_least=1)["x"].tolist():
                self.came[number] += 1
            self.queue.policy_version += 1

    def turn(self):
        with self.queue.writer() as writer:
            for _ in range(5):
                self.write(writer, 1, 1)
                self.write(writer, 3, 2)
                self.draw()
            self.write(writer, 2, 0)
            for _ in range(3):  # more than are admitted
                self.write(writer, 4, 2)
            self.draw()
        self.queue.commit()

    def perform(self, start):
        for fault in (Fault("admit.counted"), Fault("admit.admitted", 3), Fault("claims.going", 2)):
            with faulty(self.turn, faults=[fault]) as dead:
                assert dead.wait() in (0, DIED)
        with start(self.turn) as process:
            return process.wait()

    def check(self):
        with self.queue.writer() as writer:
            self.write(writer, 1, 0)
            while self.queue.num_items:
                self.draw()
            self.queue.commit()
            stats = self.queue.stats()
            came = sum(count > 0 for count in self.came[:])
            assert stats.open_admissions == 0, "a dead writer's items count"
            assert stats.admitted_items <= came, "an item counts twice"
            limit = stats.admission_limit - stats.admitted_items
            assert limit >= self.BATCH, "writers have to wait for ever"


class Queue(Scene):
    """A process writes to queues and draws from them. Others have died before, with items, tickets and episodes."""

    ROWS, CAPACITY, DRAWN, DRAWS = 48, 16, 4, 2

    def __init__(self, name):
        flag, spec = tr.Field((), torch.bool), {"x": tr.Field((), "int64")}
        steps = {"obs": tr.Field(), "reward": tr.Field(), "terminated": flag, "truncated": flag}
        self.buffer = tr.ReplayBuffer(spec, self.CAPACITY, sampler=tr.Fifo(max_draws=self.DRAWS))
        self.episodes = tr.ReplayBuffer(steps, self.CAPACITY, view=tr.Transitions(), sampler=tr.Fifo())
        self.written, self.came = shared_counters(self.ROWS), shared_counters(self.ROWS)
        self.left = shared_counters(1 + 2 * self.DRAWN)  # by the last that died: its presence, keys and numbers

    def has_room(self, buffer):
        state = buffer._segment.queue_state(False)
        return state["limit"] > state["head"]

    def write(self, most):
        with self.buffer.writer() as writer:
            for number in range(self.ROWS):
                if most and not self.written[number] and self.has_room(self.buffer):
                    writer.append(x=number)
                    self.written[number] = 1
                    most -= 1

    def take(self):
        if self.buffer.num_items:
            for number in self.buffer.sample(self.DRAWN, at_least=1)["x"].tolist():
                self.came[number] += 1

    def write_episode(self, steps=3, ends=True):
        with self.episodes.writer() as writer:
            writer.reset(obs=0.0)
            for step in range(steps):
                writer.step(obs=0.0, reward=0.0, terminated=ends and step == steps - 1, truncated=False)

    def learn_episode(self):
        self.episodes.commit()
        self.write_episode()  # nothing is left that needs room
        while self.episodes.num_items:
            self.episodes.sample(self.DRAWN, at_least=1)

    def inherit(self):
        """What the last that died has drawn and noted is this process's, if nobody else has got it."""
        segment, keys = self.buffer._segment, self.left[1 : 1 + self.DRAWN].tolist()
        if segment.adopt(keys, self.left[0], 0):
            for number in self.left[1 + self.DRAWN :]:
                self.came[number] += 1
            segment.commit(keys)

    def go_back(self):
        """As a learner does whose saved state says what it has learnt from."""
        segment = self.buffer._segment
        held = segment.held_draws()
        self.buffer.release()
        segment.end_draws(*held)

    def work(self, inherits=False):
        if inherits:
            self.inherit()
        for _ in range(8):
            self.write(6)
            self.take()
            self.learn_episode()
        self.go_back()
        self.take()
        self.buffer.release()
        self.episodes.commit()

    def hold(self):
        self.write(self.DRAWN)
        self.take()

    def bequeath(self):
        self.other = self.buffer.claim(1)  # which nobody inherits
        self.other.__enter__()
        batch = self.buffer.sample(self.DRAWN)
        for place, value in enumerate([self.buffer._segment.presence, *batch["key"].tolist(), *batch["x"].tolist()]):
            self.left[place] = value
        self.write(self.DRAWN)

    def perform(self, start):
        with Forked(self.hold) as holder, Forked(self.write_episode, 1, False) as explorer:
            assert holder.wait() == explorer.wait() == 0
        for point in ("append.ticket", "claims.held"):
            with faulty(self.work, faults=[Fault(point)]) as dead:
                assert dead.wait() == DIED
        with Forked(self.bequeath) as holder:
            assert holder.wait() == 0
        with faulty(lambda: self.buffer.num_items, faults=[Fault("absorb.synced")]) as dead:
            assert dead.wait() == DIED
        with start(self.work, True) as process:
            return process.wait()

    def check(self):
        for _ in range(self.ROWS * self.DRAWS):
            self.write(self.ROWS)
            self.take()
            if not self.buffer.num_items:
                self.buffer.commit()  # and they come again
            self.learn_episode()
        self.buffer.commit()
        self.episodes.commit()
        assert min(self.came[:]) >= self.DRAWS, "an item was lost"
        for buffer in (self.buffer, self.episodes):
            assert (buffer.num_items, buffer.stats().held_items) == (0, 0)
            assert self.has_room(buffer), "room was lost"


class SlowEpisode(Scene):
    """A process turns the ring of a queue, beside a batch that is held and an episode that goes on slowly."""

    CAPACITY, SLOW, FAST, LENGTH = 16, 3, 8, 4
    STEPS = SLOW + FAST * LENGTH

    def __init__(self, name):
        flag = tr.Field((), torch.bool)
        steps = {"obs": tr.Field((), "int64"), "reward": tr.Field(), "terminated": flag, "truncated": flag}
        view = tr.Transitions(n_step=2)
        self.buffer = tr.ReplayBuffer(steps, self.CAPACITY, view=view, sampler=tr.Fifo())
        self.written, self.came = shared_counters(self.STEPS), shared_counters(self.STEPS)

    def step(self, writer, number, ends):
        writer.step(obs=number + 1, reward=0.0, terminated=ends, truncated=False)
        self.written[number] = 1

    def write_episode(self, writer, episode):
        first = self.SLOW + episode * self.LENGTH
        writer.reset(obs=first)
        for k in range(self.LENGTH):
            self.step(writer, first + k, k == self.LENGTH - 1)

    def draw(self):
        while self.buffer.num_items > 1:
            batch = self.buffer.sample(4, at_least=1)
            for number in batch["obs"].tolist():
                self.came[number] += 1

    def work(self):
        with self.buffer.writer() as slow, self.buffer.writer() as fast:
            slow.reset(obs=0)
            self.step(slow, 0, False)
            self.write_episode(fast, 0)
            with self.buffer.claim(1) as held:
                for episode in range(1, self.FAST):
                    self.write_episode(fast, episode)
                    self.draw()
                self.came[held["obs"].item()] += 1
            for number in range(1, self.SLOW):
                self.step(slow, number, number == self.SLOW - 1)
            self.draw()
        self.buffer.commit()

    def perform(self, start):
        with start(self.work) as process:
            return process.wait()

    def check(self):
        def draw_all():
            while self.buffer.num_items:
                for number in self.buffer.sample(4, at_least=1)["obs"].tolist():
                    self.came[number] += 1
            self.buffer.commit()

        draw_all()
        with self.buffer.writer() as writer:
            for _ in range(self.CAPACITY):  # no room is lost; and who draws gives back what the dead held
                writer.reset(obs=self.STEPS - 1)
                self.step(writer, self.STEPS - 1, True)
                draw_all()
        ends = {self.SLOW - 1, *range(self.SLOW + self.LENGTH - 1, self.STEPS, self.LENGTH)}
        for number in range(self.STEPS):
            complete = self.written[number] and (number in ends or self.written[number + 1])
            assert self.came[number] >= bool(complete), f"item {number} was lost"
        assert (self.buffer.num_items, self.buffer.stats().held_items) == (0, 0)


class StoppedWriter(Scene):
    """A process turns the ring of a queue, beside a writer that is stopped within a row."""

    CAPACITY, ROWS, DRAWN = 8, 48, 3

    def __init__(self, name):
        self.buffer = tr.ReplayBuffer({"x": tr.Field((), "int64")}, self.CAPACITY, sampler=tr.Fifo())
        self.written, self.came = shared_counters(self.ROWS + 1), shared_counters(self.ROWS + 1)

    def write(self, *numbers):
        with self.buffer.writer() as writer:
            for number in numbers:
                writer.append(x=number)
                self.written[number] = 1
                yield

    def write_late(self):
        for _ in self.write(self.ROWS):
            pass

    def draw(self):
        for number in self.buffer.sample(self.DRAWN, at_least=1)["x"].tolist():
            self.came[number] += 1

    def work(self):
        for count, _ in enumerate(self.write(*range(self.ROWS))):
            if count % self.DRAWN == 0:
                self.draw()
        self.buffer.commit()

    def perform(self, start):
        fault = Fault("append.copied", stop=True)
        with faulty(self.write_late, faults=[fault]) as late:
            assert await_stop(late)
            with start(self.work) as process:
                status = process.wait()
            late.signal(signal.SIGCONT)
            assert late.wait() == 0
        return status

    def check(self):
        while self.buffer.num_items:
            self.draw()
        self.buffer.commit()
        again = np.arange(self.CAPACITY)
        self.buffer.extend(x=again)  # no room is lost
        assert self.buffer.sample(self.CAPACITY)["x"].tolist() == again.tolist()
        self.buffer.commit()
        for number in range(self.ROWS + 1):
            assert self.came[number] >= self.written[number], f"item {number} was lost"
        assert self.came[self.ROWS] == 1, "what nobody could have held came twice"
        assert (self.buffer.num_items, self.buffer.stats().held_items) == (0, 0)


class LongValues(Scene):
    """A process writes values of any length to a ring and to a queue, and draws them.

    Others have died before, in their pages and with them, and one is stopped within a row of the ring.
    """

    ROWS, DRAWN = 40, 4

    def __init__(self, name):
        spec = {"x": tr.Field((), "int64"), "text": tr.Ragged(torch.uint8)}
        self.ring = tr.ReplayBuffer(spec, 16, ragged_bytes=2048, seed=0)
        self.queue = tr.ReplayBuffer(spec, 64, sampler=tr.Fifo(), ragged_bytes=2048)
        self.written, self.came = shared_counters(self.ROWS), shared_counters(self.ROWS)

    def row(self, number):
        return {"x": number, "text": bytes((number + k) % 256 for k in range(number * 29 % 400))}

    def numbers(self, batch):
        """The numbers of a batch whose values are whole."""
        values = np.split(batch["text"].numpy(), batch.offsets("text")[1:-1].tolist())
        for number, value in zip(batch["x"].tolist(), values, strict=True):
            assert value.tobytes() == self.row(number)["text"], "a value is torn"
        return batch["x"].tolist()

    def write(self, most):
        with self.queue.writer() as writer:
            for number in range(self.ROWS):
                if most and not self.written[number] and self.queue.stats().ragged_fill < 0.5:
                    writer.append(**self.row(number))
                    self.written[number] = 1
                    most -= 1

    def take(self):
        if self.queue._segment.queue_state(False)["to_draw"]:  # with what the dead held
            for number in self.numbers(self.queue.sample(self.DRAWN, at_least=1)):
                self.came[number] += 1
            self.queue.commit()  # or what is held has the bytes that the next rows need

    def turn(self, rows=12):
        with self.ring.writer() as writer:
            for number in range(rows):
                writer.append(**self.row(number))

    def work(self):
        for _ in range(4):
            self.write(4)
            self.take()
            self.turn()
            self.numbers(self.ring.sample(8, budget={"text": 600}))

    def perform(self, start):
        for point in ("pages.row_done", "pages.busy"):
            for body, *args in ((self.write, 4), (self.turn,)):
                with faulty(body, *args, faults=[Fault(point)]) as dead:
                    assert dead.wait() == DIED
        with faulty(self.turn, faults=[Fault("append.busy", stop=True)]) as late:
            assert await_stop(late)
            with start(self.work) as process:
                status = process.wait()
            late.signal(signal.SIGCONT)
            assert late.wait() == 0
        return status

    def check(self):
        for _ in range(self.ROWS):
            self.write(self.ROWS)
            self.take()
        assert min(self.came[:]) >= 1, "an item was lost"
        stats = self.queue.stats()
        assert (stats.drawable, stats.held_items, stats.ragged_fill, stats.writers) == (0, 0, 0, 0)
        assert self.ring.stats().writers == 0  # which frees what the dead have left
        longest = {"x": 0, "text": bytes(512)}  # a quarter of the bytes
        with self.ring.writer() as writer:
            for _ in range(8):
                writer.append(**longest)
        assert self.ring.num_items == 4, "pages were lost"


OF_ROWS = {
    "in a sound buffer": Scene,
    "in changes of the grid": ChangesOfTheGrid,
    "in the end of an episode, and of all rows": EndsAndClears,
    "after a death in an absorption": after_a_death_at("adopt.rows"),
    "after a death in an update": after_a_death_at("tree.totals"),
    "after a death with a ticket": after_a_death_at("append.ticket"),
    "after a death in a row": after_a_death_at("append.header"),
    "beside a stopped explorer": BesideAStoppedExplorer,
    "in an overtaken draw": OvertakenDraw,
    "in a draw of rows that are rewritten": RewrittenDraw,
    "ahead of a learner": OutrunsALearner,
    "in waits": Waits,
    "in a load": Load,
    "in a restore": Restore,
    "in a restore in vain": RestoreInVain,
    "in a restore beside an explorer": RestoreBesideAnExplorer,
    "in a restore before explorers": ExplorersAfterARestore,
    "in a restore that comes too late": RestoreTooLate,
    "in a long absorption": LongAbsorption,
    "in a stop": Stop,
    "in a publication": Publication,
    "in epochs": Epochs,
    "in draws that are counted": DrawCounts,
    "in queues": Queue,
    "in a queue with an admission": Admitted,
    "of items that are too old": Versions,
    "beside a slow episode in a queue": SlowEpisode,
    "beside a stopped writer in a queue": StoppedWriter,
    "with values of any length": LongValues,
}
OF_TRAJECTORIES = {
    **dict(itertools.islice(OF_ROWS.items(), 16)),
    "when rows come during an absorption": RowsThatComeDuringAnAbsorption,
}


def scenes_of(name):
    return OF_ROWS if name == "rows" else OF_TRAJECTORIES

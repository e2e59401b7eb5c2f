"""Scenes of queues, and of values of any length."""

import contextlib
import signal

import numpy as np
import torch
from faulty_lives import DIED, Fault, await_stop, faulty
from forked import Forked, eventually, shared_counters
from scene import Scene

import torchreplay as tr


def work_beside(start, work, stopped, point):
    """Starts the process in question beside one that is stopped at a point, and goes on afterwards."""
    with faulty(stopped, faults=[Fault(point, stop=True)]) as late:
        assert await_stop(late)
        with start(work) as process:
            status = process.wait()
        late.signal(signal.SIGCONT)
        assert late.wait() == 0
    return status


class Admitted(Scene):
    """A process begins items and writes some, waits for its turn, draws, and publishes. Another has died in that."""

    BATCH, MAX_AGE, CAPACITY, ROWS = 4, 1, 16, 200

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

    def go_on(self):
        """As a learner does that has saved what it drew."""
        self.queue.limiter = tr.Admission(self.BATCH, self.MAX_AGE)
        held = self.queue._segment.held_draws()
        self.queue.release()
        self.queue._segment.end_draws(*held)

    def turn(self):
        with self.queue.writer() as writer:
            for _ in range(5):
                self.write(writer, 1, 1)
                self.write(writer, 3, 2)
                self.draw()
            self.go_on()
            self.write(writer, 2, 0)
            with contextlib.suppress(tr.ReplayTimeout, tr.WouldBlockForever), contextlib.ExitStack() as blocks:
                while True:  # more than are admitted
                    blocks.enter_context(writer.admit(8, timeout=0.01))
            self.write(writer, 4, 2)
            self.draw()
        self.queue.commit()

    def perform(self, start):
        for fault in (Fault("admit.counted"), Fault("admit.admitted", 3), Fault("claims.going", 2)):
            with faulty(self.turn, faults=[fault]) as dead:
                assert dead.wait() in (0, DIED)
        self.queue.limiter = tr.Admission(self.BATCH, self.MAX_AGE)  # which counts from here
        with start(self.turn) as process:
            return process.wait()

    def check(self):
        with self.queue.writer() as writer:
            self.write(writer, 1, 0)
            self.queue._segment.queue_state(False)  # and what the dead held is there again
            while self.queue.num_items:
                self.draw()
            self.queue.commit()
            stats = self.queue.stats()
            assert stats.open_admissions == 0, "a dead writer's items count"
            room = stats.admission_limit - stats.admitted_items
            assert room >= (self.MAX_AGE + 1) * self.BATCH, "an item counts twice for one version"


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


class DeadCommit(Scene):
    """A process draws from a queue after another one has died while it committed a batch."""

    ROWS, DRAWN = 12, 4

    def __init__(self, name):
        self.queue = tr.ReplayBuffer({"x": tr.Field((), "int64")}, self.ROWS, sampler=tr.Fifo())
        self.queue.extend(x=np.arange(self.ROWS))
        self.came = shared_counters(self.ROWS)

    def take(self):
        for number in self.queue.sample(self.DRAWN, at_least=1)["x"].tolist():
            self.came[number] += 1
        self.queue.commit()

    def take_all(self):
        while self.queue.num_items or self.queue.stats().held_items:  # what a dead process holds comes with a draw
            self.take()

    def perform(self, start):
        with faulty(self.take, faults=[Fault("claims.let_go", 2)]) as dead:
            assert dead.wait() == DIED
        with start(self.take_all) as process:
            return process.wait()

    def check(self):
        self.take_all()
        assert (self.queue.num_items, self.queue.stats().held_items) == (0, 0)
        assert self.came[: self.DRAWN].tolist() == [1] * self.DRAWN, "half a batch was committed"
        assert min(self.came[:]) >= 1, "an item was lost"


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

        written = self.written[:]  # by those who may have died, and not below
        draw_all()
        with self.buffer.writer() as writer:
            for _ in range(self.CAPACITY):  # no room is lost; and who draws gives back what the dead held
                writer.reset(obs=self.STEPS - 1)
                self.step(writer, self.STEPS - 1, True)
                draw_all()
        ends = {self.SLOW - 1, *range(self.SLOW + self.LENGTH - 1, self.STEPS, self.LENGTH)}
        for number in range(self.STEPS):
            complete = written[number] and (number in ends or written[number + 1])
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
        return work_beside(start, self.work, self.write_late, "append.copied")

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
        return work_beside(start, self.work, self.turn, "append.busy")

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


class DroppedItems(Scene):
    """A process draws from queues, and gives back what was overwritten meanwhile, or is done with it.

    One queue has single rows, the other one items of several. This process writes, and lives: so it knows how many
    items there were.
    """

    CAPACITY, TURNS = 12, 8

    def __init__(self, name):
        flag, sampler = tr.Field((), torch.bool), tr.Fifo(when_full="drop_oldest", commit="manual")
        steps = {"obs": tr.Field(), "reward": tr.Field(), "terminated": flag, "truncated": flag}
        self.rows = tr.ReplayBuffer({"x": tr.Field((), "int64")}, self.CAPACITY, sampler=sampler)
        self.steps = tr.ReplayBuffer(steps, self.CAPACITY, view=tr.Transitions(n_step=2), sampler=sampler)
        self.queues = self.rows, self.steps
        self.written, self.turn, self.told = shared_counters(2), shared_counters(1), shared_counters(1)
        self.began, self.done = shared_counters(2), shared_counters(2)  # items that were to be committed, and that are

    def overwrite(self):
        """Writes over some of what the process holds, and now and then over all."""
        many = 9 if self.turn[0] % 3 == 2 else 4
        self.rows.extend(x=np.arange(many))
        with self.steps.writer() as writer:
            writer.reset(obs=0.0)
            for step in range(many):
                writer.step(obs=0.0, reward=0.0, terminated=step == many - 1, truncated=False)
        for number in range(2):
            self.written[number] += many

    def be_overwritten(self):
        turn = self.turn[0]
        self.told[0] += 1
        eventually(lambda: self.turn[0] > turn, interval=0)

    def end(self, number, keys, done):
        queue = self.queues[number]
        if not done:
            queue.release(keys)
            return
        self.began[number] += len(keys)
        queue.commit(keys)
        self.done[number] += len(keys)

    def work(self):
        for turn in range(self.TURNS):
            held = [queue.sample(6, at_least=1)["key"] for queue in self.queues]
            self.be_overwritten()
            for number, keys in enumerate(held):
                self.end(number, keys[: len(keys) // 2], done=turn % 2)
                self.end(number, keys[len(keys) // 2 :], done=turn % 4 == 2)
        for queue in self.queues:
            queue.sample(2)
        self.be_overwritten()  # and its end gives back what is gone

    def perform(self, start):
        for _ in range(3):
            self.overwrite()
        with start(self.work) as process:
            while process.is_running():
                if self.told[0] > self.turn[0]:
                    self.overwrite()
                    self.turn[0] += 1
            return process.wait()

    def check(self):
        self.overwrite()
        for number, queue in enumerate(self.queues):
            queue._segment.queue_state(False)  # what the dead held goes back
            stats = queue.stats()
            assert stats.held_items == 0
            committed = self.written[number] - stats.dropped_items - stats.drawable
            assert self.done[number] <= committed <= self.began[number], "an item counts as dropped twice, or never"

"""What becomes of each item of a queue that drops the oldest: it is committed, dropped, expired, or still there."""

import contextlib
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from ragged_model import RaggedModel, random_values
from watched_buffers import look_at

import torchreplay as tr

FLAG = tr.Field((), "bool")
STEPS = {"obs": tr.Field((), "int64"), "reward": tr.Field(), "terminated": FLAG, "truncated": FLAG}
ROW = {"x": tr.Field((), "int64"), "policy_version": tr.Field((), "int64")}
LONG = {"number": tr.Field((), "int64"), "tokens": tr.Ragged("int64")}
CAPACITY, EPISODE = 12, 5


class Item:
    """Its rows' keys, who holds it, and how it has left: "committed", "dropped" or "expired"; None: it is there."""

    def __init__(self, rows, version):
        self.rows, self.version, self.holder, self.lost, self.end, self.draws = rows, version, None, False, None, 0


class Model:
    """A queue as a list of items, told what is written, drawn, given back and done."""

    def __init__(self, max_draws, max_age=None):
        self.max_draws, self.max_age, self.items, self.version = max_draws, max_age, {}, 0

    def waiting(self):
        return [key for key, item in sorted(self.items.items()) if item.end is None and item.holder is None]

    def held_by(self, holder):
        return [key for key, item in self.items.items() if item.end is None and item.holder == holder]

    def look(self, rows):
        """These are the rows that are there now."""
        for item in self.items.values():
            if item.end is None and not rows >= set(item.rows):
                if item.holder is None:
                    item.end = "dropped"
                item.lost = True
            if item.end is None and item.holder is None and self.is_too_old(item):
                item.end = "expired"

    def is_too_old(self, item):
        return self.max_age is not None and item.version < self.version - self.max_age

    def let_go(self, keys, end):
        for item in (self.items[key] for key in keys):
            item.holder, item.draws = None, item.draws + (end == "committed")
            if item.lost or (end == "committed" and item.draws == self.max_draws):
                item.end = end
        assert end in ("committed", "dropped")

    def count(self, end):
        return sum(item.end == end for item in self.items.values())


def obey(queue, connection):
    """In a process of its own: does what it is told."""
    while True:
        name, args = connection.recv()
        if name == "sample":
            connection.send(queue.sample(args, at_least=1)["key"].tolist())
        else:
            connection.send(getattr(queue, name)(args))


class Learner(Forked):
    """A process that draws, and lets go of what it is told."""

    def __init__(self, queue):
        self._mine, theirs = multiprocessing.Pipe()
        super().__init__(obey, queue, theirs)

    def do(self, name, args):
        self._mine.send((name, args))
        assert self._mine.poll(60), "no answer"
        return self._mine.recv()


class Here:
    """The same in this process."""

    def __init__(self, queue):
        self._queue = queue

    def do(self, name, args):
        if name == "sample":
            return self._queue.sample(args, at_least=1)["key"].tolist()
        return getattr(self._queue, name)(args)


class RowsWritten:
    """Rows that are items each, with the version of a policy."""

    name = property(lambda self: f"items {os.getpid()}")

    def queue(self, sampler):
        return tr.ReplayBuffer(ROW, CAPACITY, sampler=sampler, name=self.name)

    def __init__(self, chance, model):
        self.model, self.head = model, 0

    def write(self, writer):
        writer.append(x=self.head, policy_version=self.model.version)
        self.model.items[self.head] = Item([self.head], self.model.version)
        self.head += 1

    def rows(self):
        return set(range(max(0, self.head - CAPACITY), self.head))


class LongRowsWritten(RowsWritten):
    """Rows of any length, which go when their bytes are taken again."""

    def queue(self, sampler):
        return tr.ReplayBuffer(LONG, CAPACITY, sampler=sampler, ragged_bytes=2048, name=self.name)

    def __init__(self, chance, model):
        super().__init__(chance, model)
        self.chance, self.long = chance, RaggedModel(LONG, CAPACITY, 2048)

    def write(self, writer):
        values = random_values(self.chance, LONG, longest=60)
        writer.append(**values)
        self.long.append(values)
        self.model.items[self.head] = Item([self.head], 0)
        self.head += 1

    def rows(self):
        return set(self.long.keys())


class StepsWritten(RowsWritten):
    """Episodes whose items have `span` steps and begin at each `stride`-th one."""

    view, span, stride = tr.Transitions(n_step=2), 2, 1

    def queue(self, sampler):
        return tr.ReplayBuffer(STEPS, CAPACITY, view=self.view, sampler=sampler, name=self.name)

    def write(self, writer):
        step = self.head % (EPISODE + 1)
        if step == 0:
            writer.reset(obs=self.head)
        else:
            writer.step(obs=self.head, reward=0.0, terminated=step == EPISODE, truncated=False)
        first = self.head - step
        self.head += 1
        for anchor in range(0, step, self.stride):
            last = min(anchor + self.span, EPISODE)
            if last == step:
                self.model.items[first + anchor] = Item(range(first + anchor, first + last + 1), 0)


class SequencesWritten(StepsWritten):
    view, span, stride = tr.Sequences(3, stride=2), 3, 2


class LongStepsWritten(StepsWritten):
    """Steps with values of any length: rows of an item go before others."""

    def queue(self, sampler):
        self.long = RaggedModel(LONG, CAPACITY, 2048)
        spec = {"obs": tr.Ragged("int64"), **{name: field for name, field in STEPS.items() if name != "obs"}}
        how = {"view": self.view, "sampler": sampler, "ragged_bytes": 2048, "name": self.name}
        return tr.ReplayBuffer(spec, CAPACITY, **how)

    def __init__(self, chance, model):
        super().__init__(chance, model)
        self.chance = chance

    def write(self, writer):
        tokens = random_values(self.chance, LONG, longest=30)["tokens"]  # an item is seen before half the bytes turn
        self.long.append({"number": np.zeros(()), "tokens": tokens})

        class Long:
            reset = staticmethod(lambda obs: writer.reset(obs=tokens))
            step = staticmethod(lambda obs, **rest: writer.step(obs=tokens, **rest))

        super().write(Long)

    def rows(self):
        return set(self.long.keys())


KINDS = {
    "rows": RowsWritten,
    "rows of any length": LongRowsWritten,
    "transitions": StepsWritten,
    "sequences": SequencesWritten,
    "transitions of any length": LongStepsWritten,
}


def check(queue, model):
    stats = queue.stats()
    waiting, held = len(model.waiting()), [item for item in model.items.values() if item.end is None and item.holder]
    ends = [model.count(end) for end in ("committed", "dropped", "expired")]
    assert (stats.dropped_items, stats.expired_items) == tuple(ends[1:])
    assert (stats.inserted, stats.drawable) == (len(model.items), waiting)
    assert stats.inserted == sum(ends) + waiting + len(held)


class Program:
    """A writer and three learners, of which two are killed again and again."""

    def __init__(self, kind, max_draws, seed, stack):
        self.chance, self.stack = np.random.default_rng(seed), stack
        max_age = 2 if kind == "rows" and max_draws > 1 else None
        self.model = Model(max_draws, max_age)
        self.written = KINDS[kind](self.chance, self.model)
        sampler = tr.Fifo(max_draws=max_draws, when_full="drop_oldest", commit="manual", max_age=max_age)
        self.queue = stack.enter_context(self.written.queue(sampler))
        self.writer, self.live = stack.enter_context(self.queue.writer()), stack.enter_context(look_at(self.queue))
        self.learners = {1: Here(self.queue)}

    def step(self):
        who = int(self.chance.integers(1, 4))
        if who not in self.learners:
            self.learners[who] = self.stack.enter_context(Learner(self.queue))
        action = self.chance.choice(["write", "sample", "sample", "commit", "release", "kill", "publish"])
        getattr(self, action)(who, self.model.held_by(who))
        self.model.look(self.written.rows())
        if self.model.max_age is None:
            assert self.live.snapshot().to_draw == len(self.model.waiting()), "of what nobody has looked at yet"
        check(self.queue, self.model)

    def write(self, who, held):
        for _ in range(int(self.chance.integers(1, CAPACITY))):
            self.written.write(self.writer)
            self.model.look(self.written.rows())

    def sample(self, who, held):
        n = int(self.chance.integers(1, 6))
        expected = self.model.waiting()[:n]
        if expected:
            assert self.learners[who].do("sample", n) == expected
        for key in expected:
            self.model.items[key].holder = who

    def commit(self, who, held):
        self.end("commit", who, held)

    def release(self, who, held):
        self.end("release", who, held)

    def end(self, action, who, held):
        lost = sum(self.model.items[key].lost for key in held)
        # A process knows the keys of so many lost items as the queue has rows; of more it lets go all together.
        keys = held if lost > CAPACITY else [key for key in held if self.chance.random() < 0.6]
        self.learners[who].do(action, None if keys == held else torch.tensor(keys, dtype=torch.int64))
        self.model.let_go(keys, "committed" if action == "commit" else "dropped")

    def kill(self, who, held):
        if who == 1 or self.chance.random() < 0.5:
            return
        self.learners.pop(who).kill()
        self.queue._segment.queue_state(False)  # as whoever draws or waits does
        self.model.let_go(held, "dropped")

    def publish(self, who, held):
        if self.model.max_age is not None:
            self.model.version += 1
            self.queue.policy_version = self.model.version


def play(kind, max_draws, seed, steps=250):
    """A random program. Some items are lost while they are held."""
    with contextlib.ExitStack() as stack:
        program = Program(kind, max_draws, seed, stack)
        for _ in range(steps):
            program.step()
        assert sum(item.end == "dropped" for item in program.model.items.values()) > 20


@pytest.mark.parametrize("max_draws", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_item_is_committed_dropped_or_expired_once_whoever_dies(kind, max_draws):
    play(kind, max_draws, seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_in_many_programs_each_item_is_committed_dropped_or_expired_once(kind):
    for seed in range(1, 60):
        play(kind, 1 + seed % 3, seed)


# How it can be let go


def queue(capacity=10, **more):
    return tr.ReplayBuffer({"x": tr.Field((), "int64")}, capacity, sampler=tr.Fifo(when_full="drop_oldest", **more))


def write(buffer, n):
    buffer.extend(x=np.arange(n))


def dropped(buffer):
    return buffer.stats().dropped_items


def fail_in_a_claim(buffer, n):
    with buffer.claim(n):
        write(buffer, n + 2)  # over two that nobody has, too
        raise ZeroDivisionError


def test_an_item_that_was_overwritten_is_dropped_when_it_is_given_back_and_not_when_it_is_committed():
    with queue(commit="manual") as buffer:
        write(buffer, 10)
        batch = buffer.sample(8)
        write(buffer, 8)
        assert dropped(buffer) == 0
        assert buffer.commit(batch["key"][:3]) == 0
        assert dropped(buffer) == 0
        buffer.release(batch["key"][3:5])
        assert dropped(buffer) == 2
        buffer.release()
        assert dropped(buffer) == 5
        with pytest.raises(ZeroDivisionError):
            fail_in_a_claim(buffer, 4)
        assert dropped(buffer) == 5 + 2 + 4


def test_what_is_drawn_ahead_and_never_handed_out_is_dropped():
    with queue() as buffer:
        write(buffer, 10)
        batches = iter(tr.ReplayDataset(buffer, 2, prefetch=3))
        assert next(batches)["x"].tolist() == [0, 1]
        eventually(lambda: buffer.stats().held_items == 8)
        write(buffer, 9)  # one of them was nobody's
        assert dropped(buffer) == 1
        batches.close()
        assert dropped(buffer) == 1 + 6


def test_who_forgets_the_keys_of_what_it_holds_ends_all_of_it():
    with queue(commit="manual") as buffer:
        for _ in range(8):
            write(buffer, 10)
            buffer.sample(10)
        buffer.commit()
        assert dropped(buffer) == 0
        for _ in range(8):
            write(buffer, 10)
            buffer.sample(10)
        buffer.release()
        assert dropped(buffer) == 70
        assert buffer.num_items == 10


def test_what_is_held_is_dropped_where_a_saved_queue_goes_on(tmp_path):
    with queue(commit="manual") as buffer:
        write(buffer, 10)
        buffer.sample(6)
        write(buffer, 4)
        buffer.save(tmp_path / "saved")
        with tr.ReplayBuffer.load(tmp_path / "saved") as loaded, buffer.copy() as copied:
            for later in (loaded, copied):
                assert (dropped(later), later.num_items) == (4, 10)
                assert later.stats().inserted == 14
        assert dropped(buffer) == 0
        assert buffer.commit() == 2
        assert dropped(buffer) == 0


@pytest.mark.parametrize("view", [tr.Rows(), tr.Transitions()], ids=str)
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("n", [4, 8])
def test_what_was_overwritten_when_all_died_is_dropped_where_the_file_is_opened(tmp_path, view, looks, n):
    path = tmp_path / "queue"
    steps = {"reward": 0.0, "terminated": False, "truncated": False}

    def write(buffer, n):
        writer = buffer.writer()
        if isinstance(view, tr.Transitions):
            writer.reset(obs=0)
        for _ in range(n):
            (writer.step if isinstance(view, tr.Transitions) else writer.append)(obs=0, **steps)
        if looks:
            buffer.stats()

    with tr.ReplayBuffer(STEPS, 12, path=path, view=view, sampler=tr.Fifo(when_full="drop_oldest")) as buffer:
        write(buffer, 11)
        inserted = len(buffer.sample(6)["obs"]) + buffer.num_items

    def live():
        with tr.ReplayBuffer.open(path) as buffer:
            batch = buffer.sample(6)
            write(buffer, n)
            assert len(batch["obs"]) == 6
            signal.raise_signal(signal.SIGKILL)

    with Forked(live) as process:
        assert process.wait() == -signal.SIGKILL
    with tr.ReplayBuffer.open(path) as buffer:
        assert dropped(buffer) == inserted + n - buffer.num_items
        assert dropped(buffer) >= n - 1


@pytest.mark.parametrize("end", ["commit", "release", "death"])
def test_what_another_process_has_drawn_is_dropped_by_the_one_that_took_it_over(end):
    with queue(commit="manual") as buffer:
        write(buffer, 10)
        keys, presence = shared_counters(6), shared_counters(1)

        def draw():
            presence[0] = buffer._segment.presence
            for place, key in enumerate(buffer.sample(6)["key"].tolist()):
                keys[place] = key
            signal.pause()

        def take_over():
            assert buffer._segment.adopt(list(keys), presence[0], 0)

        with Forked(draw) as worker:
            eventually(lambda: list(keys) == list(range(6)))
            write(buffer, 4)
            assert dropped(buffer) == 0
            if end == "death":
                with Forked(take_over) as heir:
                    assert heir.wait() == 0
            else:
                take_over()
            worker.kill()
        buffer._segment.queue_state(False)
        if end != "death":
            assert dropped(buffer) == 0
            getattr(buffer, end)()
        assert dropped(buffer) == (0 if end == "commit" else 4)


def test_what_is_cleared_is_not_dropped_whoever_holds_it():
    with queue(commit="manual") as buffer:
        write(buffer, 10)
        buffer.sample(6)
        write(buffer, 3)  # over three that are held
        buffer.clear()
        assert dropped(buffer) == 0
        buffer.release()
        assert dropped(buffer) == 3


def test_an_item_that_is_dropped_while_it_is_held_leaves_room_for_another():
    limiter = tr.Admission(batch_size=4, max_age=3)
    sampler = tr.Fifo(when_full="drop_oldest", commit="manual")
    spec = {"x": tr.Field(), "policy_version": tr.Field((), "int64")}
    with tr.ReplayBuffer(spec, 8, sampler=sampler, limiter=limiter) as buffer, buffer.writer() as writer:

        def write(n):
            with writer.admit(n, timeout=0):
                writer.extend(x=np.zeros(n))

        write(8)
        buffer.sample(4)
        write(4)
        assert buffer.stats().admitted_items == 12
        buffer.release()
        assert (dropped(buffer), buffer.stats().admitted_items) == (4, 8)
        buffer.policy_version = 1  # of a batch that nobody holds any more
        assert buffer.stats().admission_limit - buffer.stats().admitted_items == 20 - 8

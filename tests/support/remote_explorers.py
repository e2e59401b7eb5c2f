"""Explorers of numbered rows for tests of remote writers: actors that a cluster's nodes can import."""

import os
import pickle
import random
import signal

import numpy as np
import pytest
import torch
from forked import Forked, eventually

import torchreplay as tr

SPEC = {"writer": tr.Field((), torch.int64), "count": tr.Field((), torch.int64), "frame": tr.Field((400,))}
STEPS = {
    "obs": tr.Field((2,), torch.int64),  # lane of the writer, step
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}
EPISODE = 5


def write_when_it_is_closed(buffer, writer):
    """Closes another object of the buffer, and writes with a writer of that one."""
    other = pickle.loads(pickle.dumps(buffer))
    with other.writer() as late:
        other.close()
        late.append(writer=0, count=0, frame=np.zeros(400))


class Explorer:
    """Writes numbered rows to a buffer that was passed to it."""

    def open(self, buffer, index=0):
        self.buffer, self.index, self.count = buffer, index, 0
        self.writer = buffer.writer()

    def come_late(self, buffer):
        try:
            return buffer.stopped, buffer.writer()
        except tr.Stopped as error:
            return buffer.stopped, str(error)

    def let_go(self):
        self.writer.close()
        self.buffer.close()
        self.buffer = self.writer = None

    def kind(self):
        return type(self.buffer).__name__, repr(self.buffer), os.getpid()

    def append(self, rows):
        for _ in range(rows):
            answer = self.writer.append(**self.row(self.count))
            assert answer is None, answer
            self.count += 1

    def row(self, count):
        frame = np.full(400, count + self.index / 8, np.float32)
        return {"writer": self.index, "count": count, "frame": frame}

    def write(self, rows):
        """Returns how many rows it has written when all are acknowledged."""
        self.append(rows)
        self.writer.flush()
        return self.count

    def write_until_stopped(self):
        try:
            while True:
                self.write(10)
        except tr.Stopped as error:
            return self.count, str(error), self.buffer.stopped

    def try_to(self, call):
        try:
            return call(self.buffer, self.writer)
        except Exception as error:
            return type(error), str(error)

    def write_interrupted(self, rows):
        """Writes rows with a signal every few milliseconds that raises wherever it is; returns how many did."""
        rng, interrupts, interruptible = random.Random(0), 0, True

        def interrupt(number, frame):
            if interruptible:  # CPython may run a handler long after its signal, when the timer is off again
                raise Interrupted

        signal.signal(signal.SIGALRM, interrupt)
        while interruptible:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.01))
                while (count := self.writer.rows) < rows:
                    self.writer.append(**self.row(count))
                interruptible = False
            except Interrupted:
                interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.writer.flush()
        return interrupts

    def fork(self):
        """Returns what a forked child's calls raised."""
        reading, writing = os.pipe()

        def use():
            rows = {name: [value] for name, value in self.row(0).items()}
            for call in (
                lambda: self.writer.append(**self.row(0)),
                self.buffer.writer,
                lambda: len(self.buffer),
                lambda: self.buffer.extend(**rows),
            ):
                try:
                    call()
                except Exception as error:
                    os.write(writing, f"{type(error).__name__}: {error}\n".encode())

        assert Forked(use).wait() == 0
        os.close(writing)
        with os.fdopen(reading) as told:
            return told.read().splitlines()

    def mapped(self):
        """What this process has of the memory of others: mappings and descriptors."""
        with open("/proc/self/maps") as maps:
            found = [line for line in maps if "torchreplay" in line]
        inodes = {int(line.split()[4]) for line in found}
        for fd in os.listdir("/proc/self/fd"):
            try:
                inodes.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
            except OSError:
                continue
        return inodes

    def end(self, steps):
        """Two environments whose episodes end without a flag, one after `steps` steps and one after one more."""
        no = np.zeros(2, bool)
        with self.buffer.writer(2, autoreset="disabled") as writer:
            writer.reset(obs=np.zeros((2, 2), int))
            for step in range(1, steps + 2):
                obs = np.stack([np.arange(2), np.full(2, step)], 1)
                writer.step(obs=obs, reward=np.ones(2), terminated=no, truncated=no)
                if step == steps:
                    writer.end_episode(mask=np.array([True, False]))
                    writer.reset(obs=np.zeros((2, 2), int), mask=np.array([True, False]))
            writer.end_episode()
            writer.end_episode()

    def step(self, seed, lanes, steps):
        """Steps of a vector environment whose lanes end their episodes at different times."""
        with self.buffer.writer(lanes) as writer:
            lane = np.arange(lanes) + seed * 100
            writer.reset(obs=np.stack([lane, np.zeros(lanes, int)], 1))
            ended = np.zeros(lanes, bool)
            for t in range(1, steps):
                reward = t * ~ended  # the step after an end has none
                ended = (t + np.arange(lanes)) % EPISODE == 0
                obs = np.stack([lane, np.full(lanes, t)], 1)
                writer.step(obs=obs, reward=reward, terminated=ended, truncated=np.zeros(lanes, bool))
                if t % 7 == 0:
                    writer.flush()  # chunks end in the middle of episodes

    def pull(self, weights, version):
        """Pulls `version`, and once more: whether there was something newer, and the sum of the weights then."""
        if weights is not None:
            self.weights, self.module = weights, torch.nn.Linear(3, 1, bias=False)
        eventually(lambda: self.weights.version >= version, 120)
        return [(self.weights.pull(self.module), float(self.module.weight.detach().sum())) for _ in range(2)]

    def publish(self):
        with pytest.raises(RuntimeError) as caught:
            self.weights.publish(self.module)
        return str(caught.value)


class Interrupted(Exception):
    """What a signal raises."""


def make_buffer(capacity=50_000, **options):
    return tr.ReplayBuffer(SPEC, capacity, seed=0, **options)


def rows_of(buffer):
    """All rows, in the order of their keys."""
    return buffer.gather(buffer.keys(rows=True))


def assert_complete(buffer, counts):
    """Of each writer, rows 0, 1, ... are there, once each, in the order of keys, with what was written."""
    storage = rows_of(buffer)
    assert len(buffer) == len(storage["count"]) == sum(counts.values())
    for writer, count in counts.items():
        chosen = storage["writer"] == writer
        assert torch.equal(storage["count"][chosen], torch.arange(count)), f"writer {writer}"
    expected = (storage["count"] + storage["writer"] / 8).float()
    assert torch.equal(storage["frame"], expected[:, None].expand(-1, 400))


class Owner:
    """Has a buffer on its node."""

    def __init__(self):
        self.buffer = make_buffer()

    def lend(self):
        return (self.buffer,)

    def count(self):
        return len(self.buffer)

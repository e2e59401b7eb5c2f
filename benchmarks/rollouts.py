"""GRPO over one store of rollouts: ``python -m benchmarks.rollouts --peer NAME ...``, a process of its own.

Generators answer tasks, and a learner learns from whole groups, as in ``examples/grpo.py``; only what carries the
rollouts is another. With `--kills` generators and the learner are killed in turn, and start again. It prints one JSON
object. The caller gives it a time limit and kills the whole group when it is exceeded.
"""

import argparse
import asyncio
import json
import queue
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ctypes import c_bool, c_int64
from multiprocessing import get_context
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any

import torch
from torch import Tensor, nn

import torchreplay as tr
from benchmarks.ragged_traffic import shared_out_bytes
from examples.grpo import Args, Policy, answered, loss_of, queue_of, random_task

ARGS = Args(tensorboard=False)
GROUPS = ARGS.batch_size // ARGS.group_size
"""Of a batch."""
MOST_HELD = GROUPS * (ARGS.max_age + 1)
"""Groups that a store holds: what `Admission` admits."""
MOST = 1 << 20
"""Groups of one generator at most."""
GENERATORS = 2
WARM_UP = 3.0
HANGS = 30.0
"""Seconds without a step after which a survivor hangs."""
PAUSE = 0.005
SPAWN = get_context("spawn")

Row = dict[str, Any]


class Notes:
    """What all processes write down, in memory that outlives each of them."""

    def __init__(self) -> None:
        self.finish = RawValue(c_bool)
        self.steps = RawValue(c_int64)
        self.begun = RawArray(c_int64, GENERATORS)  # groups that a generator has begun
        self.put = RawArray(c_int64, GENERATORS * MOST)  # rollouts of each group, once its put has returned
        self.learned = RawArray(c_int64, GENERATORS * MOST)  # those that a step has learned from

    def differences(self) -> tuple[int, int]:
        """Returns how many rollouts that were put nobody learned from, and how often one was learned from again."""
        pairs = list(zip(self.put, self.learned, strict=True))
        return sum(max(0, put - got) for put, got in pairs), sum(max(0, got - ARGS.group_size) for _, got in pairs)


class Store(ABC):
    """What holds rollouts between generators and a learner, which are processes of their own."""

    def open(self) -> None:  # noqa: B027  # most need nothing
        """Prepares a process that begins to use it."""

    @abstractmethod
    def put(self, number: int, policy: nn.Module, weights: tr.SharedWeights) -> None:
        """Answers a task, and adds the group."""

    @abstractmethod
    def batches(self) -> Iterator[Any]:
        """Yields batches as the loss of the example takes them. A learner has learned from one when it asks again."""

    @abstractmethod
    def publish(self, policy: nn.Module, weights: tr.SharedWeights) -> None:
        """Publishes the weights after a step."""

    @abstractmethod
    def rest(self) -> list[int]:
        """Returns the groups' numbers of the rollouts that are left."""


class Torchreplay(Store):
    """The example's own queue."""

    def __init__(self) -> None:
        self._queue = queue_of(ARGS)
        self._writer: Any = None

    def put(self, number: int, policy: nn.Module, weights: tr.SharedWeights) -> None:
        """Is admitted first."""
        self._writer = self._writer or self._queue.writer()
        with self._writer.admit(ARGS.group_size):
            weights.pull(policy, writer=self._writer)
            for row in group(policy, number):
                self._writer.append(**row)

    def batches(self) -> Iterator[Any]:
        """Yields what a `GroupDataset` does."""
        how: dict[str, Any] = {"by": "prompt", "size": ARGS.group_size, "groups": GROUPS, "min_size": 1, "timeout": 5.0}
        with self._queue.expect_writers():
            for batch in tr.GroupDataset(self._queue, **how):
                yield batch
                self._queue.commit()

    def publish(self, policy: nn.Module, weights: tr.SharedWeights) -> None:
        """Admits more, too."""
        weights.publish(policy, buffer=self._queue)

    def rest(self) -> list[int]:
        """Draws what is left, and what came back from the dead."""
        numbers: list[int] = []
        while self._queue.num_items:
            numbers += self._queue.sample(64, at_least=1)["prompt"].tolist()
        return numbers


class Groups(Store):
    """A store of whole groups, in order, which knows nothing of policies."""

    @abstractmethod
    def add(self, rows: list[Row]) -> None:
        """Adds a group, when there is room."""

    @abstractmethod
    def take(self, n: int, wait: bool = True) -> list[list[Row]]:
        """Returns the oldest `n` groups, or those that there are."""

    def put(self, number: int, policy: nn.Module, weights: tr.SharedWeights) -> None:
        """Sends tensors as arrays."""
        weights.pull(policy)
        rows = group(policy, number)
        self.add([{k: v.numpy() if isinstance(v, Tensor) else v for k, v in row.items()} for row in rows])

    def batches(self) -> Iterator[Any]:
        """Pads them."""
        while True:
            yield Padded(self.take(GROUPS))

    def publish(self, policy: nn.Module, weights: tr.SharedWeights) -> None:
        """Lets generators pull them."""
        weights.publish(policy)

    def rest(self) -> list[int]:
        """Takes what is left."""
        numbers: list[int] = []
        while groups := self.take(GROUPS, wait=False):
            numbers += [row["prompt"] for rows in groups for row in rows]
        return numbers


class Pipe(Groups):
    """A `multiprocessing.Queue`."""

    def __init__(self) -> None:
        self._queue: Any = SPAWN.Queue(MOST_HELD)

    def add(self, rows: list[Row]) -> None:
        """Puts it."""
        self._queue.put(rows)

    def take(self, n: int, wait: bool = True) -> list[list[Row]]:
        """Gets one after the other."""
        groups: list[list[Row]] = []
        with suppress(queue.Empty):
            while len(groups) < n:
                groups.append(self._queue.get(timeout=None if wait else 2.0))
        return groups


class RayActor(Groups):
    """A Ray actor with a list."""

    _list: Any = None

    def __init__(self) -> None:
        import ray

        ray.init(address="local", namespace="grpo", num_cpus=8, include_dashboard=False, log_to_driver=False)
        actor: Any = ray.remote(List)
        self._held = actor.options(name="rollouts", lifetime="detached").remote()
        ray.get(self._held.take.remote(0))
        self._address = ray.get_runtime_context().gcs_address

    def __getstate__(self) -> dict[str, str]:
        return {"_address": self._address}

    def open(self) -> None:
        """Connects, as a program of its own."""
        import ray

        ray.init(address=self._address, namespace="grpo", log_to_driver=False)
        self._list = ray.get_actor("rollouts")

    def add(self, rows: list[Row]) -> None:
        """Returns when there was room."""
        import ray

        ray.get(self._list.add.remote(rows))

    def take(self, n: int, wait: bool = True) -> list[list[Row]]:
        """Asks once: the actor waits."""
        import ray

        groups: list[list[Row]] = ray.get((self._list or self._held).take.remote(n, wait))
        return groups


class List:
    """Groups of an actor, which hands them out in order. Its calls wait within it, so that nobody has to ask twice."""

    def __init__(self) -> None:
        self._groups: list[list[Row]] = []
        self._changed = asyncio.Condition()

    async def add(self, rows: list[Row]) -> None:
        """Waits for room, and adds them."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._groups) < MOST_HELD)
            self._groups.append(rows)
            self._changed.notify_all()

    async def take(self, n: int, wait: bool = True) -> list[list[Row]]:
        """Waits for `n` groups, and returns the oldest; without `wait`, those that there are."""
        async with self._changed:
            if wait:
                await self._changed.wait_for(lambda: len(self._groups) >= n)
            taken, self._groups = self._groups[:n], self._groups[n:]
            self._changed.notify_all()
        return taken


class Padded:
    """Groups as the loss of the example takes them."""

    def __init__(self, groups: list[list[Row]]) -> None:
        self._rows = [row for rows in groups for row in rows]
        members = torch.tensor([len(rows) for rows in groups])
        columns = {name: torch.tensor([row[name] for row in self._rows]) for name in ("reward", "prompt")}
        self._columns = columns | {"group": torch.repeat_interleave(torch.arange(len(groups)), members)}

    def __getitem__(self, name: str) -> Tensor:
        return self._columns[name]

    def padded(self, name: str, value: float = 0) -> Tensor:
        """Returns the values of a field, ``[rows, longest]``."""
        values = [torch.as_tensor(row[name]) for row in self._rows]
        return nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=value)


STORES: Mapping[str, type[Store]] = {"torchreplay": Torchreplay, "multiprocessing.Queue": Pipe, "Ray actor": RayActor}


def group(policy: nn.Module, number: int) -> list[Row]:
    """Returns the answers to one task."""
    rows = answered(policy, [random_task(random.Random(number))] * ARGS.group_size)
    return [{"prompt": number, **row} for row in rows]


def generate(store: Store, slot: int, notes: Notes, weights: tr.SharedWeights) -> None:
    """Answers tasks until the run is over."""
    torch.set_num_threads(1)
    store.open()
    policy = Policy(ARGS.layers).requires_grad_(False)
    while not notes.finish.value:
        number = slot * MOST + notes.begun[slot]
        notes.begun[slot] += 1
        with suppress(tr.Stopped):
            store.put(number, policy, weights)
            notes.put[number] = ARGS.group_size


def learn(store: Store, notes: Notes, weights: tr.SharedWeights) -> None:
    """Learns until it is killed."""
    torch.set_num_threads(1)
    store.open()
    policy = Policy(ARGS.layers)
    weights.pull(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=ARGS.learning_rate)
    for batch in store.batches():
        loss = loss_of(policy, batch, ARGS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        store.publish(policy, weights)
        for number in batch["prompt"].tolist():
            notes.learned[number] += 1
        notes.steps.value += 1


class Run:
    """A program of generators and a learner.

    Args:
        peer: What carries the rollouts.
    """

    def __init__(self, peer: str) -> None:
        self.notes, self.store = Notes(), STORES[peer]()
        self.weights = tr.SharedWeights(Policy(ARGS.layers))
        self.processes: dict[int, Any] = {}
        for who in range(GENERATORS + 1):
            self.start(who)

    def start(self, who: int) -> None:
        """Starts a generator, or the learner, which has the highest number."""
        shared = self.notes, self.weights
        target, args = (learn, (self.store, *shared)) if who == GENERATORS else (generate, (self.store, who, *shared))
        self.processes[who] = SPAWN.Process(target=target, args=args, daemon=True)
        self.processes[who].start()

    def kill(self, who: int) -> None:
        """Kills it by SIGKILL."""
        self.processes[who].kill()
        self.processes[who].join()

    def goes_on(self, who: int) -> bool:
        """Waits until it has done something more; returns whether it has."""
        done = self.done(who)
        until = time.monotonic() + HANGS
        while self.done(who) < done + 2 and time.monotonic() < until:
            time.sleep(PAUSE)
        return self.done(who) >= done + 2

    def done(self, who: int) -> int:
        """Returns how often it has done its work."""
        return int(self.notes.steps.value if who == GENERATORS else self.notes.begun[who])

    def speed(self, seconds: float) -> dict[str, float]:
        """Returns rollouts a second, and resident bytes of all processes."""
        self.goes_on(GENERATORS)
        time.sleep(WARM_UP)
        before, start = self.notes.steps.value, time.monotonic()
        time.sleep(seconds)
        steps = self.notes.steps.value - before
        return {"rollouts": steps * ARGS.batch_size / (time.monotonic() - start), "memory": shared_out_bytes()}

    def deaths(self, kills: int, seed: int) -> dict[str, float]:
        """Returns the deaths, and how many rollouts were lost, learned from again, and whether somebody hung."""
        chance, hung = random.Random(seed), not self.goes_on(GENERATORS)
        for count in range(kills):
            who = chance.randrange(GENERATORS) if count % 2 else GENERATORS
            time.sleep(chance.uniform(0, 0.5))
            self.kill(who)
            self.start(who)
            if hung := not (self.goes_on(who) and self.goes_on(GENERATORS)):
                break
        self.notes.finish.value = True
        for who in range(GENERATORS):
            self.processes[who].join(timeout=5.0)
            self.kill(who)
        self.kill(GENERATORS)
        for number in [] if hung else self.store.rest():
            self.notes.learned[number] += 1
        lost, again = self.notes.differences()
        return {"kills": count + 1, "lost": lost, "again": again, "hung": hung}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts", description=__doc__)
    parser.add_argument("--peer", required=True, choices=list(STORES))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    options = _parse()
    run = Run(options.peer)
    figures = run.deaths(options.kills, options.seed) if options.kills else run.speed(options.seconds)
    print(json.dumps(figures), flush=True)

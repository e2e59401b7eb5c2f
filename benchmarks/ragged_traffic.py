"""One round of rollouts of any length: ``python -m benchmarks.ragged_traffic --peer NAME ...``, a process of its own.

A producer's process puts rollouts into a store, and then this process gets all of them, as packed batches of 16; over
and over. It prints one JSON object. The caller gives it a time limit and kills the whole group when it is exceeded.
"""

import argparse
import json
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Queue, get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import resident_bytes

DTYPES = {"tokens": torch.int32, "logprob": torch.float32, "mask": torch.uint8}
TOKEN_BYTES = sum(dtype.itemsize for dtype in DTYPES.values())
BATCH_SIZE = 16
PAGE, ALIGNED = 4096, 24
"""Bytes of a page, and those that the three values of a row lie apart at most."""
SHORTEST, LONGEST = 500, 32_000
WARM_UP = 2
"""Turns that are not measured: of one rollout, which starts what a store needs, and of all, which touch its memory."""
LEAST_TURNS = 3

Rollout = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Traffic:
    """Settings of a round: who stores the rollouts, how many there are, and seconds of measured turns."""

    peer: str
    rollouts: int
    seconds: float

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rollout, log-uniform."""
        random = np.random.default_rng(0).uniform(np.log(SHORTEST), np.log(LONGEST), self.rollouts)
        return [int(length) for length in np.exp(random)]

    @property
    def payload(self) -> int:
        """Bytes of all rollouts."""
        return sum(self.lengths) * TOKEN_BYTES

    def make(self) -> list[Rollout]:
        """Returns the rollouts, in memory that was written."""
        return [{name: torch.ones(n, dtype=dtype) for name, dtype in DTYPES.items()} for n in self.lengths]


class Store(ABC):
    """What holds rollouts between a producer's process and this one."""

    holds = True
    """Whether what was put is in the store, so that its memory can be told from the producer's."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    @abstractmethod
    def start(self) -> None:
        """Starts processes, which take memory by themselves."""

    def open(self, n: int) -> None:  # noqa: B027  # most make it when they need it
        """Makes room for the first `n` rollouts."""

    @abstractmethod
    def put(self, n: int) -> float:
        """Lets the producer put the first `n` rollouts; returns its seconds."""

    @abstractmethod
    def get(self, n: int) -> list[Rollout]:
        """Returns packed batches of them."""


class Producer:
    """A forked process that puts rollouts whenever it is asked to.

    Args:
        put: Puts rollouts. It is given what is sent with the question, too.
        traffic: Which rollouts.
    """

    def __init__(self, put: Callable[[list[Rollout], Any], None], traffic: Traffic) -> None:
        fork = get_context("fork")
        self._here, there = fork.Pipe()
        fork.Process(target=self._run, args=(put, traffic, there), daemon=True).start()
        self._here.recv()

    def ask(self, n: int, sent: Any = None) -> None:
        """Begins to put the first `n`."""
        self._here.send((n, sent))

    def answer(self) -> float:
        """Returns the seconds that it took."""
        return float(self._here.recv())

    @staticmethod
    def _run(put: Callable[[list[Rollout], Any], None], traffic: Traffic, there: Any) -> None:
        torch.set_num_threads(1)
        rollouts = traffic.make()
        there.send(None)
        while True:
            n, sent = there.recv()
            start = time.perf_counter()
            put(rollouts[:n], sent)
            there.send(time.perf_counter() - start)


class Torchreplay(Store):
    """A `ReplayBuffer` with room for the rollouts, and for one more that does not fit before the end of its ring."""

    _buffer: Any = None
    _sent: Any = None
    _writer: Any = None

    def start(self) -> None:
        """Starts the producer."""
        self._producer = Producer(self._write, self.traffic)

    def open(self, n: int) -> None:
        """Makes the buffer."""
        import torchreplay as tr

        if self._buffer:
            self._buffer.close()
        spec = {name: tr.Ragged(dtype, like=None if name == "tokens" else "tokens") for name, dtype in DTYPES.items()}
        pages = [-(-(length * TOKEN_BYTES + ALIGNED) // PAGE) for length in self.traffic.lengths[:n]]
        room = max((sum(pages) + max(pages)) * PAGE, 4 * max(pages) * PAGE)
        self._buffer = self._sent = tr.ReplayBuffer(spec, n, ragged_bytes=room)

    def put(self, n: int) -> float:
        """Appends them one by one."""
        self._producer.ask(n, self._sent)
        self._sent = None  # the producer has it
        return self._producer.answer()

    def get(self, n: int) -> list[Rollout]:
        """Draws the newest ones, by their keys."""
        keys = np.arange(self._buffer.next_key - n, self._buffer.next_key)
        return [self._buffer.gather(some, missing="raise") for some in split(keys)]

    def _write(self, rollouts: list[Rollout], buffer: Any) -> None:
        if buffer is not None:
            self._writer = buffer.writer()
        for rollout in rollouts:
            self._writer.append(**rollout)


class Pipe(Store):
    """A `multiprocessing.Queue`: what is put waits with its producer, and is copied when it is taken."""

    holds = False

    def start(self) -> None:
        """Starts the producer."""
        self._queue: Any = Queue()
        self._producer = Producer(self._write, self.traffic)

    def put(self, n: int) -> float:
        """Begins to put them, one by one."""
        self._producer.ask(n)
        return 0.0

    def get(self, n: int) -> list[Rollout]:
        """Gets them one by one, while the producer sends them."""
        taken = [self._queue.get() for _ in range(n)]
        self._producer.answer()
        return [packed([{n: torch.from_numpy(v) for n, v in one.items()} for one in some]) for some in split(taken)]

    def _write(self, rollouts: list[Rollout], sent: Any) -> None:
        for rollout in rollouts:
            self._queue.put({name: value.numpy() for name, value in rollout.items()})


class OverRay(Store):
    """What Ray carries: the producer is an actor."""

    def start(self) -> None:
        """Starts Ray."""
        import ray

        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
        producer: Any = ray.remote(RayProducer)
        self._producer = producer.remote(self.traffic)
        ray.get(self._producer.ready.remote())

    def _ask(self, n: int, put: Callable[[list[Rollout], Any], None], sent: Any) -> float:
        import ray

        return float(ray.get(self._producer.put.remote(n, put, sent)))


class RayProducer:
    """The producer of Ray's stores.

    Args:
        traffic: Which rollouts.
    """

    def __init__(self, traffic: Traffic) -> None:
        torch.set_num_threads(1)
        self._rollouts = traffic.make()

    def ready(self) -> None:
        """Returns when it is there."""

    def put(self, n: int, put: Callable[[list[Rollout], Any], None], sent: Any) -> float:
        """Returns the seconds that `put` takes for the first `n` rollouts."""
        start = time.perf_counter()
        put(self._rollouts[:n], sent)
        return time.perf_counter() - start


class RayActor(OverRay):
    """An actor with lists of tensors: how trainers of language models hold rollouts."""

    def start(self) -> None:
        """Starts the actor, too."""
        import ray

        super().start()
        actor: Any = ray.remote(Lists)
        self._lists = actor.remote()
        ray.get(self._lists.get.remote(0))

    def put(self, n: int) -> float:
        """Sends blocks, and waits for all of them."""

        def put(rollouts: list[Rollout], lists: Any) -> None:
            import ray

            ray.get([lists.put.remote(block) for block in split(rollouts)])

        return self._ask(n, put, self._lists)

    def get(self, n: int) -> list[Rollout]:
        """Gets blocks, all asked for at once."""
        import ray

        asked = [self._lists.get.remote(BATCH_SIZE) for _ in split(range(n))]
        return [packed(ray.get(block)) for block in asked]


class Lists:
    """Rollouts of an actor, which are handed out in order."""

    def __init__(self) -> None:
        self._rollouts: list[Rollout] = []

    def put(self, rollouts: list[Rollout]) -> None:
        """Adds some."""
        self._rollouts += rollouts

    def get(self, n: int) -> list[Rollout]:
        """Returns the oldest."""
        taken, self._rollouts = self._rollouts[:n], self._rollouts[n:]
        return taken


class Transfer(OverRay):
    """`TransferQueue` with its own simple storage, in one actor."""

    def start(self) -> None:
        """Starts its actors."""
        import transfer_queue

        super().start()
        transfer_queue.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
        self._turn = 0

    def put(self, n: int) -> float:
        """Puts blocks of nested tensors."""

        def put(rollouts: list[Rollout], keys: list[list[str]]) -> None:
            import transfer_queue
            from tensordict import TensorDict

            for names, block in zip(keys, split(rollouts), strict=True):
                columns = {name: [rollout[name] for rollout in block] for name in DTYPES}
                nested = {name: torch.nested.as_nested_tensor(v, layout=torch.jagged) for name, v in columns.items()}
                fields = TensorDict(nested, batch_size=[len(block)])
                transfer_queue.kv_batch_put(keys=names, partition_id="rollouts", fields=fields, tags=[{}] * len(names))

        self._turn += 1
        self._keys = split([f"{self._turn}/{i}" for i in range(n)])
        return self._ask(n, put, self._keys)

    def get(self, n: int) -> list[Rollout]:
        """Gets as many blocks, and clears them."""
        import transfer_queue

        batches = []
        for names in self._keys:
            fields = transfer_queue.kv_batch_get(keys=names, partition_id="rollouts")
            batches.append({name: fields[name].values() for name in DTYPES})
            transfer_queue.kv_clear(keys=names, partition_id="rollouts")
        return batches


def split(items: Any) -> list[Any]:
    """Returns the items in blocks of a batch."""
    return [items[at : at + BATCH_SIZE] for at in range(0, len(items), BATCH_SIZE)]


def packed(rollouts: Sequence[Rollout]) -> Rollout:
    """Returns a packed batch of rollouts."""
    return {name: torch.cat([rollout[name] for rollout in rollouts]) for name in DTYPES}


def shared_out_bytes() -> int:
    """Returns the resident memory of this process and its descendants, shared pages in equal parts (PSS).

    Without that of files, such as libraries: their parts change whenever another program begins or ends.
    """
    resident_bytes()  # which frees what is garbage here
    total, waiting, children = 0, [os.getpid()], _children()
    while waiting:
        process = waiting.pop()
        waiting += children.get(process, [])
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        total += sum(
            int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
        )
    return total


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.setdefault(parent, []).append(int(path.parent.name))
    return found


STORES: dict[str, type[Store]] = {
    "torchreplay": Torchreplay,
    "multiprocessing.Queue": Pipe,
    "Ray actor": RayActor,
    "TransferQueue": Transfer,
}


def run(traffic: Traffic) -> dict[str, float | None]:
    """Runs a round; returns `put`, `get`, `together` and `memcpy` in bytes a second, and `memory` in payloads.

    Of a store that does not hold what is put, `put` and `memory` are None.
    """
    torch.set_num_threads(1)
    store = STORES[traffic.peer](traffic)
    store.start()
    store.open(1)
    for _ in range(WARM_UP):
        _turn(store, 1)
    before, memory = shared_out_bytes(), None
    store.open(traffic.rollouts)
    if store.holds:
        store.put(traffic.rollouts)
        memory = (shared_out_bytes() - before) / traffic.payload
        store.get(traffic.rollouts)
    for _ in range(WARM_UP):
        _turn(store, traffic.rollouts)
    copy = Copy(traffic)
    turns: list[tuple[float, float, float]] = []
    start = time.perf_counter()
    while len(turns) < LEAST_TURNS or time.perf_counter() < start + traffic.seconds:
        turns.append((*_turn(store, traffic.rollouts), copy.seconds()))
    put, get, copied = (statistics.median(column) for column in zip(*turns, strict=True))
    rates = {"together": put + get, "get": get, "memcpy": copied} | ({"put": put} if store.holds else {})
    return {"put": None, "memory": memory} | {name: traffic.payload / seconds for name, seconds in rates.items()}


def _turn(store: Store, n: int) -> tuple[float, float]:
    put = store.put(n)
    start = time.perf_counter()
    batches = store.get(n)
    seconds = time.perf_counter() - start
    got, sent = sum(len(batch["tokens"]) for batch in batches), sum(store.traffic.lengths[:n])
    if got != sent:
        raise RuntimeError(f"{store.traffic.peer} gave {got:,} tokens: expected {sent:,}")
    return put, seconds


class Copy:
    """A plain copy of the rollouts into one piece of memory that was written before.

    Args:
        traffic: Which rollouts.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._sources = [value.numpy().view(np.uint8) for rollout in traffic.make() for value in rollout.values()]
        ends = np.cumsum([source.nbytes for source in self._sources])
        self._targets = np.split(np.ones(ends[-1], np.uint8), ends[:-1])

    def seconds(self) -> float:
        """Copies, and returns how long it took."""
        start = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            np.copyto(target, source)
        return time.perf_counter() - start


def _parse() -> Traffic:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ragged_traffic", description=__doc__)
    parser.add_argument("--peer", required=True, choices=list(STORES))
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0)
    return Traffic(**vars(parser.parse_args()))


if __name__ == "__main__":
    print(json.dumps(run(_parse())), flush=True)

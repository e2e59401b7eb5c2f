"""One round of a queue: ``python -m benchmarks.queue_traffic --peer NAME ...``, a process of its own.

Producers write items flat out; one consumer takes 64 at a time, as one array. It prints one JSON object. The caller
gives it a time limit and kills the whole group when it is exceeded.
"""

import argparse
import asyncio
import atexit
import ctypes
import json
import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Queue, get_context
from multiprocessing.sharedctypes import RawValue
from typing import Any

import numpy as np

BATCH_SIZE = 64
BLOCK = 16
"""Items that a producer of torchreplay writes in a call."""
HELD_BYTES = 256 << 20
"""That a queue may hold, at most."""
MOST_HELD = 65536
WARM_UP = 0.5


@dataclass(frozen=True)
class Traffic:
    """Settings of a round: who carries the items, their bytes, producers and measured seconds."""

    peer: str
    item_bytes: int
    producers: int
    seconds: float

    @property
    def capacity(self) -> int:
        """Items that a queue holds."""
        return max(4 * BATCH_SIZE, min(MOST_HELD, HELD_BYTES // self.item_bytes))

    @property
    def item(self) -> np.ndarray:
        """One item."""
        return np.arange(self.item_bytes // 4, dtype=np.float32)


class Carrier(ABC):
    """What takes items from producers, which are forked, to a consumer in this process."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    @abstractmethod
    def produce(self, finish: Any) -> None:
        """Writes items until `finish` is set. In a process of its own."""

    @abstractmethod
    def consume(self) -> Iterator[np.ndarray]:
        """Yields arrays ``[64, ...]``."""


class Torchreplay(Carrier):
    """A `ReplayBuffer` with `Fifo`."""

    def __init__(self, traffic: Traffic) -> None:
        import torchreplay as tr

        super().__init__(traffic)
        spec = {"x": tr.Field(traffic.item.shape)}
        self._queue = tr.ReplayBuffer(spec, traffic.capacity, sampler=tr.Fifo())
        self._lease = self._queue.expect_writers()

    def produce(self, finish: Any) -> None:
        """Writes blocks."""
        block = np.stack([self.traffic.item] * BLOCK)
        with self._queue.writer() as writer:
            while not finish.value:
                writer.extend(x=block)

    def consume(self) -> Iterator[np.ndarray]:
        """Yields what `sample` returns."""
        while True:
            yield self._queue.sample(BATCH_SIZE)["x"].numpy()


class Pipe(Carrier):
    """A `multiprocessing.Queue`."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(traffic)
        self._queue: Any = Queue(maxsize=min(traffic.capacity, 1024))

    def produce(self, finish: Any) -> None:
        """Puts items."""
        item = self.traffic.item
        while not finish.value:
            self._queue.put(item)

    def consume(self) -> Iterator[np.ndarray]:
        """Yields stacks."""
        while True:
            yield np.stack([self._queue.get() for _ in range(BATCH_SIZE)])


class FasterFifo(Carrier):
    """A queue of `faster-fifo`."""

    def __init__(self, traffic: Traffic) -> None:
        import faster_fifo
        import faster_fifo_reduction  # noqa: F401  # which it asks for

        super().__init__(traffic)
        self._queue: Any = faster_fifo.Queue(max_size_bytes=min(HELD_BYTES, 1 << 28))

    def produce(self, finish: Any) -> None:
        """Puts blocks."""
        block = [self.traffic.item] * BLOCK
        while not finish.value:
            self._queue.put_many(block, timeout=1e6)

    def consume(self) -> Iterator[np.ndarray]:
        """Yields stacks."""
        items: list[np.ndarray] = []
        while True:
            while len(items) < BATCH_SIZE:
                items += self._queue.get_many(timeout=1e6, max_messages_to_get=BATCH_SIZE - len(items))
            yield np.stack(items)
            items.clear()


class Echo(Carrier):
    """`id-echo`, by its own protocol over the loopback."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(traffic)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]

    def produce(self, finish: Any) -> None:
        """Sends items."""
        from echo import TcpClient

        item: Any = {"x": self.traffic.item}
        client = _patiently(lambda: TcpClient("127.0.0.1", self._port, item))
        while not finish.value:
            client.send(item)

    def consume(self) -> Iterator[np.ndarray]:
        """Yields its views."""
        from echo import Server, TcpTransport

        server = Server({"x": self.traffic.item}, batch_size=BATCH_SIZE, transport=TcpTransport(port=self._port))
        server.start()
        for sample in server.dataset_iter():
            yield sample.batch["x"]


class EchoInside(Echo):
    """`id-echo` within one process, where producers are threads. It wants a transport, which nobody uses."""

    def produce(self, finish: Any) -> None:
        """Does nothing: the consumer's process has the producers."""

    def consume(self) -> Iterator[np.ndarray]:
        """Yields its views."""
        from echo import Server, TcpTransport

        server = Server({"x": self.traffic.item}, batch_size=BATCH_SIZE, transport=TcpTransport(port=self._port))
        server.start()

        def submit() -> None:
            item: Any = {"x": self.traffic.item}
            while True:
                server.submit(item)

        # `submit` does not end while there is no room, and an interpreter that ends meanwhile aborts.
        atexit.register(os._exit, 0)
        for _ in range(self.traffic.producers):
            threading.Thread(target=submit, daemon=True).start()
        for sample in server.dataset_iter():
            yield sample.batch["x"]


class OverRay(Carrier):
    """What Ray carries: producers and what holds the items are processes of Ray's."""

    def __init__(self, traffic: Traffic) -> None:
        import ray

        super().__init__(traffic)
        ray.init(address="local", num_cpus=traffic.producers + 2, include_dashboard=False, log_to_driver=False)

    def produce(self, finish: Any) -> None:
        """Does nothing: Ray has the producers."""

    def _start(self, put: Callable[..., Any], queue: Any) -> None:
        import ray

        for _ in range(self.traffic.producers):
            ray.remote(put).remote(queue, self.traffic.item)


class RayQueue(OverRay):
    """A `ray.util.queue.Queue`."""

    def consume(self) -> Iterator[np.ndarray]:
        """Yields stacks."""
        from ray.util.queue import Queue as RemoteQueue

        queue = RemoteQueue(maxsize=min(self.traffic.capacity, 1024))

        def put(queue: Any, item: np.ndarray) -> None:
            while True:
                queue.put(item)

        self._start(put, queue)
        while True:
            yield np.stack([queue.get() for _ in range(BATCH_SIZE)])


class RayActor(OverRay):
    """An actor with a deque, which gives many items at once: how trainers of language models hold rollouts."""

    def consume(self) -> Iterator[np.ndarray]:
        """Yields stacks."""
        import ray

        actor: Any = ray.remote(Deque)
        queue = actor.options(max_concurrency=8).remote(min(self.traffic.capacity, 1024))

        def put(queue: Any, item: np.ndarray) -> None:
            while True:
                ray.get(queue.put.remote([item] * BLOCK))

        self._start(put, queue)
        while True:
            yield np.stack(ray.get(queue.get.remote(BATCH_SIZE)))


class Deque:
    """Items of an actor.

    Args:
        most: Items that it holds.
    """

    def __init__(self, most: int) -> None:
        self._items: deque[np.ndarray] = deque()
        self._most = most
        self._changed = asyncio.Condition()

    async def put(self, items: list[np.ndarray]) -> None:
        """Adds items, when there is room."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._items) + len(items) <= self._most)
            self._items.extend(items)
            self._changed.notify_all()

    async def get(self, n: int) -> list[np.ndarray]:
        """Returns the `n` oldest items, when they are there."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._items) >= n)
            taken = [self._items.popleft() for _ in range(n)]
            self._changed.notify_all()
            return taken


def _patiently(connect: Callable[[], Any]) -> Any:
    """Returns what `connect` makes, which may fail until the other side is there."""
    until = time.monotonic() + 20
    while True:
        try:
            return connect()
        except Exception:  # of whatever kind the package raises
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


CARRIERS: dict[str, type[Carrier]] = {
    "torchreplay": Torchreplay,
    "multiprocessing.Queue": Pipe,
    "faster_fifo": FasterFifo,
    "echo": Echo,
    "echo inside": EchoInside,
    "ray.util.queue": RayQueue,
    "Ray actor": RayActor,
}


def run(traffic: Traffic) -> dict[str, float]:
    """Runs a round; returns ``items`` and ``megabytes`` a second, from what the consumer got."""
    carrier = CARRIERS[traffic.peer](traffic)
    finish = RawValue(ctypes.c_bool, False)
    fork = get_context("fork")
    producers = [fork.Process(target=_produce, args=(carrier, finish), daemon=True) for _ in range(traffic.producers)]
    for producer in producers:
        producer.start()
    try:
        batches = carrier.consume()
        warm = time.perf_counter() + WARM_UP
        while time.perf_counter() < warm:
            next(batches)
        count, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < traffic.seconds:
            next(batches)
            count += BATCH_SIZE
    finally:
        finish.value = True
        for producer in producers:
            producer.kill()
    return {"items": count / elapsed, "megabytes": count * traffic.item_bytes / elapsed / 1e6}


def _produce(carrier: Carrier, finish: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    carrier.produce(finish)


def _parse() -> Traffic:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue_traffic", description=__doc__)
    parser.add_argument("--peer", required=True, choices=list(CARRIERS))
    parser.add_argument("--item-bytes", type=int, default=1024)
    parser.add_argument("--producers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    return Traffic(**vars(parser.parse_args()))


if __name__ == "__main__":
    print(json.dumps(run(_parse())), flush=True)

"""A replay buffer in a Ray actor beside the shared one: ``python -m benchmarks.actor``, a process of its own.

The actor is the one of the articles on parallel SAC: a numpy ring behind ``store`` and ``sample_batch``, to which every
worker sends its rows. A worker on the same machine writes into either. It prints one JSON object.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ray

import torchreplay as tr
from benchmarks.line import OURS
from benchmarks.peers.torchreplay import row_spec
from benchmarks.workload import SMALL, Rows

ACTOR = "Ray actor"
BATCH_SIZE = 512
CHUNK = 50
IN_FLIGHT = 100
"""Calls that a worker leaves unanswered; endlessly many would measure how fast a queue grows."""
POOL = 64


class ActorReplayBuffer:
    """The articles' replay buffer: a FIFO ring of numpy arrays, drawn from uniformly."""

    def __init__(self, capacity: int) -> None:
        self._rows = {name: np.zeros((capacity, *rows.shape[1:]), rows.dtype) for name, rows in SMALL.rows(1).items()}
        self._capacity, self._size, self._next = capacity, 0, 0
        self._generator = np.random.default_rng(0)

    def store(self, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any) -> None:
        """Writes one row."""
        for column, value in zip(self._rows.values(), (obs, action, reward, next_obs, done), strict=True):
            column[self._next] = value
        self._moved(1)

    def store_many(self, rows: Rows) -> None:
        """Writes rows with a leading dimension."""
        n = len(rows["reward"])
        places = np.arange(self._next, self._next + n) % self._capacity
        for name, column in self._rows.items():
            column[places] = rows[name]
        self._moved(n)

    def sample_batch(self, batch_size: int) -> Rows:
        """Returns rows drawn uniformly."""
        places = self._generator.integers(0, self._size, size=batch_size)
        return {name: column[places] for name, column in self._rows.items()}

    def _moved(self, rows: int) -> None:
        self._next = (self._next + rows) % self._capacity
        self._size = min(self._size + rows, self._capacity)


class Worker:
    """Writes as fast as it can; a process of its own.

    Args:
        buffer: The shared buffer.
        actor: The article's.
    """

    def __init__(self, buffer: tr.ReplayBuffer, actor: Any) -> None:
        self._buffer, self._actor = buffer, actor
        self._chunks = [SMALL.rows(CHUNK, seed) for seed in range(POOL)]
        self._single = SMALL.single_rows(POOL)
        self._writer = buffer.writer()
        self._pending: deque[Any] = deque()

    def write(self, candidate: str, chunk: int, seconds: float) -> float:
        """Returns the rows a second that arrived."""
        write = self._write_shared if candidate == OURS else self._send_to_actor
        start, written = time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            write(chunk)
            written += POOL * chunk
        ray.get(list(self._pending))
        self._pending.clear()
        return written / (time.perf_counter() - start)

    def _write_shared(self, chunk: int) -> None:
        if chunk == 1:
            append = self._writer.append
            for obs, action, reward, next_obs, done in self._single:
                append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)
        else:
            for rows in self._chunks:
                self._buffer.extend(**rows)

    def _send_to_actor(self, chunk: int) -> None:
        if chunk == 1:
            for row in self._single:
                self._sent(self._actor.store.remote(*row))
        else:
            for rows in self._chunks:
                self._sent(self._actor.store_many.remote(rows))

    def _sent(self, answer: Any) -> None:
        self._pending.append(answer)
        if len(self._pending) > IN_FLIGHT:
            ray.get(self._pending.popleft())


def _sample(draw: Callable[[], object], seconds: float) -> float:
    start, batches = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        draw()
        batches += 1
    return batches / (time.perf_counter() - start)


def _rounds(rounds: int, seconds: float, capacity: int) -> Iterator[tuple[str, str, float]]:
    buffer = tr.ReplayBuffer(row_spec(SMALL), capacity, sampler=tr.Prioritized(), seed=0)
    actor: Any = ray.remote(ActorReplayBuffer).remote(capacity)
    worker: Any = ray.remote(Worker).remote(buffer, actor)
    draws = {
        OURS: lambda: buffer.sample(BATCH_SIZE),
        ACTOR: lambda: ray.get(actor.sample_batch.remote(BATCH_SIZE)),
    }
    for _ in range(rounds):
        for name, chunk in (("rows, one at a time", 1), (f"rows, chunks of {CHUNK}", CHUNK)):
            for candidate in draws:
                yield name, candidate, ray.get(worker.write.remote(candidate, chunk, seconds))
        for candidate, draw in draws.items():
            yield f"batches of {BATCH_SIZE}", candidate, _sample(draw, seconds)
    buffer.close()


def parsed(module: str, description: str | None) -> argparse.Namespace:
    """Returns the options of a module that measures on Ray."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--capacity", type=int, default=SMALL.capacity)
    return parser.parse_args()


def main() -> None:
    """Measures, and prints the figures."""
    options = parsed("benchmarks.actor", __doc__)
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    figures: dict[str, dict[str, list[float]]] = {}
    for name, candidate, rate in _rounds(options.rounds, options.seconds, options.capacity):
        figures.setdefault(name, {}).setdefault(candidate, []).append(rate)
    ray.shutdown()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

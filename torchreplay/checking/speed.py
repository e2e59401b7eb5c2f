"""This machine's figures: what writing, drawing and feeding back cost here, beside a copy of the same bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.schema.samplers import Prioritized
from torchreplay.schema.spec import Field
from torchreplay.schema.views import Transitions
from torchreplay.segment.reservation import require_memory

ROUNDS: Final = 7
SMALL_ROWS: Final = 200_000
FRAMES: Final = 8_000
FRAME: Final = (84, 84)
SMALL: Final = {
    "obs": Field((17,)),
    "action": Field((6,)),
    "reward": Field(),
    "next_obs": Field((17,)),
    "done": Field((), bool),
}
LARGE: Final = {
    "obs": Field(FRAME, torch.uint8),
    "action": Field((), torch.int64),
    "reward": Field(),
    "terminated": Field((), bool),
    "truncated": Field((), bool),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """What a call costs here.

    Attributes:
        name: The call.
        seconds: It takes: the median of several rounds.
        spread: Half the distance between the fastest and the slowest round, as a share of `seconds`.
        rows: That it writes or returns.
        nbytes: That it copies.
    """

    name: str
    seconds: float
    spread: float
    rows: int
    nbytes: int


def measure(seconds: float = 8.0) -> Iterator[Figure]:
    """Yields this machine's figures, one after the other, for one process on an otherwise idle machine.

    Args:
        seconds: That all of it may take, about.

    Raises:
        MemoryError: There are fewer than 200 MB to be had.
    """
    require_memory(200 << 20, "the benchmark")
    per_round = seconds / (9 * ROUNDS)
    yield from _small(per_round)
    yield from _large(per_round)
    yield _copy(per_round, 256 * 2 * 4 * int(np.prod(FRAME)))


def _small(per_round: float) -> Iterator[Figure]:
    row_bytes = sum(field.nbytes for field in SMALL.values())
    rng = np.random.default_rng(0)
    row: dict[str, Any] = {name: rng.random(field.shape).astype(_numpy(field)) for name, field in SMALL.items()}
    block = {name: np.stack([value] * 64) for name, value in row.items()}
    with ReplayBuffer(SMALL, SMALL_ROWS, sampler=Prioritized(), seed=0) as buffer:
        for _ in range(SMALL_ROWS // 64):
            buffer.extend(**block)
        writer = buffer.writer()
        yield _timed("append a row", per_round, lambda: writer.append(**row), 1, row_bytes)
        yield _timed("extend by 64 rows", per_round, lambda: buffer.extend(**block), 64, 64 * row_bytes)
        batch = buffer.sample(256)
        error = torch.from_numpy(rng.random(256, np.float32))
        yield _timed("sample 256", per_round, lambda: buffer.sample(256), 256, 256 * row_bytes)
        update = lambda: buffer.update_priorities(batch, error)  # noqa: E731  # a name for the line below
        yield _timed("update 256 priorities", per_round, update, 256, 0)
        keys = buffer.keys()[:256]
        yield _timed("gather 256", per_round, lambda: buffer.gather(keys), 256, 256 * row_bytes)


def _large(per_round: float) -> Iterator[Figure]:
    obs = np.random.default_rng(0).integers(0, 255, (251, *FRAME), dtype=np.uint8)
    flags = np.arange(1, 251) == 250
    episode = {
        "obs": obs,
        "action": np.zeros(250, np.int64),
        "reward": np.zeros(250, np.float32),
        "terminated": flags,
        "truncated": np.zeros(250, bool),
    }
    frame = int(np.prod(FRAME))
    view = Transitions(n_step=3, stack={"obs": 4})
    with ReplayBuffer(LARGE, FRAMES, view=view, sampler=Prioritized(), seed=0) as buffer:
        for _ in range(FRAMES // 251):
            buffer.extend(**episode)
        yield _timed(
            "extend by an episode of 250 frames", per_round, lambda: buffer.extend(**episode), 251, 251 * frame
        )
        sampled = 256 * 2 * 4 * frame
        yield _timed("sample 256, stacks of 4 frames", per_round, lambda: buffer.sample(256), 256, sampled)
        batch = buffer.sample(256)
        again = lambda: buffer.sample(256, out=batch)  # noqa: E731
        yield _timed("the same into a batch that is there", per_round, again, 256, sampled)


def _copy(per_round: float, nbytes: int) -> Figure:
    source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    return _timed("copy as many bytes (memcpy)", per_round, lambda: np.copyto(target, source), 256, nbytes)


def _timed(name: str, per_round: float, call: Callable[[], object], rows: int, nbytes: int) -> Figure:
    once = _seconds(call, 1) or 1e-9
    count = max(1, int(per_round / max(_seconds(call, max(1, int(1e-3 / once))), 1e-9)))
    rounds = [_seconds(call, count) for _ in range(ROUNDS)]
    middle = statistics.median(rounds)
    return Figure(name, middle, (max(rounds) - min(rounds)) / 2 / middle, rows, nbytes)


def _seconds(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _numpy(field: Field) -> str:
    return str(field.dtype).removeprefix("torch.")

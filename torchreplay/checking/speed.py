"""This machine's figures: what writing, drawing and feeding back cost here, beside a copy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.checking.timing import Candidate, interleave
from torchreplay.schema.samplers import Prioritized
from torchreplay.schema.spec import Field, Spec
from torchreplay.schema.views import Transitions, View
from torchreplay.segment.reservation import require_memory

ROUND: Final = 0.002
"""Seconds of a round of one call at least."""
SHARE: Final = 0.16
"""Seconds that a round of all calls takes, about: some take longer than `ROUND`, and each is warmed up."""
SMALL_ROWS: Final = 200_000
FRAMES: Final = 8_000
FRAME: Final = (84, 84)
STACK: Final = 4
ENDS: Final = {"terminated": Field((), bool), "truncated": Field((), bool)}
SMALL: Final = {"obs": Field((17,)), "action": Field((6,)), "reward": Field(), "next_obs": Field((17,))} | ENDS
LARGE: Final = {"obs": Field(FRAME, torch.uint8), "action": Field((), torch.int64), "reward": Field()} | ENDS

_Call: TypeAlias = tuple[Callable[[], object], int, int]
"""What is timed, the rows that it writes or returns, and the bytes that it copies."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What a call costs here.

    Attributes:
        name: The call.
        seconds: It takes: the median of several rounds.
        spread: Half the distance between the 10th and the 90th percentile of the rounds, as a share of `seconds`.
        rows: That it writes or returns.
        nbytes: That it copies.
    """

    name: str
    seconds: float
    spread: float
    rows: int
    nbytes: int


def measure(seconds: float = 8.0) -> list[Figure]:
    """Returns this machine's figures, for one process on an otherwise idle machine.

    What is drawn and fed back is of other buffers than what is written, so that no row is overwritten meanwhile.

    Args:
        seconds: That all of it may take, about.

    Raises:
        MemoryError: There are fewer than 250 MB to be had.
    """
    require_memory(250 << 20, "the benchmark")
    with ExitStack() as opened:
        calls = _small(opened) | _large(opened)
        candidates = [Candidate(name, partial(_repeat, call)) for name, (call, _, _) in calls.items()]
        samples = interleave(candidates, max(5, round(seconds / SHARE)), ROUND)
    figures = []
    for name, (_, rows, nbytes) in calls.items():
        low, middle, high = np.quantile(samples[name], (0.1, 0.5, 0.9)).tolist()
        figures.append(Figure(name, middle, (high - low) / 2 / middle, rows, nbytes))
    return figures


def _repeat(call: Callable[[], object], n: int) -> None:
    for _ in range(n):
        call()


def _full(opened: ExitStack, spec: Spec, rows: int, block: dict[str, Any], view: View | None = None) -> ReplayBuffer:
    """Returns a buffer that is full of a block of rows again and again, until `opened` is closed."""
    buffer = opened.enter_context(ReplayBuffer(spec, rows, view=view, sampler=Prioritized(), seed=0))
    for _ in range(rows // len(block["obs"])):
        buffer.extend(**block)
    return buffer


def _small(opened: ExitStack) -> dict[str, _Call]:
    row_bytes = sum(field.nbytes for field in SMALL.values())
    row: dict[str, Any] = {
        name: np.zeros(field.shape, str(field.dtype).removeprefix("torch.")) for name, field in SMALL.items()
    }
    block: dict[str, Any] = {name: np.stack([value] * 64) for name, value in row.items()}
    buffer, written = (_full(opened, SMALL, SMALL_ROWS, block) for _ in range(2))
    batch, keys, error = buffer.sample(256), buffer.keys()[:256], torch.rand(256)
    return {
        "append a row": (partial(written.writer().append, **row), 1, row_bytes),
        "extend by 64 rows": (partial(written.extend, **block), 64, 64 * row_bytes),
        "sample 256": (partial(buffer.sample, 256), 256, 256 * row_bytes),
        "update 256 priorities": (partial(buffer.update_priorities, batch, error), 256, 0),
        "gather 256": (partial(buffer.gather, keys), 256, 256 * row_bytes),
    }


def _large(opened: ExitStack) -> dict[str, _Call]:
    episode: dict[str, Any] = {
        "obs": np.random.default_rng(0).integers(0, 255, (251, *FRAME), dtype=np.uint8),
        "action": np.zeros(250, np.int64),
        "reward": np.zeros(250, np.float32),
        "terminated": np.arange(1, 251) == 250,
        "truncated": np.zeros(250, bool),
    }
    view = Transitions(n_step=3, stack={"obs": STACK})
    buffer, written = (_full(opened, LARGE, rows, episode, view) for rows in (FRAMES, FRAMES // 2))
    sampled = 256 * 2 * STACK * prod(FRAME)
    batch, source, target = buffer.sample(256), np.ones(sampled, np.uint8), np.empty(sampled, np.uint8)
    return {
        "extend by an episode of 250 frames": (partial(written.extend, **episode), 251, 251 * prod(FRAME)),
        "sample 256, stacks of 4 frames": (partial(buffer.sample, 256), 256, sampled),
        "the same into a batch that is there": (partial(buffer.sample, 256, out=batch), 256, sampled),
        "copy as many bytes (memcpy)": (partial(np.copyto, target, source), 256, sampled),
    }

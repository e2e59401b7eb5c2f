"""What an `Evaluator` has found: an `Evaluation` each time, kept where its worker's death does not reach it."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from struct import Struct
from typing import Any, Final

from torchreplay.segment.handle import Handle, lasting_handle, make_handle, new_nonce, open_handle

_WHAT: Final = "log of evaluations"

_RECORD: Final = Struct("=qi5d?3xd")
"""An `Evaluation`, and the best mean until then. Its 64 bytes cross no page, so that a kill leaves no half of one."""


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation of published weights has found.

    Attributes:
        version: Version of the weights.
        episodes: Number of returns.
        mean_return: Their mean.
        std_return: Their standard deviation, of the population (numpy's `std`).
        min_return: The smallest.
        max_return: The largest.
        seconds: How long it took.
        best: Whether the mean was the best until then.
    """

    version: int
    episodes: int
    mean_return: float
    std_return: float
    min_return: float
    max_return: float
    seconds: float
    best: bool

    def as_dict(self) -> dict[str, int | float | bool]:
        """Returns the attributes by name."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"version {self.version}: mean return {self.mean_return:.4g} +- {self.std_return:.3g} over {self.episodes} "
            f"episodes, {self.min_return:.4g} to {self.max_return:.4g}{', the best so far' if self.best else ''}"
        )


class EvaluationLog:
    """All evaluations, oldest first: a file in memory that only grows. It pickles to its address on this node.

    The worker adds an evaluation by one system call, which waits for nobody. What it has added outlives it.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create(f"torchreplay-{_WHAT.replace(' ', '-')}", os.MFD_CLOEXEC)
        self._handle = make_handle(self._fd, new_nonce())
        weakref.finalize(self, os.close, self._fd)

    @cached_property
    def _fd(self) -> int:  # at the first use: workers on other nodes have no use for it
        fd = open_handle(self._handle, _WHAT, grows=True)
        weakref.finalize(self, os.close, fd)
        return fd

    def __len__(self) -> int:
        return os.fstat(self._fd).st_size // _RECORD.size

    def add(self, evaluation: Evaluation, best_return: float) -> None:
        """Notes an evaluation, and the best mean return so far."""
        os.pwritev(self._fd, [_RECORD.pack(*astuple(evaluation), best_return)], 0, os.RWF_APPEND)

    def since(self, number: int) -> list[Evaluation]:
        """Returns the evaluations from this number on; the first has the number 0."""
        return [Evaluation(*record[:-1]) for record in self._records(number)]

    @property
    def last(self) -> tuple[int, float]:
        """The version that was evaluated last, and the best mean return by then; -1 and minus infinity before."""
        version, *_, best_return = next(self._records(-1), (-1, -math.inf))
        return version, best_return

    def _records(self, start: int) -> Iterator[tuple[Any, ...]]:
        places = range(len(self))[start:]
        return _RECORD.iter_unpack(os.pread(self._fd, len(places) * _RECORD.size, places.start * _RECORD.size))

    def __reduce__(self) -> tuple[object, tuple[Handle]]:
        return attached_log, (lasting_handle(self._fd, self._handle.nonce, self._handle),)


def attached_log(handle: Handle) -> EvaluationLog:
    """Returns the log of that handle. Pickles name it: see `torchreplay.buffer.replay_buffer.attached`."""
    log = EvaluationLog.__new__(EvaluationLog)
    log._handle = handle
    return log

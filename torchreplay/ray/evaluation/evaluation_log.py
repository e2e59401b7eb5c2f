"""What an `Evaluator` has found, and where it stands: shared memory between its worker and the program."""

from __future__ import annotations

import math
import mmap
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchreplay.ray.workers.shared_state import SharedState

_KEPT: Final = 256
"""Evaluations in shared memory; the program collects them ten times a second."""

_HEADER: Final = np.dtype(
    [("count", np.int64), ("wanted", np.int64), ("best_return", np.float64), ("best_version", np.int64)]
)
_SCORE: Final = np.dtype(
    [
        ("version", np.int64),
        ("episodes", np.int64),
        ("mean_return", np.float64),
        ("std_return", np.float64),
        ("min_return", np.float64),
        ("max_return", np.float64),
        ("seconds", np.float64),
        ("best", np.int64),
    ]
)


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


class EvaluationLog(SharedState):
    """The last evaluations, the best, and the version that the program waits for.

    The worker is the only writer of all but `wanted`, the program of that. What a killed worker had found is here.

    Args:
        best_return: What an evaluation has to surpass to be the best.
    """

    what = "evaluations"

    def __init__(self, best_return: float = -math.inf) -> None:
        super().__init__(_HEADER.itemsize + _KEPT * _SCORE.itemsize)
        self._header["wanted"] = self._header["best_version"] = -1
        self._header["best_return"] = best_return

    def lay_out(self, memory: mmap.mmap) -> None:
        """Names the parts of the memory."""
        self._header: npt.NDArray[np.void] = np.frombuffer(memory, _HEADER, count=1)
        self._ring: npt.NDArray[np.void] = np.frombuffer(memory, _SCORE, offset=_HEADER.itemsize)

    def told(self, index: int) -> bytes:
        """Returns the evaluations, the best, and how many there are."""
        return self._header.tobytes() + self._ring.tobytes()

    def hear(self, index: int, told: bytes) -> None:
        """Takes over the evaluations, the best, and how many there are."""
        header = np.frombuffer(told, _HEADER, count=1)
        self._ring[:] = np.frombuffer(told, _SCORE, offset=_HEADER.itemsize)
        for name in ("best_version", "best_return", "count"):  # in this order: see `add`
            self._header[name] = header[name]

    def orders(self, index: int) -> bytes:
        """Returns the version that the program waits for."""
        return self._header["wanted"].tobytes()

    def obey(self, index: int, orders: bytes) -> None:
        """Takes over the version that the program waits for."""
        self._header["wanted"] = np.frombuffer(orders, np.int64)

    @property
    def count(self) -> int:
        """Evaluations until now."""
        return int(self._header["count"][0])

    @property
    def last_version(self) -> int:
        """The version that was evaluated last; -1 before the first."""
        return int(self._ring[(self.count - 1) % _KEPT]["version"]) if self.count else -1

    @property
    def best_return(self) -> float:
        """The best mean return; minus infinity before the first."""
        return float(self._header["best_return"][0])

    @property
    def wanted(self) -> int:
        """The version that the program waits for; -1 if it never waited."""
        return int(self._header["wanted"][0])

    @wanted.setter
    def wanted(self, version: int) -> None:
        self._header["wanted"] = version

    def is_best(self, version: int, mean_return: float) -> bool:
        """Whether this surpasses all before, or is the best itself, found again by a killed worker's successor."""
        return mean_return > self.best_return or version == int(self._header["best_version"][0])

    def raise_best(self, version: int, mean_return: float) -> None:
        """Notes weights that a killed worker has saved as the best; those known to be better stay."""
        if mean_return > self.best_return:
            self._header["best_version"] = version  # first: a successor finds it again, see `is_best`
            self._header["best_return"] = mean_return

    def add(self, evaluation: Evaluation) -> None:
        """Notes an evaluation."""
        if evaluation.best:
            self.raise_best(evaluation.version, evaluation.mean_return)
        count = self.count
        self._ring[count % _KEPT] = tuple(evaluation.as_dict().values())
        self._header["count"] = count + 1  # last: a reader of the count finds the evaluation written

    def since(self, count: int) -> tuple[list[Evaluation], int]:
        """Returns the evaluations from number `count` on, oldest first, and how many there are in all.

        Of very many the oldest are gone.
        """
        end = self.count
        places = range(max(count, end - _KEPT + 1), end)  # the next one may be on its way
        return [self._at(place % _KEPT) for place in places], end

    def _at(self, place: int) -> Evaluation:
        figures: dict[str, Any] = dict(zip(_SCORE.names or (), self._ring[place].tolist(), strict=True))
        return Evaluation(**figures | {"best": bool(figures["best"])})

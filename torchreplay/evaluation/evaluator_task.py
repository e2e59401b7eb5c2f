"""What an evaluator's worker does: run a user's function on published weights, again and again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch
from torch import nn

from torchreplay.evaluation.evaluation_log import Evaluation, EvaluationLog
from torchreplay.evaluation.model_checkpoints import ModelCheckpoints, content_of
from torchreplay.weights.shared_weights import SharedWeights
from torchreplay.workers.worker_process import Launch, Work
from torchreplay.workers.worker_table import WorkerTable

Evaluate = Callable[[Any, int], Any]
"""A user's function of a module, of any class, and a seed: plays episodes and returns their returns, `[n]`."""

_LOOK_EVERY: Final = 0.02
"""Seconds between looks at the weights' version while no evaluation is due."""


@dataclass(frozen=True)
class Results:
    """What an evaluator has found and saved, on the node on which it was made."""

    log: EvaluationLog  # what was found
    saving: ModelCheckpoints | None  # what is saved, if anything
    surpass: float  # the mean return that the first best has to surpass

    def begin(self) -> tuple[int, int, int, float]:
        """Returns the number of evaluations, the last version, and the best: its version and its mean return.

        The best has a version only if a worker before this one has saved it, and was killed before it could say so.
        """
        last, best_return = self.log.last
        best = -1, max(self.surpass, best_return)
        saved = best if self.saving is None else self.saving.best()
        return len(self.log), last, *(saved if saved[1] > best[1] else best)

    def add(self, evaluation: Evaluation, best_return: float, names: list[str], content: bytes) -> None:
        """Saves `content` under these names, and notes an evaluation; may be called again with the same."""
        if names and self.saving is not None:  # first: what is reported as saved is saved
            self.saving.write(names, content)
        if evaluation.version > self.log.last[0]:
            self.log.add(evaluation, best_return)


@dataclass
class EvaluatorTask(Work):
    """The work of an evaluator. It does not notice a stop: an evaluation that is stopped is worth nothing."""

    evaluate: Evaluate  # the user's function
    module: nn.Module | Callable[[], nn.Module]  # what it evaluates, or a function that makes it
    weights: SharedWeights  # the weights that are published
    seed: int  # of every evaluation
    every: int | None  # versions from one evaluation to the next; None for no matter
    every_seconds: float | None  # seconds from one to the next; None for no matter
    helper: Results  # where results go

    def begin(self, launch: Launch, table: WorkerTable, helper: Any = None) -> Self:
        """Makes ready to evaluate."""
        self._table, self._entry = table, table.entries[0]
        self._results: Results = helper or self.helper
        self._began = time.monotonic()
        return self

    def run(self) -> None:
        """Evaluates until it is stopped."""
        self._count, self._version, self._best_version, self._best_return = self._results.begin()
        module = self.module if isinstance(self.module, nn.Module) else self.module()
        if not isinstance(module, nn.Module):
            raise TypeError(f"the function given as `module` returned {module!r}; it must return a torch.nn.Module")
        while not self._table.stopped:
            self._entry["heartbeat"] = time.monotonic()
            if self._is_due():
                self._evaluate(module)
            else:
                time.sleep(_LOOK_EVERY)

    def _is_due(self) -> bool:
        newest, last = self.weights.version, self._version
        if newest <= last:
            return False
        waited = time.monotonic() - self._began
        return (
            last < self._table.wanted
            or (self.every is not None and newest - last >= self.every)
            or (self.every_seconds is not None and waited >= self.every_seconds)
        )

    def _evaluate(self, module: nn.Module) -> None:
        self._began = time.monotonic()
        self.weights.pull(module)
        module.eval()
        _seed_everything(self.seed)
        with torch.no_grad():
            returns = _checked(self.evaluate(module, self.seed))
        version, mean = self.weights.pulled_version, float(returns.mean())
        evaluation = Evaluation(
            version=version,
            episodes=len(returns),
            mean_return=mean,
            std_return=float(returns.std()),
            min_return=float(returns.min()),
            max_return=float(returns.max()),
            seconds=time.monotonic() - self._began,
            best=mean > self._best_return or version == self._best_version,
        )
        self._note(evaluation, module)

    def _note(self, evaluation: Evaluation, module: nn.Module) -> None:
        saving = self.helper.saving
        names = [] if saving is None else saving.due(evaluation, self._count + 1)
        content = content_of(module, evaluation) if names else b""
        best_return = max(self._best_return, evaluation.mean_return)
        self._results.add(evaluation, best_return, names, content)
        self._count, self._version, self._best_return = self._count + 1, evaluation.version, best_return
        self._entry["weight_version"] = evaluation.version
        self._entry["episodes"] += 1

    def __repr__(self) -> str:
        return repr(self.evaluate)


def _seed_everything(seed: int) -> None:
    """Seeds this process's generators: the same weights then have the same returns."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # whatever the user's function uses
    torch.manual_seed(seed)


def _checked(given: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    try:
        returns = np.asarray(given, np.float64).reshape(-1)
    except (TypeError, ValueError):
        returns = np.empty(0)
    if not len(returns) or not np.isfinite(returns).all():
        raise ValueError(
            f"evaluate(module, seed) returned {given!r}: expected the returns of its episodes, finite numbers"
        )
    return returns

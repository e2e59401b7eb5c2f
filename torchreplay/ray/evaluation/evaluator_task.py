"""What an evaluator's worker does: run a user's function on published weights, again and again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from torchreplay.ray.evaluation.evaluation_log import Evaluation, EvaluationLog
from torchreplay.ray.evaluation.model_checkpoints import ModelCheckpoints, content_of
from torchreplay.ray.workers.worker_table import WorkerTable

if TYPE_CHECKING:
    from torchreplay.ray.workers.shared_state import SharedState
    from torchreplay.ray.workers.state_replica import StateReplica
    from torchreplay.ray.workers.worker_process import Launch
    from torchreplay.weights.shared_weights import SharedWeights

Evaluate = Callable[[Any, int], Any]
"""A user's function of a module, of any class, and a seed: plays episodes and returns their returns, `[n]`."""

_LOOK_EVERY: Final = 0.02
"""Seconds between looks at the weights' version while no evaluation is due."""


@dataclass(frozen=True)
class EvaluatorTask:
    """The work of an evaluator.

    Attributes:
        evaluate: The user's function.
        module: What it evaluates, or a function that makes it.
        weights: The weights that are published.
        seed: Of every evaluation.
        every: Versions from one evaluation to the next; None for no matter.
        every_seconds: Seconds from one to the next; None for no matter.
        scores: Where results go.
        saving: What is saved, if anything.
    """

    evaluate: Evaluate
    module: nn.Module | Callable[[], nn.Module]
    weights: SharedWeights
    seed: int
    every: int | None
    every_seconds: float | None
    scores: EvaluationLog
    saving: ModelCheckpoints | None

    @property
    def pages(self) -> Sequence[SharedState]:
        """What was found."""
        return (self.scores,)

    @property
    def helper(self) -> ModelCheckpoints | None:
        """What saves: files, and the buffer, are on the evaluator's own node."""
        return self.saving

    def run(self, launch: Launch, board: WorkerTable, mirror: StateReplica | None = None) -> EvaluatorRun:
        """Returns a run that is ready to begin."""
        return EvaluatorRun(self, board, mirror)

    def __repr__(self) -> str:
        return repr(self.evaluate)


class EvaluatorRun:
    """One run of an evaluator's worker."""

    noticed_stop = False  # an evaluation that is stopped is worth nothing: no need to wait for its end

    def __init__(self, work: EvaluatorTask, board: WorkerTable, mirror: StateReplica | None) -> None:
        self._work, self._board, self._mirror = work, board, mirror
        self._entry = board.entries[0]
        self._began = time.monotonic()

    def __call__(self) -> None:
        """Evaluates until it is stopped."""
        self._remember_best()
        made = self._work.module
        module = made if isinstance(made, nn.Module) else made()
        if not isinstance(module, nn.Module):
            raise TypeError(f"the function given as `module` returned {module!r}; it must return a torch.nn.Module")
        while not self._board.stopped:
            self._entry["heartbeat"] = time.monotonic()
            if self._is_due():
                self._evaluate(module)
            else:
                time.sleep(_LOOK_EVERY)

    def give_up(self) -> None:
        """It waits for nobody."""

    def close(self) -> None:
        """Nothing is left open."""

    def _is_due(self) -> bool:
        work = self._work
        newest, last = work.weights.version, work.scores.last_version
        if newest <= last:
            return False
        waited = time.monotonic() - self._began
        return (
            last < max(0, work.scores.wanted)
            or (work.every is not None and newest - last >= work.every)
            or (work.every_seconds is not None and waited >= work.every_seconds)
        )

    def _evaluate(self, module: nn.Module) -> None:
        work = self._work
        self._began = time.monotonic()
        work.weights.pull(module)
        module.eval()
        _seed_everything(work.seed)
        with torch.no_grad():
            returns = _checked(work.evaluate(module, work.seed))
        version, mean = work.weights.pulled_version, float(returns.mean())
        evaluation = Evaluation(
            version=version,
            episodes=len(returns),
            mean_return=mean,
            std_return=float(returns.std()),
            min_return=float(returns.min()),
            max_return=float(returns.max()),
            seconds=time.monotonic() - self._began,
            best=work.scores.is_best(version, mean),
        )
        if work.saving is not None:  # first: what is reported as saved is saved
            self._save(work.saving, module, evaluation)
        work.scores.add(evaluation)
        self._entry["weight_version"] = version
        self._entry["episodes"] += 1

    def _remember_best(self) -> None:
        """Takes in what a worker before this one has saved, and was killed before it could say so."""
        saving = self._work.saving
        if saving is not None:
            best = saving.best() if self._mirror is None else self._mirror.help("best")
            self._work.scores.raise_best(*best)

    def _save(self, saving: ModelCheckpoints, module: nn.Module, evaluation: Evaluation) -> None:
        names = saving.due(evaluation, self._work.scores.count + 1)
        if not names:
            return
        content = content_of(module, evaluation)
        if self._mirror is None:
            saving.write(names, content)
        else:
            self._mirror.help("write", names, content)


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

"""`Evaluator`: how good the published weights are, found out beside the training."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from torchreplay.buffer.base import Replay
from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.errors import ReplayTimeout
from torchreplay.evaluation.evaluation_log import Evaluation, EvaluationLog
from torchreplay.evaluation.evaluator_task import Evaluate, EvaluatorTask, Results
from torchreplay.evaluation.model_checkpoints import ModelCheckpoints
from torchreplay.explorers.named import Fillable, OneOrNamed, named_buffers
from torchreplay.ray.runtime.session import logger
from torchreplay.ray.workers.placement import Placement
from torchreplay.ray.workers.resources import BackendName, WorkerResources
from torchreplay.segment.waits import LOG_EVERY
from torchreplay.validation import checked_instance, checked_int, checked_number, checked_path, checked_timeout
from torchreplay.weights.shared_weights import SharedWeights
from torchreplay.workers.explorer_stats import State
from torchreplay.workers.worker_pool import WorkerPool

_LOOK_EVERY: Final = 0.02  # seconds, of `wait`
_MAX_SEED: Final = (1 << 63) - 1


class EvaluatorFailed(RuntimeError):
    """The evaluator has ended by an error and will not be restarted."""


@dataclass(frozen=True)
class EvaluatorStats:
    """How an evaluator is doing.

    Attributes:
        state: Of its worker, as in `ExplorerStats`.
        pid: Process id of the worker's present or last run; 0 before the first.
        evaluations: Evaluations since the evaluator was made.
        version: The version evaluated last; -1 before the first.
        versions_behind: Publications since.
        best_return: Best mean return so far, that of an earlier `best.safetensors` included; NaN before the first.
        heartbeat_age: Seconds since the worker was last seen between two evaluations; NaN before.
        restarts: How often the worker was restarted.
        last_error: One line about its last failure; None if it never failed.
        last_traceback: The traceback of its last failure; None if it never failed.
    """

    state: State
    pid: int
    evaluations: int
    version: int
    versions_behind: int
    best_return: float
    heartbeat_age: float
    restarts: int
    last_error: str | None
    last_traceback: str | None


class Evaluator(WorkerPool):
    """Evaluates published weights in a process of its own, while training goes on.

    The worker pulls the newest weights into its module, puts it into evaluation mode, seeds the generators of Python,
    numpy and torch, and calls `evaluate(module, seed)` without gradients. The seed is always the same: the same
    weights have the same returns, and two evaluations differ by their weights alone. The first evaluation is that of
    the weights that it finds; then one follows whenever `every` versions or `every_seconds` are over and there is
    something newer. A worker that raises or dies is restarted as explorers are.

    Each result is an `Evaluation`, in `evaluations` and in the log (logger `torchreplay.ray`); the Lightning callback
    `EvaluationMonitor` brings it to the Trainer's loggers and its progress bar.

    Args:
        evaluate: Function of a module and a seed that plays episodes, as the policy is meant to act, and returns their
            returns: numbers `[n]`.
        weights: What the learner publishes.
        module: A module built like the one given to `SharedWeights`, which travels to the worker, or a function that
            makes it there.
        every: Versions from one evaluation to the next.
        every_seconds: Seconds from the start of one evaluation to that of the next. With `every`: the first of the two
            counts.
        seed: Of each evaluation.
        directory: Where weights are saved whenever the mean return is the best so far: `best.safetensors`, a state dict
            for `safetensors.torch.load_file`, with the result in its metadata. Files are replaced in one step. One
            that is there stays until something better is found: a new experiment needs a new directory. It is of this
            machine, wherever the worker runs.
        save_every: Evaluations from one numbered save to the next, `version-<number>.safetensors`.
        buffer: A buffer to save with the weights, each time, into `buffer/`; of several by name each into
            `buffer/<name>/`. A `ShardedReplay` needs a `directory` that all nodes share.
        max_restarts: Restarts of the worker before it counts as failed; -1 for no limit.
        restart_delay: Seconds before the first restart after a failure; doubles up to 30.
        backend: As for `ExplorerPool`, and so are `num_cpus`, `num_gpus`, `runtime_env` and `placement`.
        num_cpus: CPUs that Ray reserves.
        num_gpus: GPUs that Ray reserves.
        runtime_env: The worker's environment, as Ray takes it.
        placement: As for `ExplorerPool`; None for this machine.

    Raises:
        ValueError: Neither `every` nor `every_seconds` is given, a number is out of range, or the module is built
            otherwise than its weights.
        TypeError: `evaluate`, `weights`, `module`, `directory` or `buffer` is not what it has to be.
        CheckpointError: `directory` has a `best.safetensors` that no evaluator saved.

    Example:
        >>> with Evaluator(evaluate, weights, make_policy, every_seconds=10, directory="runs/1") as evaluator:
        ...     learn()
        ...     print(evaluator.wait())  # of the final weights
    """

    failed = EvaluatorFailed

    def __init__(
        self,
        evaluate: Evaluate,
        weights: SharedWeights,
        module: nn.Module | Callable[[], nn.Module],
        *,
        every: int | None = None,
        every_seconds: float | None = None,
        seed: int = 0,
        directory: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
        buffer: OneOrNamed[Fillable] | None = None,
        max_restarts: int = -1,
        restart_delay: float = 1.0,
        backend: BackendName = "ray",
        num_cpus: float = 0,
        num_gpus: float = 0,
        runtime_env: Mapping[str, Any] | None = None,
        placement: Placement = None,
    ) -> None:
        for name, value in (("evaluate", evaluate), ("module", module)):
            if not callable(value):
                raise TypeError(f"{name} is {value!r}: expected a function{' or a module' * (name == 'module')}")
        if every is None and every_seconds is None:
            raise ValueError("say how often to evaluate: every=<versions> or every_seconds=<seconds>")
        if every_seconds is not None:
            every_seconds = checked_number("every_seconds", every_seconds, 0)
        checked_instance("weights", weights, SharedWeights, "torchreplay.SharedWeights(module)")
        if isinstance(module, nn.Module):
            weights.require_like(module)
        buffers = {} if buffer is None else named_buffers(buffer)
        for label, one in buffers.items():
            checked_instance("buffer", one, Replay, "a buffer of this node: what is on another is saved there")
            if backend == "process" and not isinstance(one, ReplayBuffer):
                raise ValueError("backend='process': the shards of a ShardedReplay are reached through Ray")
            if label is not None and (label in (".", "..") or Path(label).name != label):
                raise ValueError(f"buffer[{label!r}] is to be saved into a directory of that name, which it cannot be")
        if directory is None and (save_every is not None or buffer is not None):
            raise ValueError("save_every and buffer say what to save: say where, directory=...")
        every, save_every = (
            None if n is None else checked_int(name, n, 1, _MAX_SEED)
            for name, n in (("every", every), ("save_every", save_every))
        )
        seed = checked_int("seed", seed, 0, _MAX_SEED)
        resources = WorkerResources(backend, num_cpus, num_gpus, runtime_env, placement)
        super().__init__(["evaluator"], resources.open, max_restarts, restart_delay, seed)
        saving = (
            None
            if directory is None
            else ModelCheckpoints(checked_path("directory", directory).absolute(), save_every, buffers)
        )
        self.weights = weights
        self._results = Results(EvaluationLog(), saving, saving.best()[1] if saving else -math.inf)
        self._work = EvaluatorTask(evaluate, module, weights, seed, every, every_seconds, self._results)
        self._evaluations: tuple[Evaluation, ...] = ()
        self._logged = 0

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """All results, oldest first."""
        known = self._evaluations  # another thread, or a signal's handler, may be reading on from here, too
        self._evaluations = known = (*known, *self._results.log.since(len(known)))
        return known

    @property
    def latest(self) -> Evaluation | None:
        """The last result; None before the first."""
        evaluations = self.evaluations
        return evaluations[-1] if evaluations else None

    @property
    def best(self) -> Evaluation | None:
        """The result with the best mean return; None before the first."""
        return max(self.evaluations, key=lambda evaluation: evaluation.mean_return, default=None)

    def wait(self, version: int | None = None, timeout: float | None = None) -> Evaluation:
        """Returns the result for weights of this version or a newer one, which is evaluated now if it was not due yet.

        Args:
            version: A published version; None for the newest.
            timeout: Seconds; None waits as long as the worker lives.

        Raises:
            ReplayTimeout: It took longer.
            EvaluatorFailed: The worker is not restarted any more, or does nothing but fail.
            RuntimeError: The evaluator does not run.
            ValueError: The version was not published, or the timeout is negative or NaN.
        """
        timeout = checked_timeout(timeout)
        newest = self.weights.version
        start = told = time.monotonic()
        version = newest if version is None else checked_int("version", version, 0, newest)
        while True:
            latest = self.latest
            if latest is not None and latest.version >= version:
                return latest
            self.check()
            supervisor = self._supervisor
            if supervisor is None:
                raise RuntimeError(f"the evaluator does not run: start() it to have version {version} evaluated")
            if supervisor.all_failing:
                raise EvaluatorFailed(f"the evaluator fails again and again\n{self._report()}")
            supervisor.table.wanted = max(version, supervisor.table.wanted)
            if timeout is not None and time.monotonic() - start >= timeout:
                raise ReplayTimeout(f"version {version} was not evaluated within {timeout} s: {self!r}")
            if time.monotonic() - told >= LOG_EVERY:
                told = time.monotonic()
                logger.warning("version %d is not evaluated yet, %.0f s on: %s", version, told - start, repr(self))
            time.sleep(_LOOK_EVERY)

    def stats(self) -> EvaluatorStats:
        """How it is doing; how it was when it was stopped."""
        (worker,) = self._worker_stats()
        last, best = self._results.log.last
        best = max(self._results.surpass, best)
        return EvaluatorStats(
            state=worker.state,
            pid=worker.pid,
            evaluations=len(self._results.log),
            version=last,
            versions_behind=self.weights.version - last if last >= 0 else 0,
            best_return=best if math.isfinite(best) else math.nan,
            heartbeat_age=worker.heartbeat_age,
            restarts=worker.restarts,
            last_error=worker.last_error,
            last_traceback=worker.last_traceback,
        )

    def _make_work(self) -> EvaluatorTask:
        return self._work

    def _listen(self) -> None:
        for evaluation in self.evaluations[self._logged :]:
            self._logged += 1
            logger.info("%s", evaluation)

    def __repr__(self) -> str:
        stats = self.stats()
        latest = "no evaluation yet" if self.latest is None else str(self.latest)
        error = "" if stats.last_error is None else f", last error: {stats.last_error}"
        return f"Evaluator({stats.state}; {stats.evaluations} evaluations, {latest}{error})"

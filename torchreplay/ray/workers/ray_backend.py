"""Workers as Ray actors: all that the supervisor needs of Ray."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

from torchreplay.ray.runtime.cluster import import_failure
from torchreplay.ray.runtime.session import RaySession
from torchreplay.ray.workers.placement import Placement, strategy_of
from torchreplay.ray.workers.shared_payload import SharedPayload
from torchreplay.ray.workers.table_replica import TableReplica, TableServer
from torchreplay.workers.backend import Backend, pickled
from torchreplay.workers.worker_process import Launch, Outcome, WorkerProcess

_LOOK_EVERY: Final = 0.1
"""Seconds between looks at whether Ray is still there, while runs are waited for."""


@dataclass(eq=False)
class ActorRun:
    """One run of one worker: its actor and the result to come."""

    actor: Any
    result: Future[Outcome]


class RayBackend(Backend[ActorRun]):
    """Runs workers as Ray actors, each in a process of its own.

    Args:
        work: `(work, table)`, for the workers' processes to unpickle.
        num_workers: How many there may be at a time.
        placement: Where they run.
        options: Of each worker's actor, as Ray takes them: `num_cpus`, `num_gpus` and `runtime_env`.
    """

    slow_start_hint = " (is there room for what they reserve?)"

    _lost: ClassVar[list[RayBackend]] = []
    """Those whose Ray was shut down. What they refer to is kept: in the next Ray its ids are those of others."""

    def __init__(self, work: Any, num_workers: int, placement: Placement, options: dict[str, Any]) -> None:
        self._runs: set[ActorRun] = set()
        cpus, gpus = num_workers * options["num_cpus"], num_workers * options["num_gpus"]
        self._session = RaySession(cpus, gpus, here=placement is None)
        self._ray = self._session.ray
        self._placement, self._options = placement, options
        self._kind: Any = None  # of every worker, unless a function says where each is to run
        self._server: Any = None  # of the table, for workers on other nodes
        try:
            if not callable(placement):
                self._kind = self._kind_for(0)  # now: what Ray does not take is refused at the start
            advice = ", and see ray.util.inspect_serializability for what it refers to"
            self._payload: SharedPayload | None = SharedPayload(pickled(work, self._ray.cloudpickle.dumps, advice))
            if placement is not None:
                self._server = self._payload.server = self._serve(*work)
        except BaseException:
            self._session.close()
            raise

    def _serve(self, work: Any, table: Any) -> Any:
        kind = self._ray.remote(TableServer).options(
            num_cpus=0,
            runtime_env=self._options["runtime_env"],
            max_restarts=-1,
            max_task_retries=-1,  # workers' questions and reports may be repeated
            scheduling_strategy=strategy_of(None, 0),
        )
        return kind.remote(work.helper, table, self._payload)

    def _kind_for(self, index: int) -> Any:
        return self._ray.remote(WorkerProcess).options(
            max_restarts=0,  # the supervisor restarts, with back-off and a fresh seed
            scheduling_strategy=strategy_of(self._placement, index),
            **self._options,
        )

    def launch(self, launch: Launch) -> ActorRun:
        """Starts a run; does not wait for it."""
        self._require_ray()
        actor = (self._kind or self._kind_for(launch.index)).remote()
        open_replica = None if self._server is None else partial(TableReplica, self._server)
        result = actor.run.remote(sys.path, self._payload, launch, open_replica).future()
        run = ActorRun(actor, result)
        self._runs.add(run)
        return run

    def wait(self, runs: Sequence[ActorRun], timeout: float) -> list[ActorRun]:
        """The runs that have ended, as `Backend.wait` says; RuntimeError when Ray was shut down."""
        deadline = time.monotonic() + timeout
        while True:
            self._require_ray()
            # Not in a call of Ray's: out of that no thread comes back when another one shuts Ray down.
            seconds = max(0.0, min(_LOOK_EVERY, deadline - time.monotonic()))
            ended = wait_for_futures([run.result for run in runs], seconds, FIRST_COMPLETED).done
            if ended or not runs or time.monotonic() >= deadline:
                return [run for run in runs if run.result in ended]

    def outcome(self, run: ActorRun) -> Outcome:
        """How an ended run ended."""
        errors = self._ray.exceptions
        try:
            return run.result.result()
        except errors.RayTaskError as error:
            return Outcome("raised", str(error).strip().splitlines()[-1], str(error))
        except (
            errors.RuntimeEnvSetupError,
            errors.ActorUnschedulableError,
            errors.ActorPlacementGroupRemoved,
        ) as error:  # there was no process
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return Outcome("raised", f"Ray could not start its process: {why}", str(error))
        except errors.RayError as error:
            failure = import_failure(error)
            if failure is not None:  # the class of its actor could not be unpickled there
                what = f"its node cannot import what a worker needs: {failure} (install it there, or see runtime_env)"
                return Outcome("raised", what, str(error))
            return Outcome("died", "its process died (killed, crashed or out of memory)", str(error))

    def release(self, run: ActorRun) -> None:
        """Lets the process of an ended run go."""
        self.kill(run)  # a graceful exit takes Ray 2 s, and the user's function has returned
        if self._is_there():
            self._runs.discard(run)

    def kill(self, run: ActorRun) -> None:
        """Kills the process of a run."""
        if self._is_there():  # or it is gone, with Ray
            self._ray.kill(run.actor, no_restart=True)

    def close(self) -> None:
        """Shuts Ray down if it was started here and nobody else needs it."""
        if not self._session.connected:
            self._give_up()
        if self._server is not None and self._is_there():
            self._ray.kill(self._server, no_restart=True)
        self._payload = None  # a backend whose Ray was shut down is kept
        self._session.close()

    def _require_ray(self) -> None:
        """Raises RuntimeError when Ray was shut down: what is asked of it then would start another one."""
        if not self._is_there():
            raise RuntimeError("Ray was shut down while its workers were running")

    def _is_there(self) -> bool:
        """Whether Ray was never seen shut down. Asks nothing of it: a call in that very moment ends the process."""
        if not self._ray.is_initialized():
            self._give_up()
        return self not in self._lost

    def _give_up(self) -> None:
        if self not in self._lost:
            self._lost.append(self)

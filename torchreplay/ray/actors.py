"""Workers as Ray actors: all that the supervisor needs of Ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchreplay.ray.backend import Backend, pickled
from torchreplay.ray.mirror import PageKeeper
from torchreplay.ray.placement import strategy_of
from torchreplay.ray.session import RaySession
from torchreplay.ray.worker import Launch, Outcome, WorkerProcess

if TYPE_CHECKING:
    from torchreplay.ray.hosting import Hosting


@dataclass(eq=False)
class ActorRun:
    """One run of one worker: its actor and the result to come."""

    launch: Launch
    actor: Any
    result: Any


class Actors(Backend[ActorRun]):
    """Runs workers as Ray actors, each in a process of its own.

    Args:
        work: `(work, board)`, for the workers' processes to unpickle.
        num_workers: How many there may be at a time.
        hosting: What each of them reserves, and where it may run.
    """

    def __init__(self, work: Any, num_workers: int, hosting: Hosting) -> None:
        reserved = num_workers * hosting.num_cpus, num_workers * hosting.num_gpus
        self._session = RaySession(*reserved, here=hosting.placement is None)
        self._ray = self._session.ray
        self._placement = hosting.placement
        runtime_env = None if hosting.runtime_env is None else dict(hosting.runtime_env)
        self._options = {"num_cpus": hosting.num_cpus, "num_gpus": hosting.num_gpus, "runtime_env": runtime_env}
        self._kind: Any = None  # of every worker, unless a function says where each is to run
        self._keeper: Any = None  # of the pages, for workers on other nodes
        try:
            if not callable(hosting.placement):
                self._kind = self._kind_for(0)  # now: what Ray does not take is refused at the start
            self._payload = self._ray.put(pickled(work, self._ray.cloudpickle.dumps))
            if hosting.placement is not None:
                self._keeper = self._keep(work, runtime_env)
        except BaseException:
            self._session.close()
            raise

    def _keep(self, work: Any, runtime_env: Any) -> Any:
        what, board = work
        kind = self._ray.remote(PageKeeper).options(
            num_cpus=0,
            runtime_env=runtime_env,
            max_restarts=-1,
            max_task_retries=-1,  # what workers ask and tell bears repetition
            scheduling_strategy=strategy_of(None, 0),
        )
        return kind.remote(what.helper, board, *what.pages)

    def _kind_for(self, index: int) -> Any:
        return self._ray.remote(WorkerProcess).options(
            max_restarts=0,  # the supervisor restarts, with back-off and a fresh seed
            scheduling_strategy=strategy_of(self._placement, index),
            **self._options,
        )

    def launch(self, launch: Launch) -> ActorRun:
        """Starts a run; does not wait for it."""
        actor = (self._kind or self._kind_for(launch.index)).remote()
        return ActorRun(launch, actor, actor.run.remote(sys.path, self._payload, launch, self._keeper))

    def wait(self, runs: Sequence[ActorRun], timeout: float) -> list[ActorRun]:
        """The runs that have ended, as soon as one has, at the latest after `timeout` seconds."""
        if not self._ray.is_initialized():  # to wait would start another Ray
            raise RuntimeError("Ray was shut down while its workers were running")
        by_result = {run.result: run for run in runs}
        ended, _ = self._ray.wait(list(by_result), num_returns=1, timeout=max(timeout, 0.0))
        return [by_result[result] for result in ended]

    def outcome(self, run: ActorRun) -> Outcome:
        """How an ended run ended."""
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(run.result)
            return outcome
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
            return Outcome("died", "its process died (killed, crashed or out of memory)", str(error))

    def release(self, run: ActorRun) -> None:
        """Lets the process of an ended run go."""
        self.kill(run)  # a graceful exit takes Ray 2 s, and the user's function has returned
        run.actor = run.result = None

    def kill(self, run: ActorRun) -> None:
        """Kills the process of a run."""
        if self._ray.is_initialized():  # or it is gone, with Ray
            self._ray.kill(run.actor, no_restart=True)

    def close(self) -> None:
        """Shuts Ray down if it was started here and nobody else needs it."""
        if self._keeper is not None and self._ray.is_initialized():
            self._ray.kill(self._keeper, no_restart=True)
        self._session.close()

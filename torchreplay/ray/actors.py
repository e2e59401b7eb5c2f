"""Workers as Ray actors: all that the supervisor needs of Ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchreplay.ray.backend import Backend, pickled
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
        self._session = RaySession(num_workers * hosting.num_cpus, num_workers * hosting.num_gpus)
        self._ray = self._session.ray
        try:
            self._payload = self._ray.put(pickled(work, self._ray.cloudpickle.dumps))
            self._actor = self._ray.remote(WorkerProcess).options(
                num_cpus=hosting.num_cpus,
                num_gpus=hosting.num_gpus,
                runtime_env=None if hosting.runtime_env is None else dict(hosting.runtime_env),
                max_restarts=0,  # the supervisor restarts, with back-off and a fresh seed
                scheduling_strategy=self._here() if hosting.placement is None else hosting.placement,
            )
        except BaseException:
            self._session.close()
            raise

    def _here(self) -> Any:
        """This machine: the buffer's memory is here."""
        node = self._ray.get_runtime_context().get_node_id()
        return self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def launch(self, launch: Launch) -> ActorRun:
        """Starts a run; does not wait for it."""
        actor = self._actor.remote()
        return ActorRun(launch, actor, actor.run.remote(sys.path, self._payload, launch))

    def wait(self, runs: Sequence[ActorRun], timeout: float) -> list[ActorRun]:
        """The runs that have ended, as soon as one has, at the latest after `timeout` seconds."""
        if not self._ray.is_initialized():  # to wait would start another Ray
            raise RuntimeError("Ray was shut down while its workers were running")
        by_result = {run.result: run for run in runs}
        ended, _ = self._ray.wait(list(by_result), num_returns=1, timeout=max(timeout, 0.0))
        return [by_result[result] for result in ended]

    def outcome(self, run: ActorRun) -> Outcome:
        """How an ended run ended."""
        try:
            outcome: Outcome = self._ray.get(run.result)
            return outcome
        except self._ray.exceptions.RayTaskError as error:
            return Outcome("raised", str(error).strip().splitlines()[-1], str(error))
        except self._ray.exceptions.RayError as error:
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
        self._session.close()

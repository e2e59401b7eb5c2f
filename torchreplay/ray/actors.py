"""Explorers as Ray actors: all that the supervisor needs of Ray."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torchreplay.ray.explorer import STOP_SIGNAL, ExplorerProcess, Launch, Outcome
from torchreplay.ray.session import import_ray

_EXIT_TIMEOUT: Final = 5.0
"""Seconds that Ray gets to take a killed actor's process down."""


@dataclass(eq=False)
class Run:
    """One run of one explorer: its actor and the result to come."""

    launch: Launch
    actor: Any
    result: Any


class Actors:
    """Launches, awaits and kills explorers on the machine of this process.

    Args:
        payload: Pickled `(explore, buffer, weights, board)`.
        num_cpus: What Ray reserves for each explorer.
    """

    def __init__(self, payload: bytes, num_cpus: float) -> None:
        self._ray = import_ray()
        self._payload = self._ray.put(payload)
        here = self._ray.get_runtime_context().get_node_id()
        self._actor = self._ray.remote(ExplorerProcess).options(
            num_cpus=num_cpus,
            max_restarts=0,  # the supervisor restarts, with back-off and a fresh seed
            # The buffer's memory is this machine's.
            scheduling_strategy=self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False),
        )

    def launch(self, launch: Launch) -> Run:
        """Starts a run in a process of its own; does not wait for it."""
        actor = self._actor.remote()
        return Run(launch, actor, actor.run.remote(sys.path, self._payload, launch))

    def wait(self, runs: Sequence[Run], timeout: float) -> list[Run]:
        """The runs that have ended, as soon as one has, at the latest after `timeout` seconds."""
        by_result = {run.result: run for run in runs}
        ended, _ = self._ray.wait(list(by_result), num_returns=1, timeout=max(timeout, 0.0))
        return [by_result[result] for result in ended]

    def outcome(self, run: Run) -> Outcome:
        """How an ended run ended."""
        try:
            outcome: Outcome = self._ray.get(run.result)
            return outcome
        except self._ray.exceptions.RayTaskError as error:
            return Outcome("raised", str(error).strip().splitlines()[-1], str(error))
        except self._ray.exceptions.RayError as error:
            return Outcome("died", "its process died (killed, crashed or out of memory)", str(error))

    def release(self, run: Run) -> None:
        """Lets the process of an ended run go."""
        self.kill(run)  # a graceful exit takes Ray 2 s, and the user's function has returned
        run.actor = run.result = None

    def interrupt(self, run: Run, pid: int) -> None:
        """Makes a run that has not seen its stop raise `Stopped`, wherever it is or waits; `pid` is its process."""
        # A pid can only be another's by now if it ended this very moment.
        if not self.wait([run], 0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STOP_SIGNAL)

    def kill(self, run: Run) -> None:
        """Kills the process of a run."""
        self._ray.kill(run.actor, no_restart=True)

    def await_exit(self, pids: Iterable[int]) -> None:
        """Returns when these processes are gone; Ray takes them down a moment after it says so."""
        deadline = time.monotonic() + _EXIT_TIMEOUT
        for pid in filter(None, pids):
            try:
                process = os.pidfd_open(pid)
            except OSError:  # gone already
                continue
            poller = select.poll()
            poller.register(process, select.POLLIN)
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            os.close(process)

"""Ray itself: started when the program has not done so, and given back as it was found."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import ClassVar

logger = logging.getLogger("torchreplay.ray")
"""Of this package. The supervisor in `torchreplay.workers` logs by the same name."""

# The workers' data never passes through Ray's object store: the least it accepts is plenty.
_OBJECT_STORE_BYTES = 80 * 2**20


def import_ray() -> ModuleType:
    """Imports Ray.

    Raises:
        ImportError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "workers run as Ray actors unless backend='process' is given, and Ray is not installed: pip install ray"
        ) from error
    return ray


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Gives the program's own handler of SIGTERM back to it, such as Lightning's or one that saves.

    `ray.init` installs a handler that exits, and a native one before it that aborts the process 3 s later. So that of
    Ray's is set anew where the program has none.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        handler = signal.getsignal(signal.SIGTERM) if before in (signal.SIG_DFL, None) else before
        if handler is not None and threading.current_thread() is threading.main_thread():  # no other may set it
            signal.signal(signal.SIGTERM, handler)


def connection() -> str:
    """Returns an id of this process's connection to Ray, which no other connection has; "" where there is none."""
    ray = import_ray()
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.get_node_id()}/{context.get_job_id()}"


class RaySession:
    """Ray for the life of a pool: joins the program's, or starts one on this machine.

    A Ray that was started here serves every session until the last one is closed, in any order.

    A program that is to run on an existing cluster calls `ray.init(address=...)` before it starts
    the pool, or sets `RAY_ADDRESS`.

    Args:
        cpus: What the workers ask Ray to reserve in all. A Ray started here announces as many
            CPUs, and no fewer than the machine has.
        gpus: The same of GPUs. A Ray started here announces those that the machine has.
        here: Whether they run on this node alone, not anywhere in the cluster.

    Raises:
        ImportError: Ray is not installed.
        ValueError: Ray has fewer CPUs or GPUs: some workers would never be started. Where it has them, and other
            sessions of this program ask for them too, a warning says so.
    """

    _lock: ClassVar = threading.RLock()  # of the two below; a signal's handler may stop a pool, too
    _open: ClassVar[set[RaySession]] = set()
    _started: ClassVar[str] = ""  # the connection to the Ray that one of them has started

    def __init__(self, cpus: float, gpus: float = 0, here: bool = True) -> None:
        self.ray = import_ray()
        self._reserved, self._here = {"CPU": cpus, "GPU": gpus}, here
        with self._lock:
            starts = not self.ray.is_initialized()
            if starts:
                with _own_sigterm():
                    self._start(cpus)
                RaySession._started = connection()
            self._connection = connection()
            self._open.add(self)
        try:
            present = self._resources()
            if not starts:  # one that was started for this session has them
                self._check("num_cpus", "CPU", present)
            self._check("num_gpus", "GPU", present)
        except BaseException:
            self.close()
            raise

    def _start(self, cpus: float) -> None:
        if os.environ.get("RAY_ADDRESS"):
            self.ray.init()
        else:
            self.ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, math.ceil(cpus)),
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                logging_level=logging.ERROR,  # its warnings are about clusters
            )

    def close(self) -> None:
        """Shuts Ray down if a session started it and this is the last; may be called again."""
        with self._lock:
            self._open.discard(self)
            if self._started and not self._open:
                started, RaySession._started = self._started, ""
                if connection() == started:  # else the program has shut it down, and may have another one by now
                    self.ray.shutdown()

    @property
    def connected(self) -> bool:
        """Whether this process is still connected to the Ray that it was connected to when the session began."""
        return connection() == self._connection

    def _resources(self) -> Mapping[str, float]:
        """Returns what Ray has, on this node or in all."""
        if not self._here:
            present: Mapping[str, float] = self.ray.cluster_resources()
            return present
        node = self.ray.get_runtime_context().get_node_id()
        return next((n["Resources"] for n in self.ray.nodes() if n["NodeID"] == node and n["Alive"]), {})

    def _check(self, argument: str, kind: str, resources: Mapping[str, float]) -> None:
        asked, present = self._reserved[kind], resources.get(kind, 0.0)
        where = "this node" if self._here else "it"
        if asked > present:
            raise ValueError(
                f"the workers ask Ray for {asked:g} {kind}s in all (how many there are * {argument}) and {where} has "
                f"{present:g}: lower {argument} (with 0, the default, any number of workers runs), start Ray with "
                f"more, or say where else they may run (placement=...)"
            )
        with self._lock:
            rivals = [one for one in self._open if one is not self and (one._here or not self._here)]
        taken = sum(one._reserved[kind] for one in rivals)
        if asked and asked + taken > present + 1e-6:  # Ray counts in 1e-4
            text = "the workers ask Ray for %g %ss, %s has %g, and other pools and evaluators of this program ask "
            text += "for %g: some may not start before others end"
            logger.warning(text, asked, kind, where, present, taken)

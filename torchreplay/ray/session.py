"""Ray itself: started when the program has not done so, and given back as it was found."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import ClassVar

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
            "workers run as Ray actors unless backend='process' is given, and Ray is not installed: "
            "pip install 'torchreplay[ray]'"
        ) from error
    return ray


class RaySession:
    """Ray for the life of a pool: joins the program's, or starts one on this machine.

    A Ray that was started here serves every session until the last is closed, in whatever order they are.

    A program that is to run on an existing cluster calls `ray.init(address=...)` before it starts
    the pool, or sets `RAY_ADDRESS`.

    Args:
        cpus: What the workers ask Ray to reserve in all. A Ray started here announces as many
            CPUs, and no fewer than the machine has.
        gpus: The same of GPUs. A Ray started here announces those that the machine has.

    Raises:
        ImportError: Ray is not installed.
        ValueError: Ray has fewer CPUs or GPUs: some workers would never be started.
    """

    _lock: ClassVar = threading.RLock()  # of the two below; a signal's handler may stop a pool, too
    _open: ClassVar[set[RaySession]] = set()
    _started: ClassVar[bool] = False  # whether Ray was, by one of them

    def __init__(self, cpus: float, gpus: float = 0) -> None:
        self.ray = import_ray()
        with self._lock:
            starts = not self.ray.is_initialized()
            if starts:
                self._start(cpus)
                RaySession._started = True
            self._open.add(self)
        try:
            present = self.ray.cluster_resources()
            if not starts:  # one that was started for this session has them, and a cluster may grow
                _check("num_cpus", cpus, "CPU", present)
            _check("num_gpus", gpus, "GPU", present)
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
                RaySession._started = False
                self.ray.shutdown()


def _check(argument: str, asked: float, kind: str, resources: Mapping[str, float]) -> None:
    present = resources.get(kind, 0.0)
    if asked > present:
        raise ValueError(
            f"the workers ask Ray for {asked:g} {kind}s in all (how many there are * {argument}) and it has "
            f"{present:g}: lower {argument} (with 0, the default, any number of workers runs), or start Ray with more"
        )

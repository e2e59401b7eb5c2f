"""Ray itself: started when the program has not done so, and given back as it was found."""

from __future__ import annotations

import logging
import math
import os
from types import ModuleType

# The explorers' data never passes through Ray's object store: the least it accepts is plenty.
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
            "an ExplorerPool runs its explorers as Ray actors, and Ray is not installed: pip install 'torchreplay[ray]'"
        ) from error
    return ray


class RaySession:
    """Ray for the life of a pool: joins the program's, or starts one on this machine.

    A program that is to run on an existing cluster calls `ray.init(address=...)` before it starts
    the pool, or sets `RAY_ADDRESS`.

    Args:
        cpus: What the explorers ask Ray to reserve in all. A Ray started here announces as many
            CPUs, and no fewer than the machine has.

    Raises:
        ImportError: Ray is not installed.
        ValueError: The Ray that runs has fewer CPUs: some explorers would never be started.
    """

    def __init__(self, cpus: float) -> None:
        self.ray = import_ray()
        self._started = not self.ray.is_initialized()
        if not self._started:
            _check_cpus(cpus, self.ray.cluster_resources().get("CPU", 0))
        elif os.environ.get("RAY_ADDRESS"):
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
        """Shuts Ray down if this session started it; may be called again."""
        if self._started:
            self._started = False
            self.ray.shutdown()


def _check_cpus(asked: float, present: float) -> None:
    if asked > present:
        raise ValueError(
            f"the explorers ask Ray for {asked:g} CPUs in all (num_explorers * num_cpus) and it has {present:g}: "
            "lower num_cpus (with 0, the default, any number of explorers runs), or start Ray with more"
        )

"""Where workers run, and what is reserved for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torchreplay.ray.workers.placement import NAMES, Placement
from torchreplay.ray.workers.ray_backend import RayBackend
from torchreplay.validation import checked_number
from torchreplay.workers.backend import Backend
from torchreplay.workers.process_backend import ProcessBackend

BackendName: TypeAlias = Literal["ray", "process"]


@dataclass(frozen=True)
class WorkerResources:
    """Arguments that all pools of workers share; see `ExplorerPool`.

    Raises:
        ValueError: The backend is unknown, a number is out of range, or something is asked of plain processes that
            only Ray does.
        TypeError: `runtime_env` is no dict.
    """

    backend: BackendName = "ray"
    num_cpus: float = 0
    num_gpus: float = 0
    runtime_env: Mapping[str, Any] | None = None
    placement: Placement = None

    def __post_init__(self) -> None:
        if self.backend not in get_args(BackendName):
            names = " or ".join(map(repr, get_args(BackendName)))
            raise ValueError(f"backend={self.backend!r}: expected {names}")
        for name in ("num_cpus", "num_gpus"):
            checked_number(name, getattr(self, name), 0)
        if self.runtime_env is not None and not isinstance(self.runtime_env, Mapping):
            raise TypeError(f"runtime_env={self.runtime_env!r}: expected a dict as Ray takes it")
        named, placement = isinstance(self.placement, str), self.placement
        of_ray = type(placement).__module__.partition(".")[0] == "ray"
        if placement is not None and not (placement in NAMES if named else callable(placement) or of_ray):
            raise ValueError(
                f"placement={self.placement!r}: expected {', '.join(map(repr, NAMES))}, a scheduling strategy of "
                "Ray's, or a function of a worker's index that returns one of these"
            )
        asked = [name for name in ("num_cpus", "num_gpus", "runtime_env", "placement") if getattr(self, name)]
        if self.backend == "process" and asked:
            raise ValueError(
                f"{', '.join(asked)}: only Ray reserves and places; leave it out with backend='process', or use "
                "backend='ray'"
            )

    def open(self, work: Any, num_workers: int) -> Backend[Any]:
        """Makes ready to run so many workers at a time; `work` is `(work, table)`, for their processes to unpickle.

        Raises as `WorkerPool.start` does.
        """
        if self.backend == "process":
            return ProcessBackend(work)
        runtime_env = None if self.runtime_env is None else dict(self.runtime_env)
        options = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "runtime_env": runtime_env}
        return RayBackend(work, num_workers, self.placement, options)

"""`ExplorerPool` over Ray: explorers as actors, on any node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torchreplay.explorers import ExplorerPool as PlainExplorerPool
from torchreplay.explorers.explorer_pool import Explore, ExplorerTask
from torchreplay.explorers.named import Fillable, OneOrNamed, named_buffers
from torchreplay.ray.remote.remote_buffer import RemoteBuffer
from torchreplay.ray.sharded.sharded_replay import ShardedReplay, shards_of
from torchreplay.ray.workers.placement import OverShards, Placement
from torchreplay.ray.workers.resources import BackendName, WorkerResources
from torchreplay.weights.shared_weights import SharedWeights
from torchreplay.workers.backend import Backend


class RayExplorerTask(ExplorerTask):
    """The work of explorers that may be on another node than the buffer."""

    def give_up(self) -> None:
        """Has its writers to other nodes wait no longer for the limiter."""
        for buffer in self._elsewhere():
            buffer.give_up()

    def close(self) -> None:
        """Closes its writers, and has those to other nodes say farewell: this process may not live much longer."""
        with ExitStack() as closing:
            for buffer in self._elsewhere():
                closing.callback(buffer.drain)
            closing.callback(super().close)

    def _elsewhere(self) -> list[RemoteBuffer]:
        buffers: Iterable[Any] = named_buffers(self.buffer).values()
        written = [shards_of(one).remote.shard if isinstance(one, ShardedReplay) else one for one in buffers]
        return [buffer for buffer in written if isinstance(buffer, RemoteBuffer)]


class ExplorerPool(PlainExplorerPool):
    """Runs a function in several processes that write to one replay buffer, or to several: by default as Ray actors.

    All that `torchreplay.explorers.ExplorerPool` says holds here, too, and its arguments are the same, but for those
    named here. Explorers may be on other nodes of the cluster.

    Args:
        explore: As there; for `backend="process"` without cloudpickle it is defined in a module.
        buffer: The buffer that they write to, a `ReplayBuffer` or a `ShardedReplay`, or several by name.
        backend: `"ray"` for Ray actors; `"process"` for plain processes, without Ray. A script that uses plain
            processes starts them under `if __name__ == "__main__":`, as each imports its main module.
        num_cpus: CPUs that Ray reserves for each explorer. By default none: all of them run, and the kernel divides the
            cores.
        num_gpus: GPUs, or a part of one, that Ray reserves for each explorer.
        runtime_env: Their environment, as Ray takes it, such as `{"env_vars": {...}}`.
        placement: Where Ray is to run them. None: on this machine, where the buffer's memory is. With a
            `ShardedReplay`: in turn on the nodes that have shards, no more on each than its `num_cpus` and `num_gpus`
            allow. `"LOCAL_FIRST"`: on this machine while it has these left, then on others. Or one of Ray's scheduling
            strategies, such as `"SPREAD"` or that of a placement group. Or a function of the explorer's index that
            returns one of these, called before each of its runs. Explorers on other nodes than the buffer's have remote
            writers and fetch the weights: the same calls, `docs/scaling.md`.

    Raises:
        ValueError: `explore` is no function, a number is out of range, or plain processes are asked for what only Ray
            does.
        TypeError: `buffer` or `weights` are none.

    Example:
        >>> with ExplorerPool(explore, 4, buffer, weights) as pool:
        ...     for step in range(10_000):
        ...         learn(buffer.sample(256))
    """

    _task = RayExplorerTask

    def __init__(
        self,
        explore: Explore,
        num_explorers: int,
        buffer: OneOrNamed[Fillable],
        weights: OneOrNamed[SharedWeights] | None = None,
        *,
        max_restarts: int = -1,
        restart_delay: float = 1.0,
        heartbeat_timeout: float | None = None,
        max_weight_sync_delay: int = 0,
        backend: BackendName = "ray",
        num_cpus: float = 0,
        num_gpus: float = 0,
        runtime_env: Mapping[str, Any] | None = None,
        placement: Placement = None,
        seed: int | None = None,
    ) -> None:
        sharded = [one for one in named_buffers(buffer).values() if isinstance(one, ShardedReplay)]
        if sharded and backend == "process":
            raise ValueError("backend='process': the shards of a ShardedReplay are reached through Ray, backend='ray'")
        if sharded and placement is None:
            placement = OverShards(sharded, {"CPU": num_cpus, "GPU": num_gpus})
        self._resources = WorkerResources(backend, num_cpus, num_gpus, runtime_env, placement)
        super().__init__(
            explore,
            num_explorers,
            buffer,
            weights,
            max_restarts=max_restarts,
            restart_delay=restart_delay,
            heartbeat_timeout=heartbeat_timeout,
            max_weight_sync_delay=max_weight_sync_delay,
            seed=seed,
        )

    def _require_reachable(self, buffer: Fillable) -> None:
        """All are reached through Ray."""

    def _require_open(self, buffer: Fillable) -> None:
        """Raises RuntimeError, or Stopped, if the buffer is closed."""
        if isinstance(buffer, ShardedReplay):
            shards_of(buffer).require_open()
        else:
            super()._require_open(buffer)

    def _open(self, work: Any, num_workers: int) -> Backend[Any]:
        """Makes ready to run the explorers, so many at a time."""
        return self._resources.open(work, num_workers)

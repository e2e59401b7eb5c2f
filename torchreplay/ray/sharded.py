"""`ShardedReplay`: one replay buffer over the nodes of a Ray cluster."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from torchreplay.arguments import checked_int
from torchreplay.batch import ReplayBatch
from torchreplay.config import MAX_CAPACITY, Config
from torchreplay.cuda import DeviceCopies
from torchreplay.drawing import MAX_BATCH
from torchreplay.hindsight import Hindsight
from torchreplay.limiters import Limiter
from torchreplay.ray.directory import NAMESPACE, Directory
from torchreplay.ray.draws import Draws
from torchreplay.ray.feedback import Feedback
from torchreplay.ray.histograms import merged_histograms
from torchreplay.ray.members import Shards
from torchreplay.ray.node_shard import Expectation, buffer_to_write_to
from torchreplay.ray.rounds import RoundStream
from torchreplay.ray.session import import_ray
from torchreplay.ray.shard_writer import ShardWriter
from torchreplay.ray.sharded_stats import ShardedStats, summed
from torchreplay.ray.union_limiter import UnionLimiter
from torchreplay.replay import Pin, Replay
from torchreplay.samplers import Sampler, Schedule
from torchreplay.segment import new_nonce
from torchreplay.spec import Spec
from torchreplay.staging import Staging
from torchreplay.views import View
from torchreplay.waiting import Wait
from torchreplay.writer import Autoreset

if TYPE_CHECKING:
    from types import TracebackType


class ShardedReplay(Replay):
    """A prioritized replay buffer whose rows lie on several nodes of a Ray cluster, for when one is not enough.

    Each node has a shard: an ordinary `ReplayBuffer` in that node's shared memory, held by an actor. Explorers write
    to the shard of the node they run on, without a message; learners draw from all of them at once, through shared
    memory from that of their own node, through Ray's object store from the others::

        replay = ShardedReplay(spec, capacity=10_000_000, sampler=tr.Prioritized())
        explorer.remote(replay)                    # there: with replay.writer() as w: w.append(...)
        batch = replay.sample(512)                 # P(i) = p_i / sum of all shards' p; weights likewise
        replay.update_priorities(batch, td)        # each TD error goes home

    It goes to tasks and actors as an argument. `tr.ReplayDataset`, `tr.MixedDataset`, `ReplayDataModule` and
    `PriorityFeedback` take it as they take a `ReplayBuffer`.

    A node that is lost costs its rows and nothing else: draws go on from the other shards, which is logged; TD errors
    for its rows are dropped and counted. Where the actor alone died, its node gets an empty shard; so does a node that
    joins later in the place of one that is gone (unless `nodes` were given). The shards live until `close()` by the
    process that made them, or its end.

    Args:
        spec: Names to `Field(shape, dtype)`, as for `ReplayBuffer`.
        capacity: Rows in all, divided evenly among the nodes.
        sampler: `Uniform()` (the default) or `Prioritized(...)`.
        view: `Rows()` (the default), `Transitions(...)`, `Sequences(...)` or `Hindsight(...)`.
        limiter: `MinSize(n)` (the default, with n = 1) or `SamplesPerInsert(...)`, counted over all shards. How
            closely it is kept: `docs/sharding.md`.
        seed: Of the draws. None: a random one.
        nodes: Ray's ids of the nodes that get a shard. None: all that are alive.

    Raises:
        RuntimeError: This process is not connected to a Ray cluster.
        ValueError: A bad spec, capacity, seed or node.
        MemoryError: A node has too little memory left for its shard.
    """

    def __init__(
        self,
        spec: Spec,
        capacity: int,
        *,
        sampler: Sampler | None = None,
        view: View | None = None,
        limiter: Limiter | None = None,
        seed: int | None = None,
        nodes: Sequence[str] | None = None,
    ) -> None:
        ray = _connected()
        chosen = _checked_nodes(ray, nodes)
        capacity = checked_int("capacity", capacity, len(chosen), MAX_CAPACITY * len(chosen))
        whole, rest = divmod(capacity, len(chosen))
        config = Config.of(spec, whole, sampler, view, limiter)
        seed = secrets.randbits(63) if seed is None else checked_int("seed", seed, 0, (1 << 63) - 1)
        limit = UnionLimiter(config.limiter, 0).limits(range(len(chosen)), 0)[0]
        nonce = new_nonce()
        here = ray.get_runtime_context().get_node_id()
        directory = ray.remote(Directory).options(
            name=_name(nonce),
            namespace=NAMESPACE,
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False),
        )
        capacities = [whole + (place < rest) for place in range(len(chosen))]
        self._owned = directory.remote(config, capacities, chosen, nodes is None, seed, limit)
        try:
            ray.get(self._owned.open.remote())
        except ray.exceptions.RayTaskError as error:
            self._end_all()
            raise error.cause from None
        except BaseException:
            self._end_all()
            raise
        self._adopt(nonce, seed, config, capacity, len(chosen))

    def _adopt(self, nonce: int, seed: int, config: Config, capacity: int, count: int) -> None:
        self._nonce, self._seed, self._config = nonce, seed, config
        self._capacity, self._count = capacity, count
        self.shards = Shards(_name(nonce), config.limiter)
        self._finish = config.view.finish if isinstance(config.view, Hindsight) else None
        self._draws = Draws(self.shards, config, seed, nonce, self._finish)
        self._feedback = Feedback(self.shards, nonce)
        self._closed = False

    @classmethod
    def _attach(cls, nonce: int, *args: Any) -> ShardedReplay:
        self = cls.__new__(cls)
        self._owned = None
        self._adopt(nonce, *args)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedReplay._attach, (self._nonce, self._seed, self._config, self._capacity, self._count)

    # Writing

    def writer(self, lanes: int | None = None, autoreset: Autoreset = "next_step") -> ShardWriter:
        """Returns a writer to the shard of the node that this process is on: one for each explorer thread.

        Its calls are those of `ReplayBuffer.writer()`, at the same cost; the keys that they return are the union's.
        They raise `ShardLost` some seconds after the shard has died: a new writer then writes to the one that takes its
        place.

        Args:
            lanes: Environments of a vector environment, as in `ReplayBuffer.writer`.
            autoreset: What the vector environment does when an episode ends.

        Raises:
            RuntimeError: This node has no shard.
            Stopped: The buffer was stopped.
            ValueError: `lanes` is out of range or asked for under `Rows()`, or `autoreset` is unknown.
        """
        self._require_open()
        return buffer_to_write_to(self.shards).writer(lanes, autoreset)

    def extend(self, /, *, priority: Any = None, **fields: Any) -> torch.Tensor:
        """Writes n rows, or under a view that links rows a whole episode, to the shard of this node.

        Arguments, results and errors are those of `ReplayBuffer.extend`; the keys are the union's.
        """
        self._require_open()
        return buffer_to_write_to(self.shards).extend(priority=priority, **fields)

    def expect_writers(self) -> Expectation:
        """Announces that writers will come, or come back: `sample` then waits for them instead of giving up.

        Returns:
            An object to `close()` when no more will come; it ends with the process as well, some seconds later.
        """
        return Expectation(self.shards)

    # Drawing

    def sample(self, batch_size: int, beta: Schedule | None = None, timeout: float | None = None) -> ReplayBatch:
        """Draws a batch from all shards, stratified and with replacement; waits until the limiter admits it.

        Every shard is asked once; `ReplayDataset` has several batches under way at a time and is faster.

        Args:
            batch_size: Number of items, B.
            beta: Exponent of the weights, instead of the sampler's own: a number, or a schedule of the batches drawn.
            timeout: Seconds to wait at most, for rows and for answers; None: as long as someone is left who may write.

        Returns:
            The fields, each `[B, *shape]`, with `key` int64 `[B]`, `weight` and `probability` float32 `[B]`: those of
            the union of all shards. Items of one shard lie together.

        Raises:
            ValueError: `batch_size` is below 1 or too large, or beta is negative.
            ReplayTimeout: The timeout passed; the text says what for, or which shard does not answer.
            WouldBlockForever: Too few rows, and nobody is left to write more.
            Stopped: The buffer was stopped, or the process that made it is gone.
        """
        self._require_open()
        wait = Wait(self.shards, timeout)
        try:
            return self._draws.draw(batch_size, beta, wait)
        finally:
            wait.end()

    def batches(
        self,
        batch_size: int,
        count: int | None,
        prefetch: int,
        timeout: float | None,
        waiting: type[Wait],
        drawn: deque[dict[str, Any]],
        staging: Staging | None = None,
    ) -> RoundStream:
        """Returns a stream of batches, for `prefetch` of which the shards are asked ahead."""
        checked_int("batch_size", batch_size, 1, MAX_BATCH)
        self._require_open()
        return RoundStream(self._draws, batch_size, count, prefetch, timeout, waiting, staging)

    def staging(self, batch_size: int, prefetch: int, device: torch.device, pin: Pin | None) -> Staging | None:
        """Returns what takes batches to a CUDA device while the learner computes; None: each is copied by itself.

        Raises:
            ValueError: `pin` is `"ring"`: the shards' rings are other processes' to page-lock.
        """
        if pin == "ring":
            raise ValueError('pin="ring" page-locks the memory of a ReplayBuffer: expected another for a ShardedReplay')
        if pin == "off":
            return None
        return Staging(self, batch_size, prefetch, DeviceCopies(device))

    # Feedback

    def update_priorities(self, batch_or_keys: ReplayBatch | Any, td: Any) -> None:
        """Feeds TD errors back to exactly the items they were computed from, each to its own shard.

        It returns when the TD errors are on their way; draws that this process asks for later know them. Those of rows
        overwritten since, or lost with their shard, are dropped and counted (`stats().stale_updates`,
        `lost_updates`). Of equal keys the last one wins.

        Args:
            batch_or_keys: A batch of this buffer, or int64 keys `[n]`.
            td: TD errors `[n]` of any real dtype, on any device; their absolute values are taken.

        Raises:
            ValueError: A shape does not fit, an error is NaN or infinite, a key was never issued, or the batch is of
                another buffer; nothing is applied.
        """
        self._require_open()
        self._feedback.send(batch_or_keys, td)

    def flush(self) -> None:
        """Waits until all TD errors fed back by this process have been applied, or counted as lost."""
        self._feedback.hear(0)

    # Inspection

    def __len__(self) -> int:
        """Returns the number of rows held by all shards."""
        self._require_open()
        self.shards.exchange()
        return sum(figures.rows for figures in self.shards.figures.values())

    @property
    def capacity(self) -> int:
        """Rows that fit into all shards."""
        return self._capacity

    @property
    def limiter(self) -> Limiter:
        """Who must wait."""
        return self._config.limiter

    @property
    def draws(self) -> int:
        """Batches that this object has drawn: the position in its own stream of random numbers."""
        return self._draws.made

    @draws.setter
    def draws(self, step: int) -> None:
        self._draws.made = checked_int("draws", step, 0, (1 << 48) - 1)

    @property
    def stream(self) -> int:
        """The number of this process's stream of random numbers."""
        return self._draws.stream

    @stream.setter
    def stream(self, number: int) -> None:
        self._draws.stream = checked_int("stream", number, 0, (1 << 48) - 1)

    def stats(self) -> ShardedStats:
        """Returns what has happened so far: over all shards, and each one's own."""
        self._require_open()
        self._feedback.hear(0)
        self.shards.exchange()
        places = self.shards.table.places
        told = self.shards.collect({number: place.actor.stats.remote() for number, place in places.items()})
        return summed(told, places, self.shards.look(), self._capacity, self._count, self.shards.union_limiter)

    def histograms(self, bins: int = 64) -> dict[str, torch.Tensor]:
        """Returns histograms of leaf priorities and of rows' ages, as `ReplayBuffer.histograms` does. O(capacity).

        Each shard counts into bins of its own, whose counts are put where the middle of the bin lies.
        """
        bins = checked_int("bins", bins, 1, 1 << 20)
        places = self.shards.look().places
        calls = {number: place.actor.histograms.remote(bins) for number, place in places.items()}
        return merged_histograms(list(self.shards.collect(calls).values()), bins)

    def __repr__(self) -> str:
        if self._closed:
            return "ShardedReplay(closed)"
        names = ", ".join("/".join(path) for path in self._config.fields)
        return (
            f"ShardedReplay({self._capacity:,} rows on {len(self.shards.table.places)} of {self._count} nodes, fields: "
            f"{names}, {self.view}, {self.sampler}, {self.limiter}{', stopped' if self.stopped else ''})"
        )

    # Life cycle

    def stop(self) -> None:
        """Tells everyone to finish: `stopped` becomes True in every process, and waiting calls raise `Stopped`."""
        self._require_open()
        self.shards.ask("stop")
        self.shards.look()

    @property
    def stopped(self) -> bool:
        """Whether `stop()` was called, in any process, as far as this one has heard: explorers hear it at once."""
        nearby = self.shards.nearby
        return (nearby is not None and nearby.buffer.stopped) or self.shards.stopped

    def close(self) -> None:
        """Detaches this object; in the process that made the shards, ends them. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.shards.detach()
        if self._owned is not None:
            self._end_all()

    def _end_all(self) -> None:
        owned, self._owned = self._owned, None
        with suppress(Exception):  # Ray may be shut down already, and everything with it
            import_ray().kill(owned, no_restart=True)  # the shards are its own, and go with it

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the ShardedReplay is closed")

    def __enter__(self) -> ShardedReplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _name(nonce: int) -> str:
    return f"replay-{nonce:016x}"


def _connected() -> Any:
    ray = import_ray()
    if not ray.is_initialized():
        raise RuntimeError("a ShardedReplay lies on the nodes of a Ray cluster: call ray.init(...) first")
    return ray


def _checked_nodes(ray: Any, nodes: Any) -> list[str]:
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    if nodes is None:
        here = ray.get_runtime_context().get_node_id()
        return sorted(alive, key=lambda node: (node != here, node))
    given = list(nodes) if isinstance(nodes, Sequence) else []
    names = {node for node in given if isinstance(node, str)}
    if not given or len(names) < len(given) or not names <= set(alive):
        raise ValueError(f"nodes is {nodes!r}: expected different ones of the nodes that are alive, {alive}")
    return given

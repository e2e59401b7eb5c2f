"""`ShardedReplay`: one replay buffer over the nodes of a Ray cluster."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from torchreplay.buffer.base import Replay
from torchreplay.buffer.local_sampler import MISSING, Missing, require_all
from torchreplay.buffer.notices import warn_of_ignored
from torchreplay.buffer.writer import Autoreset
from torchreplay.checkpoint.directory import with_description
from torchreplay.checkpoint.joined_rows import divided
from torchreplay.errors import CheckpointError, Stopped
from torchreplay.ray.remote.remote_buffer import RemoteWriter
from torchreplay.ray.sharded.coordinator_client import (
    checked_capacity,
    checked_nodes,
    coordinator_name,
    end,
    make_coordinator,
)
from torchreplay.ray.sharded.local_shard import ShardWriter
from torchreplay.ray.sharded.manifest import Manifest
from torchreplay.ray.sharded.remote_shard import RemoteShard
from torchreplay.ray.sharded.save_restore import capacities_for, restore_shards, save_shards
from torchreplay.ray.sharded.shard_client import ShardClient
from torchreplay.ray.sharded.shard_feedback import ShardFeedback
from torchreplay.ray.sharded.sharded_rows import ShardedRows
from torchreplay.ray.sharded.sharded_sampler import ShardedSampler
from torchreplay.ray.sharded.stats import ShardedStats, summed
from torchreplay.ray.sharded.writing import Expectation, buffer_to_write_to
from torchreplay.schema.batch import ReplayBatch, keys_of
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import Limiter, MinSize, SamplesPerInsert
from torchreplay.schema.samplers import Fifo, Sampler, Schedule, ignores_td, keeps_epochs
from torchreplay.schema.spec import Spec
from torchreplay.schema.views import View
from torchreplay.segment.handle import new_nonce
from torchreplay.segment.waits import Wait
from torchreplay.validation import checked_choice, checked_int, checked_kind, checked_path


class ShardedReplay(ShardedRows, Replay):
    """A prioritized replay buffer whose rows lie on several nodes of a Ray cluster, for when one is not enough.

    Each node has a shard: an ordinary `ReplayBuffer` in that node's shared memory, held by an actor. Explorers write to
    the shard of the node they run on, without a message::

        replay = ShardedReplay(spec, capacity=10_000_000, sampler=tr.Prioritized())
        explorer.remote(replay)              # there: with replay.writer() as w: w.append(...)

    Learners draw from all shards at once: through shared memory on their own node, over TCP from the others::

        batch = replay.sample(512)           # P(i) = p_i / sum of all shards' p; weights likewise
        replay.update_priorities(batch, td)  # each TD error goes home

    It goes to tasks and actors as an argument. `tr.ReplayDataset`, `tr.MixedDataset`, `ReplayDataModule` and
    `PriorityFeedback` take it as they take a `ReplayBuffer`.

    A node that is lost costs its rows and nothing else: draws go on from the other shards, which is logged; TD errors
    for its rows are dropped and counted. Where the actor alone died, its node gets an empty shard; so does a node that
    joins later in the place of one that is gone (unless `nodes` were given). The shards live until the object that made
    them is closed or is garbage, or its process ends: keep it for as long as others use them.

    Args:
        spec: Names to `Field(shape, dtype)`, or to `Ragged(dtype)` for values of any length, as for `ReplayBuffer`.
        capacity: Rows in all. They are divided evenly among the nodes.
        sampler: `Uniform()` (the default) or `Prioritized(...)`.
        view: `Rows()` (the default), `Transitions(...)`, `Sequences(...)` or `Hindsight(...)`.
        limiter: `MinSize(n)` (the default, with n = 1) or `SamplesPerInsert(...)`. It counts over all shards, and can
            be changed later. How closely it is kept: `docs/sharding_in_depth.md`.
        seed: Of the draws, 0 to 2^64 - 1. None: a random one.
        nodes: Ray's ids of the nodes that get a shard. None: all that are alive.
        name: What people call it, as for `ReplayBuffer`. Its shards are called `"NAME/0"`, `"NAME/1"` and so on.
        ragged_bytes: Bytes for the values of ragged fields, together, divided evenly among the nodes. The values of one
            row take at most a quarter of a node's. None: there are no such fields.

    Raises:
        RuntimeError: This process is not connected to a Ray cluster, or a shard cannot be made: its node is gone.
        ValueError: A bad spec, capacity, seed, node or name; or a node's share of `ragged_bytes` is too small, or they
            are missing, or given in vain.
        MemoryError: A node has too little memory left for its shard.
    """

    _sampler: ShardedSampler

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
        name: str | None = None,
        ragged_bytes: int | None = None,
    ) -> None:
        chosen = checked_nodes(nodes)
        capacities = divided(checked_capacity(capacity, len(chosen)), [1] * len(chosen))
        if ragged_bytes is not None:
            ragged_bytes = checked_int("ragged_bytes", ragged_bytes, 1) // len(chosen)
        config = Config.of(spec, capacities[-1], sampler, view, limiter, name, ragged_bytes)
        seed = secrets.randbits(63) if seed is None else checked_int("seed", seed, 0, (1 << 64) - 1)
        self._found(config, capacities, chosen, nodes is None, seed)

    def _found(self, config: Config, capacities: list[int], nodes: list[str], anywhere: bool, seed: int) -> None:
        nonce = new_nonce()
        given, instead = f"sampler is {config.sampler}", "expected Uniform() or Prioritized(), or one ReplayBuffer"
        if keeps_epochs(config.sampler):
            raise ValueError(f"{given}: each shard would keep epochs of its own; {instead}")
        if isinstance(config.sampler, Fifo):
            raise ValueError(f"{given}: each shard would be a queue of its own, in its own order; {instead}")
        if config.sampler.max_draws is not None:
            raise ValueError(
                f"{given}: each shard would count the draws of its own items, and wait for them; leave max_draws out, "
                f"or use one ReplayBuffer"
            )
        if config.has_versions:
            raise ValueError(
                "the spec has a field 'policy_version': each shard would have to hear of the learner's version; give "
                "the field another name, or use one ReplayBuffer"
            )
        self._owned = make_coordinator(nonce, config, capacities, nodes, anywhere, seed)
        try:
            self._init_state(nonce, seed, config, sum(capacities), len(nodes))
        except BaseException:
            end(self._owned)
            raise

    def _init_state(self, nonce: int, seed: int, config: Config, capacity: int, count: int) -> None:
        self._nonce, self._config = nonce, config
        self._ignores_td = ignores_td(config.sampler)  # and no warning has said so yet
        self._capacity, self._count = capacity, count
        self._shards = ShardClient(coordinator_name(nonce), config.called)
        self._feedback = ShardFeedback(self._shards, nonce)
        self._sampler = ShardedSampler(self._shards, config, seed, nonce, self._feedback)

    def _require_open(self) -> None:
        self._shards.require_open()

    def __reduce__(self) -> tuple[Any, ...]:
        return attached_shards, (self._nonce, self._sampler.seed, self._config, self._capacity, self._count)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            "the shards of a ShardedReplay are not copied in memory: save(directory) it, and "
            "ShardedReplay.load(directory) makes another; copy.copy() gives another object over the same shards"
        )

    # Writing

    def writer(
        self, envs: Any = None, autoreset: Autoreset | None = None, *, num_envs: int | None = None
    ) -> ShardWriter | RemoteWriter:
        """Returns a writer to the shard of the node that this process is on: one for each explorer thread.

        Its calls are those of `ReplayBuffer.writer()`, at the same cost; the keys that they return are the union's.
        They raise `ShardLost` some seconds after the shard has died: a new writer then writes to the one that takes its
        place.

        On a node without a shard it writes through Ray to the shard that had the fewest writers when this process asked
        first. It is a remote writer, as a `RemoteBuffer` has them: its calls return no keys. All writers of a process
        write to the same shard for as long as that is there, and to another one after its loss.

        Args:
            envs: The environment, or the vector environment, whose steps it writes, as in `ReplayBuffer.writer`.
            autoreset: What the vector environment does when an episode ends; None: what `envs` says.
            num_envs: Environments of the vector environment, where `envs` is not given.

        Raises:
            RuntimeError: No node that is alive has a shard, or this node's was lost and is not made anew for a minute.
            Stopped: The buffer was stopped.
            ValueError: As there.
        """
        self._require_open()
        return buffer_to_write_to(self._shards).writer(envs, autoreset, num_envs=num_envs)

    def extend(self, /, *args: Any, priority: Any = None, **fields: Any) -> torch.Tensor | None:
        """Writes n rows, or under a view that links rows a whole episode, to the shard that `writer` writes to.

        Arguments, results and errors are those of `ReplayBuffer.extend`; the keys are the union's. On a node without a
        shard it returns None when the rows are in the other node's shard.
        """
        self._require_open()
        buffer = buffer_to_write_to(self._shards)
        if isinstance(buffer, RemoteShard):
            self._rows_extended += buffer.deliver(*args, priority=priority, **fields)
            return None
        keys = buffer.extend(*args, priority=priority, **fields)
        self._rows_extended += keys.numel()
        return keys

    def expect_writers(self) -> Expectation:
        """Announces that writers will come, or come back: `sample` then waits for them instead of giving up.

        Returns:
            An object to `close()` when no more will come; it ends with the process as well, some seconds later.
        """
        return Expectation(self._shards.coordinator)

    # Drawing, and feeding back

    def sample(
        self,
        batch_size: int,
        beta: Schedule | None = None,
        timeout: float | None = None,
        *,
        device: torch.device | str | int | None = None,
        budget: Mapping[str, int] | None = None,
    ) -> ReplayBatch:
        """Draws a batch from all shards, stratified and with replacement; waits until the limiter admits it.

        Every shard is asked once. `ReplayDataset` has several batches under way at a time and is faster.

        Args:
            batch_size: Number of items, B.
            beta: Exponent of the weights, instead of the sampler's own: a number, or a schedule of the batches drawn.
            timeout: Seconds to wait at most, for rows and for answers; None: as long as someone is left who may write.
                Answers of other nodes take a millisecond or more: in less time there is no batch.
            device: Where the batch goes; `key` stays on the CPU. None: it stays where it is.
            budget: Of ragged fields: the most elements that the batch may have, as for `ReplayBuffer.sample`.

        Returns:
            The fields, each `[B, *shape]`, and ragged ones as `ReplayBatch` says; with `key` int64 `[B]`, `weight` and
            `probability` float32 `[B]`: those of the union of all shards. Items of one shard lie together.

        Raises:
            ValueError: `batch_size` is below 1 or too large, or beta is negative; or `budget` names no ragged field.
            OverflowError: The batch has more elements of a ragged field than int32 offsets can say.
            ReplayTimeout: The timeout passed; the text says what for, or which shard does not answer.
            WouldBlockForever: Too few rows, and nobody is left to write more.
            Stopped: The buffer was stopped, or the process that made it is gone.
        """
        self._require_open()
        limits = None if budget is None else self._sampler.checked_budget(budget)
        self._feedback.apply_arrived()
        if limits is None and (drawn := self._sampler.draw_here(batch_size, beta)) is not None:
            batch = self._sampler.finished(drawn[0])
            return batch if device is None else batch.to(device)
        wait = Wait(self._shards, timeout)
        try:
            batch = self._sampler.draw(batch_size, beta, wait, limits)
        finally:
            wait.end()
        if limits is not None:
            self._sampler.warn_of_budget(limits, batch)
        return batch if device is None else batch.to(device)

    def gather(self, keys: Any, missing: Missing = "drop") -> ReplayBatch:
        """Returns the items anchored at given rows of any shards, as `ReplayBuffer.gather` does.

        TD errors that this process has fed back before are known to it.

        Args:
            keys: int64 `[n]`, or a batch of this buffer, whose `key` is taken.
            missing: As there. Items that are lost with their shard are missing, too.

        Returns:
            A batch of the m <= n items there are, in the order of `keys`; `key` says which. `weight` (with the
            sampler's beta) and `probability` are those that a draw from all shards would give them, each shard being as
            it is just after its items were found.

        Raises:
            ValueError, MissingItems: As there.
            Stopped: The process that made the buffer is gone.
        """
        checked_choice("missing", missing, MISSING)
        self._require_open()
        self._feedback.apply_arrived()
        self._feedback.hear(0)
        wanted = keys_of(keys, self._nonce) if isinstance(keys, dict) else keys
        batch = self._sampler.gather(wanted)
        if missing == "raise":
            require_all(wanted, batch)
        return batch

    def update_priorities(self, batch_or_keys: ReplayBatch | Any, td: Any) -> None:
        """Feeds TD errors back to exactly the items they were computed from, as `ReplayBuffer.update_priorities` does.

        Each goes to its own shard. It returns when the TD errors are on their way; draws that this process asks for
        later know them. Those of rows overwritten since, or lost with their shard, are dropped and counted
        (`stats().stale_updates`, `lost_updates`). Of equal keys the last one wins. Those on a CUDA device are not
        waited for, as there. They are sent once they have come, in the order given, when this process next calls the
        buffer or asks for a batch; `flush` waits for them.

        Args:
            batch_or_keys: A batch of this buffer, or int64 keys `[n]`.
            td: TD errors `[n]` of any real dtype, on any device. They may need a gradient (no `detach()`):
                their values are read, and their absolute values taken.

        Raises:
            ValueError: As there; nothing is applied.

        Warns:
            UserWarning: The sampler is `Uniform`, which ignores them. Said once.
        """
        if self._shards.closed:
            self._require_open()
        self._feedback.send(batch_or_keys, td)
        if self._ignores_td:
            self._ignores_td = False
            warn_of_ignored(self._nonce, self._config.called, type(self.sampler).__name__)

    def flush(self) -> None:
        """Waits until all TD errors fed back by this process have been applied, or counted as lost.

        Raises:
            ValueError: Some that came from a device are NaN or infinite: they are dropped, and the others applied.
        """
        self._feedback.flush()

    # Looking into it

    def __len__(self) -> int:
        """Returns the number of rows held by all shards."""
        self._require_open()
        self._shards.exchange()
        return sum(figures.stats.size for figures in self._shards.figures.values())

    @property
    def capacity(self) -> int:
        """Rows that fit into all shards."""
        return self._capacity

    @property
    def limiter(self) -> Limiter:
        """Who must wait. Set it to change it for every process. Processes that can go on under the new one do.

        A new limiter counts from the moment at which it is set, as that of a `ReplayBuffer` does. Of the items inserted
        before, `min_size` count (or all, if there are fewer). Of the draws before, none count. Learners that wait for
        rows hear of it at once, the others within a second. Each keeps to the old one until then, and its draws under
        the old one do not count for the new one.
        """
        self._require_open()
        return self._shards.look().rule.limiter

    @limiter.setter
    def limiter(self, limiter: Limiter | None) -> None:
        self._require_open()
        default: Limiter = MinSize()
        self._shards.set_limiter(checked_kind("limiter", limiter, default, (MinSize, SamplesPerInsert)))

    @property
    def draws(self) -> int:
        """Batches that this object has drawn: the position in its own stream of random numbers."""
        return self._sampler.made

    @draws.setter
    def draws(self, step: int) -> None:
        self._sampler.made = checked_int("draws", step, 0, (1 << 48) - 1)

    @property
    def stream(self) -> int:
        """The number of this process's stream of random numbers."""
        return self._sampler.stream

    @stream.setter
    def stream(self, number: int) -> None:
        self._sampler.stream = checked_int("stream", number, 0, (1 << 48) - 1)

    def stats(self) -> ShardedStats:
        """Returns what has happened so far: over all shards, and each one's own."""
        self._require_open()
        shards = self._shards
        self._feedback.apply_arrived()
        self._feedback.hear(0)
        shards.exchange()
        asked = shards.limiter.tally.batches, shards.rounds, shards.connections.carried
        return summed(shards.figures, shards.look(), self._capacity, self._count, shards.limiter, asked)

    @property
    def stopped(self) -> bool:
        """Whether `stop()` was called, in any process, as far as this one has heard: explorers hear it at once."""
        return self._shards.stopped

    def __repr__(self) -> str:
        named = "" if self.name is None else f"{self.name!r}, "
        if self._shards.closed:
            return f"ShardedReplay({named}closed)"
        names, table = ", ".join("/".join(path) for path in self._config.fields), self._shards.table
        return (
            f"ShardedReplay({named}{self._capacity:,} rows on {len(table.entries)} of {self._count} nodes, fields: "
            f"{names}, {self._config.view}, {self._config.sampler}, {table.rule.limiter}"
            f"{', stopped' if self.stopped else ''})"
        )

    # Checkpoints

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Saves all shards while others go on writing and drawing, each by its own node.

        The directory must be one that all nodes see. Each shard has a checkpoint of its own there, like that of a
        `ReplayBuffer`. Rows are exact, each by itself. Rows written during the save may be in it or not. TD errors that
        this process has fed back are waited for. A shard that is lost meanwhile costs its rows, which is logged: the
        checkpoint has the others. A save that is killed, or fails, leaves the one before as it was.

        Args:
            directory: Where to; made if need be. A checkpoint that is there is replaced.

        Raises:
            CheckpointError: What a node has saved is not there, as seen from this one.
            OSError: A disk is full, or a node cannot write the directory, or does not see it.
            RuntimeError: No shard is left.
            ValueError: TD errors from a device are NaN or infinite, as `flush` says; nothing is saved.
        """
        self._require_open()
        root = checked_path("directory", directory).absolute()
        self.flush()
        save_shards(self._shards, self._config, self._sampler, root)

    @classmethod
    def load(
        cls,
        directory: str | os.PathLike[str],
        capacity: int | None = None,
        *,
        view: View | None = None,
        nodes: Sequence[str] | None = None,
        sampler: Sampler | None = None,
    ) -> ShardedReplay:
        """Returns a new buffer with the rows, keys, priorities and counters of a saved one.

        Training goes on as if nothing had happened. Old batches' keys are still valid, the limiter stands where it did,
        and the draws follow those of the saving process. A shard goes to the node that it was saved on if that is one
        of the nodes, else to any of them. Further nodes get empty shards.

        A cluster that lost a node can resume: where there are fewer nodes than shards, some shards join that of another
        node. Their rows come behind its own, as if they had been written last, and have new keys. What is fed back
        under their old keys is dropped and counted (`stats().lost_updates`).

        Args:
            directory: What `save` wrote; all nodes must see it.
            capacity: Rows in all, divided among the nodes as evenly as the saved rows allow. If not all fit, those of
                the fullest shards are left out, oldest first. None: as many in all as before, and on further nodes as
                many on each.
            view: Another view, as for `ReplayBuffer.load`; or the buffer's own with functions that a checkpoint does
                not hold, those of `Hindsight`. None: the buffer's own.
            nodes: Ray's ids of the nodes that get a shard. None: all that are alive.
            sampler: Another sampler; or the buffer's own with a function for its beta, which a checkpoint does not
                hold. None: the buffer's own.

        Raises:
            CheckpointError: There is no checkpoint, it is damaged, or a node does not see it.
            RuntimeError: This process is not connected to a Ray cluster. Or a shard cannot be made, or is lost:
                its node is gone, or it died.
            MemoryError: A node has too little memory left for its shard.
            ValueError: `capacity`, `view`, `nodes` or `sampler` does not fit.
        """
        root = checked_path("directory", directory).absolute()

        def loaded(manifest: Manifest) -> ShardedReplay:
            config, chosen = manifest.config.loaded_with(view, sampler, None), checked_nodes(nodes)
            capacities = capacities_for(manifest, root, chosen, capacity)
            joined = max(1, -(-len(manifest.parts) // len(chosen)))  # shards in one, at most
            ragged_bytes = None if config.ragged_bytes is None else joined * config.ragged_bytes
            config = replace(config, capacity=min(capacities), ragged_bytes=ragged_bytes)
            replay = cls.__new__(cls)
            replay._found(config, capacities, chosen, nodes is None, manifest.seed)
            try:
                replay._restore(manifest, root)
            except BaseException:
                replay.close()
                raise
            return replay

        return with_description(root, lambda: Manifest.read(root), loaded, CheckpointError)

    def restore(self, directory: str | os.PathLike[str]) -> None:
        """Does what `load` does to a buffer that is there and was never written to, before others get it.

        A restore that fails after the shards have begun to fill stops the buffer, since some may hold a part of the
        checkpoint. Draws and writers raise `Stopped`. Close it; another one can be restored. One that is refused before
        leaves it as it was.

        Args:
            directory: What `save` wrote, of a buffer with the same spec. Capacity, view and sampler may be others, as
                for `ReplayBuffer.load`. So may the nodes, or there are more or fewer, as for `load`. Of a node's rows
                those that fit are taken, the newest of each of its shards.

        Raises:
            CheckpointError: There is no checkpoint, it is damaged or of another kind, or a node does not see it. Or
                the buffer holds rows already, or writers whose keys would change.
            RuntimeError: A shard was lost meanwhile; the buffer is stopped.
        """
        self._require_open()
        root = checked_path("directory", directory).absolute()
        self._restore(Manifest.read(root), root)

    def _restore(self, manifest: Manifest, root: Path) -> None:
        restore_shards(self._shards, self._config, manifest, root)
        sampler = self._sampler  # which goes on in the saving process's stream of random numbers
        sampler.seed, sampler.stream, sampler.made = manifest.seed, manifest.stream, manifest.step

    # Life cycle

    def stop(self) -> None:
        """Stops the buffer: `stopped` becomes True in every process, and waiting calls raise `Stopped`."""
        self._require_open()
        self._shards.coordinator.ask("stop")
        self._shards.look()

    def close(self) -> None:
        """Detaches this object; in the process that made the shards, ends them. Idempotent.

        Elsewhere TD errors that were fed back are applied first, and the others hear what was drawn here.

        Raises:
            ValueError: TD errors from a device are NaN or infinite, as `flush` says; the buffer is closed.
        """
        if self._shards.closed:
            return
        self._shards.close()
        connected = self._shards.coordinator.connected  # and not a forked child, which has made nothing
        try:
            if self._owned is None and connected:
                with suppress(Stopped):
                    self._shards.report(last=True)
                    self._feedback.flush()
        finally:
            self._shards.release()
            owned, self._owned = self._owned, None
            if owned is not None and connected:
                end(owned)


def attached_shards(nonce: int, *args: Any) -> ShardedReplay:
    """Returns the buffer that another process has made.

    Pickles name it: see `torchreplay.buffer.replay_buffer.attached`.
    """
    replay = ShardedReplay.__new__(ShardedReplay)
    replay._owned = None
    replay._init_state(nonce, *args)
    return replay


def shards_of(replay: ShardedReplay) -> ShardClient:
    """Returns this process's view of the shards of `replay`. For the other rooms of this package."""
    return replay._shards

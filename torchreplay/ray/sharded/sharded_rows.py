"""`ShardedRows`: the rows and items that a `ShardedReplay` holds, looked at, changed and taken out."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.buffer.rewriting import episode_key, names_field, rewriting
from torchreplay.ray.sharded.shard_client import ShardClient
from torchreplay.ray.sharded.shard_feedback import ShardFeedback
from torchreplay.ray.sharded.shard_keys import pack, unpack
from torchreplay.ray.sharded.sharded_sampler import ShardedSampler
from torchreplay.ray.sharded.stats import merged_histograms
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import Config, Configured
from torchreplay.schema.spec import Field, nest
from torchreplay.validation import checked_int


class ShardedRows(Configured):
    """The part of a `ShardedReplay` that is about what it holds, beside writing and drawing."""

    _nonce: int
    _shards: ShardClient
    _feedback: ShardFeedback
    _sampler: ShardedSampler

    # Changing what is there

    def rewrite(self, keys: ReplayBatch | Any, /, **fields: Any) -> int:
        """Sets fields of rows that are there, each in its own shard, as `ReplayBuffer.rewrite` does.

        All values are checked before any is sent. Rows that are lost with their shard do not count. A row that begins
        an episode is found by its own shard: where one refuses a call for it, others may have done their part.
        """
        self._shards.require_open()
        wanted, values, _ = rewriting(self._config, self._nonce, keys, fields)
        self._sampler.refuse_items(keys, fields)
        issued = self._issued(wanted)
        checked = _values_of_rows(self._config, len(issued), values)

        def call(ask: Any, own: NDArray[np.int64], mine: NDArray[np.bool_]) -> Any:
            return ask("rewrite", own, named=nest({path: values[mine] for path, values in checked.items()}))

        return sum(changed for _, changed in self._shards.ask_owners(issued, call))

    def rows_of(self, batch_or_keys: ReplayBatch | Any) -> torch.Tensor:
        """Returns the keys of the rows that items consist of, as `ReplayBuffer.rows_of` does."""
        self._shards.require_open()
        plan = self._config.view.plan(self._config.fields)
        keys = self._issued(batch_or_keys)
        rows = np.full((len(keys), 1 if plan is None else plan.steps + 1), -1, np.int64)
        for mine, own in self._shards.ask_owners(keys, lambda ask, own, _: ask("rows_of", own)):
            rows[mine] = np.where(own < 0, own, own + (keys[mine, None] - unpack(keys[mine, None])[1]))
        return torch.from_numpy(rows)

    def discard(self, batch_or_keys: ReplayBatch | Any) -> int:
        """Takes items out of all draws to come, as `ReplayBuffer.discard` does.

        Draws that are under way may still bring them.
        """
        self._shards.require_open()
        keys = self._issued(batch_or_keys)
        return sum(n for _, n in self._shards.ask_owners(keys, lambda ask, own, _: ask("discard", own)))

    def discard_episode(self, key: int) -> int:
        """Takes the items of a whole episode out of all draws to come, as `ReplayBuffer.discard_episode` does."""
        self._shards.require_open()
        keys = self._issued([episode_key(self._config, key)])
        return sum(n for _, n in self._shards.ask_owners(keys, lambda ask, own, _: ask("discard_episode", int(own[0]))))

    def _issued(self, batch_or_keys: ReplayBatch | Any) -> NDArray[np.int64]:
        keys = self._feedback.checked_keys(batch_or_keys)
        self._feedback.require_issued(keys)
        return keys

    def clear(self) -> None:
        """Takes the rows of all shards away, for every process, as `ReplayBuffer.clear` does.

        The limiter counts as that of a new buffer does. Learners hear of that as they hear of another limiter. Draws
        that they have under way may still come, and may bring the largest priority of before back.

        Raises:
            RuntimeError: A shard is being restored.
            ValueError: TD errors from a device are NaN or infinite, as `flush` says; nothing is cleared.
        """
        self._shards.require_open()
        self._feedback.flush()
        self._shards.clear()

    # Looking into it

    @property
    def num_items(self) -> int:
        """Items that can be drawn now: under `Rows()` all rows, under other views those that are complete."""
        self._shards.require_open()
        self._shards.exchange()
        return sum(figures.drawn.drawable for figures in self._shards.figures.values())

    def keys(self, *, rows: bool = False) -> torch.Tensor:
        """Returns the keys of the items that can be drawn now, shard by shard, each shard's oldest first. O(capacity).

        Args:
            rows: True: the keys of all rows held, those too that are the anchor of no item.

        Returns:
            int64 `[n]`. Beside explorers some of them may be gone when they are used.
        """
        self._shards.require_open()
        self._feedback.apply_arrived()
        parts = [pack(number) + keys for number, keys in self._shards.ask_all("keys", named={"rows": rows})]
        return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]))

    def priorities(self, keys: Any) -> torch.Tensor:
        """Returns the raw priorities |td| of items, float32 `[n]`, as `ReplayBuffer.priorities` does.

        Those of items that are lost with their shard are NaN, too.

        Args:
            keys: Integer keys `[n]`, or a batch of this buffer.

        Raises:
            ValueError: As there.
        """
        self._shards.require_open()
        wanted = self._issued(keys)
        self._feedback.flush()
        raw = np.full(len(wanted), np.nan, np.float32)
        for mine, priorities in self._shards.ask_owners(wanted, lambda ask, own, _: ask("priorities", own)):
            raw[mine] = priorities
        return torch.from_numpy(raw)

    def histograms(self, bins: int = 64) -> dict[str, torch.Tensor]:
        """Returns histograms of raw priorities and of rows' ages, as `ReplayBuffer.histograms` does. O(capacity).

        Each shard counts into bins of its own, whose counts are put where the middle of the bin lies. While there is
        no shard they are those of an empty buffer.
        """
        self._shards.require_open()
        bins = checked_int("bins", bins, 1, 1 << 20)
        self._feedback.apply_arrived()
        self._feedback.hear(0)
        return merged_histograms([told for _, told in self._shards.ask_all("histograms", bins)], bins)


def _values_of_rows(config: Config, n: int, fields: dict[str, Any]) -> dict[tuple[str, ...], torch.Tensor]:
    """Returns values for some fields of `n` rows, `[n, *shape]` by path, in the dtypes of the fields, once they fit."""
    fixed = {path: field for path, field in config.fields.items() if isinstance(field, Field)}
    chosen = {path: field for path, field in fixed.items() if names_field(fields, path)}
    # A buffer refuses what its rows cannot hold, and says why.
    with ReplayBuffer(nest(chosen or fixed), max(1, n)) as rows:
        count = len(rows.extend(**fields))
        if count != n:
            raise ValueError(f"got {count} values, expected one for each of the {n} keys; nothing was changed")
        held: Any = rows.storage
        return {path: reduce(lambda value, name: value[name], path, held)[:n].clone() for path in chosen}

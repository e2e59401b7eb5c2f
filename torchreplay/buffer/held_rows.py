"""`HeldRows`: the rows and items that a `ReplayBuffer` holds, looked at, changed and taken out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchreplay.buffer.episodes import episodes
from torchreplay.buffer.inspection import StorageView, histograms
from torchreplay.buffer.rewriting import anchors, episode_key, rewriting
from torchreplay.schema.batch import ReplayBatch, keys_of
from torchreplay.schema.config import Configured
from torchreplay.schema.samplers import priorities_of
from torchreplay.schema.spec import Field, nest
from torchreplay.segment.waits import NEVER
from torchreplay.validation import checked_int

if TYPE_CHECKING:
    from torchreplay import _C
    from torchreplay.buffer.local_sampler import LocalSampler


class HeldRows(Configured):
    """The part of a `ReplayBuffer` that is about what it holds, beside writing and drawing."""

    _sampler: LocalSampler
    _segment: _C.Segment
    _nonce: int

    # Changing what is there

    def rewrite(self, keys: ReplayBatch | Any, /, **fields: Any) -> int:
        """Sets fields of rows that are there, from any process, while others write and draw.

        A batch has a row's old values or its new ones, over all fields of one call. If the calling process dies, each
        row has one or the other. Batches that are drawn already, also by a `ReplayDataset` ahead, keep what they have.
        n-step returns are computed when a batch is drawn, so they use the new rewards. Priorities stay: feed TD errors
        back where the new values change them.

        Keys name rows. Under a view that links rows an item has several: `rows_of` says which. There the values of a
        step lie in the row that the step has written, beside the observation that it led to. `batch["key"]` names the
        row before, whose observation the step was taken at: so it is refused for them.

        Args:
            keys: Integer keys of rows `[n]`. Under `Rows()` also a batch of this buffer. Of equal keys the last wins.
            **fields: Values `[n, *shape]` for one or several fields, nested ones in dicts that may name a part.

        Returns:
            How many rows got the values: rows that were overwritten have not.

        Raises:
            ValueError: A field is unknown, its values do not fit, or it says where episodes end. A key was never
                issued, or the batch is of another buffer, or of a view that links rows. A row begins an episode, and
                all fields are of steps: it has none. Or values of steps are given with `batch["key"]`, of the batch
                that this process was handed last. Nothing is changed.
            RuntimeError: The buffer is closed, or is being restored.

        Example:
            >>> buffer.rewrite(keys[:2], reward=[1.0, 2.0])
            2
            >>> buffer.gather(keys)["reward"].tolist()
            [1.0, 2.0, 0.0, 0.0, 0.0]
        """
        checked = rewriting(self._config, self._nonce, keys, fields)
        self._sampler.refuse_items(keys, fields)
        return self._segment.rewrite(*checked)

    def rows_of(self, batch_or_keys: ReplayBatch | Any) -> torch.Tensor:
        """Returns the keys of the rows that items consist of, from the anchor on.

        `buffer.rewrite(buffer.rows_of(batch)[:, 1], reward=...)` sets the reward of the step that each item of
        `Transitions(n_step=1)` begins with. Frames before the anchor, which a stack shows, are left out.

        Args:
            batch_or_keys: A batch of this buffer, or integer keys `[n]` of anchors.

        Returns:
            int64 `[n, steps + 1]`, -1 where the item has no such row (any more); `[n, 1]` under `Rows()`.

        Raises:
            ValueError: The keys are no integers `[n]`, or one was never issued; or the batch is of another buffer.

        Example:
            >>> buffer.rows_of(keys[:2])  # under `Rows()`, an item is one row
            tensor([[0],
                    [1]])
        """
        return self._segment.rows_of(anchors(self._nonce, batch_or_keys))

    def discard(self, batch_or_keys: ReplayBatch | Any) -> int:
        """Takes items out of all draws to come, for every process and every checkpoint.

        Their rows stay as parts of other items, and go when the ring turns. TD errors for them are dropped and counted
        (`stats().unready_updates`). Batches that are drawn already, also by a `ReplayDataset` ahead, keep them.

        Args:
            batch_or_keys: A batch of this buffer, or integer keys `[n]` of anchors.

        Returns:
            How many: those that were discarded, or whose rows were overwritten, before do not count.

        Raises:
            ValueError: A key was never issued, or the batch is of another buffer. Nothing is changed.
            RuntimeError: The buffer is closed, or is being restored.

        Example:
            >>> buffer.discard(keys[1:3])
            2
            >>> buffer.keys().tolist()
            [0, 3, 4]
        """
        return self._segment.discard(anchors(self._nonce, batch_or_keys))

    def discard_episode(self, key: int) -> int:
        """Does what `discard` does to all rows there are of one episode.

        Steps that come later are not discarded: end the episode first, such as by `writer.end_episode()`.

        Args:
            key: Of one of its rows.

        Returns:
            Of how many rows; 0 where the row is gone.

        Raises:
            ValueError: The key was never issued, or the view links no rows.
            RuntimeError: The buffer is closed, or is being restored.

        Example:
            >>> flag = tr.Field((), torch.bool)
            >>> spec = {"obs": tr.Field(3), "terminated": flag, "truncated": flag}
            >>> buffer = tr.ReplayBuffer(spec, capacity=100, view=tr.Sequences(2))
            >>> keys = buffer.extend(obs=torch.zeros(3, 3), terminated=[False, True], truncated=[False, False])
            >>> buffer.discard_episode(keys[0])
            3
            >>> buffer.keys().tolist()
            []
        """
        return self._segment.discard_episode(episode_key(self._config, key))

    def clear(self) -> None:
        """Takes all rows away, for every process. O(capacity).

        Keys go on: none is given twice, and TD errors of rows that are gone count as stale. Explorers may go on writing
        meanwhile: rows that are being written at this moment may stay. Episodes under way go on, without the steps
        before. Batches that a `ReplayDataset` has drawn ahead still come. The largest priority is 1 again, and the
        limiter counts as that of a new buffer does. `stats` goes on counting.

        Raises:
            RuntimeError: The buffer is closed, or is being restored.
            ValueError: TD errors from a device are NaN or infinite, as `flush` says; nothing is cleared.

        Example:
            >>> buffer.clear()
            >>> len(buffer), buffer.next_key
            (0, 5)
        """
        self._sampler.flush()
        self._segment.clear()

    # Looking into it

    @property
    def next_key(self) -> int:
        """The key that the next row gets: as many rows as that were begun so far. One atomic read."""
        return self._segment.head

    @property
    def num_items(self) -> int:
        """Items that can be drawn now: under `Rows()` all rows, under other views those that are complete."""
        return int(self._segment.stats()["drawable"])

    def keys(self, *, rows: bool = False) -> torch.Tensor:
        """Returns the keys of the items that can be drawn now, oldest first. O(capacity).

        `buffer.gather(buffer.keys())` is everything that can be drawn.

        Args:
            rows: True: the keys of all rows held, those too that are the anchor of no item.

        Returns:
            int64 `[n]`. Beside explorers some of them may be gone when they are used.

        Example:
            >>> buffer.keys()
            tensor([0, 1, 2, 3, 4])
            >>> everything = buffer.gather(buffer.keys())
        """
        self._sampler.pending.apply_arrived()
        self._segment.refresh(NEVER, False)  # brings what was written into the tree
        keys1 = self._segment.column(-2)
        there = keys1 > 0 if rows else (self._segment.column(-1) > 0) & (keys1 > 0)
        return torch.sort(keys1[there] - 1).values

    def episodes(self, *, unfinished: bool = False) -> Iterator[dict[str, Any]]:
        """Yields the episodes held, in the order of their first rows, as `extend(**episode)` takes them. O(capacity).

        Those of `discard_episode` are left out. Where `discard` took single items out the rows are there.

        Args:
            unfinished: True: also those that have no end, and those whose first rows were overwritten, as far as they
                are there.

        Yields:
            Observation fields `[T + 1, *shape]`, the others `[T, *shape]`, nested as the spec; copies. Of ragged fields
            lists of as many values, `[length, *shape]`. Episodes whose rows are overwritten meanwhile are left out.

        Raises:
            ValueError: The view links no rows.

        Example:
            >>> flag = tr.Field((), torch.bool)
            >>> spec = {"obs": tr.Field(3), "terminated": flag, "truncated": flag}
            >>> buffer = tr.ReplayBuffer(spec, capacity=100, view=tr.Sequences(2))
            >>> keys = buffer.extend(obs=torch.zeros(3, 3), terminated=[False, True], truncated=[False, False])
            >>> [len(episode["obs"]) for episode in buffer.episodes()]
            [3]
        """
        return episodes(self._sampler, unfinished)

    def priorities(self, keys: Any) -> torch.Tensor:
        """Returns the raw priorities |td| of items.

        Args:
            keys: Integer keys `[n]`, or a batch of this buffer.

        Returns:
            float32 `[n]`, as exact as the leaves (float32) hold them; NaN for items that cannot be drawn. Under
            `Uniform()`, which ignores priorities, they are 1.

        Raises:
            ValueError: The keys are no integers `[n]`, or one was never issued; or the batch is of another buffer.

        Example:
            >>> buffer.update_priorities(keys[:1], [3.0])
            >>> buffer.priorities(keys).round(decimals=2)
            tensor([3., 1., 1., 1., 1.])
        """
        wanted = keys_of(keys, self._nonce) if isinstance(keys, dict) else keys
        checked = self._segment.checked_keys(wanted)
        self._sampler.flush()
        self._segment.refresh(NEVER, False)
        slots = checked % self._config.capacity
        leaves, keys1 = self._segment.column(-1)[slots], self._segment.column(-2)[slots]
        raw = priorities_of(leaves.double(), self._config.sampler).float()
        return torch.where((keys1 == checked + 1) & (leaves > 0), raw, math.nan)

    def histograms(self, bins: int = 64) -> dict[str, torch.Tensor]:
        """Returns histograms of raw priorities and of rows' ages. O(capacity).

        Args:
            bins: Number of bins.

        Returns:
            `priority_edges` (float64 `[bins + 1]`, logarithmic) and `priority` (int64 `[bins]`, counts of drawable
            items by raw priority |td|; what is below the sampler's `eps` counts as `eps`); `age_edges` (float64
            `[bins + 1]`, in rows written since) and `age` (int64 `[bins]`, counts of rows).

        Example:
            >>> found = buffer.histograms(bins=8)
            >>> found["priority"].sum(), found["age"].sum()
            (tensor(5), tensor(5))
        """
        self._sampler.pending.apply_arrived()
        bins = checked_int("bins", bins, 1, 1 << 20)
        head = self._segment.stats()["rows_written"]
        return histograms(self._segment.column(-1), self._segment.column(-2), head, bins, self._config.sampler)

    @property
    def storage(self) -> dict[str, Any]:
        """Tensors `[capacity, *shape]` over the shared memory itself, nested as the spec, for inspection.

        Ragged fields have none: their values lie elsewhere. The tensors are live: a row may change while it is looked
        at, and writing to them bypasses every promise. They cannot be pickled.

        Example:
            >>> buffer.storage["action"][:5]
            StorageView([0, 1, 2, 3, 4])
        """
        fixed = {path: i for i, (path, field) in enumerate(self._config.fields.items()) if isinstance(field, Field)}
        return nest({path: StorageView.over(self._segment.column(i)) for path, i in fixed.items()})

"""`MixedDataset`: batches from several buffers at once, whose TD errors find their way back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, TypeVar

import numpy as np
import torch

from torchreplay.buffer.base import MAX_BATCH, Pin, Replay, source_of
from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.errors import ReplayTimeout, WouldBlockForever
from torchreplay.loading.dataset import ReplayDataset
from torchreplay.loading.destination import refuse_worker, require_device, require_pin
from torchreplay.loading.limiter_deadlock import LimiterDeadlockGuard
from torchreplay.loading.mixture import Mixture, as_indices, checked_errors, require_issued
from torchreplay.loading.stepped_dataset import Loop, SteppedDataset
from torchreplay.schema.batch import ReplayBatch, keys_of
from torchreplay.schema.samplers import Fifo
from torchreplay.segment.waits import logger
from torchreplay.validation import checked_int

AnyReplay = TypeVar("AnyReplay", bound=Replay)  # the keys of a Mapping are of one type alone


class MixedDataset(SteppedDataset[Any]):
    """Batches drawn from several buffers, infinite or `steps` long, in one of two forms.

    **Shares**: one batch with items of every buffer, such as demonstrations beside what explorers write. The first
    example below has them.

    A batch is a `ReplayBatch`. The items of the first buffer, 24 there, come first, then those of the next. The counts
    are the same in every batch: whole items that sum to `batch_size`, as near to the shares as they can be (largest
    remainder). `batch["buffer"]`, int64 `[B]` on the batch's device, says which buffer an item came from: its position
    in the dict.

    - `batch["probability"]` is that of the draw: the buffer's part of the batch times the item's probability there.
    - `batch["weight"]` corrects for priorities, not for shares. Shares are wanted (as in R2D3, Paine et al. 2019,
      https://arxiv.org/abs/1909.01387): each buffer stands for its items drawn uniformly. An item's weight is its own
      buffer's (N P)^-beta, divided by the largest one possible in any of the buffers (with `weights="batch"`, in the
      batch; with `"none"`, by nothing). So the weights of different buffers compare; divided by each buffer's own
      largest, as in its own batches, they would let uniform demonstrations outweigh prioritized experience.

    **Names**: one batch of each buffer, for learners with several agents or policies, whose specs and views may
    differ. An element is a dict of what a `ReplayDataset` of each buffer gives. Steps that belong together, of all
    agents at once, are rows of one buffer instead, with a nested spec.

    A queue (`Fifo`) among the buffers ends the iteration, as it ends that of a `ReplayDataset`. Parts that make no
    whole element are in their queues again. With shares that goes for a shorter last batch, too: its size is logged.

    The rest is as in `ReplayDataset`. A new iteration continues the streams of draws. `DataLoader` (with
    `batch_size=None`) works with workers under every start method. No global random state is touched. After `stop()` of
    any of the buffers an iteration ends without an error. A wait for one buffer is a wait for the batch. An explorer
    that writes to several of them could wait for ever at one with a `SamplesPerInsert` while the learner waits for its
    rows in another. So its writers go on meanwhile, beyond the ratio. That takes writers of one thread. If explorers
    write by several threads or from other nodes, give only one buffer a `SamplesPerInsert`. It should be the last one
    to have its `min_size`.

    Args:
        buffers: Buffers to their shares, positive numbers whose ratios count, or names to buffers.
        batch_size: Items in a batch: in all with shares, of each buffer with names.
        steps: Elements in one iteration; None for an endless one.
        prefetch: Batches drawn ahead of each buffer, as in `ReplayDataset`.
        device: Where tensors go (all but `"key"`); None leaves them on the CPU.
        timeout: Seconds that the draw from one buffer may wait for data before it raises `ReplayTimeout`; None waits
            for as long as a writer is alive.
        pin: How batches reach a CUDA device, as in `ReplayDataset`, with names. With shares the parts always meet in
            ordinary memory.

    Attributes:
        buffers: The buffers, in their order.
        counts: Items that each gives to a step, in the same order.

    Raises:
        ValueError: An argument is of the wrong kind or out of range, or a share is too small for one item. With shares:
            batches of the buffers differ in a name, a shape, a dtype or in how weights are normalised.
        TypeError: If `timeout` is neither a number nor a text, which is a ValueError.

    Example:
        >>> def filled():
        ...     buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100, sampler=tr.Prioritized())
        ...     rows = buffer.extend(obs=torch.zeros(50, 3))
        ...     return buffer
        >>> online, demonstrations = filled(), filled()
        >>> dataset = tr.MixedDataset({online: 0.75, demonstrations: 0.25}, batch_size=32, steps=10)
        >>> dataset.counts
        (24, 8)
        >>> for batches in tr.MixedDataset({"red": filled(), "blue": filled()}, batch_size=32, steps=10):
        ...     red, blue = batches["red"], batches["blue"]  # of 32 items each
    """

    def __init__(
        self,
        buffers: Mapping[AnyReplay, float] | Mapping[str, Replay],
        batch_size: int = 256,
        steps: int | None = None,
        prefetch: int = 2,
        device: torch.device | str | int | None = None,
        timeout: float | None = None,
        pin: Pin | None = None,
    ) -> None:
        self.batch_size = checked_int("batch_size", batch_size, 1, MAX_BATCH)
        self.device = None if device is None else require_device(device)
        require_pin(pin, self.device)
        self._names, self.buffers, shares = _sorted_out(buffers)
        _require_different(self.buffers)
        self._mixture = None if shares is None else Mixture(shares, self.batch_size, self.device)
        self.counts = (self.batch_size,) * len(self.buffers) if self._mixture is None else self._mixture.counts
        # With shares the parts meet on the CPU and go to the device together.
        where, how = (self.device, pin) if self._mixture is None else (None, None)
        self._parts = [
            ReplayDataset(buffer, count, steps, prefetch, where, timeout, how)
            for buffer, count in zip(self.buffers, self.counts, strict=True)
        ]
        self.steps, self.prefetch, self.timeout = self._parts[0].steps, self._parts[0].prefetch, self._parts[0].timeout

    def __iter__(self) -> Iterator[Any]:
        """Draws element after element.

        Yields:
            With shares a `ReplayBatch` of `batch_size` items, with names a dict of them; on `device`.

        Raises:
            ReplayTimeout: If a draw waits longer than `timeout`; a note says for which buffer, here and below.
            WouldBlockForever: If a draw waits for data that nobody can write any more.
            ReplayLost: If a `ShardedReplay` is gone, and was not stopped.
            RuntimeError: In a worker of a `DataLoader`, with a CUDA device, of a queue, or with `max_draws`.
        """
        self._begin()
        return self._elements()

    def _elements(self) -> Iterator[Any]:
        if self.device is not None and self.device.type == "cuda":
            refuse_worker(self)
        with contextlib.ExitStack() as open_streams:
            streams = [iter(part) for part in self._parts]
            named = list(zip(self._names, self.buffers, strict=True))
            waits = [
                LimiterDeadlockGuard(name, buffer, [other for other in named if other[1] is not buffer])
                for name, buffer in named
            ]
            for stream in streams:
                open_streams.callback(stream.close)  # type: ignore[attr-defined]  # it is a generator
            while (parts := self._next_of(streams, waits)) is not None:
                if self._mixture is None:
                    yield dict(zip(self._names, parts, strict=True))
                else:
                    yield self._mixture.batch_of(parts, [part._drawn_from for part in self._parts])

    def _taken_by(self, loop: Loop) -> None:
        super()._taken_by(loop)
        for part in self._parts:
            part._taken_by(loop)

    @property
    def ready(self) -> int:
        """How many of the next elements this process has drawn all parts of."""
        return min(part.ready for part in self._parts)

    def _next_of(
        self, streams: list[Iterator[ReplayBatch]], waits: list[LimiterDeadlockGuard]
    ) -> list[ReplayBatch] | None:
        parts: list[ReplayBatch] = []
        whole = False
        try:
            for name, stream, wait in zip(self._names, streams, waits, strict=True):
                try:
                    with wait:
                        part = next(stream, None)
                except (ReplayTimeout, WouldBlockForever) as error:
                    error.add_note(f"It was the wait for buffer {name!r} of {self!r}.")
                    raise
                if part is None:
                    return None
                parts.append(part)
                if self._is_short(part, name):
                    return None
            whole = True
            return parts
        finally:
            if not whole:
                self._give_back(parts)

    def _is_short(self, part: ReplayBatch, name: Any) -> bool:
        """Returns whether it is the shorter batch at the end of a queue, of which no mixture can be made."""
        lacks = 0 if self._mixture is None else self._mixture.counts[name] - part.batch_size
        if lacks > 0:
            logger.warning(
                "%s ends: %d items are left in the queue that is buffer %d, and a batch takes %d; get them by "
                "queue.sample(%d, at_least=1)",
                *(repr(self), part.batch_size, name, part.batch_size + lacks, part.batch_size),
            )
        return lacks > 0

    def _give_back(self, parts: list[ReplayBatch]) -> None:
        """Has parts that nobody gets be drawn again, where their buffers count draws, or hand out each item once."""
        for buffer, part in zip(self.buffers, parts, strict=False):
            if isinstance(buffer, ReplayBuffer) and isinstance(buffer.sampler, Fifo):
                buffer.release(part)
            else:
                source_of(buffer).give_back({"key": part["key"].cpu()})

    def update_priorities(self, batch: Mapping[str, Any], td: Any) -> None:
        """Feeds TD errors back to exactly the items they were computed from, each to its own buffer.

        As in `ReplayBuffer.update_priorities`, TD errors of rows overwritten since are dropped and counted. Those on a
        device are waited for.

        Args:
            batch: What the dataset gave, also after a way through `DataLoader`, `.to(device)`, `LaBER` or pickle.
            td: With shares TD errors `[B]` of any real dtype, on any device; with names a dict of them, one for each
                buffer that gets feedback. Their absolute values are taken.

        Raises:
            ValueError: A shape or a name does not fit, or an error is NaN or infinite. Or a key was never issued, or
                the batch is of other buffers. Nothing is applied.
            RuntimeError: One of the buffers is closed; nothing is applied.

        Example:
            >>> for batch in dataset:
            ...     dataset.update_priorities(batch, torch.ones(32))
            >>> online.stats().updated, demonstrations.stats().updated
            (240, 80)
        """
        if self._mixture is not None:
            self._mixture.feed_back(batch, td)
        else:
            self._feed_back_by_name(batch, td)

    def flush(self) -> None:
        """Has all TD errors applied that this process has fed back, in every buffer.

        Raises:
            ValueError: Some were NaN or infinite: they are dropped, and the others applied.

        Example:
            >>> batch = next(iter(dataset))
            >>> dataset.update_priorities(batch, torch.ones(32))
            >>> dataset.flush()
            >>> online.stats().updated
            24
        """
        with contextlib.ExitStack() as flushed:
            for buffer in self.buffers:
                flushed.callback(buffer.flush)

    def _feed_back_by_name(self, batches: Any, tds: Any) -> None:
        known = dict(zip(self._names, self.buffers, strict=True))
        for what, given in (("batch", batches), ("td", tds)):
            if isinstance(given, ReplayBatch) or not isinstance(given, Mapping) or not given.keys() <= known.keys():
                found = list(given) if isinstance(given, Mapping) else type(given).__name__
                raise ValueError(f"{what} has {found}: expected a dict with names out of {list(known)}")
        checked = []
        for name, td in tds.items():
            batch = batches.get(name)
            if not isinstance(batch, ReplayBatch):
                raise ValueError(f"there are TD errors for {name!r}, but its batch is {batch!r:.200}")
            if getattr(batch, "source", None) not in (None, source_of(known[name]).nonce):
                raise ValueError(f"the batch named {name!r} was drawn from another buffer than {name!r}")
            keys = as_indices(f"the 'key' of the batch named {name!r}", keys_of(batch, source_of(known[name]).nonce))
            errors = checked_errors(f"the TD errors for {name!r}", td, len(keys))
            require_issued(known[name], repr(name), keys, np.arange(len(keys)))
            checked.append((known[name], keys, errors))
        for buffer, keys, errors in checked:
            buffer.update_priorities(keys, errors)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the stream. As that of a `ReplayDataset`, the state holds no experience.

        Returns:
            `form`, "shares" or "names"; `buffers`, their names, or with shares a pair of numbers that identifies each;
            `parts`, the state of a `ReplayDataset` for each, in the same order.

        Example:
            >>> batches = iter(dataset)
            >>> batch = next(batches)
            >>> state = dataset.state_dict()  # beside the buffers' own `save`
        """
        states = [part.state_dict() for part in self._parts]
        # The last one is drawn last: where a draw failed, the parts before it are a batch ahead.
        parts = [state | {"position": states[-1]["position"]} for state in states]
        if self._mixture is None:
            return {"form": "names", "buffers": list(self._names), "parts": parts}
        return {"form": "shares", "buffers": [_marks(buffer) for buffer in self.buffers], "parts": parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken: the next iteration hands out what was left of that one.

        The shares and `batch_size` may be others: what was drawn ahead in another number of items is left out.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            ValueError: If it is not such a state, or that of a dataset in the other form. Or its buffers have other
                names, are more or fewer, or stand in another order.

        Example:
            >>> first = next(iter(dataset))
            >>> resumed = tr.MixedDataset({online: 0.75, demonstrations: 0.25}, batch_size=32, steps=10)
            >>> resumed.load_state_dict(dataset.state_dict())
            >>> len(list(resumed))
            9
        """
        for part, state in zip(self._parts, self._states_in(state_dict), strict=True):
            part.load_state_dict(state)

    def _states_in(self, state_dict: Any) -> list[Any]:
        """Returns the state of each part; raises what `load_state_dict` says."""
        known = isinstance(state_dict, Mapping) and set(state_dict) == {"form", "buffers", "parts"}
        form, buffers, states = (state_dict[name] for name in ("form", "buffers", "parts")) if known else (None,) * 3
        if not isinstance(buffers, list) or not isinstance(states, list) or len(buffers) != len(states):
            raise ValueError(
                f"state_dict is {state_dict!r:.200}; a MixedDataset's state has 'form', 'buffers' and 'parts', a state "
                f"for each of the buffers"
            )
        own = "names" if self._mixture is None else "shares"
        if form != own:
            raise ValueError(f"the state is of a MixedDataset made with {form!r:.20}, and this one is made with {own}")
        if self._mixture is None:
            if sorted(map(repr, buffers)) != sorted(map(repr, self._names)):
                raise ValueError(f"the state is of the buffers {buffers!r:.200}, and this dataset of {self._names}")
            return [states[buffers.index(name)] for name in self._names]
        if len(buffers) != len(self.buffers):
            raise ValueError(f"the state is of {len(buffers)} buffers, and this dataset of {len(self.buffers)}")
        _require_same_order(buffers, [_marks(buffer) for buffer in self.buffers])
        return states

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_parts": [copy(part) for part in self._parts]}  # each has a place of its own

    def __repr__(self) -> str:
        length = "endless" if self.steps is None else f"steps={self.steps}"
        counts = ", ".join(f"{name!r}: {count}" for name, count in zip(self._names, self.counts, strict=True))
        return f"MixedDataset({{{counts}}}, {length}; use DataLoader(dataset, batch_size=None))"


def _sorted_out(given: Any) -> tuple[list[Any], tuple[Replay, ...], dict[Replay, Any] | None]:
    """Returns the buffers' names, which with shares are their positions, the buffers, and the shares, if given.

    Raises:
        ValueError: It is neither of the two forms.
    """
    if isinstance(given, Mapping) and given:
        if all(isinstance(buffer, Replay) for buffer in given):
            return list(range(len(given))), tuple(given), dict(given)
        if all(isinstance(name, str) and isinstance(buffer, Replay) for name, buffer in given.items()):
            return list(given), tuple(given.values()), None
        given = {type(key).__name__: type(value).__name__ for key, value in given.items()}
    raise ValueError(f"buffers is {given!r:.200}: expected a dict, {{buffer: share, ...}} or {{name: buffer, ...}}")


def _marks(buffer: Replay) -> list[int]:
    """Returns what a state names a buffer by: its identity, and its seed, which a restored one has too."""
    source = source_of(buffer)
    return [source.nonce, source.seed]


def _require_same_order(then: list[Any], now: list[list[int]]) -> None:
    """Raises ValueError where buffers change places: a restored one has another identity, but the seed it had."""
    if not all(isinstance(marks, list | tuple) and [*map(type, marks)] == [int, int] for marks in then):
        raise ValueError(f"'buffers' of the state is {then!r:.200}: expected a list of two numbers for each buffer")
    for before, after in zip(zip(*then, strict=True), zip(*now, strict=True), strict=True):
        if before == after:
            return
        if set(before) == set(after) and len(set(after)) == len(after):
            order = ", ".join(str(after.index(mark)) for mark in before)
            raise ValueError(
                f"the state is of these buffers in another order: what it has first to last are buffers {order} here. "
                f"Give the dataset its buffers in the order they had"
            )


def _require_different(buffers: tuple[Replay, ...]) -> None:
    if len({source_of(buffer).nonce for buffer in buffers}) < len(buffers):
        raise ValueError("one buffer is there twice: give it once, with a larger share or batch_size")

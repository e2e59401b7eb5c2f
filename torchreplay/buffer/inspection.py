"""Looking into a buffer's memory."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from torchreplay import _C
from torchreplay.buffer.pending_updates import PendingUpdates
from torchreplay.buffer.stats import Stats
from torchreplay.schema.config import Configured
from torchreplay.schema.limiters import Limiter, MinSize, SamplesPerInsert, from_native
from torchreplay.schema.samplers import LARGEST_PRIORITY, Sampler, Uniform, priorities_of
from torchreplay.schema.spec import nest
from torchreplay.segment.waits import NEVER
from torchreplay.validation import checked_int, checked_kind


class StorageView(torch.Tensor):
    """A tensor over the shared memory of a buffer, which refuses to be pickled; so do slices and views of it.

    torch would copy the memory to a shared file of its own and silently point this tensor there. What is computed from
    it is a plain tensor.
    """

    @classmethod
    def over(cls, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`'s memory as a view of this type."""
        return tensor.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if torch.compiler.is_compiling():
                return result
            memory = {place(given) for given in tree_leaves((args, kwargs)) if isinstance(given, cls)} - {None}

            def guarded(part: Any) -> Any:
                return cls.over(part) if type(part) is torch.Tensor and place(part) in memory else part

            return type(result)(map(guarded, result)) if type(result) in (tuple, list) else guarded(result)

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.clone()

    def share_memory_(self) -> StorageView:
        """Returns the tensor, whose memory is shared as it is."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a view of a buffer's shared memory cannot be pickled: pickle the buffer, or view.clone()")


def place(tensor: torch.Tensor) -> int | None:
    """Returns where the memory begins that a tensor is a view of; None if it has none, as sparse ones and wrappers."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def smallest_priority(leaf: float, sampler: Sampler) -> float:
    """Returns the raw priority of the smallest leaf, as `priorities_of` does; 0 when there is none."""
    if not leaf:
        return 0.0
    if isinstance(sampler, Uniform) or not sampler.alpha:
        return 1.0
    largest = math.log(LARGEST_PRIORITY)
    return max(0.0, math.exp(min(math.log(leaf) / sampler.alpha, largest)) - sampler.eps)


def histograms(
    leaves: torch.Tensor, keys1: torch.Tensor, head: int, bins: int, sampler: Sampler
) -> dict[str, torch.Tensor]:
    """Returns the histograms that `ReplayBuffer.histograms` documents.

    Args:
        leaves: float32 `[capacity]`, 0 for slots that cannot be drawn.
        keys1: int64 `[capacity]`, key + 1 of each slot's row, 0 for none.
        head: The next key.
        bins: Number of bins.
        sampler: The buffer's.
    """
    priorities = priorities_of(leaves[(leaves > 0) & (keys1 > 0)].double(), sampler)  # other rows are being restored
    positive = priorities.clamp(min=getattr(sampler, "eps", 1.0))  # 0 has no logarithm
    ages = (head - keys1[keys1 > 0]).double()
    low, high = (math.log10(positive.min()), math.log10(positive.max())) if len(positive) else (0.0, 0.0)
    # A range of no width would put everything beside its only value.
    priority_range = (low, high) if high > low else (low - 0.5, low + 0.5)
    age_range = (0.0, float(ages.max()) if len(ages) else 1.0)
    return {
        "priority_edges": torch.logspace(*priority_range, bins + 1, dtype=torch.float64, device="cpu"),
        # Clamped: logarithms of the extremes may differ from the edges in the last bit.
        "priority": torch.histc(positive.log10().clamp(*priority_range), bins, *priority_range).long(),
        "age_edges": torch.linspace(*age_range, bins + 1, dtype=torch.float64, device="cpu"),
        "age": torch.histc(ages, bins, *age_range).long(),
    }


class Inspection(Configured):
    """The part of a `ReplayBuffer` that shows what is in it."""

    _segment: _C.Segment
    _nonce: int
    _deferred: PendingUpdates

    def __len__(self) -> int:
        """Returns the number of rows held."""
        rows = self._segment.refresh(NEVER, False)
        assert rows is not None  # the buffer's end did not end the wait
        return rows

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self._config.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory, or of the file."""
        return self._segment.nbytes

    @property
    def path(self) -> Path | None:
        """The file that holds the buffer; None when it lies in memory."""
        return Path(os.readlink(f"/proc/self/fd/{self._segment.fd}")) if self._segment.in_file else None

    @property
    def limiter(self) -> Limiter:
        """Who must wait. Set it to change it for every process at once. Processes that can go on under the new one do.

        None sets the default, `MinSize(1)`, as it does where a buffer is made.

        A new limiter counts from the moment at which it is set, as if its `min_size` items had just come and none had
        been drawn. Of the items inserted before, `min_size` count (or all, if there are fewer). Of the draws before,
        none count. So the balance of `SamplesPerInsert` starts in the middle of its bounds, and neither side has to
        make up for what was allowed before.
        """
        return from_native(*self._segment.limiter)

    @limiter.setter
    def limiter(self, limiter: Limiter | None) -> None:
        default: Limiter = MinSize()
        self._segment.set_limiter(checked_kind("limiter", limiter, default, (MinSize, SamplesPerInsert)).native())

    @property
    def draws(self) -> int:
        """Batches that this attached object has drawn: the position in its own stream of draws. Set it to resume."""
        return self._segment.step

    @draws.setter
    def draws(self, step: int) -> None:
        self._segment.step = checked_int("draws", step, 0, (1 << 48) - 1)

    @property
    def stream(self) -> int:
        """The number of this process's stream of draws. Set it to resume that of another process."""
        return self._segment.stream

    @stream.setter
    def stream(self, number: int) -> None:
        self._segment.stream = checked_int("stream", number, 0, (1 << 32) - 1)

    def stats(self) -> Stats:
        """Returns what has happened so far, over all processes."""
        self._deferred.apply_arrived()
        return self._stats()

    def _stats(self) -> Stats:
        values = self._segment.stats()
        values["priority_min"] = smallest_priority(values.pop("smallest_leaf"), self._config.sampler)
        return Stats.of(values)

    def _marks(self) -> tuple[int, int]:
        return self._nonce, self._segment.seed

    def histograms(self, bins: int = 64) -> dict[str, torch.Tensor]:
        """Returns histograms of raw priorities and of rows' ages. O(capacity).

        Args:
            bins: Number of bins.

        Returns:
            `priority_edges` (float64 `[bins + 1]`, logarithmic) and `priority` (int64 `[bins]`, counts of drawable
            items by raw priority |td|; what is below the sampler's `eps` counts as `eps`); `age_edges` (float64
            `[bins + 1]`, in rows written since) and `age` (int64 `[bins]`, counts of rows).
        """
        bins = checked_int("bins", bins, 1, 1 << 20)
        head = self.stats().rows_written  # which applies what has arrived
        return histograms(self._segment.column(-1), self._segment.column(-2), head, bins, self._config.sampler)

    @property
    def storage(self) -> dict[str, Any]:
        """Tensors `[capacity, *shape]` over the shared memory itself, nested as the spec, for inspection.

        They are live: a row may change while it is looked at, and writing to them bypasses every promise. They cannot
        be pickled.
        """
        return nest({path: StorageView.over(self._segment.column(i)) for i, path in enumerate(self._config.fields)})

    def __repr__(self) -> str:
        if self._segment.closed:
            return "ReplayBuffer(closed)"
        stats = self._stats()  # a repr raises nothing
        where = "shared" if self.path is None else f"in {self.path}"
        names = ", ".join("/".join(path) for path in self._config.fields)
        return (
            f"ReplayBuffer({stats.size:,}/{stats.capacity:,} rows, fields: {names}, "
            f"{stats.nbytes / 2**20:,.1f} MiB {where}, {self.view}, {self.sampler}, {self.limiter}, "
            f"{stats.writers} writers{', stopped' if stats.stopped else ''})"
        )

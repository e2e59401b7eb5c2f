"""Batches on their way to a device: drawn into slots of memory, and copied from there while the learner computes."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchreplay.cuda.copies import GatherCopies, keep_in_children, seen_by
from torchreplay.cuda.long_rows import LongRows
from torchreplay.cuda.packing import DRAWN, Packing, batch_of
from torchreplay.cuda.routes import Copies, Copy, PathSelector, Route
from torchreplay.schema.batch import Finish, ReplayBatch
from torchreplay.schema.spec import Path

if TYPE_CHECKING:
    from torchreplay import _C
    from torchreplay.cuda.pinned_memory import PageLock
    from torchreplay.schema.config import Config, Configured

SPARE = 3
"""Slots beside those of the batches ordered: copies from them may be under way without anyone waiting."""


class Drawn(Protocol):
    """What batches are drawn from."""

    @property
    def _finish(self) -> Finish | None: ...


class Local(Protocol):
    """What has its rows in the memory of this machine."""

    @property
    def _config(self) -> Config: ...
    @property
    def _segment(self) -> _C.Segment: ...


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one batch on its way.

    Attributes:
        block: Everything but the keys, whatever the route.
        key: int64 `[B]`.
        route: Of the batch that is drawn into it.
        tensors: What lies in the block then.
        batch: The same, and the keys, as that batch.
        sent: What of the block is sent to the device.
        took: Seconds that its draw took.
        copy: The last one from here.
    """

    block: torch.Tensor
    key: torch.Tensor
    route: Route
    tensors: dict[Path, torch.Tensor] = field(init=False)
    batch: ReplayBatch = field(init=False)
    sent: torch.Tensor = field(init=False)
    took: float = 0.0
    copy: Copy | None = None

    def __post_init__(self) -> None:
        self.assign(self.route)

    def assign(self, route: Route) -> None:
        """Makes it one for a batch on that route."""
        self.route = route
        self.tensors = route.drawn(self.block)
        self.batch = batch_of(self.tensors, self.key)
        self.sent = self.block[: route.nbytes]


class Staging:
    """Slots that batches are drawn into, and copied to a device from: one copy for each batch.

    - The copy of the next batch starts when a batch is handed out, if that one is drawn by then, and so runs beside the
      learner's step. It takes nothing from the stream of draws: a batch copied and not handed out is still one that is
      drawn ahead.
    - A slot is drawn into again once its copy has ended. Until then the others are used; there are enough of them for
      `SPARE` copies to be under way. Who asks for batches faster than that waits for the oldest copy: it is the
      device's link that is too slow then.
    - Where there are several routes, the first batches take them in turn, and those after them the quickest one.

    It is for one iteration, and one thread.

    Args:
        buffer: The buffer to draw from.
        batch_size: Items in a batch.
        prefetch: Batches drawn ahead of the one asked for; 0: the buffer itself finishes each.
        choice: Of the route on which each gets to the device.
    """

    def __init__(self, buffer: Drawn, batch_size: int, prefetch: int, choice: PathSelector) -> None:
        self._process = os.getpid()
        keep_in_children(self)
        self._batch_size = batch_size
        self._computes = buffer._finish is not None
        self._finish = buffer._finish if prefetch else None
        self._copies = choice.routes[0].copies
        self._nbytes = max(route.nbytes for route in choice.routes)
        self._choice = choice
        self._may_make = prefetch + 1 + SPARE
        self._ordered = deque[Slot]()  # to be drawn into, or drawn, in the order of the batches
        self._left = deque[Slot]()  # handed out; the copy that started first is the first

    def require_own_process(self) -> None:
        """Checks that this process began the iteration.

        Raises:
            RuntimeError: Its parent did, in whose memory batches are drawn.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "this iteration is the parent process's, and CUDA does not survive a fork: begin another"
            )

    def place(self) -> ReplayBatch:
        """Returns a batch for the next one to be drawn into, which is the next one to be handed out then."""
        self._ordered.append(slot := self._free_slot())
        return slot.batch

    def copy_ahead(self, drawn: int) -> None:
        """Starts the copy of the next batch, unless that is not drawn.

        Args:
            drawn: How many of the batches to come are.
        """
        if drawn and self._ordered and self._ordered[0].copy is None:
            with suppress(Exception):  # such as a user's function raises: it does so again when it is this batch's turn
                self._start(self._ordered[0])

    @property
    def times_draws(self) -> bool:
        """Whether `note_draw` wants to know."""
        return self._choice.open

    def note_draw(self, batch: ReplayBatch, seconds: float) -> None:
        """Takes notice of how long the draw of a batch took that `place` gave."""
        for slot in self._ordered:
            if slot.batch is batch:
                slot.took = seconds

    def hand_out(self, batch: ReplayBatch) -> ReplayBatch | None:
        """Returns a drawn batch on the device; only `key` stays, in memory of its own.

        Args:
            batch: What `place` gave, drawn by now; or one in other memory, which is copied by itself.

        Returns:
            None if rows of it were overwritten before the device had read them.
        """
        slot = self._slot_of(batch)
        if slot is None:
            return batch.to(self._copies.device)
        self._left.append(slot)
        if slot.copy is None:
            self._start(slot)
        assert slot.copy is not None
        intact = slot.copy.intact()
        self._choice.note_outcome(slot.route, not intact)
        if not intact:
            return None
        moved = batch_of(slot.route.arrived(slot.copy.take()), batch["key"].clone())
        moved.source = batch.source
        return moved

    def _slot_of(self, batch: ReplayBatch) -> Slot | None:
        if not any(slot.batch is batch for slot in self._ordered):
            return None
        while (slot := self._ordered.popleft()).batch is not batch:
            self._left.append(slot)  # of an order that failed
        return slot

    def _start(self, slot: Slot) -> None:
        if self._finish is not None:
            self._finish(slot.batch)
        if self._computes:
            _write_back(slot.batch, slot.tensors)
        slot.copy = slot.route.copies.start(slot.sent, self._choice.open)

    def _free_slot(self) -> Slot:
        if self._left and (self._may_make <= 0 or _is_free(self._left[0])):
            slot = self._left.popleft()
            if slot.copy is not None:
                slot.copy.wait()
                if self._choice.open:
                    self._choice.note(slot.route, slot.took, slot.copy.seconds())
                slot.copy = None
            route = self._choice.next()
            if slot.route is not route:
                slot.assign(route)
            return slot
        self._may_make -= 1
        key = torch.empty(self._batch_size, dtype=torch.int64, device="cpu")
        return Slot(self._copies.memory(self._nbytes), key, self._choice.next())


def copied_by_host(buffer: Configured, batch_size: int, copies: Copies) -> Route:
    """Returns the route of batches whose values are copied twice: by the host as they are drawn, and to the device."""
    packing = Packing({**buffer._config.outputs(), **DRAWN}, batch_size)
    return Route("copied by the host", copies, packing.end, packing.tensors, packing.tensors)


def read_by_device(buffer: Local, batch_size: int, device: torch.device, lock: PageLock) -> list[Route]:
    """Returns the route of batches whose long values the device reads in the buffer's own memory, which is page-locked.

    Nothing where there are no long values, and with a warning where the device does not reach that memory.
    """
    if not buffer._segment.long_outputs:
        return []
    try:
        rows = LongRows(buffer._segment, buffer._config.outputs(), batch_size, partial(seen_by, device))
    except RuntimeError as error:
        warnings.warn(f'pin="ring": {error}; the rows are copied by the host first', RuntimeWarning, stacklevel=2)
        return []
    copies = GatherCopies(device, rows, lock)
    return [Route("read by the device", copies, rows.drawn.end, rows.places, rows.tensors)]


def _write_back(batch: ReplayBatch, tensors: Mapping[Path, torch.Tensor]) -> None:
    """Puts what was computed, in memory of its own, where the batch goes on its way from."""
    for path, tensor in tensors.items():
        level: dict[str, Any] = batch
        for name in path[:-1]:
            level = level[name]
        if level[path[-1]] is not tensor:
            level[path[-1]] = tensor.copy_(level[path[-1]])


def _is_free(slot: Slot) -> bool:
    return slot.copy is None or slot.copy.done()

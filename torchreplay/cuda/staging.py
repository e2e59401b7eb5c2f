"""Batches on their way to a device: drawn into slots of memory, and copied from there while the learner computes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from torchreplay.cuda.copies import DeviceCopies, DeviceCopy, keep_in_children
from torchreplay.cuda.packing import Drawn, Packing, RaggedPacking, batch_of, drawn_with
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import Config
from torchreplay.schema.spec import Field, Path, Ragged
from torchreplay.schema.tensor_info import pack

SPARE = 3
"""Slots beside those of the batches ordered: copies from them may be under way without anyone waiting."""


@dataclass(slots=True, eq=False)
class Room:
    """Where a batch with values of any length is drawn into: how many there are only the draw finds out.

    Attributes:
        batch: The tensors of what has one size; the draw returns this. Items that a budget leaves out have rubbish.
        block: uint8 `[n]`; values, offsets and lengths go there, if it is enough.
        limits: The most elements of each ragged field of the batch, -1 for any number; None: there is no budget.
        drawn: What the draw says, as `Drawn`.
    """

    batch: ReplayBatch
    block: torch.Tensor
    limits: tuple[int, ...] | None
    drawn: Any = None


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one batch on its way.

    Attributes:
        block: Everything of one size but the keys.
        tensors: What lies in the block.
        batch: The same, and the keys.
        room: The same, and memory for values of any length; None: the batch has none.
        copies: The last ones from here, of the block and of the room.
    """

    block: torch.Tensor
    tensors: dict[Path, torch.Tensor]
    batch: ReplayBatch
    room: Room | None
    copies: list[DeviceCopy] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        """Whether they have ended."""
        return all(copy.done() for copy in self.copies)


class Staging:
    """Slots that batches are drawn into, and copied to a device from: one copy for each batch.

    - Values of any length are another copy, of as much as there is.
    - The copy of the next batch starts when a batch is handed out, if that one is drawn by then, and so runs beside the
      learner's step. The stream of draws does not change: a batch copied and not handed out is still one that is drawn
      ahead.
    - A slot is drawn into again once its copy has ended. Until then the others are used; there are enough of them for
      `SPARE` copies to be under way. If batches are asked for faster than that, the device's link is too slow, and the
      caller waits for the oldest copy.
    - Each slot has a second block for values of any length. A batch that does not fit is drawn into other memory. It is
      copied once, into a larger block, which the slot keeps. The other slots get one as large before their next draw.

    It is for one iteration, and one thread.

    Args:
        config: Of the buffer to draw from.
        batch_size: Items in a batch.
        prefetch: Batches drawn ahead of the one asked for; 0: the buffer itself finishes each.
        copies: What copies them to the device.
        limits: The most elements of each ragged field of a batch, -1 for any number; None: there is no budget.
    """

    def __init__(
        self,
        config: Config,
        batch_size: int,
        prefetch: int,
        copies: DeviceCopies,
        limits: tuple[int, ...] | None = None,
    ) -> None:
        self._process = os.getpid()
        keep_in_children(self)
        self._batch_size = batch_size
        self._computes = config.finish is not None
        self._finish = config.finish if prefetch or config.ragged else None
        self._outputs = config.outputs()
        fixed = {path: column for path, column in self._outputs.items() if isinstance(column, Field)}
        self._packing = Packing({**fixed, **drawn_with(config.fields)}, batch_size)
        self._ragged = RaggedPacking({p: column for p, column in self._outputs.items() if isinstance(column, Ragged)})
        self._limits = limits
        self._room_bytes: int | None = None
        if config.ragged:
            self._room_bytes = room_bytes(config, batch_size, limits) if limits else 0
        self._copies = copies
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

    @property
    def room(self) -> Room | None:
        """Where the values of any length of that batch are drawn into, as well; None: it has none."""
        return self._ordered[-1].room

    def room_of(self, batch: ReplayBatch) -> Room | None:
        """Returns where the values of any length of a drawn batch are; None: it has none, or lies in other memory."""
        return next((slot.room for slot in self._ordered if slot.batch is batch), None)

    def copy_ahead(self, drawn: int) -> None:
        """Starts the copy of the next batch, unless that is not drawn.

        Args:
            drawn: How many of the batches to come are.
        """
        if drawn and self._ordered and not self._ordered[0].copies:
            with suppress(Exception):  # such as a user's function raises: it does so again when it is this batch's turn
                self._start(self._ordered[0])

    def hand_out(self, batch: ReplayBatch) -> ReplayBatch:
        """Returns a drawn batch on the device; only `key` and lengths stay, in memory of their own.

        Args:
            batch: That of what `place` gave, drawn by now; or one in other memory, which is copied by itself.
        """
        slot = self._slot_of(batch)
        if slot is None:
            return batch.to(self._copies.device)
        self._left.append(slot)
        if not slot.copies:
            self._start(slot)
        if slot.room is None:
            moved = batch_of(self._packing.tensors(slot.copies[0].take()), batch["key"].clone())
        else:
            moved = self._with_values(slot, slot.room)
        if "age" in moved:  # it may have grown since the copy began
            moved["age"] = batch["age"][: len(moved["key"])].clone().to(self._copies.device, non_blocking=True)
        moved.source = batch.source
        return moved

    def _with_values(self, slot: Slot, room: Room) -> ReplayBatch:
        """Returns the batch on the device, where it has values of any length."""
        drawn = _said_of(room)
        block, values = (copy.take() for copy in slot.copies)
        fixed = {path: tensor[: drawn.items] for path, tensor in self._packing.tensors(block).items()}
        ragged = self._ragged.values(values, drawn)
        tensors = {path: fixed.pop(path) if path in fixed else ragged.pop(path) for path in self._outputs}
        tensors |= ragged | self._ragged.lengths(room.block, drawn) | fixed
        return batch_of(tensors, room.batch["key"][: drawn.items].clone())

    def _slot_of(self, batch: ReplayBatch) -> Slot | None:
        if not any(slot.batch is batch for slot in self._ordered):
            return None
        while (slot := self._ordered.popleft()).batch is not batch:
            self._left.append(slot)  # of an order that failed
        return slot

    def _start(self, slot: Slot) -> None:
        batch, tensors = slot.batch, slot.tensors
        items = self._batch_size if slot.room is None else _said_of(slot.room).items
        if self._computes and items < self._batch_size:
            tensors = {path: tensor[:items] for path, tensor in tensors.items()}
            batch = batch_of(tensors, batch["key"][:items])
        if self._finish is not None:
            self._finish(batch)
        if self._computes:
            _write_back(batch, tensors)
        blocks = [slot.block] if slot.room is None else [slot.block, self._filled(slot.room)]
        slot.copies = [self._copies.start(block) for block in blocks]

    def _filled(self, room: Room) -> torch.Tensor:
        """Returns what is used of the block with the values, which is made larger where they lie elsewhere."""
        drawn = _said_of(room)
        if drawn.block is not None:
            room.block = self._copies.memory(self._grown(drawn.nbytes))
            room.block[: drawn.nbytes].copy_(drawn.block)
            room.drawn = drawn._replace(block=None)
        return room.block[: drawn.nbytes]

    def _grown(self, nbytes: int) -> int:
        """Returns the bytes of a block for values, now that there was a batch with so many."""
        self._room_bytes = max(self._room_bytes or 0, nbytes + nbytes // 8)
        return self._room_bytes

    def _free_slot(self) -> Slot:
        if self._left and (self._may_make <= 0 or self._left[0].is_free):
            slot = self._left.popleft()
            for copy in slot.copies:
                if not copy.done():
                    copy.wait()
            slot.copies = []
            if slot.room is not None and self._room_bytes and len(slot.room.block) < self._room_bytes:
                slot.room.block = self._copies.memory(self._room_bytes)
            return slot
        self._may_make -= 1
        block = self._copies.memory(self._packing.nbytes)
        tensors = self._packing.tensors(block)
        batch = batch_of(tensors, torch.empty(self._batch_size, dtype=torch.int64, device="cpu"))
        if self._room_bytes is None:
            return Slot(block, tensors, batch, None)
        return Slot(block, tensors, batch, Room(batch, self._copies.memory(self._room_bytes), self._limits))


def room_bytes(config: Config, batch_size: int, limits: tuple[int, ...]) -> int:
    """Returns the bytes of the values of a batch within a budget, with offsets and lengths; 0: any number may come.

    An item that alone is more than the budget needs more.

    Args:
        config: Of the buffer.
        batch_size: Items in a batch.
        limits: The most elements of each ragged field of a batch; -1: any number.
    """
    most = dict[Any, int]()  # of those that are of one length
    outputs = config.ragged_outputs()
    for (of, _, _), limit in zip(outputs, limits, strict=True):
        if limit >= 0:
            most[of] = min(limit, most.get(of, limit))
    if any(of not in most for of, _, _ in outputs):
        return 0
    infos: list[tuple[torch.dtype, tuple[int, ...]]] = []
    for of, column, steps in outputs:
        rows = batch_size * steps
        infos += [(column.dtype, (most[of], *column.shape)), (torch.int32, (rows + 1,)), (torch.int64, (rows,))]
    return pack(infos)[1]


def _said_of(room: Room) -> Drawn:
    assert room.drawn is not None
    return Drawn(*room.drawn)


def _write_back(batch: ReplayBatch, tensors: Mapping[Path, torch.Tensor]) -> None:
    """Puts what was computed, in memory of its own, where the batch goes on its way from."""
    for path, tensor in tensors.items():
        level: dict[str, Any] = batch
        for name in path[:-1]:
            level = level[name]
        if level[path[-1]] is not tensor:
            level[path[-1]] = tensor.copy_(level[path[-1]])

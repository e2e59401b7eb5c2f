"""Batches on their way to a device: drawn into slots of memory, and copied from there while the learner computes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from torchreplay.cuda.copies import DeviceCopies, DeviceCopy, keep_in_children
from torchreplay.cuda.packing import Packing, batch_of, drawn_with
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import Config
from torchreplay.schema.spec import Path, fixed_fields

SPARE = 3
"""Slots beside those of the batches ordered: copies from them may be under way without anyone waiting."""


@dataclass(slots=True, eq=False)
class Slot:
    """Memory for one batch on its way.

    Attributes:
        block: Everything but the keys.
        tensors: What lies in the block.
        batch: The same, and the keys.
        copy: The last one from here.
    """

    block: torch.Tensor
    tensors: dict[Path, torch.Tensor]
    batch: ReplayBatch
    copy: DeviceCopy | None = None


class Staging:
    """Slots that batches are drawn into, and copied to a device from: one copy for each batch.

    - The copy of the next batch starts when a batch is handed out, if that one is drawn by then, and so runs beside the
      learner's step. The stream of draws does not change: a batch copied and not handed out is still one that is drawn
      ahead.
    - A slot is drawn into again once its copy has ended. Until then the others are used; there are enough of them for
      `SPARE` copies to be under way. If batches are asked for faster than that, the device's link is too slow, and the
      caller waits for the oldest copy.

    It is for one iteration, and one thread.

    Args:
        config: Of the buffer to draw from.
        batch_size: Items in a batch.
        prefetch: Batches drawn ahead of the one asked for; 0: the buffer itself finishes each.
        copies: What copies them to the device.
    """

    def __init__(self, config: Config, batch_size: int, prefetch: int, copies: DeviceCopies) -> None:
        self._process = os.getpid()
        keep_in_children(self)
        self._batch_size = batch_size
        self._computes = config.finish is not None
        self._finish = config.finish if prefetch else None
        outputs = fixed_fields(config.outputs(), "a dataset with device=")
        self._packing = Packing({**outputs, **drawn_with(config.fields)}, batch_size)
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

    def copy_ahead(self, drawn: int) -> None:
        """Starts the copy of the next batch, unless that is not drawn.

        Args:
            drawn: How many of the batches to come are.
        """
        if drawn and self._ordered and self._ordered[0].copy is None:
            with suppress(Exception):  # such as a user's function raises: it does so again when it is this batch's turn
                self._start(self._ordered[0])

    def hand_out(self, batch: ReplayBatch) -> ReplayBatch:
        """Returns a drawn batch on the device; only `key` stays, in memory of its own.

        Args:
            batch: What `place` gave, drawn by now; or one in other memory, which is copied by itself.
        """
        slot = self._slot_of(batch)
        if slot is None:
            return batch.to(self._copies.device)
        self._left.append(slot)
        if slot.copy is None:
            self._start(slot)
        assert slot.copy is not None
        moved = batch_of(self._packing.tensors(slot.copy.take()), batch["key"].clone())
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
        slot.copy = self._copies.start(slot.block)

    def _free_slot(self) -> Slot:
        if self._left and (self._may_make <= 0 or _is_free(self._left[0])):
            slot = self._left.popleft()
            if slot.copy is not None and not slot.copy.done():
                slot.copy.wait()
            slot.copy = None
            return slot
        self._may_make -= 1
        block = self._copies.memory(self._packing.nbytes)
        tensors = self._packing.tensors(block)
        key = torch.empty(self._batch_size, dtype=torch.int64, device="cpu")
        return Slot(block, tensors, batch_of(tensors, key))


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

"""Long values of drawn items, read where they lie in the buffer's own memory: by a device, over the link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchreplay.cuda.packing import DRAWN, Packing
from torchreplay.schema.spec import Field, Path

if TYPE_CHECKING:
    from torchreplay import _C

WORDS = -3
"""The column of the words that name the rows."""

PLACES: Path = ("",)  # which is no field's
"""Where a block holds the places of all long values."""

WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""What values are read as: the widest elements that divide them."""


@dataclass(frozen=True, slots=True)
class LongOutput:
    """One of a batch's fields whose values are read where they lie.

    Attributes:
        path: Of the field.
        rows: Of an item.
        places: Which of all places are those of its rows.
        values: Of the column it is made of, as wide elements: `[capacity, elements of a row]`.
    """

    path: Path
    rows: int
    places: slice
    values: torch.Tensor


class LongRows:
    """What a batch's long values are read from, and how the rest of it travels.

    A native thread draws the batch: everything but the long values, of which it notes where each lies, and by which
    word its row is named. The device reads them later, and then the words again: a word names its row alone, and
    changes before the row's values do. Where all words are still the same, everything read is what was drawn; that is
    what a copy by the host itself looks at, too. It takes for granted that what one kernel reads of the host's memory
    it reads after the kernels before it on its stream, and from memory: devices do not cache that beyond a kernel.

    Args:
        segment: The buffer's memory.
        outputs: A batch's fields, by path.
        batch_size: Items in a batch, B.
        reach: Returns a tensor of the buffer's memory as whoever reads it sees it.

    Attributes:
        drawn: What the host draws: everything but long values, and their places.
        end: Bytes of the block that has both that and the long values.
    """

    def __init__(
        self,
        segment: _C.Segment,
        outputs: Mapping[Path, Field],
        batch_size: int,
        reach: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        paths = list(outputs)
        long = {paths[o]: (column, rows) for o, column, rows in segment.long_outputs}
        short = {path: field for path, field in outputs.items() if path not in long}
        all_rows = sum(rows for _, rows in long.values())
        self._paths = (*outputs, *DRAWN)
        self.drawn = Packing({**short, **DRAWN, PLACES: Field((all_rows, 2), torch.int64)}, batch_size)
        self._long = Packing({path: outputs[path] for path in long}, batch_size, self.drawn.end)
        self.end = self._long.end
        self._outputs, first = list[LongOutput](), 0
        for path, (column, rows) in long.items():
            places = slice(first, first := first + batch_size * rows)
            self._outputs.append(LongOutput(path, rows, places, reach(_wide(segment.column(column)))))
        self._words = reach(segment.column(WORDS))

    def places(self, block: torch.Tensor) -> dict[Path, torch.Tensor]:
        """Returns what a batch is drawn into: its tensors in a block, `int64 [B, rows, 2]` for each long field."""
        tensors = self.drawn.tensors(block)
        places = tensors.pop(PLACES).view(-1, 2)
        located = {o.path: places[o.places].view(-1, o.rows, 2) for o in self._outputs}
        tensors.update(located)
        return {path: tensors[path] for path in self._paths}

    def tensors(self, block: torch.Tensor) -> dict[Path, torch.Tensor]:
        """Returns the batch's tensors in a block of `end` bytes, the whole of its storage, once `read` has been."""
        tensors = self.drawn.tensors(block) | self._long.tensors(block)
        return {path: tensors[path] for path in self._paths}

    def read(self, block: torch.Tensor) -> torch.Tensor:
        """Reads the long values of the batch drawn into a block, to their places there; nobody waits for a device.

        Args:
            block: uint8 `[end]`, the whole of its storage, its first `drawn.end` bytes as drawn.

        Returns:
            bool `[]`: everything is what was drawn. If it is not, some rows were overwritten meanwhile.
        """
        slots, words = self.drawn.tensors(block)[PLACES].view(-1, 2).unbind(1)
        values = self._long.tensors(block)
        none = words == 0
        for output in self._outputs:
            mine = slots[output.places]
            to = values[output.path].view(len(mine), -1).view(output.values.dtype)
            torch.index_select(output.values, 0, mine, out=to)
            if output.rows > 1:  # some may lie beyond an episode's end
                to.masked_fill_(none[output.places].unsqueeze(1), 0)
        # After all values: a device does one thing after the other.
        return (self._words.index_select(0, slots) == words).logical_or_(none).all()


def _wide(column: torch.Tensor) -> torch.Tensor:
    rows = column.flatten(1)
    nbytes = rows.shape[1] * rows.element_size()
    return rows.view(next(dtype for width, dtype in WIDTHS.items() if nbytes % width == 0))

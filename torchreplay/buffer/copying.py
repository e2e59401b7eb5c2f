"""Rows of one segment into another, in memory."""

from __future__ import annotations

from torchreplay import _C
from torchreplay.checkpoint.buffer_checkpoint import SHARD_BYTES
from torchreplay.checkpoint.description import ROW_COLUMNS, without_grid
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import from_native


def copy_rows(source: _C.Segment, target: _C.Segment, config: Config, capacity: int) -> None:
    """Places the rows of a segment into a new one that nobody else has, and has its draws go on there.

    Args:
        source: Where others may go on writing.
        target: Of the same fields and view.
        config: Of `source`.
        capacity: Of `target`.

    Raises:
        RuntimeError: `source` is being restored.
    """
    row_bytes = 32 + sum(field.nbytes for field in config.fields.values())
    slots = max(1, min(config.capacity, SHARD_BYTES // row_bytes))
    key_column = len(config.fields) + ROW_COLUMNS.index("/key")
    imports = source.imports
    rows = _C.Import(target, 0)
    try:
        for first in range(0, config.capacity, slots):
            columns = source.export_rows(first, min(first + slots, config.capacity))
            if len(columns[key_column]):
                # By numpy: torch would do it in several threads, in which a forked child can hang.
                rows.issue(int(columns[key_column].numpy().max()) + 1)
                rows.place(columns)
        counts, limiter = source.counts()
        if capacity < config.capacity:
            counts = without_grid(counts)
        if source.imports != imports:
            raise BufferError("restored meanwhile")
        rows.issue(int(counts[0]))  # tickets without a row too: the next key is the same
        stream, step = source.draws_go_on
        native = from_native(*limiter).native()
        target.set_limiter(native)
        rows.finish(counts, native, source.seed, stream, step)
    except BufferError:
        raise RuntimeError("the buffer is being restored: copy it when that is over") from None
    finally:
        rows.abandon()

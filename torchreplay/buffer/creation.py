"""Making a buffer's memory, filling it with the rows of another, and attaching to that of others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from torchreplay import _C
from torchreplay.checkpoint.buffer_checkpoint import SHARD_BYTES, tell_left_out
from torchreplay.checkpoint.description import ROW_COLUMNS, without_grid
from torchreplay.checkpoint.lost_items import LostItems
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import from_native
from torchreplay.schema.spec import to_native
from torchreplay.schema.views import View
from torchreplay.segment.handle import new_nonce
from torchreplay.segment.reservation import SPARE, Reservation, begin_reservation, page_tables
from torchreplay.segment.segment_file import NewFile, boot_number


@contextmanager
def new_segment(
    config: Config, path: Path | None, seed: int, by_and_by: bool, pages_when_used: bool = False
) -> Iterator[tuple[_C.Segment, int, Reservation]]:
    """Makes a segment; where a path is given, in a new file, which is there when the context has ended in order.

    Args:
        config: The buffer's.
        path: The file.
        seed: Of the draws.
        by_and_by: Whether large fields may be reserved in what is yielded, before rows are placed there.
        pages_when_used: Whether pages for values of any length are not reserved, but taken when they are first used.

    Yields:
        The segment, its identity, and its memory as far as it is reserved.

    Raises:
        MemoryError: There is too little memory, or this process may not map as much.
    """
    nonce = new_nonce()
    native = to_native(config.fields)
    text, shape = config.to_text(), config.shape()
    size, arrays = _C.segment_layout(config.capacity, native, shape, len(text.encode()))
    weighting, limits, what = config.weighting(), config.limiter.native(), config.called.removeprefix("the ")
    with nullcontext() if path is None else NewFile(path, size) as new:
        if new is None:
            beyond = 0
            if pages_when_used and config.ragged:
                regions = _C.segment_regions(config.capacity, native, shape, len(text.encode()))
                beyond = size - regions["page_words"]
            ours = arrays if by_and_by else []
            slots, spare = (config.capacity, SPARE + page_tables(size)) if by_and_by else (0, 0)
            reservation = begin_reservation(size - beyond, what, ours, slots, spare, beyond)
        else:
            reservation = Reservation(new.fd, 0, what)
        with reservation:
            fd, boot = reservation.fd, 0 if path is None else boot_number()
            segment = _C.Segment(
                fd, True, nonce, native, ReplayBatch, seed, config.capacity, weighting, limits, shape, text, boot
            )
            segment.called = config.called
            yield segment, nonce, reservation


def attached_segment(fd: int, nonce: int, view: View | None) -> tuple[_C.Segment, Config]:
    """Returns a segment that others made, and what its buffer was made of; closes its descriptor `fd`.

    Raises:
        ConnectionError: It is no buffer's, or damaged.
        ValueError: `view` is not the buffer's, or has not the same functions.
    """
    try:
        segment = _C.Segment(fd, False, nonce, None, ReplayBatch)
        config = Config.from_text(segment.text)
        segment.describe(to_native(config.fields), config.capacity, config.shape())
        segment.called = config.called
        from_native(*segment.limiter)  # which is no part of the description: it may change at any time
    except ValueError as error:
        raise ConnectionError(str(error)) from None
    finally:
        os.close(fd)
    return segment, config.with_functions(view)


def copy_rows(source: _C.Segment, target: _C.Segment, config: Config, into: Config) -> None:
    """Places the rows of a segment into a new one that nobody else has, and has its draws go on there.

    Args:
        source: Where others may go on writing.
        target: Of the same fields and view.
        config: Of `source`.
        into: Of `target`.

    Raises:
        RuntimeError: `source` is being restored.
        ValueError: It is a queue, of which `target` cannot hold all items. Or the values of a row are longer than a
            quarter of its bytes for them.
    """
    imports, lost = source.imports, LostItems(config, into)
    lengths, keys = slice(len(config.fields), -len(ROW_COLUMNS)), -len(ROW_COLUMNS) + list(ROW_COLUMNS).index("/key")
    rows = _C.Import(target)
    try:
        rows.begin(0)
        for columns in _rows_of(source, config):
            if config.ragged and (
                complaint := rows.expect([columns[keys], *columns[lengths]], config.ragged_bytes or 0)
            ):
                raise ValueError(complaint)
            # By numpy: torch would do it in several threads, in which a forked child can hang.
            rows.issue(int(columns[keys].numpy().max()) + 1)
            lost.add(columns)
            rows.place(columns)
        left_out = rows.left_out()
        if complaint := lost.complaint(left_out):
            raise ValueError(complaint)
        counts, limiter = source.counts()
        left_out = left_out[left_out >= int(counts[0]) - into.capacity]  # the others have no slot
        if into.capacity < config.capacity or len(left_out):
            counts = without_grid(counts)
        if source.imports != imports:
            raise BufferError("restored meanwhile")
        rows.issue(int(counts[0]))  # tickets without a row too: the next key is the same
        stream, step = source.draws_go_on
        native = from_native(*limiter).native()
        target.set_limiter(native)
        rows.finish(counts, native, source.seed, stream, step, source.policy_version)
    except BufferError:
        raise RuntimeError("the buffer is being restored: copy it when that is over") from None
    finally:
        rows.abandon()
    tell_left_out("the copy", left_out, into)


def _rows_of(source: _C.Segment, config: Config) -> Iterator[list[torch.Tensor]]:
    """Yields all rows, some at a time; those with values of any length in the order in which they are to leave."""
    row_bytes = 32 + sum(field.nbytes for field in config.fields.values())
    slots, capacity = max(1, min(config.capacity, SHARD_BYTES // row_bytes)), config.capacity
    oldest = int(source.counts()[0][0]) % capacity if config.ragged else 0
    for begin, end in ((oldest, capacity), (0, oldest)):
        first = begin
        while first < end:
            columns, first = source.export_rows(first, min(first + slots, end), SHARD_BYTES)
            if len(columns[-1]):
                yield columns

"""Buffers of long values, and what reads those in the ring late, in the place of a device."""

import contextlib
import itertools

from late_copies import LateCopies, LateReads
from numbered_episodes import row_by_row, spec, write_calls
from numbered_items import VIEWS as ALL_VIEWS
from numbered_items import NumberedRows

import torchreplay as tr
from torchreplay.cuda.long_rows import LongRows
from torchreplay.cuda.routes import PathSelector, Route
from torchreplay.cuda.staging import Staging

VIEWS = {"rows": NumberedRows()} | {name: view for name, view in ALL_VIEWS.items() if name != "hindsight"}


def writing_rows(buffer, index):
    with buffer.writer() as writer:
        yield from row_by_row(writer, index * 4)


def numbered_buffer(name, rows=512, calls=400):
    buffer = tr.ReplayBuffer(spec(), rows, sampler=tr.Prioritized(), view=VIEWS[name].view, seed=3)
    if name != "rows":
        write_calls(buffer, 0, calls)
    elif calls:
        with contextlib.closing(writing_rows(buffer, 0)) as written:
            list(itertools.islice(written, calls))
    return buffer


def here(tensor):
    return tensor


class ReadDataset(tr.ReplayDataset):
    """A dataset whose batches' long values are read late."""

    def _make_staging(self):
        rows = LongRows(self.buffer._segment, self.buffer._config.outputs(), self.batch_size, here)
        self.copies = LateReads(rows)
        return Staging(
            self.buffer,
            self.batch_size,
            self.prefetch,
            PathSelector([Route("", self.copies, rows.drawn.end, rows.places, rows.tensors)]),
        )


class TimedCopies(LateCopies):
    """Copies that end at once, and are said to have taken a given time."""

    def __init__(self, took, rows=None):
        super().__init__()
        self.took, self.rows = took, rows
        self.nbytes = None if rows is None else rows.end
        self.timed = 0

    def start(self, block, timed=False):
        self.timed += timed
        copy = (LateReads.make if self.rows else LateCopies.make)(self, block)
        copy.seconds = lambda: self.took
        copy.run()
        self.started.append(copy)
        return copy

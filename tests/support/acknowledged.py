"""Explorers whose calls the test can see: each row acknowledged to them must be there."""

import itertools
from dataclasses import dataclass
from functools import partial

import numpy as np
from forked import shared_counters
from numbered_episodes import LANES, in_lanes, row_by_row, step_by_step, wide
from numbered_items import VIEWS, NumberedItems, NumberedRows

NOTES = 4096  # more rows than one explorer writes between two looks
BURST = 32  # calls whose values are made ahead, so that deaths fall into the writing
WIDER = 2**14  # of int64: 128 KiB, which take as long to copy as everything else that a call does


class Notes:
    """(key, code) of the rows whose call has returned, in memory shared with a forked explorer."""

    def __init__(self):
        self._noted = shared_counters(1)
        self._rows = shared_counters(2 * NOTES)
        self._taken = 0

    def add(self, key, code):
        at = 2 * (self._noted[0] % NOTES)
        self._rows[at], self._rows[at + 1] = key, code
        self._noted[0] += 1  # last: a death before it leaves nothing half noted

    def take(self):
        """Returns (keys, codes) noted since the last time."""
        end = self._noted[0]
        assert end - self._taken <= NOTES, "the test looks too seldom"
        at = np.arange(self._taken, end) % NOTES
        self._taken = end
        rows = np.asarray(self._rows).reshape(-1, 2)[at]
        return rows[:, 0], rows[:, 1]


class Rehearsal:
    """Stands for a writer and keeps the one call it gets."""

    def __init__(self):
        self.call = None

    def __getattr__(self, method):
        return partial(self._keep, method)

    def _keep(self, method, **values):
        self.call = method, values


@dataclass(frozen=True)
class Way:
    """A way of writing, and what the items of its rows are.

    Attributes:
        items: What a draw must look like.
        calls: Generator over (writer, stream or streams), one call of the writer a turn.
        lanes: Of the writer; None: no lanes.
    """

    items: NumberedItems
    calls: object
    lanes: int | None = None

    @property
    def most_rows(self):
        """Rows of a call."""
        return self.lanes or 1

    def write(self, buffer, index, notes):
        """Writes for ever as explorer `index`, noting what its writer acknowledged; yields the rows of every call."""
        streams = index * LANES + (np.arange(self.lanes) if self.lanes else 0)
        rehearsal = Rehearsal()
        calls = self.calls(rehearsal, streams)
        with buffer.writer(self.lanes) if self.lanes else buffer.writer() as writer:
            while True:
                burst = [(rows, *rehearsal.call) for rows in itertools.islice(calls, BURST)]
                for _, _, values in burst:
                    values["obs"]["wide"] = wide(values["obs"]["code"], WIDER)
                for rows, method, values in burst:
                    keys = getattr(writer, method)(**values)
                    if self.lanes:
                        chosen = values.get("mask", slice(None))
                        for key, code in zip(
                            keys[chosen].tolist(), values["obs"]["code"][chosen].tolist(), strict=True
                        ):
                            notes.add(key, code)
                    else:
                        notes.add(keys, int(values["obs"]["code"]))
                    yield rows


WAYS = {
    "rows": Way(NumberedRows(), row_by_row),
    "steps": Way(VIEWS["transitions"], step_by_step),
    "lanes": Way(VIEWS["transitions"], partial(in_lanes, autoreset="next_step"), lanes=3),
}


def assert_acknowledged_rows_are_there(buffer, notes, most_lost):
    """While nobody writes: rows that were acknowledged are in their slots, unless newer ones took those.

    Args:
        notes: Of all explorers, also of the dead.
        most_lost: Rows at most that the dead may have been writing; a slot may be without any row for each of them.

    Returns:
        How many rows there were to look for, and how many slots are empty because a writer died in them.
    """
    buffer.stats(), len(buffer)  # frees what the dead held, and looks at what was written
    key1 = buffer._segment.column(-2).numpy()
    head = buffer.stats().rows_written
    empty = int((key1[:head] == 0).sum())
    assert empty <= most_lost, "lost row: more slots are empty than explorers died"
    keys, codes = (np.concatenate(parts) for parts in zip(*(n.take() for n in notes), strict=True))
    slots = keys % buffer.capacity
    # A dead writer may have begun to overwrite a row; then nothing is in its slot.
    replaced = (key1[slots] > keys + 1) | ((key1[slots] == 0) & (keys + buffer.capacity < head))
    stored = buffer.storage["obs"]["code"].numpy()[slots]
    assert (replaced | (key1[slots] == keys + 1)).all(), "lost row: it was acknowledged and never arrived"
    assert (replaced | (stored == codes)).all(), "foreign row: a key names another row than its writer was told"
    return len(keys), empty

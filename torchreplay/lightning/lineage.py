"""Which checkpoints a buffer has the rows of: its own, and those of the buffers that it was restored from."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torchreplay.buffer.base import Replay, source_of

_BEFORE: Final = dict[int, dict[int, "Reached"]]()
"""Of the buffers that this process has restored: those that they were restored from, and how far those had come."""


class Reached(NamedTuple):
    """How far a buffer has come."""

    rows: int
    updates: int


class Origin(NamedTuple):
    """The buffer that a checkpoint was saved of.

    Attributes:
        nonce: Its identity.
        reached: How far it had come.
        before: The buffers that it had been restored from, and how far they had come.
    """

    nonce: int
    reached: Reached
    before: dict[int, Reached]

    @classmethod
    def of(cls, buffer: Replay) -> Origin:
        """Returns what `buffer` is now."""
        nonce = source_of(buffer).nonce
        return cls(nonce, _reached(buffer), _BEFORE.get(nonce, {}))

    def as_data(self) -> dict[str, Any]:
        """Returns it as what a checkpoint can hold that is loaded with `weights_only`."""
        before = {nonce: list(reached) for nonce, reached in self.before.items()}
        return {"nonce": self.nonce, "reached": list(self.reached), "before": before}

    @classmethod
    def from_data(cls, parts: dict[str, Any]) -> Origin:
        """Returns what `as_data` described."""
        before = {nonce: Reached(*reached) for nonce, reached in parts["before"].items()}
        return cls(parts["nonce"], Reached(*parts["reached"]), before)

    def since(self, buffer: Replay) -> Reached | None:
        """Returns what `buffer` has got since the checkpoint; None: its rows are not those of the checkpoint."""
        now = Origin.of(buffer)
        held = (now.before | {now.nonce: now.reached}).get(self.nonce)
        if held is None or held.rows < self.reached.rows or held.updates < self.reached.updates:
            return None
        return Reached(now.reached.rows - self.reached.rows, now.reached.updates - self.reached.updates)

    def note_restored(self, buffer: Replay) -> None:
        """Remembers that `buffer` was restored from the checkpoint."""
        _BEFORE[source_of(buffer).nonce] = self.before | {self.nonce: self.reached}


def _reached(buffer: Replay) -> Reached:
    stats = buffer.stats()
    return Reached(stats.rows_written, stats.updated)

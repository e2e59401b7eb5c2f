"""The exceptions that are torchreplay's own. Bad arguments raise `ValueError` or `TypeError` as everywhere."""


class Stopped(RuntimeError):
    """The buffer was stopped: all writers and waiting calls are to finish."""


class ReplayLost(Stopped):
    """The shards of a `ShardedReplay` are gone, or the buffer of another node is, and nobody had stopped it."""


class ReplayTimeout(TimeoutError):
    """A wait took longer than its `timeout`. The text has the numbers."""


class WouldBlockForever(RuntimeError):
    """A wait that nobody is left to end: for rows without a writer, or for a learner that will not come."""


class AttachError(RuntimeError, ConnectionError):
    """A handle cannot be attached: its owner is gone, on another machine, of another user, or another version."""


class LearnerLost(RuntimeError):
    """Another rank, that learned from the same buffer, died or failed. The text names it and its process."""


class MissingItems(KeyError):
    """Items to be gathered cannot be drawn: their rows were overwritten, or are not complete.

    Attributes:
        missing: How many.
        asked: How many keys there were.
        first: The first key without an item.
    """

    def __init__(self, missing: int, asked: int, first: int) -> None:
        super().__init__(missing, asked, first)
        self.missing, self.asked, self.first = missing, asked, first

    def __str__(self) -> str:
        return (
            f"{self.missing:,} of {self.asked:,} items cannot be drawn, the first under key {self.first}: its row was "
            f"overwritten or never written, or the item is not complete; missing='drop' leaves such items out"
        )


class CheckpointError(ValueError):
    """A saved buffer, or one in a file, is missing, damaged, or of another version."""

"""The exceptions that are torchreplay's own. Bad arguments raise `ValueError` or `TypeError` as everywhere."""


class Stopped(RuntimeError):
    """The buffer was stopped: all writers and waiting calls are to finish.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
        >>> buffer.stop()  # in any process
        >>> buffer.sample(4)
        Traceback (most recent call last):
        torchreplay.errors.Stopped: the replay buffer was stopped
    """


class ReplayLost(Stopped):
    """The shards of a `ShardedReplay` are gone, or the buffer of another node is, and nobody had stopped it."""


class ReplayTimeout(TimeoutError):
    """A wait took longer than its `timeout`. The text has the numbers.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
        >>> explorers_come = buffer.expect_writers()
        >>> buffer.sample(4, timeout=0.01)
        Traceback (most recent call last):
        torchreplay.errors.ReplayTimeout: no batch within 0.01 s: 0 items were inserted, 1 are needed ...
    """


class WouldBlockForever(RuntimeError):
    """A wait that nobody is left to end: for rows without a writer, or for a learner that will not come.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
        >>> buffer.sample(4)  # before anybody has written, or has begun to
        Traceback (most recent call last):
        torchreplay.errors.WouldBlockForever: sample() would wait for ever: 0 items were inserted, 1 are needed ...
    """

    no_writer = False  # is left: the items that are there are the last
    alone_since = 0.0  # by the monotonic clock, where no writer is left: the learner waits for one since then


class AttachError(RuntimeError, ConnectionError):
    """A handle cannot be attached: its owner is gone, on another machine, of another user, or another version.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
        >>> handle = buffer.handle()
        >>> buffer.close()
        >>> tr.ReplayBuffer.attach(handle)
        Traceback (most recent call last):
        torchreplay.errors.AttachError: the owner of the replay buffer (process ...) is gone, or has closed it: ...
    """


class LearnerLost(RuntimeError):
    """Another rank, that learned from the same buffer, died or failed. The text names it and its process.

    Example:
        >>> def make_buffer():
        ...     return tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
        >>> try:
        ...     with tr.Learners(make_buffer) as buffer:
        ...         pass  # train
        ... except tr.LearnerLost as error:
        ...     print(f"start all ranks again from the last checkpoint: {error}")
    """


class MissingItems(KeyError):
    """Items to be gathered cannot be drawn: their rows were overwritten, or are not complete.

    Attributes:
        missing: How many.
        asked: How many keys there were.
        first: The first key without an item.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=2)
        >>> keys = buffer.extend(obs=torch.zeros(3, 3))  # the third row overwrites the first
        >>> buffer.gather(keys, missing="raise")
        Traceback (most recent call last):
        torchreplay.errors.MissingItems: 1 of 3 items cannot be drawn, the first under key 0: ...
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
    """A saved buffer, or one in a file, is missing, damaged, or of another version.

    Example:
        >>> try:
        ...     buffer = tr.ReplayBuffer.load("checkpoint")
        ... except tr.CheckpointError as error:  # there is none yet
        ...     buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
    """

"""Two processes write numbered rows to a queue, and two draw them."""

import contextlib

from forked import Forked, shared_counters

import torchreplay as tr


def drawn_by_two_learners(buffer, rows, row_of, numbers_of, batch_size, prefetch):
    """Returns how often each number was drawn, when writers and learners have ended.

    Args:
        buffer: The queue.
        rows: How many are written, each with a number of its own.
        row_of: Returns the row with a number, as `append` takes it.
        numbers_of: Returns the numbers of a batch, whose other values it checks.
        batch_size: Of each learner's dataset.
        prefetch: Of it.
    """
    drawn = shared_counters(rows), shared_counters(rows)

    def write(first):
        with buffer.writer() as writer:
            for number in range(first, rows, 2):
                writer.append(**row_of(number))

    def learn(own):
        for batch in tr.ReplayDataset(buffer, batch_size, prefetch=prefetch):
            for number in numbers_of(batch):
                own[number] += 1

    lease = buffer.expect_writers()
    with contextlib.ExitStack() as running:
        learners = [running.enter_context(Forked(learn, own)) for own in drawn]
        writers = [running.enter_context(Forked(write, first)) for first in range(2)]
        assert [writer.wait() for writer in writers] == [0, 0]
        lease.close()
        assert [learner.wait() for learner in learners] == [0, 0]
    return [sum(counts) for counts in zip(*drawn, strict=True)]

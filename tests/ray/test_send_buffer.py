"""What a remote writer has written and nobody has acknowledged: chunks of good size, and not without bounds."""

import pytest
import torch

import torchreplay as tr
from torchreplay.ray.remote import send_buffer as outboxes
from torchreplay.ray.remote.send_buffer import IN_FLIGHT, SendBuffer

ROWS = 64


class Full(Exception):
    """The outbox admits no more rows."""


class Collecting(tr.Writer):
    """Does not wait."""

    def _wait(self, stalled):
        raise Full


@pytest.fixture
def outbox(monkeypatch):
    monkeypatch.setattr(outboxes, "CHUNK_ROWS", ROWS)
    return SendBuffer(tr.ReplayBuffer({"n": tr.Field((), torch.int64)}, 1000)._config, 1)


@pytest.fixture
def write(outbox):
    """Writes so many rows more, numbered from 0."""
    writer = Collecting(outbox.stage._segment, outbox.stage._config)

    def write(rows):
        for _ in range(rows):
            writer.append(n=writer.rows)

    return write


def sizes(outbox):
    return [chunk.rows for chunk in outbox.chunks]


def test_chunks_are_whole_as_long_as_nobody_waits_for_them(outbox, write):
    write(ROWS - 1)
    outbox.cut(everything=False)
    assert sizes(outbox) == []
    write(1)
    outbox.cut(everything=False)
    assert sizes(outbox) == [ROWS]
    write(5)
    outbox.cut(everything=False)
    assert sizes(outbox) == [ROWS]
    outbox.cut(everything=True)
    write(6)
    outbox.hurried = True
    outbox.cut(everything=False)
    assert sizes(outbox) == [ROWS, 5, 6]
    assert [chunk.first for chunk in outbox.chunks] == [0, ROWS, ROWS + 5]


def test_a_writer_of_whom_nothing_is_acknowledged_gets_so_far_and_no_further(outbox, write):
    for _ in range(10 * IN_FLIGHT):
        try:
            write(ROWS)
        except Full:
            outbox.cut(everything=True)
    assert sizes(outbox) == [ROWS] * IN_FLIGHT
    with pytest.raises(Full):
        write(1)
    outbox.acknowledge(1)
    outbox.cut(everything=False)
    write(ROWS)
    assert [chunk.number for chunk in outbox.chunks] == [2, 3, 4, 5]
    assert not outbox.is_empty


def test_it_is_empty_when_all_is_acknowledged(outbox, write):
    assert outbox.is_empty
    write(3)
    assert not outbox.is_empty
    outbox.cut(everything=True)
    assert not outbox.is_empty
    outbox.in_air = 1
    outbox.acknowledge(1)
    assert not outbox.is_empty, "a call is under way"
    outbox.in_air = 0
    assert outbox.is_empty
    assert outbox.answered


def test_the_first_reason_to_take_no_more_rows_is_the_one_that_is_told(outbox, write):
    outbox.end("it was refused")
    outbox.end("Ray was shut down")
    assert outbox.ending == "it was refused"
    with pytest.raises(Full):
        write(1)

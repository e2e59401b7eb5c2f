"""What a remote writer has written and nobody has acknowledged: chunks of good size, and not without bounds."""

import pytest
import torch

import torchreplay as tr
from torchreplay.ray.remote import send_buffer as send_buffers
from torchreplay.ray.remote.send_buffer import IN_FLIGHT, SendBuffer

ROWS = 64


class Full(Exception):
    """The send buffer admits no more rows."""


class Collecting(tr.Writer):
    """Does not wait."""

    def _wait(self, stalled):
        raise Full


@pytest.fixture
def send_buffer(monkeypatch):
    monkeypatch.setattr(send_buffers, "CHUNK_ROWS", ROWS)
    return SendBuffer(tr.ReplayBuffer({"n": tr.Field((), torch.int64)}, 1000)._config, 1)


@pytest.fixture
def write(send_buffer):
    """Writes so many rows more, numbered from 0."""
    writer = Collecting(send_buffer.stage._segment, send_buffer.stage._config)

    def write(rows):
        for _ in range(rows):
            writer.append(n=writer.rows)

    return write


def sizes(send_buffer):
    return [chunk.rows for chunk in send_buffer.chunks]


def test_chunks_are_whole_as_long_as_nobody_waits_for_them(send_buffer, write):
    write(ROWS - 1)
    send_buffer.cut(everything=False)
    assert sizes(send_buffer) == []
    write(1)
    send_buffer.cut(everything=False)
    assert sizes(send_buffer) == [ROWS]
    write(5)
    send_buffer.cut(everything=False)
    assert sizes(send_buffer) == [ROWS]
    send_buffer.cut(everything=True)
    write(6)
    send_buffer.hurried = True
    send_buffer.cut(everything=False)
    assert sizes(send_buffer) == [ROWS, 5, 6]
    assert [chunk.first for chunk in send_buffer.chunks] == [0, ROWS, ROWS + 5]


def test_a_writer_of_whom_nothing_is_acknowledged_gets_so_far_and_no_further(send_buffer, write):
    for _ in range(10 * IN_FLIGHT):
        try:
            write(ROWS)
        except Full:
            send_buffer.cut(everything=True)
    assert sizes(send_buffer) == [ROWS] * IN_FLIGHT
    with pytest.raises(Full):
        write(1)
    send_buffer.acknowledge(1)
    send_buffer.cut(everything=False)
    write(ROWS)
    assert [chunk.number for chunk in send_buffer.chunks] == [2, 3, 4, 5]
    assert not send_buffer.is_empty


def test_it_is_empty_when_all_is_acknowledged(send_buffer, write):
    assert send_buffer.is_empty
    write(3)
    assert not send_buffer.is_empty
    send_buffer.cut(everything=True)
    assert not send_buffer.is_empty
    send_buffer.in_air = 1
    send_buffer.acknowledge(1)
    assert not send_buffer.is_empty, "a call is under way"
    send_buffer.in_air = 0
    assert send_buffer.is_empty
    assert send_buffer.answered


def test_the_first_reason_to_take_no_more_rows_is_the_one_that_is_told(send_buffer, write):
    send_buffer.end("it was refused")
    send_buffer.end("Ray was shut down")
    assert send_buffer.ending == "it was refused"
    with pytest.raises(Full):
        write(1)

"""What a remote writer has written and nobody has acknowledged: chunks of good size, and not without bounds."""

from types import SimpleNamespace

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

    def _look(self, stalled, waited):
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
    return [chunk.rows for chunk in send_buffer.window.chunks]


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
    assert [chunk.first for chunk in send_buffer.window.chunks] == [0, ROWS, ROWS + 5]


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
    assert [chunk.number for chunk in send_buffer.window.chunks] == [2, 3, 4, 5]
    assert not send_buffer.is_empty


def test_it_is_empty_when_all_is_acknowledged(send_buffer, write):
    assert send_buffer.is_empty
    write(3)
    assert not send_buffer.is_empty
    send_buffer.cut(everything=True)
    assert not send_buffer.is_empty
    send_buffer.window.note_sent(1)
    send_buffer.acknowledge(1)
    assert not send_buffer.is_empty, "a call is under way"
    send_buffer.window.note_answer()
    assert send_buffer.is_empty
    assert not send_buffer.source.fresh


def numbers_sent(window):
    sent = []
    for chunk in window.to_send():
        window.note_sent(chunk.number)
        sent.append(chunk.number)
    return sent


def test_after_one_that_was_not_taken_all_are_sent_again_once_every_call_is_answered(send_buffer, write):
    window = send_buffer.window
    for _ in range(3):
        write(ROWS)
        send_buffer.cut(everything=False)
    assert numbers_sent(window) == [1, 2, 3]
    assert numbers_sent(window) == []
    send_buffer.acknowledge(1)
    window.go_back()
    for _ in range(3):
        assert numbers_sent(window) == [], "a call is under way"
        window.note_answer()
    assert numbers_sent(window) == [2, 3]


def test_what_cannot_be_sent_keeps_back_what_is_behind_it_for_a_while(send_buffer, write, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(send_buffers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    window = send_buffer.window
    for _ in range(2):
        write(ROWS)
        send_buffer.cut(everything=False)
    for chunk in window.to_send():
        window.stored[chunk.number] = "lost"
        window.start_over(0.25)
    assert not window.stored
    assert numbers_sent(window) == []
    clock.now += 0.25
    assert numbers_sent(window) == [1, 2]


def test_the_first_reason_to_take_no_more_rows_is_the_one_that_is_told(send_buffer, write):
    send_buffer.end("it was refused")
    send_buffer.end("Ray was shut down")
    assert send_buffer.ended.reason == "it was refused"
    with pytest.raises(Full):
        write(1)

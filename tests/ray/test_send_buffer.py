"""What a remote writer has written and nobody has acknowledged: chunks of good size, and not without bounds."""

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import torchreplay as tr
from torchreplay.ray.remote import send_buffer as send_buffers
from torchreplay.ray.remote.ingest_actor import IngestWriter
from torchreplay.ray.remote.send_buffer import IN_FLIGHT, SendBuffer
from torchreplay.segment.delivery_log import DeliveryLog

ROWS = 64


class Full(Exception):
    """The send buffer admits no more rows."""


class Collecting(tr.Writer):
    """Does not wait."""

    def _look(self, stalled, waited, pages=False):
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
    for _ in window.to_send():
        window.start_over(0.25)
    assert numbers_sent(window) == []
    clock.now += 0.25
    assert numbers_sent(window) == [1, 2]


def test_the_first_reason_to_take_no_more_rows_is_the_one_that_is_told(send_buffer, write):
    send_buffer.end("it was refused")
    send_buffer.end("Ray was shut down")
    assert send_buffer.ended.reason == "it was refused"
    with pytest.raises(Full):
        write(1)


TOKENS = {"tokens": tr.Ragged(torch.int32), "like": tr.Ragged(torch.float32, like="tokens"), "n": tr.Field()}
CHUNK, WINDOW = 1 << 15, 3 << 15


class Sending(tr.Writer):
    """Sends what there is to an ingest when no more is admitted; counts how often it does."""

    def __init__(self, send_buffer, buffer, num_envs=None):
        super().__init__(send_buffer.segment, buffer._config, num_envs)
        self.send_buffer, self.log, self.times, self.most = send_buffer, DeliveryLog(), 0, 0
        source = send_buffer.source
        self.ingest = IngestWriter(buffer, self.log.entry(source.writer, source.num_envs, source.rows, True))

    def _look(self, stalled, waited, pages=False):
        assert not stalled
        self.times += 1
        self.send_buffer.wanted = self._wanted_bytes()
        self.send(everything=False)
        assert self._admitted(), "it would wait until the next sweep"

    def send(self, everything):
        self.send_buffer.cut(everything)
        for chunk in list(self.send_buffer.window.chunks):
            self.most = max(self.most, chunk.block.nbytes)
            self.ingest.write(chunk)
            self.send_buffer.acknowledge(chunk.number)
        if everything and not self.send_buffer.is_empty:
            self.send(everything)


@pytest.fixture
def small(monkeypatch):
    """Chunks of a few rows."""
    for name, size in (("CHUNK_BYTES", CHUNK), ("WINDOW_BYTES", WINDOW), ("CHUNK_ROWS", ROWS)):
        monkeypatch.setattr(send_buffers, name, size)


@pytest.mark.parametrize("seed", range(4))
def test_values_of_any_length_arrive_whole_and_in_order_whatever_their_sizes(small, seed):
    """Beside a list of arrays: from values of nothing to a quarter of the buffer, which is far more than a chunk."""
    random, rows = np.random.default_rng(seed), []
    buffer = tr.ReplayBuffer(TOKENS, 5000, ragged_bytes=1 << 24)
    most = (1 << 24) // 4 // 8  # elements
    writer = Sending(SendBuffer(buffer._config, 1), buffer)
    for n in range(300):
        longest = (0, 8, 300, 3 * CHUNK // 8, most // 20)[int(random.integers(0, 5))] if n != 150 else 0
        tokens = random.integers(0, 2**31, most - 1 if n == 150 else int(random.integers(0, longest + 1)))
        rows.append(tokens.astype(np.int32))
        writer.append(tokens=rows[-1], like=rows[-1].astype(np.float32), n=n)
    writer.send(everything=True)
    assert writer.times
    keys = torch.arange(300 - 100, 300)
    batch = buffer.gather(keys)
    there = batch["n"].int().tolist()
    assert there == list(range(there[0], 300)), "the oldest are gone, where pages were needed"
    assert len(there) > 20
    assert buffer.stats().rows_written == 300
    expected = [rows[n] for n in there]
    assert batch.lengths("tokens").tolist() == [len(row) for row in expected]
    assert np.array_equal(batch["tokens"].numpy(), np.concatenate(expected))
    assert np.array_equal(batch["like"].numpy(), np.concatenate(expected).astype(np.float32))


def test_episodes_with_values_of_any_length_arrive_linked(small):
    """Two environments: what a value is, and how long, follows from the environment and the step."""
    flag = tr.Field((), torch.bool)
    spec = {"obs": tr.Ragged(torch.int64), "act": tr.Ragged(torch.uint8), "reward": tr.Field()}
    spec |= {"terminated": flag, "truncated": flag}
    buffer = tr.ReplayBuffer(spec, 5000, view=tr.Transitions(), ragged_bytes=1 << 22)
    writer = Sending(SendBuffer(buffer._config, 2), buffer, 2)

    def obs(env, step):
        return [env, *[step] * (step % 50)]

    writer.reset(obs=[obs(env, 0) for env in range(2)])
    no = np.zeros(2, bool)
    for step in range(1, 800):
        values = [obs(env, step) for env in range(2)]
        acts = [[env] * (step % 7) for env in range(2)]
        writer.step(obs=values, act=acts, reward=[step, -step], terminated=no, truncated=no)
    writer.send(everything=True)
    assert writer.times
    batch = buffer.gather(buffer.keys())
    assert batch["reward"].abs().tolist() == [step for step in range(1, 800) for _ in range(2)]
    values = [torch.split(batch[name], batch.lengths(name).tolist()) for name in ("obs", "next_obs", "act")]
    for reward, *found in zip(batch["reward"].int().tolist(), *values, strict=True):
        env, step = int(reward < 0), abs(reward)
        assert [value.tolist() for value in found] == [obs(env, step - 1), obs(env, step), [env] * (step % 7)]


def test_a_writer_of_long_values_of_whom_nothing_is_acknowledged_is_stopped_by_their_bytes(small):
    config = tr.ReplayBuffer(TOKENS, 1000, ragged_bytes=1 << 22)._config
    send_buffer = SendBuffer(config, 1)
    writer, row = Collecting(send_buffer.segment, config), np.zeros(1500, np.int32)

    def write():
        with pytest.raises(Full):
            writer.extend(tokens=[row] * 1000, like=[row] * 1000, n=[0] * 1000)

    for _ in range(10 * IN_FLIGHT):
        write()
        send_buffer.cut(everything=False)
    values = 8 * len(row)
    assert [chunk.rows for chunk in send_buffer.window.chunks] == [-(-CHUNK // values)] * IN_FLIGHT
    for chunk in send_buffer.window.chunks:
        assert values * chunk.rows <= chunk.block.nbytes < values * chunk.rows + 400, "values, and no pages"
    assert writer.rows * values < IN_FLIGHT * (CHUNK + values) + WINDOW
    rows = writer.rows
    send_buffer.acknowledge(1)
    send_buffer.cut(everything=False)
    write()
    assert writer.rows == rows + -(-CHUNK // values)


def test_a_buffer_of_many_bytes_takes_little_memory_where_its_rows_come_from(small):
    class There(tr.Writer):
        def _look(self, stalled, waited, pages=False):
            send_buffer.cut(everything=False)
            for number in [chunk.number for chunk in send_buffer.window.chunks]:
                send_buffer.acknowledge(number)

    config = tr.ReplayBuffer(TOKENS, 8, ragged_bytes=1 << 22)._config
    send_buffer = SendBuffer(replace(config, ragged_bytes=1 << 40), 1)
    segment = send_buffer.segment
    before = os.fstat(segment.fd).st_blocks * 512
    writer, row = There(segment, config), np.zeros(1 << 10, np.int32)
    for n in range(2000):
        writer.append(tokens=row, like=row, n=n)
    assert writer.rows * 8 * len(row) > 100 * WINDOW
    taken = os.fstat(segment.fd).st_blocks * 512 - before
    assert taken < 4 * WINDOW
    send_buffer.stage.close()


def test_values_that_are_too_long_for_the_buffer_are_refused_where_they_are_written(small):
    buffer = tr.ReplayBuffer(TOKENS, 100, ragged_bytes=1 << 16)
    send_buffer = SendBuffer(buffer._config, 1)
    far, here = Collecting(send_buffer.segment, buffer._config), buffer.writer()
    for length in ((1 << 16) // 4 // 8 + 1, 5000):
        texts = []
        for writer in (far, here):
            with pytest.raises(ValueError, match=r"a quarter of ragged_bytes=65536") as refusal:
                writer.append(tokens=range(length), like=range(length), n=0)
            texts.append(str(refusal.value))
        assert texts[0] == texts[1]
    longest = range((1 << 16) // 4 // 8)
    for writer in (far, here):
        writer.append(tokens=longest, like=longest, n=0)

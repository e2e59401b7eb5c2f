"""The log of remote writers' chunks outlives the ingest actor. Of a chunk that comes again exactly the missing rows are
written, wherever the ingest was killed."""

import random
import time

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters

import torchreplay as tr
from torchreplay.ray.remote import send_buffer as send_buffers
from torchreplay.ray.remote.ingest_actor import IngestWriter
from torchreplay.ray.remote.send_buffer import SendBuffer
from torchreplay.segment import delivery_log as delivery_logs
from torchreplay.segment.delivery_log import DeliveryLog

SPEC = {
    "obs": tr.Field((2,), torch.int64),
    "reward": tr.Field((), torch.float64),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}
LANES = 3
CALLS = 3000
ROWS = 64
VIEWS = {"rows": tr.Rows(), "linked": tr.Transitions(n_step=2, gamma=1.0)}


def make(view, capacity=2 * LANES * CALLS):
    """Single rows have values of any length, too."""
    if view is VIEWS["rows"]:
        return tr.ReplayBuffer(SPEC | {"text": tr.Ragged(torch.uint8)}, capacity, view=view, ragged_bytes=1 << 21)
    return tr.ReplayBuffer(SPEC, capacity, view=view, seed=0)


def calls(writer, linked):
    """Makes the calls of a vector environment whose lanes end their episodes at different times."""
    lane, flags = np.arange(LANES), np.zeros(LANES, bool)
    for t in range(CALLS):
        obs = np.stack([lane, np.full(LANES, t)], 1)
        if linked and t == 0:
            writer.reset(obs=obs)
        else:
            values = {"obs": obs, "reward": np.full(LANES, t), "terminated": (t + lane) % 7 == 0, "truncated": flags}
            texts = {} if linked else {"text": [b"%d" % at * ((t + at) % 40) for at in range(LANES)]}
            (writer.step if linked else writer.extend)(**values, **texts)
        yield


def chunks_of(view, monkeypatch):
    """What a remote writer sends."""
    monkeypatch.setattr(send_buffers, "CHUNK_ROWS", ROWS)
    config = make(view)._config
    send_buffer = SendBuffer(config, LANES)
    collected = send_buffer.window.chunks
    linked = view is not VIEWS["rows"]
    chunks = []
    with tr.Writer(send_buffer.stage._segment, config, LANES if linked else None) as writer:
        for _ in calls(writer, linked):
            send_buffer.cut(everything=True)
            while len(collected) > 2 or (collected and collected[-1].rows < ROWS):
                chunks.append(collected.popleft())
    chunks += collected
    assert [chunk.number for chunk in chunks] == list(range(1, len(chunks) + 1))
    return send_buffer.source, chunks


def items(buffer):
    batch = buffer.gather(torch.arange(buffer.stats().rows_written))
    names = sorted(batch.keys() - {"key", "weight", "probability", "text", "offsets", "lengths"})
    n = len(batch["key"])
    rows = torch.cat([batch[name].reshape(n, -1).double() for name in names], 1).tolist()
    texts = torch.split(batch["text"], batch.lengths("text").tolist()) if "text" in batch else [()] * n
    return [(*row, *map(int, text)) for row, text in zip(rows, texts, strict=True)]


def ingest(buffer, log, source, chunks):
    """Does what the ingest does: goes on where the one before was killed."""
    eventually(log.acquire)
    writer = IngestWriter(buffer, log.entry(source.writer, source.num_envs, source.rows, True))
    for chunk in chunks[writer.entry.written :]:
        writer.write(chunk)


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_whoever_writes_chunks_may_be_killed_at_any_time(view, monkeypatch):
    source, chunks = chunks_of(view, monkeypatch)
    plain, buffer = make(view), make(view)
    linked = view is not VIEWS["rows"]
    with tr.Writer(plain._segment, plain._config, LANES if linked else None) as writer:
        for _ in calls(writer, linked):
            pass
    made = DeliveryLog()
    rng = random.Random(0)
    kills = 0
    while (entry := made.entry(source.writer, source.num_envs, source.rows, True)).written < len(chunks):
        before = entry.written
        child = Forked(ingest, buffer, made, source, chunks)
        eventually(lambda: entry.written > before or not child.is_running(), interval=0)  # noqa: B023
        stop = time.perf_counter() + rng.uniform(0, 0.002)
        while time.perf_counter() < stop:
            pass
        kills += child.is_running()
        child.kill()
        assert child.status in (0, -9)
    assert kills > 3
    found, expected = items(buffer), items(plain)
    assert len(found) > LANES * CALLS * 0.8
    assert sorted(found) == sorted(expected)
    if not linked:
        assert found == expected


@pytest.mark.parametrize("turned", [False, True])
def test_a_row_whose_writing_was_not_noted_comes_once_also_when_the_ring_has_turned_past_it(turned, monkeypatch):
    monkeypatch.setattr(send_buffers, "CHUNK_ROWS", ROWS)
    buffer = tr.ReplayBuffer({"x": tr.Field((), torch.int64)}, 100)
    send_buffer, log = SendBuffer(buffer._config, 1), DeliveryLog()
    with tr.Writer(send_buffer.stage._segment, buffer._config) as writer:
        for x in range(3):
            writer.append(x=1000 + x)
    send_buffer.cut(everything=True)
    chunk, source = send_buffer.window.chunks[0], send_buffer.source
    killed = IngestWriter(buffer, log.entry(source.writer, 1, source.rows, True))

    def die(*_):
        raise InterruptedError

    monkeypatch.setattr(killed.entry, "finish", die)
    with pytest.raises(InterruptedError):
        killed.write(chunk)
    if turned:
        buffer.extend(x=torch.arange(100))
    IngestWriter(buffer, log.entry(source.writer, 1, source.rows, True)).write(chunk)
    assert buffer.stats().rows_written == (103 if turned else 3)
    assert (buffer.storage["x"] >= 1000).sum() == (0 if turned else 3)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("turned", ["not", "pages", "pages of those before"])
def test_a_row_of_any_length_that_was_not_noted_comes_once_also_when_others_have_its_pages(rows, turned):
    """What was announced last was written, and then its pages were taken again, or those of the rows before it."""
    buffer = tr.ReplayBuffer({"text": tr.Ragged(torch.uint8), "x": tr.Field((), torch.int64)}, 100, ragged_bytes=4096)
    send_buffer, log = SendBuffer(buffer._config, 1), DeliveryLog()
    with tr.Writer(send_buffer.segment, buffer._config) as writer:
        for x in range(rows):
            writer.append(text=b"x" * 600, x=1000 + x)
    send_buffer.cut(everything=True)
    chunk, source = send_buffer.window.chunks[0], send_buffer.source
    entry = log.entry(source.writer, 1, source.rows, True)
    entry.begin(1, rows)
    killed = tr.Writer(buffer._segment, buffer._config)
    killed._relay(chunk.block, rows, np.zeros(rows, int), entry.keys[:rows], entry.runs, 0)
    # Rows of 640 bytes in 4096: six fit.
    others = {"not": 0, "pages": 7, "pages of those before": 6 - 1}[turned]
    buffer.extend(text=[b"y" * 600] * others, x=np.arange(others))
    assert len(buffer) == min(6, rows + others)
    IngestWriter(buffer, entry).write(chunk)
    assert buffer.stats().rows_written == rows + others
    assert entry.keys[:rows].tolist() == list(range(rows))


def test_a_row_of_any_length_that_was_announced_and_not_written_is_written():
    buffer = tr.ReplayBuffer({"text": tr.Ragged(torch.uint8)}, 100, ragged_bytes=4096)
    send_buffer, log = SendBuffer(buffer._config, 1), DeliveryLog()
    with tr.Writer(send_buffer.segment, buffer._config) as writer:
        writer.extend(text=[b"first", b"second"])
    send_buffer.cut(everything=True)
    chunk, source = send_buffer.window.chunks[0], send_buffer.source
    entry = log.entry(source.writer, 1, source.rows, True)
    entry.begin(1, 2)
    buffer.extend(text=[b"third"])
    entry.keys[:2], entry.runs[:] = [0, 1], [1, 2]  # row 0 is "third", and row 1 was never busy
    IngestWriter(buffer, entry).write(chunk)
    batch = buffer.gather([0, 1])
    assert bytes(batch["text"].numpy()) == b"thirdsecond"


def test_a_writer_that_is_forgotten_leaves_its_place():
    log = DeliveryLog()
    for writer in (5, 6):
        log.entry(writer, 1, ROWS, True)
    log.forget(5)
    log.forget(7)
    assert log.heard_of(60.0) == 1
    assert log.entry(5, 1, ROWS, False) is None
    assert log.entry(6, 1, ROWS, False) is not None


def test_the_entry_of_a_writer_that_left_goes_to_the_next_one():
    log = DeliveryLog()
    first = log.entry(1, num_envs=2, rows=8, fresh=True)
    first.begin(1, 8)
    first.finish(1, np.zeros(2, first.ends().dtype))
    assert log.entry(1, 2, 8, fresh=False).written == 1
    assert log.entry(2, 2, 8, fresh=False) is None
    first.leave()
    second = log.entry(3, num_envs=1, rows=8, fresh=True)
    assert second.written == 0
    assert not len(second.ends())
    assert second.begin(1, 8)
    assert not second.begin(1, 8)
    assert (log.entries["offset"] > 0).sum() == 1


def test_an_entry_goes_to_another_writer_only_when_nothing_was_heard_for_long(monkeypatch):
    monkeypatch.setattr(delivery_logs, "MAX_WRITERS", 2)
    log = DeliveryLog()
    assert log.entry(1, 1, 8, True).written == 0
    log.entry(2, 1, 8, True)
    with pytest.raises(MemoryError, match="2 remote writers"):
        log.entry(3, 1, 8, True)
    monkeypatch.setattr(delivery_logs, "FORGOTTEN_AFTER", 0.0)
    log.entry(2, 1, 8, False)
    log.entry(3, 1, 8, True)
    assert log.entry(1, 1, 8, False) is None
    assert log.entry(2, 1, 8, False) is not None


def test_a_writer_that_is_heard_of_keeps_its_entry_however_long_ago_it_came(monkeypatch):
    monkeypatch.setattr(delivery_logs, "MAX_WRITERS", 2)
    log = DeliveryLog()
    first = log.entry(1, 1, 8, True)
    log.entry(2, 1, 8, True)
    log.entries["used"] -= delivery_logs.FORGOTTEN_AFTER + 1
    first.touch()
    assert log.heard_of(delivery_logs.FORGOTTEN_AFTER) == 1
    log.entry(3, 1, 8, True)
    assert log.entry(1, 1, 8, False) is not None
    assert log.entry(2, 1, 8, False) is None


def test_a_free_entry_serves_also_a_writer_that_needs_more_room(monkeypatch):
    monkeypatch.setattr(delivery_logs, "MAX_WRITERS", 2)
    log = DeliveryLog()
    for entry in [log.entry(number, 1, 8, True) for number in (1, 2)]:
        entry.leave()
    wide = log.entry(3, num_envs=1000, rows=800, fresh=True)
    narrow = log.entry(4, num_envs=1, rows=8, fresh=True)
    wide.begin(1, 800)
    ends = np.arange(2000).view(wide.ends().dtype)
    wide.finish(1, ends)
    assert narrow.begin(1, 8)
    narrow.finish(1, ends[:1])
    assert (wide.ends() == ends).all()
    assert (wide.keys == -1).all()


def test_one_process_at_a_time_may_write_and_death_lets_the_next_one():
    def acquire(log):
        assert log.acquire()
        acquired[0] = 1
        eventually(lambda: False)

    acquired = shared_counters(1)
    log = DeliveryLog()
    with Forked(acquire, DeliveryLog.attach(log.handle())) as child:
        eventually(lambda: acquired[0])
        successor = DeliveryLog.attach(log.handle())
        assert not successor.acquire()
        assert not successor.acquire()
        child.kill()
        assert successor.acquire()

"""Rows of remote writers over a connection: what cuts it, what is refused, and what happens without. No Ray runs."""

import contextlib
import random
import socket
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from forked import eventually
from local_ingest import CutConnections, Home, ServedIngest, ray_of_this_process

import torchreplay as tr

pytest.importorskip("ray")
from torchreplay.ray.remote import row_sender, send_buffer
from torchreplay.ray.remote.remote_buffer import RemoteWriter
from torchreplay.ray.remote.row_sender import RowSender
from torchreplay.ray.remote.row_wire import ANSWER, PUSH, Answer, Chunk, RowLink, RowServer, Source
from torchreplay.ray.remote.send_buffer import SendBuffer
from torchreplay.ray.sharded.remote_shard import RemoteShard
from torchreplay.ray.wire import way
from torchreplay.ray.wire.connection import HELLO, MARK, Address, LinkBroken

SECONDS = 20
SPEC = {"n": tr.Field((), torch.int64), "wide": tr.Field((100,), torch.int64)}
FLAG = tr.Field((), torch.bool)
STEPS = {"obs": tr.Field((), torch.int64), "reward": tr.Field(), "terminated": FLAG, "truncated": FLAG}


@pytest.fixture
def serve(monkeypatch):
    """Returns the ingest of a buffer, and what makes a sender to it."""
    ray_of_this_process(monkeypatch)
    senders, ingests = [], []

    def serve(buffer):
        ingest = ServedIngest(buffer, monkeypatch)
        ingests.append(ingest)

        def sender():
            senders.append(RowSender(Home(ingest)))
            return senders[-1]

        return ingest, sender

    yield serve
    for sender in senders:
        sender.drain()
    for ingest in ingests:
        if ingest.server is not None:
            ingest.server.close()
    eventually(lambda: not any(thread.name.startswith("torchreplay") for thread in threading.enumerate()))


def chunks_of(buffer, monkeypatch, rows=64, n=4):
    """The first so many chunks of a writer, and its source."""
    monkeypatch.setattr(send_buffer, "CHUNK_ROWS", rows)
    collected = SendBuffer(buffer._config, 1)
    with tr.Writer(collected.segment, buffer._config) as writer:
        for number in range(n):
            counts = np.arange(number * rows, (number + 1) * rows)
            writer.extend(n=counts, wide=counts[:, None].repeat(100, 1))
            collected.cut(everything=True)
    collected.stage.close()
    return list(collected.window.chunks), collected.source


def numbers(buffer):
    batch = buffer.gather(buffer.keys(rows=True))
    assert torch.equal(batch["wide"], batch["n"][:, None].expand(-1, 100))
    return batch["n"].tolist()


@pytest.mark.parametrize("seed", range(3))
def test_connections_that_are_cut_in_mid_chunk_lose_and_double_nothing(serve, monkeypatch, seed):
    """In either direction, after any number of bytes: of the hello, of a head, of a block, of an answer."""
    chance = random.Random(seed)
    for module, name in ((way, "BROKEN_SECONDS"), (way, "AGAIN_SECONDS"), (row_sender, "PAUSE")):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(send_buffer, "CHUNK_ROWS", 64)
    buffer = tr.ReplayBuffer(SPEC, 10_000)
    ingest, sender = serve(buffer)
    first = [1 << 20]  # so that there was a connection: one that never was is not tried again
    cuts = CutConnections(ingest.locate(), lambda: first.pop() if first else chance.choice([30, 200, 60_000, 300_000]))
    ingest.locate = lambda: cuts.address
    with RemoteWriter(sender(), buffer._config, None, "next_step") as writer:
        for n in range(8000):
            writer.append(n=n, wide=np.full(100, n))
    assert numbers(buffer) == list(range(8000))
    assert cuts.cut > 10
    cuts.close()


def test_episodes_go_on_over_a_connection_that_is_cut(serve, monkeypatch):
    for module, name in ((way, "BROKEN_SECONDS"), (row_sender, "PAUSE")):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(send_buffer, "CHUNK_ROWS", 64)
    view = tr.Transitions(n_step=2, gamma=1.0)
    buffer = tr.ReplayBuffer(STEPS, 10_000, view=view)
    ingest, sender = serve(buffer)
    cuts = CutConnections(ingest.locate(), lambda: 20_000)
    ingest.locate = lambda: cuts.address
    no = np.zeros(2, bool)
    with RemoteWriter(sender(), buffer._config, 2, "next_step") as writer:
        writer.reset(obs=np.array([0, -1]))
        for step in range(1, 2000):
            writer.step(obs=np.array([step, -1 - step]), reward=np.zeros(2), terminated=no, truncated=no)
        writer.end_episode()
    batch = buffer.gather(buffer.keys())
    assert cuts.cut
    due = {(step, min(step + 2, 1999)) for step in range(1999)}
    items = list(zip(batch["obs"].tolist(), batch["next_obs"].tolist(), strict=True))
    assert len(items) == 2 * len(due)
    assert set(items) == due | {(-1 - obs, -1 - after) for obs, after in due}
    cuts.close()


def test_where_no_connection_can_be_made_rows_go_by_rays_calls_and_it_is_said_once(serve, caplog):
    buffer = tr.ReplayBuffer(SPEC, 1000)
    ingest, sender = serve(buffer)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = Address(*closed.getsockname(), b"any")
    ingest.locate = lambda: address
    with RemoteWriter(sender(), buffer._config, None, "next_step") as writer:
        for n in range(3):
            writer.append(n=n, wide=np.full(100, n))
            writer.flush()
    assert numbers(buffer) == [0, 1, 2]
    assert ingest.by_ray == 3
    (record,) = caplog.records
    assert "the buffer on node there is called through Ray, which is slower" in record.getMessage()
    assert "refused" in record.getMessage()


def test_rows_go_over_the_connection_where_there_is_one(serve):
    buffer = tr.ReplayBuffer(SPEC, 1000)
    ingest, sender = serve(buffer)
    with RemoteWriter(sender(), buffer._config, None, "next_step") as writer:
        assert writer.append(n=7, wide=np.full(100, 7)) is None
        assert writer.extend(n=[8, 9], wide=np.array([[8], [9]]).repeat(100, 1)) is None
        writer.flush()
        writer._buffer_closed = True  # as closing the object of the buffer does
        with pytest.raises(RuntimeError, match="is closed, and this writer with it"):
            writer.append(n=10, wide=np.zeros(100))
    assert numbers(buffer) == [7, 8, 9]
    assert ingest.by_ray == 0


@pytest.mark.parametrize(
    "head",
    [
        (MARK, 5, 1, 64, True, 1, 0, 64, 0, 1 << 40),  # more bytes than any chunk has
        (MARK, 5, 1, 64, True, 1, 0, 64, 900, 1000),  # links behind its end
        (MARK, 5, 1, 64, True, 1, 0, (1 << 64) - 1, 0, 1000),
        (b"what", 5, 1, 64, True, 1, 0, 1, 0, 1000),
    ],
)
def test_a_chunk_that_makes_no_sense_ends_the_connection_and_writes_nothing(serve, head):
    buffer = tr.ReplayBuffer(SPEC, 1000)
    ingest, _ = serve(buffer)
    with socket.create_connection(ingest.locate()[:2], SECONDS) as connection:
        connection.sendall(HELLO + ingest.locate().secret + PUSH.pack(*head))
        assert connection.recv(1 << 10) == HELLO
        assert connection.recv(1) == b""
    assert len(buffer) == 0


def test_a_block_of_another_length_than_its_rows_is_refused_and_the_connection_goes_on(serve, monkeypatch, caplog):
    buffer = tr.ReplayBuffer(SPEC, 1000)
    ingest, _ = serve(buffer)
    (chunk, *_), source = chunks_of(buffer, monkeypatch)
    short = chunk._replace(block=chunk.block[:-64].copy())
    with contextlib.closing(RowLink(ingest.locate())) as link:
        assert "bytes, expected" in link.push(source, short).result(SECONDS).refusal
        assert len(buffer) == 0
        assert link.push(source, chunk).result(SECONDS).written == 1
    assert numbers(buffer) == list(range(64))
    ingest.ingest.depart(source)
    caplog.clear()  # its records hold tracebacks, and these the buffer


@pytest.mark.parametrize("hello", [HELLO + bytes(32), b"another program's\n" * 4])
def test_who_does_not_know_the_secret_writes_nothing(serve, hello):
    buffer = tr.ReplayBuffer(SPEC, 1000)
    ingest, _ = serve(buffer)
    with socket.create_connection(ingest.locate()[:2], SECONDS) as stranger:
        stranger.sendall(hello[: len(HELLO) + 32])
        assert stranger.recv(1) == b""
    with pytest.raises(OSError, match="connection"):
        RowLink(ingest.locate()._replace(secret=bytes(32)))


def test_an_answer_that_is_too_long_ends_the_connection(serve, monkeypatch):
    buffer = tr.ReplayBuffer(SPEC, 1000)
    serve(buffer)
    (chunk, *_), source = chunks_of(buffer, monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as liar:

        def lie():
            with liar.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(HELLO + ANSWER.pack(MARK, 1, False, 1 << 31))
                connection.recv(1)

        liar_thread = threading.Thread(target=lie)
        liar_thread.start()
        with contextlib.closing(RowLink(Address(*liar.getsockname(), b"any"))) as link, pytest.raises(LinkBroken):
            link.push(source, chunk).result(SECONDS)
        liar_thread.join()


def test_chunks_that_come_over_several_connections_at_once_are_written_once(serve, monkeypatch):
    buffer = tr.ReplayBuffer(SPEC, 10_000)
    ingest, _ = serve(buffer)
    chunks, source = chunks_of(buffer, monkeypatch)
    ways = [RowLink(ingest.locate()) for _ in range(4)]
    for chunk in chunks:
        answers = [link.push(source, chunk) for link in ways]
        assert {answer.result(SECONDS).written for answer in answers} == {chunk.number}
    assert numbers(buffer) == list(range(64 * len(chunks)))
    for link in ways:
        link.close()
    ingest.ingest.depart(source)


def test_a_chunk_that_comes_when_its_writer_has_left_is_not_written_again(serve, monkeypatch, caplog):
    buffer = tr.ReplayBuffer(SPEC, 10_000)
    ingest, _ = serve(buffer)
    (chunk, *_), source = chunks_of(buffer, monkeypatch)
    assert source.fresh
    with contextlib.closing(RowLink(ingest.locate())) as late:
        assert ingest.ingest.push(source, chunk).written == 1  # by Ray's call
        ingest.ingest.depart(source)
        assert "closed" in late.push(source, chunk).result(SECONDS).refusal
    ingest.ingest.look([source])
    assert numbers(buffer) == list(range(64))
    assert not ingest.log.entries["writer"].any()
    caplog.clear()  # its records hold tracebacks, and these the buffer


def test_a_writer_that_another_thread_opens_while_its_shard_is_closed_is_closed_with_it(serve):
    buffer = tr.ReplayBuffer(SPEC, 1000)
    ingest, sender = serve(buffer)
    shard, rows = RemoteShard.__new__(RemoteShard), sender()
    shard._actor, shard._connection, shard._closed = Home(ingest), (buffer._config, rows), False
    shard._connecting, shard._writers = threading.Lock(), weakref.WeakSet()
    opened = rows.open
    rows.open = lambda config, num_envs: (opened(config, num_envs), shard.close())[0]  # as another thread does
    with shard.writer() as writer, pytest.raises(RuntimeError, match="is closed, and this writer with it"):
        writer.append(n=1, wide=np.zeros(100, np.int64))
    assert len(buffer) == 0


def test_an_answer_is_for_its_own_chunk_wherever_the_connection_ends():
    """Two threads end what waits, the one that takes answers and the one that closes: neither shifts the others'."""
    server = RowServer("127.0.0.1", lambda source, chunk: Answer(written=chunk.number), 1 << 20)
    block, interval = np.zeros(256, np.uint8), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        answered = 0
        for _ in range(400):
            link = RowLink(server.address)
            answers = [link.push(Source(n, 1, 1, False), Chunk(n, 0, 1, 0, block)) for n in range(1, 41)]
            link.close()
            for n, answer in enumerate(answers, 1):
                with contextlib.suppress(LinkBroken):
                    assert answer.result(SECONDS).written == n
                    answered += 1
        assert 0 < answered < 400 * 40
    finally:
        sys.setswitchinterval(interval)
        server.close()
    eventually(lambda: not any(thread.name.startswith("torchreplay") for thread in threading.enumerate()))

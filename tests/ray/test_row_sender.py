"""What the writers of a process hear of its sender, when their rows are refused, or it has come to its end."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import eventually
from local_ingest import Actor, Home, Method, ServedIngest, Unreachable, ray_of_this_process

import torchreplay as tr

pytest.importorskip("ray")
from torchreplay.ray import ReplayLost
from torchreplay.ray.remote import send_buffer as send_buffers
from torchreplay.ray.remote.ingest_actor import IngestWriter
from torchreplay.ray.remote.remote_buffer import RemoteBuffer, RemoteWriter
from torchreplay.ray.remote.row_sender import RowSender
from torchreplay.ray.remote.row_wire import Answer
from torchreplay.ray.runtime.actor_client import NodeActor
from torchreplay.schema.config import extend_as
from torchreplay.segment.delivery_log import DeliveryLog
from torchreplay.workers.worker_process import WorkerProcess

CONFIG = tr.ReplayBuffer({"n": tr.Field((), torch.int64)}, 100)._config


@pytest.fixture(params=["by Ray's calls", "over a connection"])
def sender_to(monkeypatch, request):
    """Returns a sender to an ingest that answers so."""
    ray_of_this_process(monkeypatch)
    senders = []

    def make(answer):
        wired = request.param == "over a connection"
        senders.append(RowSender(Home(Actor(answer, 1 << 26 if wired else None))))
        return senders[-1]

    yield make
    for sender in senders:
        sender.drain()
        assert not sender._thread.is_alive()
        server = sender._actor._find().server
        if server is not None:
            server.close()


def write_for_ever(writer):
    while True:
        writer.append(n=2)


def test_rows_that_are_refused_are_an_error_and_no_end_of_the_buffer(sender_to):
    sender = sender_to(lambda chunk: Answer(refusal="there is no room for them"))
    writer = RemoteWriter(sender, CONFIG, None, "next_step")
    writer.append(n=1)
    with pytest.raises(RuntimeError, match="no room for them") as refusal:
        writer.flush()
    assert refusal.type is RuntimeError
    with pytest.raises(RuntimeError, match="no room for them") as refusal:
        write_for_ever(writer)
    assert refusal.type is RuntimeError
    with pytest.raises(RuntimeError, match="no room for them"):
        writer.close()
    assert writer.closed
    with pytest.raises(ValueError, match="the writer is closed"):
        writer.flush()
    eventually(lambda: not sender._send_buffers)  # others may write, and it tries anew
    assert RemoteWriter(sender, CONFIG, None, "next_step").rows == 0


def test_a_remote_writer_refuses_what_a_local_one_refuses_and_sends_nothing_of_it(sender_to):
    chunks, no = [], np.zeros(2, bool)

    def answer(chunk):
        chunks.append(chunk)
        return Answer(chunk.number)

    spec = {"obs": tr.Field(), "reward": tr.Field()} | {n: tr.Field((), bool) for n in ("terminated", "truncated")}
    config = tr.ReplayBuffer(spec, 100, view=tr.Transitions())._config
    step = {"obs": np.zeros(2), "reward": np.zeros(2), "terminated": no, "truncated": no}
    with RemoteWriter(sender_to(answer), config, 2, "next_step") as writer:
        writer.reset(obs=np.zeros(2))
        writer.step(**step | {"terminated": ~no})
        with pytest.raises(ValueError, match=r"follows an end and brings a set flag .*buffer.writer\(envs\)"):
            writer.step(**step | {"truncated": ~no})
        with pytest.warns(UserWarning, match="'reward' is not 0 in environment 0"):
            writer.step(**step | {"reward": np.ones(2)})
        with ThreadPoolExecutor(1) as other, pytest.raises(ValueError, match="another thread is in the middle"):
            other.submit(lambda: writer.step(**step)).result()
        writer.flush()
        assert writer.rows == 6
    assert sum(chunk.rows for chunk in chunks) == 6


def test_a_row_that_needs_more_pages_than_there_is_room_for_gets_them(sender_to, monkeypatch):
    """Of rows of a few bytes to four chunks, each as long as its number says."""
    monkeypatch.setattr(send_buffers, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(send_buffers, "WINDOW_BYTES", 3 << 16)
    buffer = tr.ReplayBuffer(
        {"text": tr.Ragged(torch.uint8), "n": tr.Field((), torch.int64)}, 1000, ragged_bytes=1 << 26
    )
    sizes = [int(size) for size in np.random.default_rng(0).choice([3, 5000, 1 << 16, 1 << 18], 200)]
    log, chunks = DeliveryLog(), []

    def answer(chunk):
        chunks.append(chunk)
        return Answer(chunk.number)

    with RemoteWriter(sender_to(answer), buffer._config, None, "next_step") as writer:
        for n, size in enumerate(sizes):
            writer.append(text=b"%c" % n * size, n=n)
    ingest = IngestWriter(buffer, log.entry(1, 1, 4096, True))
    for chunk in chunks:
        ingest.write(chunk)
    batch = buffer.gather(range(200))
    assert batch["n"].tolist() == list(range(200))
    assert batch.lengths("text").tolist() == sizes
    assert np.array_equal(batch["text"].numpy(), np.repeat(np.arange(200, dtype=np.uint8), sizes))


@pytest.mark.parametrize("ending", [ReplayLost("its process is gone"), tr.Stopped("it was stopped")])
def test_a_buffer_that_is_gone_is_told_from_one_that_was_stopped(sender_to, ending):
    sender = sender_to(lambda chunk: Answer(ending=ending))
    writer = RemoteWriter(sender, CONFIG, None, "next_step")
    writer.append(n=1)
    for call in (writer.flush, lambda: write_for_ever(writer), lambda: RemoteWriter(sender, CONFIG, None, "next_step")):
        with pytest.raises(tr.Stopped, match=str(ending)) as told:
            call()
        assert told.type is type(ending)
    writer.close()


def test_an_explorer_whose_rows_are_refused_has_failed(sender_to, monkeypatch):
    def explore(*_):
        with RemoteWriter(sender_to(lambda chunk: Answer(refusal="no room")), CONFIG, None, "next_step") as writer:
            writer.append(n=1)

    monkeypatch.setattr("torchreplay.workers.worker_process._work", explore)
    outcome = WorkerProcess().run([], b"", None)
    assert (outcome.kind, outcome.error) == ("raised", "RuntimeError: no room")


def test_a_process_that_has_closed_its_writers_for_good_is_told_so(sender_to):
    sender = sender_to(lambda chunk: Answer(chunk.number))
    with RemoteWriter(sender, CONFIG, None, "next_step") as writer:
        writer.append(n=1)
    late = RemoteWriter(sender, CONFIG, None, "next_step")
    sender.drain()
    late.append(n=2)
    with pytest.raises(RuntimeError, match="closed its writers for good"):
        late.flush()
    with pytest.raises(RuntimeError, match="closed its writers for good"):
        RemoteWriter(sender, CONFIG, None, "next_step")


def test_a_process_that_gives_up_drops_what_the_limiter_keeps_out_and_nothing_else(sender_to):
    there, tries = [], []

    def answer(chunk):
        tries.append(chunk)
        if not there:
            raise Unreachable("it is being started again")
        return Answer(chunk.number)

    sender = sender_to(answer)
    writer = RemoteWriter(sender, CONFIG, None, "next_step")
    writer.append(n=1)
    (send_buffer,) = sender._send_buffers
    eventually(lambda: send_buffer.delay)
    sender.give_up()
    before = len(tries)
    eventually(lambda: len(tries) >= before + 2)  # it goes on trying
    there.append(True)
    writer.flush()
    writer.close()

    limited = sender_to(lambda chunk: Answer(waiting="the learner to draw more", limited=True))
    writer = RemoteWriter(limited, CONFIG, None, "next_step")
    writer.append(n=1)
    (send_buffer,) = limited._send_buffers
    eventually(lambda: send_buffer.delay)
    limited.give_up()
    with pytest.raises(tr.Stopped, match="the learner to draw more"):
        writer.flush()
    writer.close()


def test_nothing_is_asked_of_a_ray_that_was_shut_down_meanwhile(sender_to, monkeypatch):
    monkeypatch.setattr("torchreplay.ray.remote.row_sender.HEARTBEAT", 0.0)
    sender = sender_to(lambda chunk: Answer(chunk.number))
    writer = RemoteWriter(sender, CONFIG, None, "next_step")
    asked, look = [], sender._actor._find().look.remote

    def shut_down():
        sender._actor._find().look.remote = lambda sources: asked.append(sources) or look(sources)
        sender._ray.is_initialized = lambda: False

    sender._events.put(shut_down)
    eventually(lambda: sender.ending)
    sender.drain()
    assert not sender._thread.is_alive()
    assert asked == []
    with pytest.raises(tr.Stopped, match="Ray was shut down in this process"):
        writer.append(n=1)


class Elsewhere:
    """Ray, with one other node, whose actors do not answer."""

    exceptions = SimpleNamespace(RayError=Unreachable, RayTaskError=ZeroDivisionError)

    def __init__(self):
        self.running, self.asked, self.answer = True, [], Future()

    def is_initialized(self):
        return self.running

    def remote(self, **_):
        method = SimpleNamespace(remote=lambda *args: self.asked.append(args) or self.call)
        method.options = lambda **_: method
        actor = SimpleNamespace(read=method)
        return lambda kind: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: actor))

    @property
    def call(self):
        return SimpleNamespace(future=lambda: self.answer)


def test_who_waits_for_another_node_is_told_that_ray_was_shut_down_and_asks_it_no_more(monkeypatch):
    ray = Elsewhere()
    monkeypatch.setattr("torchreplay.ray.runtime.actor_client.import_ray", lambda: ray)
    monkeypatch.setattr("torchreplay.ray.runtime.actor_client.LOG_EVERY", 0.01)
    monkeypatch.setattr("torchreplay.ray.runtime.actor_client.living_nodes", lambda: {"there": {}})
    monkeypatch.setattr("torchreplay.ray.runtime.actor_client.only_on", lambda node: None)
    home = NodeActor("there", object, "name", ())
    ray.answer.set_result(3)
    assert home.ask("read") == 3
    ray.answer = Future()
    waiting = threading.Timer(0.1, lambda: setattr(ray, "running", False))
    waiting.start()
    with pytest.raises(tr.AttachError, match="Ray was shut down in this process"):
        home.ask("read")
    with pytest.raises(tr.AttachError, match="Ray was shut down in this process"):
        home.ask("read")
    assert len(ray.asked) == 2
    waiting.join()


def test_every_call_of_a_closed_remote_buffer_is_a_runtime_error(monkeypatch):
    monkeypatch.setattr("torchreplay.ray.remote.remote_buffer.NodeActor", lambda node, *_: SimpleNamespace(node=node))
    buffer = RemoteBuffer(tr.Handle(1, 2, 3, 4, 5, "machine", "node"))
    buffer.close()
    buffer.close()
    calls = [buffer.writer, lambda: buffer.extend(n=[1]), lambda: len(buffer), lambda: buffer.stopped]
    for call in (*calls, buffer.stats, buffer.stop, lambda: buffer.limiter, lambda: buffer.capacity, buffer.__enter__):
        with pytest.raises(RuntimeError, match="the replay buffer is closed"):
            call()
    assert repr(buffer) == "RemoteBuffer(on node node)"


def test_rows_of_extend_are_of_the_learners_version(monkeypatch):
    ray_of_this_process(monkeypatch)
    spec = {"x": tr.Field((), torch.int64), "policy_version": tr.Field((), torch.int64)}
    with tr.ReplayBuffer(spec, 100, sampler=tr.Fifo(max_age=1)) as buffer:
        served = ServedIngest(buffer, monkeypatch)
        served.describe = Method(served.ingest.describe)
        with monkeypatch.context() as patch:
            patch.setattr("torchreplay.ray.remote.remote_buffer.NodeActor", lambda *_: Home(served))
            there = RemoteBuffer(buffer.handle())
        buffer.policy_version = 7
        there.extend(x=[1, 2])
        there.extend(x=[3], policy_version=[6])
        extend_as(there, 6)  # an explorer's weights may be older
        there.extend(x=[4])
        batch = buffer.sample(4, timeout=10)
        assert (batch["x"].tolist(), batch["policy_version"].tolist()) == ([1, 2, 3, 4], [7, 7, 6, 6])
        there.drain()
        served.server.close()
    eventually(lambda: not any(thread.name.startswith("torchreplay") for thread in threading.enumerate()))

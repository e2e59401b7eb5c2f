"""Draws and feedback over a connection of a learner's own: what comes through, and what ends it. Without Ray."""

import contextlib
import math
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import Forked, eventually
from local_shards import SPEC

import torchreplay as tr
from torchreplay import _C
from torchreplay.ray.sharded import reply_collector
from torchreplay.ray.sharded.batch_block import Layout
from torchreplay.ray.sharded.shard_actor import Shard
from torchreplay.ray.sharded.shard_wire import ANSWER, REQUEST, ShardLink, ShardReply, ShardServer
from torchreplay.ray.wire import server
from torchreplay.ray.wire.connection import HELLO, MARK, Address, LinkBroken, connect
from torchreplay.ray.wire.way import Way
from torchreplay.schema.config import Config

RAGGED = {**SPEC, "tokens": tr.Ragged("int32")}
SECONDS = 20


class Served:
    """A shard of 50 rows, a server and a link to it.

    Where the native core does not answer, `before` is called before each draw.
    """

    def __init__(self, spec=SPEC, native=True, initial="max_held"):
        config = Config.of(
            spec, 100, tr.Prioritized(alpha=1.0, initial=initial), None, None, None, 1 << 16 if spec is RAGGED else None
        )
        self.layout, self.shard = Layout(config.outputs()), Shard(3, config, 1, None)
        self.shard.open()
        rows = {"home": np.arange(50), "index": np.arange(50)}
        rows |= {name: np.zeros((50, *field.shape), np.uint8) for name, field in spec.items() if name == "picture"}
        if spec is RAGGED:
            rows["tokens"] = [np.full(i % 4, i, np.int32) for i in range(50)]
        self.shard._buffer.extend(**rows)
        self.before = lambda: None
        self.server = ShardServer("127.0.0.1", self._draw, self.shard.update, self.shard._native if native else None)
        self.exchange = _C.Exchange()
        self.link = ShardLink(self.server.address, self.exchange)

    def _draw(self, n, largest):
        self.before()
        return self.shard.draw(n, largest)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.link.close()
        self.server.close()
        self.shard._buffer.close()


@pytest.fixture(params=[True, False], ids=["native", "python"])
def native(request):
    """Whether the native core answers."""
    return request.param


def test_a_draw_brings_the_items_and_what_they_were_drawn_from(native):
    with Served(native=native) as served:
        report, block = served.link.draw(32, 1.0, served.layout).result(SECONDS)
        batch = served.layout.batch_over(torch.from_numpy(block), 32)
        assert torch.equal(batch["home"], batch["index"])
        assert torch.equal(batch["key"], batch["index"] + (3 << 48))
        assert report.candidates == 32
        assert report.drawn == served.shard.draw(0, 0.0)[0].drawn
        due = served.shard._buffer.stats().as_dict()
        exact = {name: value for name, value in due.items() if name not in ("last_write_age", "sample_wait_share")}
        assert {name: getattr(report.stats, name) for name in exact} == exact
        assert {type(getattr(report.stats, name)) for name in ("size", "priority_max", "stopped")} == {int, float, bool}


def test_it_counts_what_it_carries(native):
    with Served(native=native) as served:
        served.link.update(np.arange(50), np.ones(50)).result(SECONDS)
        _, block = served.link.draw(32, 1.0, served.layout).result(SECONDS)
        assert served.exchange.carried == 2 * (REQUEST.size + ANSWER.size) + 50 * (8 + 8) + block.nbytes


def test_values_of_any_length_come_with_their_lengths():
    with Served(RAGGED) as served:
        report, block = served.link.draw(32, 1.0, served.layout).result(SECONDS)
        assert report.candidates == 32
        fixed = served.layout.batch_over(served.layout.as_tensor(block), 32)
        batch = served.layout.with_values(fixed, [(block, np.arange(32))])
        for i, at in enumerate(batch["index"].tolist()):
            begin, end = batch["offsets"]["tokens"][i : i + 2].tolist()
            assert batch["tokens"][begin:end].tolist() == [at] * (at % 4)


def test_feedback_comes_before_the_draws_asked_for_later(native):
    with Served(native=native) as served:
        errors = np.linspace(1, 3, 50)
        done = served.link.update(np.arange(50), errors)
        report, _ = served.link.draw(4, 1.0, served.layout).result(SECONDS)
        assert done.result(0)
        assert report.drawn.total == pytest.approx((errors + served.shard._config.sampler.eps).sum(), rel=1e-6)


def test_what_the_shard_raises_is_raised_and_the_connection_goes_on(native):
    with Served(native=native) as served:
        with pytest.raises(ValueError, match="key 77 at index 1 was never issued"):
            served.link.update(np.array([1, 77]), np.ones(2)).result(SECONDS)
        assert served.link.draw(4, 1.0, served.layout).result(SECONDS)[0].candidates == 4


def test_the_native_core_answers_as_python_does():
    with Served() as served, Served(native=False) as other:
        largest = 0.0
        for step in range(1, 20):
            answers = []
            for one in served, other:
                keys = np.arange(step) * 7 % 50
                fed_back = one.link.update(keys, keys + 0.5 * step)
                report, block = one.link.draw(5 * step, 2.0 * step, one.layout).result(SECONDS)
                assert fed_back.result(0)
                answers.append((report, block))
            (report, block), (due, due_block) = answers
            batches = [one.layout.batch_over(torch.from_numpy(each), 5 * step) for each in (block, due_block)]
            for name in ("home", "index", "key", "probability"):
                assert torch.equal(batches[0][name], batches[1][name])
            assert (report.drawn, report.candidates, report.writers) == (due.drawn, due.candidates, due.writers)
            assert report.stats == replace(due.stats, last_write_age=report.stats.last_write_age)
            largest = max(largest, 2.0 * step, (keys + 0.5 * step).max())
            assert report.stats.priority_max == largest


@pytest.mark.parametrize("largest", [math.inf, 1e39])
def test_a_largest_priority_that_is_none_changes_nothing(native, largest):
    with Served(native=native) as served:
        with pytest.raises(ValueError, match="the largest priority is"):
            served.link.draw(4, largest, served.layout).result(SECONDS)
        assert served.link.draw(4, 1.0, served.layout).result(SECONDS)[0].stats.priority_max == 1.0


@pytest.mark.parametrize("td", [math.nan, math.inf])
def test_errors_that_are_no_numbers_are_refused_and_none_is_applied(native, td):
    with Served(native=native) as served:
        with pytest.raises(ValueError, match="1 of 2 TD errors are NaN or infinite, the first at index 1"):
            served.link.update(np.arange(2), np.array([5.0, td])).result(SECONDS)
        assert served.link.draw(4, 1.0, served.layout).result(SECONDS)[0].drawn.total == pytest.approx(50, rel=1e-4)


def test_to_feed_back_nothing_is_allowed_and_a_closed_shard_says_so(native):
    nothing = np.empty(0, np.int64), np.empty(0)
    with Served(native=native) as served:
        assert served.link.update(*nothing).result(SECONDS) is True
        served.shard._buffer.close()
        for keys in (nothing, (np.arange(1), np.ones(1))):
            with pytest.raises(RuntimeError, match="is closed"):
                served.link.update(*keys).result(SECONDS)


def test_a_largest_priority_that_others_have_seen_since_the_shard_was_cleared_counts(native):
    with Served(native=native, initial="max_seen") as served:
        served.link.draw(4, 500.0, served.layout).result(SECONDS)
        served.shard.clear()
        assert served.link.draw(4, 20.0, served.layout).result(SECONDS)[0].stats.priority_max == 20
        served.shard._buffer.extend(home=np.arange(5), index=np.arange(5))
        drawn = served.link.draw(4, 20.0, served.layout).result(SECONDS)[0].drawn
        assert drawn.total == pytest.approx(5 * 20, rel=1e-4)


def shared_memory():
    """The bytes of shared memory that this process has mapped."""
    ranges = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in (each.split("-") for each in ranges))


def test_a_learner_that_reads_no_more_keeps_no_closed_shard(native):
    before = shared_memory()
    with Served({**SPEC, "picture": tr.Field((1_000_000,), "uint8")}, native=native) as served:
        most = shared_memory()
        assert most >= before + 100_000_000
        stalled = connect(served.server.address)
        with stalled:
            stalled.sendall(REQUEST.pack(MARK, 50, 1.0))
            assert stalled.recv(4) == MARK  # the others wait for room
            served.shard._buffer.close()
            eventually(lambda: shared_memory() < most - 90_000_000)


def test_a_shard_that_takes_another_number_signs_with_that_one(native):
    with Served(native=native) as served:
        served.link.draw(4, 1.0, served.layout).result(SECONDS)
        served.shard._restore(5, [])
        _, block = served.link.draw(4, 1.0, served.layout).result(SECONDS)
        batch = served.layout.batch_over(torch.from_numpy(block), 4)
        assert torch.equal(batch["key"], batch["index"] + (5 << 48))


def test_a_closed_buffer_says_so(native):
    with Served(native=native) as served:
        served.shard._buffer.close()
        for answer in served.link.draw(4, 1.0, served.layout), served.link.update(np.arange(1), np.ones(1)):
            with pytest.raises(RuntimeError, match="closed"):
                answer.result(SECONDS)


def test_nothing_is_drawn_while_there_is_nothing_and_the_reason_comes(native):
    with Served(native=native) as served:
        served.shard.clear()
        report, block = served.link.draw(4, 1.0, served.layout).result(SECONDS)
        assert (report.candidates, report.stats.drawable, block) == (0, 0, None)
        served.shard._buffer.extend(home=np.arange(3), index=np.arange(3))
        assert served.link.draw(4, 1.0, served.layout).result(SECONDS)[0].candidates == 4


@pytest.mark.parametrize("hello", [HELLO + bytes(32), b"another program's\n" * 4])
def test_who_does_not_know_the_secret_is_not_heard(hello):
    with Served() as served, socket.create_connection(served.server.address[:2], SECONDS) as stranger:
        stranger.sendall(hello[: len(HELLO) + 32])
        assert stranger.recv(1) == b""
        with pytest.raises(OSError, match="connection"):
            ShardLink(served.server.address._replace(secret=bytes(32)), served.exchange)


@pytest.mark.parametrize("request_", [REQUEST.pack(MARK, 1 << 31, 1.0), REQUEST.pack(b"what", 4, 1.0)])
def test_a_request_that_makes_no_sense_ends_the_connection(request_):
    with Served() as served:
        broken = ShardReply(served.link.native.ask(0, request_), served.layout)
        with pytest.raises(LinkBroken):
            broken.result(SECONDS)
        with pytest.raises(LinkBroken):
            served.link.draw(4, 1.0, served.layout).result(SECONDS)


def test_an_answer_that_makes_no_sense_ends_the_connection():
    with Served() as served, socket.create_server(("127.0.0.1", 0)) as liar:

        def lie():
            connection, _ = liar.accept()
            connection.recv(100)
            connection.sendall(HELLO + b"\x00" * 1000)

        threading.Thread(target=lie, daemon=True).start()
        link = ShardLink(Address(*liar.getsockname(), b"any"), served.exchange)
        with pytest.raises(LinkBroken):
            link.draw(4, 1.0, served.layout).result(SECONDS)


def test_a_shard_that_ray_knows_to_be_dead_is_not_waited_for(monkeypatch):
    """Of a node that is lost no connection ends."""
    exceptions = pytest.importorskip("ray").exceptions

    def get(call):
        assert call == "a call"
        raise exceptions.ActorDiedError

    def lose(number, why):
        lost.append(number)
        served.link.close()

    wait = lambda calls, num_returns, timeout: (calls, [])  # noqa: E731
    ray = SimpleNamespace(exceptions=exceptions, wait=wait, get=get, is_initialized=lambda: True)
    monkeypatch.setattr(reply_collector, "WATCH_SECONDS", 0.1)
    monkeypatch.setattr(reply_collector, "import_ray", lambda: ray)
    with Served(native=False) as served:
        lost, held = [], threading.Event()
        served.before = lambda: held.wait(SECONDS)
        collector = reply_collector.ReplyCollector(lose, str, lambda number: "a call")
        assert collector.collect({7: served.link.draw(4, 1.0, served.layout)}) == {}
        assert lost == [7]
        held.set()
        ray.is_initialized = lambda: False
        held.clear()
        other = ShardLink(served.server.address, served.exchange)
        with pytest.raises(tr.AttachError, match="Ray was shut down"):
            collector.collect({7: other.draw(4, 1.0, served.layout)})
        held.set()
        other.close()


def test_where_no_connection_can_be_made_it_is_said_once_and_ray_is_called(caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = Address(*closed.getsockname(), b"any")
    asked = []

    def locate():
        asked.append(None)
        return address

    wait = lambda calls, timeout: (calls, [])  # noqa: E731
    way = Way(connect, "shard 2 on node b", locate)
    way._ray = SimpleNamespace(get=lambda call: call, wait=wait, exceptions=way._ray.exceptions)
    assert [way.link() for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert "shard 2 on node b is called through Ray, which is slower" in record.getMessage()
    assert len(asked) == 1


def test_strangers_who_say_nothing_keep_nobody_out_for_long_and_start_few_threads(monkeypatch):
    monkeypatch.setattr(server, "HELLO_SECONDS", 1)
    with Served() as served:
        before = threading.active_count()
        strangers = [socket.create_connection(served.server.address[:2]) for _ in range(3 * server.STRANGERS)]
        eventually(lambda: threading.active_count() >= before + server.STRANGERS // 2)
        assert threading.active_count() <= before + server.STRANGERS
        assert served.link.draw(8, 1.0, served.layout).result(SECONDS) is not None
        eventually(lambda: threading.active_count() == before)
        with contextlib.closing(ShardLink(served.server.address, served.exchange)) as other:
            assert other.draw(8, 1.0, served.layout).result(SECONDS) is not None
        for stranger in strangers:
            stranger.close()


def test_a_listener_goes_on_after_the_system_has_refused_a_connection(monkeypatch):
    with Served() as served:
        refused = threading.Event()
        accept = socket.socket.accept

        def fail_once(listener):
            if refused.is_set():
                return accept(listener)
            connection, _ = accept(listener)
            connection.close()
            refused.set()
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(socket.socket, "accept", fail_once)
        for _ in range(2):  # the first wakes the call of accept() that waits
            socket.create_connection(served.server.address[:2]).close()
        assert refused.wait(SECONDS)
        with contextlib.closing(ShardLink(served.server.address, served.exchange)) as other:
            assert other.draw(8, 1.0, served.layout).result(SECONDS) is not None


class Halved:
    """A server whose answer of so many bytes comes in two halves, the second one when it is told to."""

    def __init__(self, answer):
        self._answer, self.go_on = answer, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        self.link = ShardLink(Address(*self._listener.getsockname(), b"any"), _C.Exchange())

    def hang_up(self):
        """Ends the connection."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def _serve(self):
        self._connection, _ = self._listener.accept()
        with self._connection as connection:
            connection.recv(100)
            connection.sendall(HELLO)
            while connection.recv(REQUEST.size):
                connection.sendall(self._answer[:100])
                self.go_on.wait(SECONDS)
                connection.sendall(self._answer[100:])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.link.close()
        self.go_on.set()
        self._listener.close()


def answer_of(served, n=32):
    """Bytes of an answer to a draw of `n` items."""
    with connect(served.server.address) as connection, connection.makefile("rb") as answers:
        connection.sendall(REQUEST.pack(MARK, n, 1.0))
        head = answers.read(ANSWER.size)
        _, text, body, *_ = ANSWER.unpack(head)
        return head + answers.read(text + body)


def test_half_an_answer_can_be_waited_for_in_vain_and_comes_whole_later():
    with Served() as served, Halved(answer_of(served)) as halved:
        answer = halved.link.draw(32, 1.0, served.layout)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                answer.result(0.01)
        halved.go_on.set()
        report, block = answer.result(SECONDS)
        batch = served.layout.batch_over(torch.from_numpy(block), 32)
        assert report.candidates == 32
        assert torch.equal(batch["key"], batch["index"] + (3 << 48))


def test_a_learner_that_computes_has_its_answers_read_by_a_thread():
    with Served() as served:
        for _ in range(4):  # from the second time on it counts as one that is away between its calls
            answer = served.link.draw(4, 1.0, served.layout)
            answer.exception(SECONDS)
            time.sleep(0.01)
        ahead = served.link.draw(4, 1.0, served.layout)
        done = served.link.update(np.arange(50), np.ones(50))
        eventually(lambda: ahead.done() and done.done())  # nobody waits for them


def test_several_threads_wait_over_one_connection():
    with Served() as served:
        sizes = [1 + k % 7 for k in range(120)]
        with ThreadPoolExecutor(6) as pool:
            draw = lambda n: served.link.draw(n, 1.0, served.layout).result(SECONDS)  # noqa: E731
            assert [report.candidates for report, _ in pool.map(draw, sizes)] == sizes


def test_who_waits_reads_on_where_another_has_given_up():
    with Served() as served, Halved(answer_of(served)) as halved:
        answer = halved.link.draw(32, 1.0, served.layout)
        with ThreadPoolExecutor(2) as pool:
            impatient = pool.submit(answer.exception, 0.3)
            patient = pool.submit(answer.result, SECONDS)
            with pytest.raises(TimeoutError):
                impatient.result(SECONDS)
            halved.go_on.set()
            assert patient.result(SECONDS)[0].candidates == 32


def test_a_signal_handler_may_wait_for_what_it_has_interrupted():
    with Served() as served, Halved(answer_of(served)) as halved:
        answer, heard = halved.link.draw(32, 1.0, served.layout), []

        def handle(*_):
            halved.go_on.set()
            heard.append(answer.exception(SECONDS))
            heard.append(halved.link.draw(32, 1.0, served.layout).result(SECONDS)[0].candidates)

        before = signal.signal(signal.SIGALRM, handle)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            assert answer.result(SECONDS)[0].candidates == 32
        finally:
            signal.signal(signal.SIGALRM, before)
        assert heard == [None, 32]


def test_a_forked_child_leaves_its_parents_connection_alone():
    with Served() as served:
        answer = served.link.draw(4, 1.0, served.layout)

        def child():
            with pytest.raises(RuntimeError, match="forked child"):
                served.link.draw(4, 1.0, served.layout)
            served.link.close()

        with Forked(child) as forked:
            assert forked.wait(SECONDS) == 0
        assert answer.result(SECONDS)[0].candidates == 4
        assert served.link.draw(4, 1.0, served.layout).result(SECONDS)[0].candidates == 4


def test_an_answer_of_items_that_nobody_has_asked_for_ends_the_connection():
    with Served() as served, Halved(answer_of(served, 64)) as halved:
        halved.go_on.set()
        with pytest.raises(LinkBroken, match="nobody has asked for"):
            halved.link.draw(32, 1.0, served.layout).result(SECONDS)


def test_a_connection_says_that_it_has_ended_before_anything_is_asked():
    with Served() as served, Halved(b"") as halved:
        assert halved.link.broken is None
        halved.go_on.set()
        halved.hang_up()
        eventually(lambda: halved.link.broken is not None)
        with pytest.raises(LinkBroken):
            halved.link.draw(4, 1.0, served.layout).result(SECONDS)

"""The ingest of remote writers without Ray: a plain object, whose calls are answered at once. For tests of what their
sender does."""

import contextlib
import socket
import threading
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import torchreplay as tr
from torchreplay.ray.remote import ingest_actor
from torchreplay.ray.remote.ingest_actor import Ingest
from torchreplay.ray.remote.row_wire import RowServer
from torchreplay.ray.runtime.actor_client import ActorClient, NodeActor
from torchreplay.segment.delivery_log import DeliveryLog


class Unreachable(Exception):
    """What a call raises while nobody answers."""


class TaskFailed(Unreachable):
    """What a call raises whose method has raised."""

    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class Call:
    """What a call of Ray's returns."""

    def __init__(self, function, args):
        self._answer = Future()
        try:
            self._answer.set_result(function(*args))
        except Unreachable as error:
            self._answer.set_exception(error)
        except (tr.Stopped, ValueError, RuntimeError) as error:
            self._answer.set_exception(TaskFailed(error))

    def future(self):
        return self._answer


class Method:
    def __init__(self, function):
        self.remote = lambda *args: Call(function, args)

    def options(self, **_):
        return self


class Actor:
    """The ingest, whose answer to every chunk is what `answer` returns for it.

    With `most` it takes chunks of at most so many bytes over connections, too.
    """

    def __init__(self, answer, most=None):
        def over_a_connection(source, chunk):
            try:
                return answer(chunk._replace(block=chunk.block.copy()))  # its memory is used again
            except Unreachable:
                raise ConnectionError from None

        self.server = None if most is None else RowServer("127.0.0.1", over_a_connection, most)
        self.push = Method(lambda source, chunk: answer(chunk))
        self.address = Method(self.locate)
        self.depart = Method(lambda source: None)
        self.look = Method(lambda sources: "")

    def locate(self):
        if self.server is None:
            raise Unreachable("no connection is allowed")
        return self.server.address


class ServedIngest:
    """A buffer's ingest in this process, which is called as an actor is; `by_ray` counts the chunks that came so."""

    def __init__(self, buffer, monkeypatch):
        monkeypatch.setattr(ingest_actor, "LINGER", 0.0)  # its thread ends when the last writer has left
        monkeypatch.setattr(ingest_actor, "_LOOK_EVERY", 0.01)
        self.log, self.by_ray = DeliveryLog(), 0
        self._handle = replace(buffer.handle(), delivery_log=self.log.handle())
        self.start()

    def start(self):
        """Begins; or the process that served until now has died, and another one begins with its log."""
        self.ingest = Ingest(self._handle)
        self.locate = self.ingest.address
        self.push = Method(self._push)
        self.address = Method(lambda: self.locate())
        self.depart = Method(self.ingest.depart)
        self.look = Method(self.ingest.look)
        for name in ("truncate", "admit", "ask"):
            setattr(self, name, Method(getattr(self.ingest, name)))

    def _push(self, source, chunk):
        self.by_ray += 1
        return self.ingest.push(source, chunk)

    @property
    def server(self):
        return self.ingest._server


class Home(NodeActor):
    """The node there, on which that actor serves."""

    def __init__(self, actor):
        ActorClient.__init__(self, "the node there", "forked")
        self.node, self._find = "there", lambda: actor


def ray_of_this_process(monkeypatch):
    """Puts something in Ray's place that knows these calls."""
    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=Unreachable, RayTaskError=TaskFailed),
        is_initialized=lambda: True,
        wait=lambda calls, timeout: (calls, []),
        put=lambda value: value,
        get=lambda call: call.future().result(),
        kill=lambda actor, no_restart: None,
        get_runtime_context=lambda: SimpleNamespace(current_actor=None),
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
    )
    for module in ("remote.row_sender", "remote.ingest_actor", "runtime.actor_client", "wire.way"):
        monkeypatch.setattr(f"torchreplay.ray.{module}.import_ray", lambda: ray)


class CutConnections:
    """Passes connections on to a server, and ends each where it pleases: after so many bytes there or back.

    Args:
        address: Of the server.
        budget: Returns after how many bytes the next connection ends, in both directions together.
    """

    def __init__(self, address, budget):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = address._replace(port=self._listener.getsockname()[1])
        self._to, self._budget, self.cut = address[:2], budget, 0
        self._ends = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with self._listener:
            while True:
                try:
                    near, _ = self._listener.accept()
                except OSError:
                    return
                far, left = socket.create_connection(self._to), [self._budget()]
                self._ends += near, far
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass, args=(*ends, left)))
                    self._threads[-1].start()

    def _pass(self, source, sink, left):
        try:
            while data := source.recv(min(1 << 16, max(1, left[0]))):
                left[0] -= len(data)
                sink.sendall(data)
                if left[0] <= 0:
                    self.cut += 1
                    break
        except OSError:
            pass
        _shut_down(source, sink)

    def close(self):
        _shut_down(self._listener)
        self._threads[0].join()
        _shut_down(*self._ends)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


def _shut_down(*ends):
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

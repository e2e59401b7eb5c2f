"""What carries a batch from another process: ``python -m benchmarks.transports``, a process of its own.

A learner asks, and as many bytes as a batch has come into memory that it has ready. Each candidate has a process that
answers at once, on this machine. In each round all candidates are asked for a while, one after the other. What is not
installed is left out. It prints one JSON object: batches a second.
"""

import argparse
import importlib
import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

import torchreplay as tr
from benchmarks.line import OURS
from benchmarks.workload import ATARI, SMALL
from torchreplay import _C
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.ray.sharded.batch_block import Layout
from torchreplay.ray.sharded.shard_sampler import Answer, ShardReport
from torchreplay.ray.sharded.shard_wire import ShardLink, ShardServer
from torchreplay.ray.wire.connection import Address
from torchreplay.schema.spec import Field

ASKED = 24
"""Bytes of a request."""
HOST = "127.0.0.1"
BATCHES = {"64 Atari rows": (64, ATARI.row_bytes), "256 small rows": (256, SMALL.row_bytes)}
SIZES = {name: rows * nbytes for name, (rows, nbytes) in BATCHES.items()}

Ask = Callable[[memoryview], None]
"""Fills a batch's memory with the answer to one request, which says how many bytes are wanted."""


class Tcp:
    """A socket, and nothing else."""

    needs = "socket"

    @staticmethod
    def serve(port: int) -> None:
        """Answers until the other side is gone."""
        with (
            suppress(ConnectionError),
            socket.create_server((HOST, port)) as listener,
            listener.accept()[0] as connection,
        ):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked, answer = bytearray(ASKED), np.zeros(max(SIZES.values()), np.uint8).data
            while connection.recv_into(asked, 0, socket.MSG_WAITALL) == ASKED:
                connection.sendall(answer[: int.from_bytes(asked, "little")])

    @staticmethod
    @contextmanager
    def connected(port: int) -> Iterator[Ask]:
        """Gives what asks."""
        with socket.create_connection((HOST, port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def ask(room: memoryview) -> None:
                connection.sendall(len(room).to_bytes(ASKED, "little"))
                if connection.recv_into(room, 0, socket.MSG_WAITALL) < len(room):
                    raise ConnectionError

            yield ask


class Wire:
    """What a `ShardedReplay` uses, without the draw: a shard's server, and a learner's link with its thread."""

    needs = "ray"

    @staticmethod
    def _layout(nbytes: int) -> Layout:
        return Layout({("bytes",): Field((nbytes,), torch.uint8)})

    @classmethod
    def serve(cls, port: int) -> None:
        """Answers for ever; the first to connect hears where."""
        buffer = tr.ReplayBuffer({"bytes": tr.Field((), torch.uint8)}, 8)
        report, layouts = ShardReport(buffer.stats(), TreeSummary(0.0, 0, 0.0)), dict[int, Layout]()

        def draw(n: int, largest: float) -> Answer:
            layout = layouts.setdefault(n, cls._layout(int(largest)))
            return replace(report, candidates=n), layout.new_block(n).numpy()

        host, own_port, secret = ShardServer(HOST, draw, lambda keys, td: 0).address
        with socket.create_server((HOST, port)) as listener, listener.accept()[0] as connection:
            connection.sendall(json.dumps([host, own_port, secret.hex()]).encode())
        threading.Event().wait()

    @classmethod
    @contextmanager
    def connected(cls, port: int) -> Iterator[Ask]:
        """Gives what asks; the answer lies in memory of the link's own."""
        with socket.create_connection((HOST, port)) as connection:
            host, own_port, secret = json.loads(connection.makefile().read())
        link = ShardLink(Address(host, own_port, bytes.fromhex(secret)), _C.Exchange())
        layouts = {rows * nbytes: (rows, nbytes, cls._layout(nbytes)) for rows, nbytes in BATCHES.values()}

        def ask(room: memoryview) -> None:
            rows, nbytes, layout = layouts.get(len(room)) or (1, 1, cls._layout(1))
            link.draw(rows, float(nbytes), layout).result()

        yield ask
        link.close()


class ZeroMq:
    """A pair of sockets of pyzmq, without copies of its own."""

    needs = "zmq"

    @staticmethod
    def serve(port: int) -> None:
        """Answers for ever."""
        zmq: Any = importlib.import_module("zmq")
        pair, answer = zmq.Context().socket(zmq.PAIR), np.zeros(max(SIZES.values()), np.uint8).data
        pair.bind(f"tcp://{HOST}:{port}")
        while True:
            pair.send(answer[: int.from_bytes(pair.recv(), "little")], copy=False)

    @staticmethod
    @contextmanager
    def connected(port: int) -> Iterator[Ask]:
        """Gives what asks."""
        zmq: Any = importlib.import_module("zmq")
        pair = zmq.Context().socket(zmq.PAIR)
        pair.connect(f"tcp://{HOST}:{port}")

        def ask(room: memoryview) -> None:
            pair.send(len(room).to_bytes(ASKED, "little"))
            room[:] = pair.recv(copy=False).buffer

        yield ask


class Gloo:
    """`torch.distributed` between two ranks."""

    needs = "torch.distributed"

    @staticmethod
    def _joined(port: int, rank: int) -> Any:
        distributed: Any = importlib.import_module("torch.distributed")
        distributed.init_process_group("gloo", init_method=f"tcp://{HOST}:{port}", rank=rank, world_size=2)
        return distributed

    @classmethod
    def serve(cls, port: int) -> None:
        """Answers until the other side is gone."""
        distributed = cls._joined(port, 0)
        asked, answer = torch.zeros(ASKED // 8, dtype=torch.int64), torch.zeros(max(SIZES.values()), dtype=torch.uint8)
        while True:
            distributed.recv(asked, 1)
            distributed.send(answer[: int(asked[0])], 1)

    @classmethod
    @contextmanager
    def connected(cls, port: int) -> Iterator[Ask]:
        """Gives what asks."""
        distributed = cls._joined(port, 1)

        def ask(room: memoryview) -> None:
            distributed.send(torch.tensor([len(room), 0, 0]), 0)
            distributed.recv(torch.frombuffer(room, dtype=torch.uint8), 0)

        yield ask


class Flight:
    """Arrow Flight: a stream of one record batch for each request."""

    needs = "pyarrow.flight"

    @staticmethod
    def serve(port: int) -> None:
        """Answers for ever."""
        arrow: Any = importlib.import_module("pyarrow")
        flight: Any = importlib.import_module("pyarrow.flight")
        whole = arrow.array(np.zeros(max(SIZES.values()), np.uint8))

        class Server(flight.FlightServerBase):  # type: ignore[misc]
            def do_get(self, context: Any, ticket: Any) -> Any:
                batch = arrow.record_batch([whole[: int.from_bytes(ticket.ticket, "little")]], ["bytes"])
                return flight.RecordBatchStream(arrow.Table.from_batches([batch]))

        Server(f"grpc://{HOST}:{port}").serve()

    @staticmethod
    @contextmanager
    def connected(port: int) -> Iterator[Ask]:
        """Gives what asks."""
        flight: Any = importlib.import_module("pyarrow.flight")
        client = flight.FlightClient(f"grpc://{HOST}:{port}")

        def ask(room: memoryview) -> None:
            at = 0
            for chunk in client.do_get(flight.Ticket(len(room).to_bytes(ASKED, "little"))):
                column = chunk.data.column(0)
                room[at : at + len(column)] = column.to_numpy().data
                at += len(column)

        yield ask


class RayCalls:
    """Calls of an actor on another node of Ray's: the object store carries large answers."""

    needs = "ray"
    serve = None

    @staticmethod
    @contextmanager
    def connected(port: int) -> Iterator[Ask]:
        """Gives what asks."""
        ray: Any = importlib.import_module("ray")
        cluster: Any = importlib.import_module("ray.cluster_utils").Cluster(shutdown_at_exit=True)
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=2**28, include_dashboard=False) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")

        class Shard:
            def draw(self, size: int) -> Any:
                return np.zeros(size, np.uint8)

        place = strategies.NodeAffinitySchedulingStrategy(nodes[1].node_id, soft=False)
        shard = ray.remote(Shard).options(num_cpus=0, scheduling_strategy=place).remote()

        def ask(room: memoryview) -> None:
            room[:] = ray.get(shard.draw.remote(len(room))).data

        yield ask
        ray.shutdown()
        cluster.shutdown()


CANDIDATES: dict[str, Any] = {
    OURS: Wire,
    "plain TCP": Tcp,
    "ZeroMQ": ZeroMq,
    "gloo": Gloo,
    "Arrow Flight": Flight,
    "Ray's calls": RayCalls,
}


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@contextmanager
def asking(kind: Any) -> Iterator[Ask]:
    """Gives what asks a candidate's other process, once that answers."""
    port, server = _free_port(), None
    if kind.serve is not None:
        server = multiprocessing.get_context("spawn").Process(target=kind.serve, args=(port,), daemon=True)
        server.start()
    until = time.monotonic() + 60
    try:
        with ExitStack() as stack:
            while True:
                try:
                    ask = stack.enter_context(kind.connected(port))
                    ask(memoryview(bytearray(100)))
                    break
                except Exception:  # it may not listen yet, and each library says so in its own way
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.2)
            yield ask
    finally:
        if server is not None:
            server.kill()
            server.join()


def _rate(ask: Ask, size: int, seconds: float) -> float:
    room = np.empty(size, np.uint8).data
    ask(room)
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        ask(room)
        count += 1
    return count / (time.perf_counter() - start)


def main() -> None:
    """Measures, and prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transports", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    figures: dict[str, dict[str, list[float]]] = {size: {} for size in SIZES}
    with ExitStack() as stack:
        asks = {
            name: stack.enter_context(asking(kind)) for name, kind in CANDIDATES.items() if _is_installed(kind.needs)
        }
        for _ in range(options.rounds):
            for size, nbytes in SIZES.items():
                for name, ask in asks.items():
                    figures[size].setdefault(name, []).append(_rate(ask, nbytes, options.seconds))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

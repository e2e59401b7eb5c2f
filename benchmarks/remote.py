"""A remote writer, from one Ray node to another: ``python -m benchmarks.remote``, a process of its own.

Two nodes on this machine, one explorer on the second. Beside its rows, others cross over a bare socket: collected in
arrays, sent as they lie there, and copied into a ring of arrays. And beside its Atari rows, blocks of the size of its
chunks cross by nothing but Ray: put into the object store there, and taken from it here. It prints one JSON object.
"""

import argparse
import json
import socket
import threading
import time
from collections import deque
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import torchreplay as tr
from benchmarks.line import OURS
from benchmarks.peers.torchreplay import row_spec
from benchmarks.workload import ATARI, SMALL, Workload
from torchreplay.ray.remote.row_wire import CHUNK_BYTES, CHUNK_ROWS
from torchreplay.ray.remote.send_buffer import IN_FLIGHT

STORE = "object store"
TCP = "plain TCP"
POOL = 64


def _columns(workload: Workload, rows: int) -> list[NDArray[Any]]:
    obs: tuple[Any, Any] = workload.shape, workload.dtype
    return [np.zeros((rows, *shape), dtype) for shape, dtype in (obs, ((), "i8"), ((), "f4"), obs, ((), "?"))]


def _rows_of_a_block(workload: Workload) -> int:
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // workload.row_bytes))


class Sink:
    """Takes blocks, and does nothing with them."""

    def take(self, block: Any) -> int:
        """Returns the block's size: it is here."""
        return len(block)

    def listen(self, workload: Workload, capacity: int) -> tuple[str, int]:
        """Takes rows from whoever connects first, says 1 byte when they end; returns where."""
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        listener = socket.create_server((host, 0))
        threading.Thread(target=self._take_rows, args=(listener, workload, capacity), daemon=True).start()
        return host, listener.getsockname()[1]

    def _take_rows(self, listener: socket.socket, workload: Workload, capacity: int) -> None:
        rows = _rows_of_a_block(workload)
        blocks = capacity // rows
        block, ring, at = _columns(workload, rows), _columns(workload, blocks * rows), 0
        with listener, listener.accept()[0] as connection:
            while all(connection.recv_into(column.data, 0, socket.MSG_WAITALL) == column.nbytes for column in block):
                for whole, part in zip(ring, block, strict=True):
                    whole[at * rows : (at + 1) * rows] = part
                at = (at + 1) % blocks
            connection.sendall(b"1")


class Explorer:
    """Writes as fast as it can."""

    def write(self, buffer: tr.ReplayBuffer, workload: Workload, seconds: float) -> float:
        """Returns the rows a second that were acknowledged."""
        rows = workload.single_rows(POOL)
        with buffer.writer() as writer:
            for obs, action, reward, next_obs, done in rows:  # the ingest is there when they are
                writer.append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)
            writer.flush()
            start, written = time.perf_counter(), 0
            while time.perf_counter() < start + seconds:
                for obs, action, reward, next_obs, done in rows:
                    writer.append(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)
                written += POOL
            writer.flush()
            return written / (time.perf_counter() - start)

    def write_plainly(self, address: tuple[str, int], workload: Workload, seconds: float) -> float:
        """Returns the rows a second that were acknowledged."""
        rows, block, at, written = workload.single_rows(POOL), _columns(workload, _rows_of_a_block(workload)), 0, 0
        most, (obs_to, action_to, reward_to, next_obs_to, done_to) = len(block[0]), block
        with socket.create_connection(address) as connection:
            start = time.perf_counter()
            while time.perf_counter() < start + seconds:
                for obs, action, reward, next_obs, done in rows:
                    obs_to[at], action_to[at], reward_to[at], next_obs_to[at] = obs, action, reward, next_obs
                    done_to[at] = done
                    at += 1
                    if at == most:
                        for column in block:
                            connection.sendall(column.data.cast("B"))
                        at, written = 0, written + most
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            return written / (time.perf_counter() - start)

    def send(self, sink: Any, seconds: float) -> float:
        """Returns the bytes a second that have crossed, as many blocks under way as a writer has."""
        block = np.zeros(CHUNK_BYTES, np.uint8)
        ray.get(sink.take.remote(block))
        pending: deque[Any] = deque()
        start, taken = time.perf_counter(), 0
        while time.perf_counter() < start + seconds:
            pending.append(sink.take.remote(ray.put(block)))
            if len(pending) >= IN_FLIGHT:
                taken += int(ray.get(pending.popleft()))
        for answer in pending:
            taken += int(ray.get(answer))
        return taken / (time.perf_counter() - start)


def _measure(rounds: int, seconds: float, shrink: int) -> dict[str, dict[str, list[float]]]:
    cluster: Any = Cluster()
    nodes = [
        cluster.add_node(num_cpus=2, object_store_memory=512 * 2**20, include_dashboard=False, **settings)
        for settings in ({"_system_config": {"worker_niceness": 0}}, {})
    ]
    ray.init(cluster.address, log_to_driver=False)
    places = [{"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(n.node_id, False)} for n in nodes]
    sink: Any = ray.remote(Sink).options(**places[0]).remote()
    explorer: Any = ray.remote(Explorer).options(**places[1]).remote()
    small, atari = (
        tr.ReplayBuffer(row_spec(w), w.capacity // s, seed=0) for w, s in ((SMALL, shrink), (ATARI, 10 * shrink))
    )
    figures: dict[str, dict[str, list[float]]] = {"small rows": {}, "Atari rows": {}}
    for _ in range(rounds):
        for rates, workload, buffer, unit in zip(
            figures.values(), (SMALL, ATARI), (small, atari), (1, ATARI.row_bytes), strict=True
        ):
            rates.setdefault(OURS, []).append(unit * ray.get(explorer.write.remote(buffer, workload, seconds)))
            address = ray.get(sink.listen.remote(workload, buffer.capacity))
            rates.setdefault(TCP, []).append(unit * ray.get(explorer.write_plainly.remote(address, workload, seconds)))
        figures["Atari rows"].setdefault(STORE, []).append(ray.get(explorer.send.remote(sink, seconds)))
    ray.shutdown()
    cluster.shutdown()
    return figures


def main() -> None:
    """Measures, and prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--shrink", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(_measure(options.rounds, options.seconds, options.shrink)))


if __name__ == "__main__":
    main()

"""A pool's table and its copy on another node: reports and orders, without a cluster."""

import time
from types import SimpleNamespace

import pytest

import torchreplay as tr
from torchreplay.ray.workers import table_replica
from torchreplay.ray.workers.table_replica import TableReplica, TableServer
from torchreplay.workers import worker_table
from torchreplay.workers.worker_process import Launch
from torchreplay.workers.worker_table import ENTRY, WorkerTable


class Called:
    """An actor that is called as any object."""

    def __init__(self, server):
        self._server = server

    def __getattr__(self, method):
        return SimpleNamespace(remote=getattr(self._server, method))


class Copies:
    """A table of three workers, and a copy of it as on another node with another clock."""

    def __init__(self, monkeypatch, ahead=1e6):
        ray = SimpleNamespace(get=lambda answer, timeout=None: answer, exceptions=SimpleNamespace(RayError=OSError))
        monkeypatch.setattr(table_replica, "import_ray", lambda: ray)
        self.table, self.remote_table, self.interrupts = WorkerTable(3), WorkerTable(3), []
        self._clock, self._ahead, self._patch = time.monotonic, ahead, monkeypatch

    def replica(self, index, run):
        """What keeps the copy for a run of a worker, but for its thread."""
        replica = TableReplica(Called(TableServer(None, self.table, b"")), Launch(index, 3, 0, run), self.remote_table)
        replica._interrupt = lambda: self.interrupts.append(run)
        return replica

    def exchange(self, replica):
        """Has it report by the other node's clock."""
        dump = self.remote_table.dump_status

        def dump_there(index):
            with self._patch.context() as patch:
                patch.setattr(worker_table, "time", SimpleNamespace(monotonic=lambda: self._clock() + self._ahead))
                return dump(index)

        with self._patch.context() as patch:
            patch.setattr(self.remote_table, "dump_status", dump_there)
            replica._exchange(None)


def test_what_a_worker_writes_comes_home_and_what_the_pool_orders_goes_out(monkeypatch):
    copies = Copies(monkeypatch)
    copies.table.launch(1, run=4)
    copies.table.wanted = 9
    replica = copies.replica(1, 4)
    entry = copies.remote_table.entries[1]
    for number, column in enumerate(name for name in ENTRY.names if name != "node"):
        entry[column] = number + 1
    entry["node"] = b"ab" * 28
    beat = time.monotonic() - 5
    entry["heartbeat"] = beat + 1e6  # by the other node's clock
    copies.exchange(replica)
    at_home = copies.table.entries[1]
    for column in ENTRY.names:
        if column != "heartbeat":
            assert at_home[column].tolist() == entry[column].tolist(), column
    took = time.monotonic() - 5 - beat
    assert beat - 1e-6 <= at_home["heartbeat"] <= beat + took  # the age is kept, and what the news took is not in it
    assert not copies.table.entries[0]["rows"]
    assert not copies.table.entries[2]["rows"]
    assert (copies.remote_table.stopped, copies.remote_table.wanted) == (False, 9)


def test_a_worker_is_interrupted_once_and_not_before_it_knows_that_it_is_to_stop(monkeypatch):
    copies = Copies(monkeypatch)
    copies.table.launch(1, run=4)
    replica = copies.replica(1, 4)
    copies.table.stopped = True
    for _ in range(2):
        copies.exchange(replica)
        assert copies.remote_table.stopped
    copies.table.interrupt(2)
    copies.exchange(replica)
    assert not copies.interrupts  # that was another worker
    copies.table.interrupt(1)
    for _ in range(2):
        copies.exchange(replica)
    assert copies.interrupts == [4]
    copies.table.launch(1, run=5)
    copies.exchange(copies.replica(1, 5))
    assert copies.interrupts == [4]


def test_a_worker_that_has_a_successor_is_not_heard_and_is_to_end_at_once(monkeypatch):
    copies = Copies(monkeypatch)
    copies.table.launch(0, run=0)
    replica = copies.replica(0, 0)
    copies.remote_table.entries[0]["pid"] = copies.remote_table.entries[0]["rows"] = 7
    copies.exchange(replica)
    assert copies.table.entries[0]["pid"] == 7
    copies.table.launch(0, run=1)
    for _ in range(2):
        copies.exchange(replica)
        assert copies.remote_table.stopped
    assert copies.interrupts == [0]
    assert copies.table.entries[0]["pid"] == 0
    with pytest.raises(tr.Stopped, match="another run"):
        copies.replica(0, 0)
    copies.remote_table.entries[0]["rows"] = 0
    copies.replica(0, 1)
    assert copies.remote_table.entries[0]["rows"] == 7  # the successor goes on counting

"""A pool's table and its copy on another node: reports and orders, without a cluster."""

import time
from types import SimpleNamespace

from torchreplay.ray.workers import worker_table as table_module
from torchreplay.ray.workers.table_replica import TableServer
from torchreplay.ray.workers.worker_table import ENTRY, WorkerTable


class Copies:
    """A table, a copy of it as on another node with another clock, and the server between them."""

    def __init__(self, monkeypatch, ahead=1e6):
        self.board, self.far_board = WorkerTable(3), WorkerTable(3)
        self.server = TableServer(None, self.board)
        self._clock, self._ahead, self._patch = time.monotonic, ahead, monkeypatch

    def there(self, call):
        """Calls a function by the other node's clock."""
        with self._patch.context() as patch:
            patch.setattr(table_module, "time", SimpleNamespace(monotonic=lambda: self._clock() + self._ahead))
            return call()

    def exchange(self, index, run):
        status = self.there(lambda: self.far_board.dump_status(index))
        control = self.server.exchange(index, run, status)
        if control is not None:
            self.far_board.load_control(index, control)
        return control


def test_what_a_worker_writes_comes_home_and_what_the_pool_orders_goes_out(monkeypatch):
    copies = Copies(monkeypatch)
    copies.board.launch(1, run=4)
    copies.board.wanted = 9
    entry = copies.far_board.entries[1]
    for number, column in enumerate(name for name in ENTRY.names if name != "node"):
        entry[column] = number + 1
    entry["node"] = b"ab" * 28
    beat = time.monotonic() - 5
    entry["heartbeat"] = beat + 1e6  # by the other node's clock
    assert copies.exchange(1, 4) is not None
    at_home = copies.board.entries[1]
    for column in ENTRY.names:
        if column != "heartbeat":
            assert at_home[column].tolist() == entry[column].tolist(), column
    took = time.monotonic() - 5 - beat
    assert beat - 1e-6 <= at_home["heartbeat"] <= beat + took  # the age is kept, and what the news took is not in it
    assert not copies.board.entries[0]["rows"]
    assert not copies.board.entries[2]["rows"]
    assert (copies.board.wanted, copies.far_board.wanted) == (9, 9)
    assert not copies.far_board.stopped
    copies.board.stopped = True
    copies.board.interrupt(1)
    copies.exchange(1, 4)
    assert copies.far_board.stopped
    assert [copies.far_board.is_interrupted(index) for index in range(3)] == [False, True, False]


def test_a_worker_that_has_a_successor_is_not_heard(monkeypatch):
    copies = Copies(monkeypatch)
    copies.board.launch(0, run=0)
    copies.far_board.entries[0]["pid"] = copies.far_board.entries[0]["rows"] = 7
    assert copies.exchange(0, 0) is not None
    assert copies.board.entries[0]["pid"] == 7
    copies.board.launch(0, run=1)
    assert copies.exchange(0, 0) is None
    assert copies.server.enter(0, 0) is None
    assert copies.board.entries[0]["pid"] == 0
    copies.far_board.load_status(0, copies.server.enter(0, 1))
    assert copies.far_board.entries[0]["rows"] == 7  # the successor goes on counting

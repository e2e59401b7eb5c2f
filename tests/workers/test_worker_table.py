"""A pool's table: the same memory for all of its processes, and a copy where it cannot be."""

import pickle
from dataclasses import replace

import pytest

import torchreplay as tr
from torchreplay.workers import worker_table
from torchreplay.workers.worker_process import Launch, WorkerProcess
from torchreplay.workers.worker_table import WorkerTable


def test_a_table_that_was_pickled_is_the_same_memory():
    table = WorkerTable(3)
    other = pickle.loads(pickle.dumps(table))
    table.stopped = True
    other.entries[2]["episodes"] = 7
    assert other.stopped
    assert table.entries[2]["episodes"] == 7
    del table
    with pytest.raises(tr.AttachError, match="gone"):
        pickle.loads(pickle.dumps(other))


def test_a_worker_with_a_copy_that_nobody_keeps_is_refused(monkeypatch):
    table = WorkerTable(1)
    table._handle = replace(table._handle, node="another")
    monkeypatch.setattr(worker_table, "is_elsewhere", lambda node: node == "another")
    outcome = WorkerProcess().run([], pickle.dumps((None, table)), Launch(0, 1, 0, 0))
    assert outcome.kind == "raised"
    assert "another Ray node than its pool" in outcome.error

"""What the commands for live buffers are tried with."""

from types import SimpleNamespace

import pytest
from forked import Forked, eventually, shared_counters
from live_commands import Command
from watched_buffers import learn_for_ever, make, write_for_ever

import torchreplay as tr


@pytest.fixture
def call(tmp_path):
    """Calls a command, and returns its status and its output."""

    def call(*arguments):
        with Command(tmp_path / "output", *arguments) as command:
            return SimpleNamespace(status=command.wait(), output=command.output())

    return call


@pytest.fixture
def run():
    """A buffer that an explorer fills and a learner draws from, neither of them as fast as it could."""
    buffer = make(4096, limiter=tr.SamplesPerInsert(8.0, min_size=64))
    rows, batches = shared_counters(1), shared_counters(1)
    with Forked(write_for_ever, buffer, rows), Forked(learn_for_ever, buffer, batches, 0.002):
        eventually(lambda: batches[0] > 5)
        yield buffer
    buffer.close()

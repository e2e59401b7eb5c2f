"""Names of buffers: kept in the memory itself, for every process that attaches, and in what people read."""

import io
import os
import pickle

import numpy as np
import pytest
import torch
from forked import Forked, shared_counters
from stopped_holder import StoppedHolder
from watched_buffers import SPEC, make, write

import torchreplay as tr


def note_name(handle, told):
    text = tr.ReplayBuffer.attach(handle).name.encode()
    told[: len(text)] = text


def test_every_process_that_attaches_sees_the_name():
    buffer = make(name="red team")
    assert pickle.loads(pickle.dumps(buffer)).name == "red team"
    told = memoryview(shared_counters(8)).cast("B")
    with Forked(note_name, buffer.handle(), told) as other:
        assert other.wait() == 0
    assert bytes(told).rstrip(b"\0") == b"red team"


def test_a_buffer_without_a_name_has_none_and_messages_are_as_before():
    buffer = tr.ReplayBuffer(SPEC, 10)
    assert buffer.name is None
    assert repr(buffer).startswith("ReplayBuffer(0/10 rows")
    with pytest.raises(tr.WouldBlockForever, match=r"^sample\(\) would wait for ever"):
        buffer.sample(1)


def test_the_name_is_in_repr_and_in_the_name_of_the_memory():
    buffer = make(name="red team, left: 2/3")
    assert repr(buffer).startswith("ReplayBuffer('red team, left: 2/3', 0/1,000 rows")
    target = os.readlink(f"/proc/self/fd/{buffer._segment.fd}")
    assert target == "/memfd:torchreplay-replay-buffer-red-team-left-2-3 (deleted)"
    buffer.close()
    assert repr(buffer) == "ReplayBuffer('red team, left: 2/3', closed)"


def test_errors_of_a_named_buffer_say_which_it_is():
    buffer = make(name="blue")
    with pytest.raises(tr.WouldBlockForever, match=r"sample\(\) of the replay buffer 'blue' would wait for ever"):
        buffer.sample(1)
    with buffer.expect_writers(), pytest.raises(tr.ReplayTimeout, match="no batch of the replay buffer 'blue' within"):
        buffer.sample(1, timeout=0.01)
    writer = buffer.writer()
    buffer.close()
    with pytest.raises(RuntimeError, match="the replay buffer 'blue' is closed, and this writer with it"):
        writer.append(x=np.zeros(2))
    stopped = make(name="green")
    stopped.stop()
    with pytest.raises(tr.Stopped, match="the replay buffer 'green' was stopped"):
        stopped.sample(1)


def test_too_little_memory_names_the_buffer():
    with pytest.raises(MemoryError, match=r"replay buffer 'huge' needs .* of memory"):
        tr.ReplayBuffer({"x": tr.Field(1 << 20)}, 1 << 24, name="huge")


def test_a_wait_for_the_lock_names_the_buffer():
    buffer = make(name="held")
    write(buffer, 100)
    with (
        StoppedHolder(buffer),
        pytest.raises(tr.ReplayTimeout, match="lock of the replay buffer 'held' has not come free"),
    ):
        buffer.sample(1, timeout=0.01)


def test_checkpoints_copies_and_files_keep_the_name(tmp_path):
    buffer = make(name="kept ✓")
    write(buffer, 10)
    buffer.save(tmp_path / "saved")
    assert tr.ReplayBuffer.load(tmp_path / "saved").name == "kept ✓"
    archive = io.BytesIO()
    buffer.save(archive)
    archive.seek(0)
    assert tr.ReplayBuffer.load(archive).name == "kept ✓"
    assert buffer.copy().name == "kept ✓"
    made = tr.ReplayBuffer(SPEC, 10, path=tmp_path / "replay.bin", name="on disk")
    made.close()
    assert tr.ReplayBuffer.open(tmp_path / "replay.bin").name == "on disk"


def test_a_checkpoint_restores_into_a_buffer_of_another_name(tmp_path):
    buffer = make(name="old")
    write(buffer, 10)
    buffer.save(tmp_path / "saved")
    other = make(name="new")
    other.restore(tmp_path / "saved")
    assert (other.name, len(other)) == ("new", 10)


@pytest.mark.parametrize("bad", ["", "x" * 65, "a\nb", "\x1b[31mred", " red", "red ", "tab\there", "\u202egnihton"])
def test_names_that_cannot_be_shown_are_refused(bad):
    with pytest.raises(ValueError, match=r"name is .*: expected 1 to 64 printable characters"):
        tr.ReplayBuffer(SPEC, 10, name=bad)


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="name is 3: expected a short text"):
        tr.ReplayBuffer(SPEC, 10, name=3)


def test_torch_batches_of_a_named_buffer_are_the_same():
    named, plain = make(name="named"), make(name=None)
    for buffer in (named, plain):
        write(buffer, 50)
    assert torch.equal(named.sample(32)["key"], plain.sample(32)["key"])

"""Live buffers, found through the kernel: what is there is found, and nothing else."""

import os
import struct
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
from forked import Forked, eventually, shared_counters
from watched_buffers import SPEC, content_of, look_at, make, write, write_for_ever

import torchreplay as tr
from torchreplay.monitoring.discovery import NoSuchBuffer, program_of, shared_files
from torchreplay.monitoring.survey import choose, survey
from torchreplay.segment.process_state import state_of


def found(buffer):
    inode = os.fstat(buffer._segment.fd).st_ino
    return [file for file in shared_files() if file.inode == inode]


def listed(name):
    return [one for one in survey(0.01) if one.name == name]


def test_a_live_buffer_is_found_with_those_who_have_it_open():
    buffer = make()
    rows = shared_counters(1)
    with Forked(write_for_ever, buffer, rows) as explorer:
        eventually(lambda: rows[0] > 0)
        (file,) = found(buffer)
        assert {pid for pid, _ in file.holders} == {os.getpid(), explorer.pid}
        assert (file.kind, file.path) == ("buffer", None)
        (one,) = listed(buffer.name)
        assert (one.pid, one.writers, one.learners, one.capacity) == (os.getpid(), 1, 0, 1000)
        eventually(lambda: listed(buffer.name)[0].rows_per_second > 0)  # between two looks it may not have its turn


def test_the_figures_of_a_survey_are_the_buffers_own():
    buffer = make()
    write(buffer, 64)
    for _ in range(3):
        buffer.sample(8)
    (one,) = listed(buffer.name)
    stats = buffer.stats()
    assert (one.rows, one.capacity, one.nbytes) == (stats.size, stats.capacity, stats.nbytes)
    assert (one.writers, one.learners) == (stats.writers, stats.learners) == (1, 1)
    assert (one.rows_per_second, one.batches_per_second) == (0, 0)
    assert 0 < one.age < 60
    assert one.program == program_of(os.getpid()) != ""


def test_a_closed_buffer_is_found_no_more():
    buffer = make()
    inode, name = os.fstat(buffer._segment.fd).st_ino, buffer.name
    buffer.close()
    assert inode not in [file.inode for file in shared_files()]
    with pytest.raises(NoSuchBuffer):
        choose(name)


def test_the_buffer_of_a_killed_owner_is_found_while_somebody_else_has_it():
    mine, theirs = Pipe()

    def own():
        buffer = make(name=f"orphan {os.getpid()}")
        theirs.send(buffer.handle())
        time.sleep(60)

    with Forked(own) as owner:
        attached = tr.ReplayBuffer.attach(mine.recv())
        assert [one.pid for one in listed(attached.name)] == [owner.pid]
    assert [one.pid for one in listed(attached.name)] == [os.getpid()]


def test_a_buffer_in_a_file_is_found_by_what_is_in_it(path):
    buffer = tr.ReplayBuffer(SPEC, 10, path=path)
    (file,) = found(buffer)
    assert file.path == path
    with choose(str(path)) as live, choose(os.path.relpath(path)) as again:
        assert live.nonce == again.nonce == buffer._nonce
        assert live.name == "replay.bin"
    os.unlink(path)
    assert [file.path for file in found(buffer)] == [path]


def test_files_of_other_programs_are_left_out(tmp_path):
    imposter = os.memfd_create("torchreplay-replay-buffer-imposter")
    os.write(imposter, b"nothing of ours" * 40_000)
    other = tmp_path / "other.bin"
    other.write_bytes(bytes(1 << 20))
    with other.open("r+b") as file:
        inodes = {os.fstat(fd).st_ino for fd in (imposter, file.fileno())}
        assert not inodes & {file.inode for file in shared_files()}
    os.close(imposter)


def test_a_buffer_of_another_format_version_is_listed_with_what_is_wrong():
    buffer = make()
    content = bytearray(content_of(buffer))
    content[8:16] = struct.pack("<Q", 3)
    fd = os.memfd_create("torchreplay-replay-buffer-old")
    os.write(fd, content)
    inode = os.fstat(fd).st_ino
    (one,) = [one for one in survey(0.01) if one.inode == inode]
    assert one.name == f"#{inode}"
    with pytest.raises(ConnectionError, match="format version 3, this build reads version"):
        choose(f"#{inode}")
    assert "format version 3, this build reads version" in one.trouble
    assert listed(buffer.name)[0].trouble == ""
    os.close(fd)


def test_those_who_only_look_do_not_hold_a_buffer():
    buffer = make()
    with look_at(buffer), look_at(buffer) as live:
        (file,) = found(buffer)
        assert [pid for pid, _ in file.holders] == [os.getpid()]
        assert live.in_use()
        buffer.close()
        assert not live.in_use()
        assert live.file.inode not in [file.inode for file in shared_files()]


def test_processes_that_vanish_while_they_are_looked_at_are_no_trouble(tally):
    buffer = make()
    seen = 0
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline or seen <= 3:
        children = [Forked(lambda: os.kill(os.getpid(), 9)) for _ in range(4)]
        names = [one.name for one in survey(0.0)]
        assert names.count(buffer.name) == 1
        for child in children:
            child.wait()
        seen += 1
    tally("surveys beside dying processes", seen)


def test_a_buffer_is_chosen_by_name_inode_or_process():
    buffer, other = make(), make()
    inode = os.fstat(buffer._segment.fd).st_ino
    for given in (buffer.name, str(inode), f"#{inode}"):
        with choose(given) as live:
            assert live.nonce == buffer._nonce
    with pytest.raises(NoSuchBuffer, match=r"live buffers: .*Say which by its #number"):
        choose(str(os.getpid()))
    other.close()


def test_a_name_that_is_not_there_says_what_is():
    buffer = make()
    with pytest.raises(NoSuchBuffer, match=f"no live buffer is called 'nobody': there are .*{buffer.name}"):
        choose("nobody")


def test_two_buffers_of_one_name_are_told_apart_by_their_inodes():
    twins = [make(name=f"twin {os.getpid()}") for _ in range(2)]
    with pytest.raises(NoSuchBuffer, match="may be 2 live buffers"):
        choose(twins[0].name)
    for twin in twins:
        with choose(f"#{os.fstat(twin._segment.fd).st_ino}") as live:
            assert live.nonce == twin._nonce


def test_without_any_buffer_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr("torchreplay.monitoring.survey.shared_files", list)
    with pytest.raises(NoSuchBuffer, match="start a program that makes a ReplayBuffer"):
        choose(None)


def test_a_machine_with_many_processes_is_surveyed_in_time(monkeypatch):
    # The promise is 0.3 s for a whole `list`, of which two looks take 0.15 s.
    buffers = [make() for _ in range(20)]
    best = min(_seconds(lambda: survey(0.15)) for _ in range(3))
    assert best < 0.3, f"{best:.3f} s"
    assert {buffer.name for buffer in buffers} <= {one.name for one in survey(0.0)}


def _seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def test_states_and_programs_of_processes_that_are_gone_are_empty():
    child = Forked(lambda: None)
    child.wait()
    assert (state_of(child.pid), program_of(child.pid)) == ("", "")
    assert state_of(os.getpid()) == "R"
    assert Path("/proc/self/exe").resolve().name.startswith(program_of(os.getpid()).split()[0][:6])

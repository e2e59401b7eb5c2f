"""Files of buffers in the making: nobody takes them for buffers, and what nobody finishes is in nobody's way."""

import errno
import fcntl
import gc
import os
import signal
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from belongings import descriptors
from forked import Forked

import torchreplay as tr
from torchreplay import _C
from torchreplay.buffer import creation, replay_buffer
from torchreplay.segment import segment_file

SPEC = {"x": tr.Field((64,)), "n": tr.Field((), torch.int64)}


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of 500 rows."""
    made = tr.ReplayBuffer(SPEC, 1000, seed=1)
    made.extend(x=np.zeros((500, 64)), n=np.arange(500))
    made.save(tmp_path / "saved")
    return tmp_path / "saved"


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def make(path, saved):
    return tr.ReplayBuffer.load(saved, path=path) if saved else tr.ReplayBuffer(SPEC, 1000, path=path)


DEATHS = {
    "as its room is taken": (os, "posix_fallocate"),
    "before it is laid out": (_C, "Segment"),
    "before its rows are there": (replay_buffer, "load_rows"),
    "before it has its name": (_C, "rename_new"),
}


@pytest.mark.parametrize(
    ("death", "loads"), [(d, loads) for d in DEATHS for loads in (False, True) if loads or "rows" not in d]
)
def test_who_dies_in_the_making_leaves_nothing_at_its_path_and_the_next_one_clears_up(
    tmp_path, saved, monkeypatch, death, loads
):
    path = tmp_path / "ring"
    module, name = DEATHS[death]
    with monkeypatch.context() as patched:
        patched.setattr(module, name, die)
        with Forked(make, path, saved if loads else None) as maker:
            assert maker.wait() == -signal.SIGKILL
    assert not path.exists()
    (left,) = tmp_path.glob(".torchreplay-*")
    assert left.is_file()
    with pytest.raises(FileNotFoundError):
        tr.ReplayBuffer.open(path)
    with make(path, saved if loads else None) as made:
        assert len(made) == (500 if loads else 0)
        assert made.path == path
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ring", "saved"]
    with tr.ReplayBuffer.open(path) as again:
        assert len(again) == (500 if loads else 0)


def test_what_is_being_made_is_not_cleared_up(tmp_path, saved, monkeypatch):
    made = []
    rename = _C.rename_new

    def meanwhile(*names):
        if not made:
            made.append(None)
            make(tmp_path / "other", None).close()
        rename(*names)

    monkeypatch.setattr(_C, "rename_new", meanwhile)
    with make(tmp_path / "ring", saved) as ring:
        assert len(ring) == 500
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["other", "ring", "saved"]


def bind_socket(name):
    """Its address may have 108 bytes, and the path more."""
    directory = os.open(name.parent, os.O_PATH)
    try:
        socket.socket(socket.AF_UNIX).bind(f"/proc/self/fd/{directory}/{name.name}")
    finally:
        os.close(directory)


OTHERS = {
    "a pipe": os.mkfifo,
    "a directory": os.mkdir,
    "a socket": lambda name: bind_socket(Path(name)),
    "a link to a pipe": lambda name: (os.mkfifo(f"{name}.pipe"), os.symlink(f"{name}.pipe", name)),
    "a link to a file": lambda name: (Path(f"{name}.file").touch(), os.symlink(f"{name}.file", name)),
    "a device": lambda name: os.symlink("/dev/tty", name),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", OTHERS)
def test_what_others_have_given_the_name_of_an_unfinished_file_is_not_waited_for_and_stays(tmp_path, kind):
    name = tmp_path / segment_file.UNFINISHED.format("0" * 16)
    OTHERS[kind](name)
    before = set(tmp_path.iterdir())
    make(tmp_path / "ring", None).close()
    assert set(tmp_path.iterdir()) == before | {tmp_path / "ring"}


def test_an_unfinished_file_of_another_user_stays(tmp_path, monkeypatch):
    name = tmp_path / segment_file.UNFINISHED.format("0" * 16)
    name.touch()
    with monkeypatch.context() as other:
        other.setattr("os.geteuid", lambda: name.stat().st_uid + 1)
        make(tmp_path / "ring", None).close()
    assert name.exists()


def test_of_two_that_make_the_same_file_one_has_it(tmp_path):
    path, together, results = tmp_path / "ring", threading.Barrier(2), []

    class Together(segment_file.NewFile):
        def finish(self):
            together.wait()
            super().finish()

    def run():
        try:
            results.append(make(path, None))
        except FileExistsError as error:
            results.append(error)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(creation, "NewFile", Together)
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (error,) = [result for result in results if isinstance(result, FileExistsError)]
    assert error.filename == str(path)
    (made,) = [result for result in results if isinstance(result, tr.ReplayBuffer)]
    made.extend(x=np.zeros((3, 64)), n=np.arange(3))
    made.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["ring"]
    with tr.ReplayBuffer.open(path) as again:
        assert len(again) == 3


def test_a_new_name_replaces_no_file(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("a")
    _C.rename_new(os.fsencode(old), os.fsencode(new))
    assert (old.exists(), new.read_text()) == (False, "a")
    old.write_text("b")
    with pytest.raises(FileExistsError):
        _C.rename_new(os.fsencode(old), os.fsencode(new))
    assert (old.read_text(), new.read_text()) == ("b", "a")
    with pytest.raises(FileNotFoundError):
        _C.rename_new(os.fsencode(tmp_path / "none"), os.fsencode(tmp_path / "other"))


def test_a_name_that_is_too_long_is_refused_before_anything_is_made(tmp_path):
    with pytest.raises(OSError, match="name too long"):
        make(tmp_path / ("x" * 300), None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["flock", "rename_new"])
def test_an_error_in_the_making_leaves_nothing(tmp_path, saved, monkeypatch, call):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(*{"flock": (fcntl, "flock"), "rename_new": (_C, "rename_new")}[call], refuse)
    before = descriptors()
    for given in (None, *([saved] if call == "rename_new" else [])):
        with pytest.raises(OSError, match="not supported"):
            make(tmp_path / "ring", given)
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    gc.collect()
    assert descriptors() <= before

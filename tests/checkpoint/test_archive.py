"""`save` and `load` with a file object: a checkpoint that carries its rows with it."""

import io
import pickle
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import torch

import torchreplay as tr

SPEC = {"x": tr.Field((3,), torch.float32), "image": tr.Field((64, 64), torch.uint8)}


def filled(n=50):
    buffer = tr.ReplayBuffer(SPEC, 40, sampler=tr.Prioritized(), seed=3)
    rng = np.random.default_rng(0)
    keys = buffer.extend(x=rng.normal(size=(n, 3)), image=rng.integers(0, 256, (n, 64, 64), np.uint8))
    buffer.update_priorities(keys[-20:], torch.linspace(0, 5, 20))
    return buffer


def assert_same(found, expected):
    assert torch.equal(found.keys(), expected.keys())
    items, others = found.gather(found.keys()), expected.gather(expected.keys())
    for name in items:
        assert torch.equal(items[name], others[name]), name
    assert found.stats().rows_written == expected.stats().rows_written


def test_a_buffer_comes_back_from_a_file_object():
    file = io.BytesIO()
    with filled() as buffer:
        buffer.save(file)
        file.seek(0)
        with tr.ReplayBuffer.load(file) as loaded:
            assert_same(loaded, buffer)
            assert torch.equal(loaded.sample(8)["key"], buffer.sample(8)["key"])


def test_several_follow_each_other_in_one_file(tmp_path):
    with filled() as first, filled(20) as second:
        with (tmp_path / "both").open("wb") as file:
            first.save(file)
            second.save(file)
        with (tmp_path / "both").open("rb") as file:
            for buffer in (first, second):
                with tr.ReplayBuffer.load(file) as loaded:
                    assert_same(loaded, buffer)


@pytest.mark.slow
def test_bytes_in_a_pickle_are_read_by_a_new_process(tmp_path):
    file = io.BytesIO()
    with filled() as buffer:
        buffer.save(file)
        rows = buffer.keys().tolist()
    (tmp_path / "data").write_bytes(pickle.dumps(file.getvalue()))
    program = """
import io, pickle, sys
import torchreplay as tr
with tr.ReplayBuffer.load(io.BytesIO(pickle.load(open(sys.argv[1], "rb")))) as buffer:
    print(buffer.keys().tolist())
"""
    ran = subprocess.run([sys.executable, "-c", program, tmp_path / "data"], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(rows)


@pytest.mark.parametrize("cut", [0, 1, 700, 5000, -20000])
def test_a_truncated_or_foreign_file_is_no_checkpoint(cut):
    file = io.BytesIO()
    with filled() as buffer:
        buffer.save(file)
    with pytest.raises(tr.CheckpointError):
        tr.ReplayBuffer.load(io.BytesIO(file.getvalue()[:cut]))
    with pytest.raises(tr.CheckpointError, match="holds no checkpoint"):
        tr.ReplayBuffer.load(io.BytesIO(b"no archive at all" * 100))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, None])
def test_an_archive_that_leads_out_of_its_directory_is_refused(kind, tmp_path):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w|") as archive:
        member = tarfile.TarInfo("../outside" if kind is None else "inside")
        if kind is not None:
            member.type, member.linkname = kind, "/etc/passwd"
        archive.addfile(member)
    file.seek(0)
    with pytest.raises(tr.CheckpointError, match="it has the entry"):
        tr.ReplayBuffer.load(file)


def test_an_archive_whose_file_has_holes_of_any_size_is_refused():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("checkpoint.json")
        member.size = 1
        member.pax_headers = {"GNU.sparse.size": str(1 << 30), "GNU.sparse.map": "0,1"}
        archive.addfile(member, io.BytesIO(b"x"))
    file.seek(0)
    with pytest.raises(tr.CheckpointError, match="it has the entry"):
        tr.ReplayBuffer.load(file)


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("checkpoint.json/b",), ("a", "a/")])
def test_an_archive_in_which_a_name_is_both_a_file_and_a_directory_is_refused(names):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w|") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            archive.addfile(member)
    file.seek(0)
    with pytest.raises(tr.CheckpointError):
        tr.ReplayBuffer.load(file)

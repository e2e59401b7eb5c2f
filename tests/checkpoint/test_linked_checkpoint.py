"""A checkpoint in two places, of which only one takes room."""

import errno
import os
import shutil

import pytest
import torch

import torchreplay as tr
from torchreplay.checkpoint.directory import link_checkpoint


def buffer_of(numbers):
    buffer = tr.ReplayBuffer({"number": tr.Field((), torch.int64)}, 100)
    buffer.extend(number=torch.tensor(numbers))
    return buffer


def numbers_in(directory):
    with tr.ReplayBuffer.load(directory) as buffer:
        return buffer.gather(buffer.keys())["number"].tolist()


def files_of(directory):
    return {path.stat().st_ino for path in directory.rglob("*.safetensors")}


def test_it_replaces_what_was_there_and_shares_the_files(tmp_path):
    buffer_of([1, 2]).save(tmp_path / "one")
    buffer_of([3]).save(tmp_path / "other")
    for _ in range(2):  # the second time there is nothing to do
        link_checkpoint(tmp_path / "one", tmp_path / "other")
        assert numbers_in(tmp_path / "other") == [1, 2]
        assert files_of(tmp_path / "other") == files_of(tmp_path / "one") != set()
        assert len(list((tmp_path / "other").iterdir())) == 2


def test_a_save_to_one_place_leaves_the_other_as_it_was(tmp_path):
    buffer_of([1, 2]).save(tmp_path / "one")
    link_checkpoint(tmp_path / "one", tmp_path / "other")
    buffer_of([3]).save(tmp_path / "one")
    assert (numbers_in(tmp_path / "one"), numbers_in(tmp_path / "other")) == ([3], [1, 2])
    shutil.rmtree(tmp_path / "one")
    assert numbers_in(tmp_path / "other") == [1, 2]


def test_an_empty_buffers_checkpoint_can_be_linked(tmp_path):
    tr.ReplayBuffer({"number": tr.Field()}, 3).save(tmp_path / "one")
    link_checkpoint(tmp_path / "one", tmp_path / "other")
    with tr.ReplayBuffer.load(tmp_path / "other") as buffer:
        assert len(buffer) == 0


@pytest.mark.parametrize("reason", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP], ids=os.strerror)
def test_where_the_filesystem_has_no_links_it_is_copied(tmp_path, monkeypatch, reason):
    def refuse(source, target):
        raise OSError(reason, os.strerror(reason), source)

    monkeypatch.setattr(os, "link", refuse)
    buffer_of([1, 2]).save(tmp_path / "one")
    link_checkpoint(tmp_path / "one", tmp_path / "other")
    assert numbers_in(tmp_path / "other") == [1, 2]
    assert not files_of(tmp_path / "other") & files_of(tmp_path / "one")


def test_a_source_that_is_gone_leaves_what_was_there(tmp_path):
    buffer_of([3]).save(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        link_checkpoint(tmp_path / "missing", tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        link_checkpoint(tmp_path / "missing", tmp_path / "new")
    assert numbers_in(tmp_path / "other") == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_what_a_killed_link_left_is_made_anew(tmp_path):
    buffer_of([1, 2]).save(tmp_path / "one")
    (rows,) = (tmp_path / "one").glob("rows-*")
    (tmp_path / "other" / rows.name).mkdir(parents=True)
    link_checkpoint(tmp_path / "one", tmp_path / "other")
    assert numbers_in(tmp_path / "other") == [1, 2]

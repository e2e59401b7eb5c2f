"""`compat.minari`: episodes in Minari's file format."""

import h5py
import numpy as np
import pytest
import torch
from scalar_steps import STEPS

import torchreplay as tr
from torchreplay.compat import minari

SPEC = {
    "obs": {"vector": tr.Field((3,)), "pair": {"0": tr.Field((), torch.int64), "1": tr.Field((2,), torch.uint8)}},
    "action": tr.Field((2,)),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}


def write_as_minari_does(path, lengths, seed=0):
    """A file as `minari.DataCollector` lays it out: float64 rewards, groups for dict and tuple spaces."""
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        for i, steps in enumerate(lengths):
            group = file.create_group(f"episode_{i}")
            group["observations/vector"] = rng.normal(size=(steps + 1, 3)).astype(np.float32)
            group["observations/pair/_index_0"] = rng.integers(0, 9, steps + 1)
            group["observations/pair/_index_1"] = rng.integers(0, 9, (steps + 1, 2), np.uint8)
            group["actions"] = rng.normal(size=(steps, 2)).astype(np.float32)
            group["rewards"] = rng.normal(size=steps)
            group["terminations"] = np.arange(1, steps + 1) == (steps if i % 2 else 0)
            group["truncations"] = np.arange(1, steps + 1) == (0 if i % 2 else steps)
            group.attrs.update(id=i, total_steps=steps)


@pytest.fixture
def path(tmp_path):
    write_as_minari_does(tmp_path / "main_data.hdf5", [5, 3, 1, 12, 2, 4, 3, 3, 3, 3, 7])  # more than ten: 10 after 2
    return tmp_path / "main_data.hdf5"


def test_a_buffer_holds_the_steps_of_the_file(path):
    with tr.ReplayBuffer(SPEC, 100, view=tr.Transitions()) as buffer, h5py.File(path) as file:
        assert minari.read(path, buffer) == 11
        found = list(buffer.episodes())
        assert len(found) == 11
        for i, episode in enumerate(found):
            group = file[f"episode_{i}"]
            np.testing.assert_array_equal(episode["obs"]["vector"], group["observations/vector"])
            np.testing.assert_array_equal(episode["obs"]["pair"]["1"], group["observations/pair/_index_1"])
            np.testing.assert_allclose(episode["reward"], group["rewards"], rtol=1e-6)
            np.testing.assert_array_equal(episode["terminated"], group["terminations"])


def test_the_spec_is_that_of_the_file(path):
    assert minari.spec_of(path) == SPEC
    assert minari.spec_of(path.parent) == SPEC


def test_what_is_written_reads_back_the_same(path, tmp_path):
    with tr.ReplayBuffer(SPEC, 100, view=tr.Sequences(4)) as buffer:
        minari.read(path, buffer)
        assert minari.write(buffer, tmp_path / "copy.hdf5") == 11
        for one, other in zip(minari.episodes(path), minari.episodes(tmp_path / "copy.hdf5"), strict=True):
            np.testing.assert_array_equal(one["obs"]["pair"]["0"], other["obs"]["pair"]["0"])
            np.testing.assert_array_equal(one["action"], other["action"])
            np.testing.assert_array_equal(one["truncated"], other["truncated"])
        with h5py.File(tmp_path / "copy.hdf5") as file:
            assert (file.attrs["total_episodes"], file.attrs["total_steps"]) == (11, 46)
            assert file["episode_3"].attrs["total_steps"] == 12
        with pytest.raises(FileExistsError):
            minari.write(buffer, tmp_path / "copy.hdf5")


def test_rows_that_belong_to_no_episode_are_refused_before_a_file_is_made(tmp_path):
    with tr.ReplayBuffer(STEPS, 10) as buffer, pytest.raises(ValueError, match="belong to no episode"):
        minari.write(buffer, tmp_path / "rows.hdf5")
    assert not list(tmp_path.iterdir())


def test_an_unfinished_episode_is_written_as_truncated(tmp_path):
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions()) as buffer, buffer.writer() as writer:
        writer.reset(obs=0)
        for i in (1, 2):
            writer.step(obs=i, action=i, reward=1.0, terminated=False, truncated=False)
        assert minari.write(buffer, tmp_path / "none.hdf5") == 0
        assert minari.write(buffer, tmp_path / "one.hdf5", unfinished=True) == 1
        (episode,) = minari.episodes(tmp_path / "one.hdf5")
        assert episode["obs"].tolist() == [0, 1, 2]
        assert episode["truncated"].tolist() == [False, True]


def test_other_names_and_fewer_fields(path):
    names = {
        "o": "observations",
        "a": "actions",
        "r": "rewards",
        "terminated": "terminations",
        "truncated": "truncations",
    }
    view = tr.Transitions(observation="o", reward="r")
    with tr.ReplayBuffer(minari.spec_of(path, names), 100, view=view) as buffer:
        assert minari.read(path, buffer, names) == 11
        assert set(buffer.sample(4)) >= {"o", "next_o", "a", "r"}


def test_what_is_no_data_set_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no HDF5 file"):
        list(minari.episodes(tmp_path / "nothing"))
    (tmp_path / "text").write_text("no HDF5")
    with pytest.raises(ValueError, match="is no HDF5 file"):
        list(minari.episodes(tmp_path / "text"))
    with h5py.File(tmp_path / "empty.hdf5", "w"):
        pass
    with pytest.raises(ValueError, match="holds no episode"):
        list(minari.episodes(tmp_path / "empty.hdf5"))
    with h5py.File(tmp_path / "part.hdf5", "w") as file:
        file["episode_0/observations"] = np.zeros(3)
    with pytest.raises(ValueError, match="has no 'actions'"):
        list(minari.episodes(tmp_path / "part.hdf5"))

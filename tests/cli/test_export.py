"""`torchreplay export` writes what others read: compared with the buffer by the libraries of the formats."""

import h5py
import numpy as np
import pytest
import safetensors.torch
import stored_buffers
import torch
from click.testing import CliRunner

import torchreplay as tr
from torchreplay.cli import main

FORMS = ["file", "directory", "archive"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return stored_buffers.make(tmp_path_factory.mktemp("stored"))


def run(*arguments):
    return CliRunner().invoke(main, ["export", *(str(argument) for argument in arguments)])


@pytest.mark.parametrize("form", FORMS)
def test_safetensors_have_every_field_of_every_row_oldest_first(stored, form, tmp_path):
    target = tmp_path / "rows.safetensors"
    result = run(stored.forms[form], target)
    assert (result.exit_code, result.output) == (0, f"50 rows in {target}\n")
    found = safetensors.torch.load_file(target)
    for name, expected in stored.columns().items():
        assert torch.equal(found[name], expected), name
    assert torch.equal(found["row.key"], stored.keys)


@pytest.mark.parametrize("form", FORMS)
def test_npz_has_the_same_and_float32_for_bfloat16(stored, form, tmp_path):
    assert run(stored.forms[form], tmp_path / "rows.npz").exit_code == 0
    with np.load(tmp_path / "rows.npz") as found:
        assert found["state/hidden"].dtype == np.float32
        for name, expected in stored.columns().items():
            values = expected.float() if expected.dtype == torch.bfloat16 else expected
            np.testing.assert_array_equal(found[name], values.numpy())


@pytest.mark.parametrize("form", ["file", "directory"])
def test_a_ragged_field_has_an_array_of_values_and_one_of_offsets(form, tmp_path, monkeypatch):
    monkeypatch.setattr("torchreplay.checkpoint.buffer_checkpoint.SHARD_BYTES", 1024)
    monkeypatch.setattr("torchreplay.files.rows.CHUNK_BYTES", 300)
    spec = {
        "a": {"tokens": tr.Ragged(torch.uint16), "flags": tr.Ragged(torch.bool, (2,), like="a/tokens")},
        "narrow": tr.Ragged(torch.bfloat16),
        "reward": tr.Field(),
    }
    lengths = np.random.default_rng(0).integers(0, 40, (60, 2)).tolist()
    lengths[-2:] = [0, 7], [7, 0]
    rows = [
        ([key * 3 + i for i in range(n)], [[i % 2, i % 3 == 0] for i in range(n)], [float(key + i) for i in range(m)])
        for key, (n, m) in enumerate(lengths)
    ]
    tokens, flags, narrow = ([row[i] for row in rows] for i in range(3))
    flags = [np.array(value, bool).reshape(-1, 2) for value in flags]
    with tr.ReplayBuffer(spec, 25, path=tmp_path / "file", ragged_bytes=6000) as buffer:
        buffer.extend(a={"tokens": tokens, "flags": flags}, narrow=narrow, reward=np.arange(60.0))
        buffer.save(tmp_path / "directory")
        keys = buffer.keys().tolist()
    assert len(keys) == 25
    for suffix in ("safetensors", "npz"):
        target = tmp_path / f"rows.{suffix}"
        assert run(tmp_path / form, target).output == f"25 rows in {target}\n"
        found = safetensors.torch.load_file(target) if suffix == "safetensors" else np.load(target)
        for name, values in (("a/tokens", tokens), ("a/flags", flags), ("narrow", narrow)):
            offsets, packed = found[f"{name}.offsets"], found[f"{name}.values"]
            assert str(offsets.dtype).endswith("int64")
            assert offsets.tolist() == np.cumsum([0, *(len(values[key]) for key in keys)]).tolist()
            assert packed.tolist() == [element for key in keys for element in np.array(values[key]).tolist()]
            assert name not in found
        assert found["reward"].tolist() == found["row.key"].tolist() == keys


def test_names_that_an_export_of_ragged_fields_needs_are_refused_and_so_are_episodes(tmp_path):
    spec = {"x": tr.Ragged(torch.uint8), "x.offsets": tr.Field()}
    with tr.ReplayBuffer(spec, 4, ragged_bytes=4096) as buffer:
        buffer.save(tmp_path / "saved")
    result = run(tmp_path / "saved", tmp_path / "rows.npz")
    assert result.exit_code == 2
    assert "a field named 'x.offsets', which an export needs for itself" in " ".join(result.output.split())
    result = run(tmp_path / "saved", tmp_path / "rows.hdf5")
    assert result.exit_code == 2
    assert "HDF5 as Minari has it takes fields of one shape only, and 'x' is Ragged" in " ".join(result.output.split())


@pytest.mark.parametrize("form", FORMS)
def test_priorities_are_those_of_the_buffer_and_nan_where_no_item_starts(stored, form, tmp_path):
    run(stored.forms[form], tmp_path / "rows.npz")
    with np.load(tmp_path / "rows.npz") as found:
        np.testing.assert_array_equal(found["row.priority"], stored.buffer.priorities(stored.keys).numpy())
        assert np.isnan(found["row.priority"]).sum() == 50 - stored.buffer.num_items > 0


def test_previous_and_step_lead_through_each_episode(stored, tmp_path):
    run(stored.forms["file"], tmp_path / "rows.npz")
    with np.load(tmp_path / "rows.npz") as found:
        # One writer: its rows follow each other, ten to an episode.
        keys = stored.keys.numpy()
        np.testing.assert_array_equal(found["row.step"], keys % (stored_buffers.STEPS + 1))
        inside = found["row.step"] > 0
        np.testing.assert_array_equal(found["row.previous"][inside], keys[inside] - 1)


@pytest.mark.parametrize("form", FORMS)
def test_hdf5_has_the_whole_episodes_as_minari_lays_them_out(stored, form, tmp_path):
    target = tmp_path / "rows.hdf5"
    assert run(stored.forms[form], target).output == f"5 episodes in {target}\n"
    expected = list(stored.buffer.episodes())
    with h5py.File(target) as file:
        assert (file.attrs["total_episodes"], file.attrs["total_steps"]) == (5, 45)
        for number, episode in enumerate(expected):
            group = file[f"episode_{number}"]
            np.testing.assert_array_equal(group["observations"][()], episode["obs"].numpy())
            np.testing.assert_array_equal(group["actions"][()], episode["action"].numpy())
            np.testing.assert_array_equal(group["rewards"][()], episode["reward"].numpy())
            np.testing.assert_array_equal(group["terminations"][()], episode["terminated"].numpy())
            np.testing.assert_array_equal(group["state/hidden"][()], episode["state"]["hidden"].float().numpy())


def test_rows_of_no_episode_have_no_hdf5(tmp_path):
    with tr.ReplayBuffer({"x": tr.Field()}, 8) as buffer:
        buffer.extend(x=torch.zeros(3))
        buffer.save(tmp_path / "checkpoint")
    result = run(tmp_path / "checkpoint", tmp_path / "rows.h5")
    assert result.exit_code == 2
    assert "belong to no episode" in result.output
    assert list(tmp_path.iterdir()) == [tmp_path / "checkpoint"]


def test_a_file_that_is_there_stays_without_force(stored, tmp_path):
    target = tmp_path / "rows.npz"
    target.write_bytes(b"mine")
    result = run(stored.forms["file"], target)
    assert result.exit_code == 2
    assert "--force replaces it" in result.output
    assert target.read_bytes() == b"mine"
    assert run("--force", stored.forms["file"], target).exit_code == 0
    assert np.load(target)["reward"].shape == (50,)


def test_an_unknown_suffix_is_refused(stored, tmp_path):
    result = run(stored.forms["file"], tmp_path / "rows.csv")
    assert result.exit_code == 2
    assert "expected .safetensors, .npz, .hdf5 or .h5" in result.output


def test_rows_that_are_overwritten_meanwhile_are_an_error_and_leave_no_file(stored, tmp_path, monkeypatch):
    from torchreplay.files import export

    with tr.ReplayBuffer({"x": tr.Field((1000,))}, 20, path=tmp_path / "b.bin") as buffer:
        buffer.extend(x=torch.zeros(20, 1000))
        write = export.write_npz

        def overtaken(rows, path):
            buffer.extend(x=torch.ones(3, 1000))
            return write(rows, path)

        monkeypatch.setattr("torchreplay.cli.export.write_npz", overtaken)
        result = run(tmp_path / "b.bin", tmp_path / "rows.npz")
    assert result.exit_code == 2
    assert "buffer.save(directory)" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.bin"]


def test_rows_of_many_shards_come_out_in_the_order_of_their_keys(tmp_path):
    """Files of 4 MB have fewer rows than the ring, which has wrapped around in the middle of one."""
    with tr.ReplayBuffer({"x": tr.Field((4096,), torch.int64)}, 400) as buffer:
        for first in range(0, 550, 50):
            numbers = torch.arange(first, first + 50)
            buffer.extend(x=numbers[:, None].expand(50, 4096))
        buffer.save(tmp_path / "checkpoint")
    assert len(list((tmp_path / "checkpoint").rglob("*.safetensors"))) > 3
    run(tmp_path / "checkpoint", tmp_path / "rows.safetensors")
    found = safetensors.torch.load_file(tmp_path / "rows.safetensors")
    assert found["row.key"].tolist() == list(range(150, 550))
    assert torch.equal(found["x"], torch.arange(150, 550)[:, None].expand(400, 4096))

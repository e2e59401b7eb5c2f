"""The offline example learns more than what was recorded, from a file alone."""

from statistics import mean

import pytest
import torch
from example_programs import curve, evaluations, explanation, imported, succeed

import torchreplay as tr

NAME = "offline"

pytest.importorskip("gymnasium")
pytest.importorskip("h5py")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.mark.slow
def test_it_does_better_than_the_player_whose_episodes_it_learns_from(tmp_path):
    flags = "--seed 1 --total-steps 2000 --solved-at 1000 --no-tensorboard"
    lines = evaluations(succeed(NAME, tmp_path, *flags.split(), timeout=150))
    assert [line["step"] for line in lines] == [500, 1000, 1500, 2000]
    learned = mean(line["mean_return"] for line in lines[1:])  # one evaluation alone may be a low one
    assert learned > 2 * lines[-1]["recorded"]
    assert not list(tmp_path.iterdir())


def test_both_forms_of_its_file_hold_the_same_episodes(tmp_path, monkeypatch, capsys):
    offline = imported(NAME, monkeypatch)
    found = {}
    for form in ("minari", "flat"):
        args = offline.Args(episodes=4, form=form, noise=0.1)  # long ones, of which some are cut at 500 steps
        offline.record(tmp_path / form, args)
        with offline.filled_buffer(tmp_path / form, tr.Transitions(), 0) as buffer:
            found[form] = list(buffer.episodes())
    assert len(found["flat"]) == 4
    for flat, minari in zip(*found.values(), strict=True):
        assert all(torch.equal(flat[name], minari[name]) for name in ("obs", "action", "reward", "terminated"))
        assert torch.equal(flat["truncated"], minari["truncated"])
    steps = sum(len(episode["action"]) for episode in found["flat"])
    assert capsys.readouterr().err == f"{steps:,} steps, 4 episodes\n"


@pytest.mark.slow
def test_its_curve_can_be_read_in_tensorboard(tmp_path):
    flags = "--episodes 3 --total-steps 20 --eval-every 10 --eval-episodes 2"
    lines = evaluations(succeed(NAME, tmp_path, *flags.split(), timeout=150))
    kept = curve(tmp_path / "runs" / "offline-seed0")
    assert kept == pytest.approx({line["step"]: line["mean_return"] for line in lines}, abs=1e-2)


def test_it_explains_every_flag(monkeypatch, capsys):
    _, words = explanation(NAME, monkeypatch, capsys)
    assert "learner steps between two evaluations (default: 500)" in words


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_it_solves_cartpole_with_every_seed(seed, tmp_path):
    last = evaluations(succeed(NAME, tmp_path, "--seed", str(seed), "--no-tensorboard", timeout=150))[-1]
    assert last["solved"]
    assert last["mean_return"] >= 475

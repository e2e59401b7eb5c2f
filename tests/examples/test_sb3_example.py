"""The example with Stable-Baselines3 runs, and its explorers write into the model's buffer."""

import pytest
from example_programs import curve, evaluations, explanation, succeed

NAME = "sb3"
QUICK = "--total-steps 200 --eval-every 100 --eval-episodes 1 --learning-starts 20 --num-explorers 1 --min-items 2000"

pytest.importorskip("stable_baselines3")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.mark.slow
def test_explorers_write_into_the_buffer_of_the_model_that_learns(tmp_path):
    lines = evaluations(succeed(NAME, tmp_path, *QUICK.split(), timeout=150))
    assert [line["step"] for line in lines] == [100, 200]
    assert all(8 <= line["mean_return"] <= 500 for line in lines)
    assert lines[-1]["rows"] > 2000
    kept = curve(tmp_path / "runs" / "sb3-seed0")
    assert kept == pytest.approx({line["step"]: line["mean_return"] for line in lines}, abs=1e-2)


def test_it_explains_every_flag(monkeypatch, capsys):
    flags, words = explanation(NAME, monkeypatch, capsys)
    assert flags >= 14
    assert "explorer processes (default: 2)" in words


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(5))
def test_it_solves_cartpole_with_every_seed(seed, tmp_path):
    last = evaluations(succeed(NAME, tmp_path, "--seed", str(seed), "--no-tensorboard", timeout=380))[-1]
    assert last["solved"]
    assert last["mean_return"] >= 475

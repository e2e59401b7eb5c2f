"""The demo shows its run while it lasts, sums it up, and learns."""

import pytest
import torch
from example_programs import assert_tensorboard_says, evaluations, imported, succeed

import torchreplay as tr

NAME = "apex_cartpole"
QUICK = "--total-steps 60 --eval-every 30 --eval-episodes 2 --learning-starts 300 --num-explorers 2 --solved-at 501"

pytest.importorskip("ray")
pytest.importorskip("pytorch_lightning")
pytest.importorskip("gymnasium")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.mark.slow
def test_the_demo_prints_one_json_line_per_evaluation_and_leaves_a_picture_and_curves(tmp_path):
    done = succeed(NAME, tmp_path, *QUICK.split(), "--seed", "7", timeout=170)
    lines = evaluations(done)
    assert [line["step"] for line in lines] == [30, 60]
    assert all(8 <= line["mean_return"] <= 500 for line in lines)
    assert "not solved" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{NAME}.png", "runs"]
    assert_tensorboard_says(lines, tmp_path / "runs" / f"{NAME}-seed7")


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(5))
def test_the_demo_solves_cartpole_within_five_minutes(seed, tmp_path):
    done = succeed(NAME, tmp_path, "--seed", str(seed), "--no-tensorboard", "--plot", "", timeout=300)
    assert evaluations(done)[-1]["mean_return"] >= 475
    assert not list(tmp_path.iterdir())


def watched(monkeypatch, rows):
    """Returns a run's `Progress`, its buffer with that many rows, and a clock to set."""
    buffer = tr.ReplayBuffer({"obs": tr.Field()}, 10_000, limiter=tr.SamplesPerInsert(1.0, 1000, tolerance=1.0))
    clock = [0.0]
    module = imported("progress", monkeypatch)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    progress = module.Progress("A run", buffer, total_steps=2, solved=1.0)
    buffer.extend(obs=torch.zeros(rows))
    return progress, buffer, clock


def test_the_rates_of_a_summary_are_those_since_learning_began(monkeypatch, capsys):
    progress, buffer, clock = watched(monkeypatch, rows=1000)
    clock[0] = 10.0
    progress.learned(1, buffer.sample(8))
    clock[0] = 12.0
    buffer.extend(obs=torch.zeros(100))
    progress.learned(8, buffer.sample(8))
    progress.evaluated(8, 0.5)
    progress.summarize("")
    words = capsys.readouterr().err
    assert "12.0 s, of which 10.0 s until the first batch" in words
    assert "8 steps, 4 a second" in words
    assert "1,100 rows, 50 a second" in words


def test_a_run_that_ends_before_its_first_evaluation_has_a_summary_and_no_picture(monkeypatch, capsys, tmp_path):
    progress, buffer, _ = watched(monkeypatch, rows=1000)
    progress.learned(1, buffer.sample(8))
    progress.summarize(str(tmp_path / "run.png"))
    assert "no evaluation in 1 steps" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_picture_may_go_to_a_directory_that_is_not_there_yet(monkeypatch, tmp_path):
    progress, buffer, clock = watched(monkeypatch, rows=1000)
    progress.learned(1, buffer.sample(8))
    clock[0] = 1.0
    progress.evaluated(1, 0.5)
    progress.summarize(str(tmp_path / "of" / "today" / "run.png"))
    assert (tmp_path / "of" / "today" / "run.png").exists()

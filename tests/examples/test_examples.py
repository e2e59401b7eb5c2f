"""The examples run, say what they promise to say, and learn."""

import sys
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from example_programs import evaluations, explanation, imported, succeed

import torchreplay as tr

NAMES = ["apex_cartpole", "apex_multiprocessing"]
QUICK = "--total-steps 60 --eval-every 30 --eval-episodes 2 --learning-starts 300 --num-explorers 2 --solved-at 501"

pytest.importorskip("ray")
pytest.importorskip("gymnasium")


@pytest.fixture(params=NAMES)
def example(request, monkeypatch):
    return imported(request.param, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_one_json_line_per_evaluation_and_leaves_a_picture(name, tmp_path):
    done = succeed(name, tmp_path, *QUICK.split(), timeout=150)
    lines = evaluations(done)
    assert [line["step"] for line in lines] == [30, 60]
    assert all(8 <= line["mean_return"] <= 500 for line in lines)
    assert "not solved" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.png"]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_explains_every_flag(name, monkeypatch, capsys):
    flags, words = explanation(name, monkeypatch, capsys)
    assert flags >= 18
    assert "learner steps between two evaluations (default: 250)" in words


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", NAMES)
def test_an_example_solves_cartpole_within_five_minutes(name, seed, tmp_path):
    done = succeed(name, tmp_path, "--seed", str(seed), timeout=300)
    assert evaluations(done)[-1]["mean_return"] >= 475


def step(reward=1.0, q=0.25):
    return (np.zeros(4, np.float32), 1, reward, np.float32(q))


def test_a_transition_is_the_discounted_sum_of_its_rewards_scaled_by_one_minus_gamma(example):
    row = example.transition(deque([step(1), step(2), step(4)]), np.ones(4, np.float32), 0.5, False, 0.5)
    assert row["reward"] == pytest.approx(0.5 * (1 + 2 / 2 + 4 / 4))
    assert row["discount"] == pytest.approx(0.5**3)


def test_the_first_priority_is_the_td_error_that_the_explorer_found(example):
    window = deque([step(1, q=0.25), step(2)])
    row = example.transition(window, np.ones(4, np.float32), 0.5, False, 0.5)
    assert row["priority"] == pytest.approx(abs(0.5 * (1 + 2 / 2) + 0.5**2 * 0.5 - 0.25))


def test_only_termination_ends_the_bootstrapping_and_a_time_limit_does_not(example):
    window = deque([step()])
    assert example.transition(window, np.ones(4, np.float32), 0.5, True, 0.9)["discount"] == 0.0
    assert example.transition(window, np.ones(4, np.float32), 0.5, False, 0.9)["discount"] == pytest.approx(0.9)


def test_a_policy_that_always_pushes_one_way_falls_within_a_dozen_steps_in_every_evaluated_episode(example):
    class AlwaysLeft(torch.nn.Module):
        def forward(self, obs):
            return torch.tensor([1.0, 0.0]).expand(len(obs), 2)

    returns = example.evaluate(AlwaysLeft(), episodes=20, seed=3)
    assert returns.shape == (20,)
    assert ((returns >= 8) & (returns <= 12)).all()


def watched(monkeypatch, rows):
    """Returns a run's `Progress`, its buffer with that many rows, and a clock to set."""
    buffer = tr.ReplayBuffer({"obs": tr.Field()}, 10_000, limiter=tr.SamplesPerInsert(1.0, 1000, tolerance=1.0))
    clock = [0.0]
    monkeypatch.setattr(imported("progress", monkeypatch).time, "monotonic", lambda: clock[0])
    progress = imported("progress", monkeypatch).Progress("A run", buffer, total_steps=2, solved=1.0)
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


@dataclass
class Flags:
    """What the command does."""

    steps: int = 3
    """how many steps"""
    learning_rate: float = 0.5
    """how fast"""


def test_the_command_line_sets_the_fields_of_the_dataclass(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flags", "--learning-rate", "0.25"])
    assert imported("command_line", monkeypatch).parse(Flags) == Flags(steps=3, learning_rate=0.25)


@dataclass
class MoreFlags(Flags):
    """What another command does."""

    burn_in: int = field(default=5, metadata={"least": 0})
    """which steps come first"""
    seed: int = 0
    """what is drawn"""


def parsed(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["flags", *flags])
    return imported("command_line", monkeypatch).parse(MoreFlags)


def test_the_help_explains_the_flags_that_a_dataclass_inherits_too(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--help")
    words = " ".join(capsys.readouterr().out.split())
    assert "how many steps (default: 3)" in words
    assert "which steps come first (default: 5)" in words


@pytest.mark.parametrize(
    ("flag", "given", "least"),
    [("--steps", "0", 1), ("--steps", "1.5", 1), ("--steps", "many", 1), ("--burn-in", "-1", 0), ("--seed", "-1", 0)],
)
def test_a_number_that_is_too_small_or_none_is_refused_with_what_is_expected(flag, given, least, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parsed(monkeypatch, flag, given)
    assert f"argument {flag}: {given} given, expected a whole number of at least {least}" in capsys.readouterr().err
    assert parsed(monkeypatch, flag, str(least)) is not None

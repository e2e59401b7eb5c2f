"""The example of two policies runs, says what it promises to say, and learns what takes both."""

from itertools import product

import pytest
import torch
from example_programs import evaluations, explanation, imported, succeed

NAME = "multi_agent"
BEST = 1 - 0.05 * sum(max(min(d, 7 - d) for d in start) for start in product(range(7), repeat=2)) / 48


@pytest.fixture
def example(monkeypatch):
    return imported(NAME, monkeypatch)


class Knowing(torch.nn.Module):
    """Moves towards the other along an axis, as one who knows the game."""

    def __init__(self, axis):
        super().__init__()
        self.axis = axis

    def forward(self, obs):
        distance = int(obs[7 * self.axis : 7 * (self.axis + 1)].argmax())
        return torch.tensor([distance == 0, distance > 3, 0 < distance <= 3]).float()


def test_the_best_return_is_that_of_policies_that_know_the_game_and_takes_both(example):
    assert example.evaluate({"red": Knowing(0), "blue": Knowing(1)}) == pytest.approx(BEST)
    assert example.Args.solved_at < BEST
    idle = torch.nn.Linear(14, 3)
    torch.nn.init.zeros_(idle.weight)
    torch.nn.init.constant_(idle.bias, 0.0)
    assert example.evaluate({"red": Knowing(0), "blue": idle}) < 0.0


@pytest.mark.slow
def test_it_prints_one_json_line_per_evaluation(tmp_path):
    flags = "--total-steps 20 --eval-every 10 --learning-starts 1 --num-explorers 1 --solved-at 2"
    lines = evaluations(done := succeed(NAME, tmp_path, *flags.split(), timeout=150))
    assert [line["step"] for line in lines] == [10, 20]
    assert all(-0.6 <= line["mean_return"] <= BEST + 1e-3 for line in lines)
    assert "1 explorers" in done.stderr
    assert not list(tmp_path.iterdir())


def test_it_explains_every_flag(monkeypatch, capsys):
    _, words = explanation(NAME, monkeypatch, capsys)
    assert "learner steps between two evaluations (default: 250)" in words


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(3))
def test_both_policies_learn_to_meet(seed, tmp_path):
    done = succeed(NAME, tmp_path, "--seed", str(seed), timeout=300)
    assert evaluations(done)[-1]["mean_return"] >= 0.87

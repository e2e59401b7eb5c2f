"""The example of demonstrations runs, says what it promises to say, and learns what its control cannot."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import torchreplay as tr

EXAMPLE = Path(__file__).parents[1] / "examples" / "demonstrations_mountaincar.py"
QUICK = "--total-steps 20 --eval-every 10 --eval-episodes 2 --learning-starts 10 --num-envs 2 --demonstrations 200"

pytest.importorskip("gymnasium")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    return import_module("demonstrations_mountaincar")


def run(cwd, *flags, timeout=150):
    command = [sys.executable, str(EXAMPLE), *flags]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def evaluations(stdout):
    return [json.loads(line) for line in stdout.splitlines()]


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_it_prints_one_json_line_per_evaluation_with_demonstrations_and_without(share, tmp_path):
    lines = evaluations(run(tmp_path, *QUICK.split(), "--share", str(share)))
    assert [(line["step"], line["share"]) for line in lines] == [(10, share), (20, share)]
    assert all(-200 <= line["mean_return"] < 0 for line in lines)
    assert not list(tmp_path.iterdir())


def test_it_explains_every_flag(tmp_path):
    words = " ".join(run(tmp_path, "--help").split())
    assert "learner steps between two evaluations (default: 500)" in words
    assert "share of each batch that is demonstrations; 0: none (default: 0.5)" in words


@pytest.mark.soak
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_solved_with_demonstrations_and_not_without_in_as_many_steps(seed, tmp_path):
    solved = evaluations(run(tmp_path, "--seed", str(seed), timeout=450))
    assert solved[-1]["mean_return"] >= -115
    control = evaluations(
        run(tmp_path, "--seed", str(seed), "--share", "0", "--total-steps", str(solved[-1]["step"]), timeout=450)
    )
    assert control[-1]["step"] == solved[-1]["step"]
    assert max(line["mean_return"] for line in control) <= -150


def test_two_runs_with_the_same_seed_learn_the_same_and_another_seed_learns_another(example, monkeypatch, capsys):
    def learned(seed):
        quick = {"total_steps": 5, "eval_every": 5, "learning_starts": 10, "num_envs": 2, "demonstrations": 100}
        example.train(example.Args(seed=seed, eval_episodes=1, **quick))
        return json.loads(capsys.readouterr().out)["mean_return"]

    def weights_instead_of_returns(policy, episodes, seed):
        return sum(parameter.double().sum() for parameter in policy.__self__.parameters()).detach() * 1e6

    monkeypatch.setattr(example, "evaluate", weights_instead_of_returns)
    assert learned(seed=3) == learned(seed=3)
    assert learned(seed=3) != learned(seed=4)


def test_the_driver_gets_up_every_hill_and_random_actions_do_not(example):
    torch.manual_seed(0)
    returns = example.evaluate(example.drive, episodes=50, seed=2)
    assert ((returns > -200) & (returns <= -80)).all()
    assert -130 < returns.mean() < -110
    assert (example.evaluate(lambda obs: torch.randint(3, (len(obs),)), episodes=50, seed=2) == -200).all()


def test_demonstrations_reach_the_goal_and_start_apart_from_experience(example):
    torch.manual_seed(0)
    online, demonstrated = example.buffers_of(example.Args(demonstrations=2_000))
    assert len(online) == 0
    assert 2_000 <= len(demonstrated) < 2_100
    batch = demonstrated.sample(1024)
    assert batch["terminated"].any()
    # Whoever is m steps from the goal has gamma^(m - 1) as return.
    window = torch.isclose(batch["reward"][:, None], 0.99 ** torch.arange(5.0)).any(1)
    assert torch.equal(batch["terminated"], window)
    assert torch.equal(batch["terminated"], batch["reward"] > 0)
    assert (batch["next_obs"][batch["terminated"], 0] >= 0.5).all()


def test_the_td_error_is_that_of_double_q_learning(example):
    class Table(torch.nn.Module):
        def __init__(self, values):
            super().__init__()
            self.values = torch.tensor(values)

        def forward(self, obs):
            return self.values[obs[..., 0].long()]

    q = Table([[0.1, 0.2, 0.3], [0.9, 0.5, 0.4]])
    target = Table([[0.0, 0.0, 0.0], [0.25, 0.75, 0.0]])
    batch = tr.ReplayBatch(
        obs=torch.zeros(2, 2),
        next_obs=torch.ones(2, 2),
        action=torch.tensor([1, 2]),
        reward=torch.tensor([0.0, 1.0]),
        discount=torch.tensor([0.5, 0.0]),
    )
    # The online network prefers action 0 in the next state, which the target network values at 0.25.
    expected = [0.5 * 0.25 - 0.2, 1 - 0.3]
    assert example.td_errors(q, target, batch).tolist() == pytest.approx(expected)

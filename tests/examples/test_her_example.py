"""The example of hindsight runs, says what it promises to say, and learns what its control cannot."""

import math

import numpy as np
import pytest
import torch
from example_programs import curve, evaluations, explanation, imported, succeed

NAME = "her"
QUICK = "--total-steps 20 --eval-every 10 --eval-episodes 2 --learning-starts 60 --num-envs 2 --solved-at 2"

pytest.importorskip("mujoco")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")
gym = pytest.importorskip("gymnasium")


@pytest.fixture
def example(monkeypatch):
    return imported(NAME, monkeypatch)


def evaluations_of(cwd, *flags, timeout=150):
    return evaluations(succeed(NAME, cwd, *flags, "--no-tensorboard", timeout=timeout))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["future", "final", "episode", "none"])
def test_it_prints_one_json_line_per_evaluation_with_each_strategy(strategy, tmp_path):
    lines = evaluations_of(tmp_path, *QUICK.split(), "--strategy", strategy)
    assert [line["step"] for line in lines] == [10, 20]
    assert [line["rows"] for line in lines] == [2 * (1 + 60 + 10), 2 * (1 + 60 + 20)]
    assert all(line["strategy"] == strategy for line in lines)
    assert all(-50 <= line["mean_return"] <= 0 and 0 <= line["success_rate"] <= 1 for line in lines)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_its_curves_can_be_read_in_tensorboard(tmp_path):
    lines = evaluations(succeed(NAME, tmp_path, *QUICK.split(), "--seed", "5", timeout=150))
    for name in ("mean_return", "success_rate"):
        kept = curve(tmp_path / "runs" / "her-seed5", f"charts/{name}")
        assert kept == pytest.approx({line["step"]: line[name] for line in lines}, abs=1e-3)


def test_it_explains_every_flag(monkeypatch, capsys):
    _, words = explanation(NAME, monkeypatch, capsys)
    assert "learner steps between two evaluations (default: 1000)" in words
    assert "--strategy {future,final,episode,none}" in words


@pytest.mark.soak
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", range(5))
def test_it_is_solved_with_hindsight_and_not_without_in_as_many_steps(seed, tmp_path):
    solved = evaluations_of(tmp_path, "--seed", str(seed), timeout=450)
    assert solved[-1]["solved"]
    assert solved[-1]["success_rate"] >= 0.95
    control = evaluations_of(tmp_path, "--seed", str(seed), "--strategy", "none", timeout=450)
    assert control[-1]["step"] == 15_000
    assert max(line["success_rate"] for line in control) <= 0.1


def test_two_runs_with_the_same_seed_learn_the_same_and_another_seed_learns_another(example, monkeypatch):
    def weights_instead_of_returns(agent, arms, seed):
        return sum(parameter.double().sum().item() for parameter in agent.parameters()), 0.0

    def learned(seed):
        quick = {"total_steps": 10, "eval_every": 10, "eval_episodes": 1, "learning_starts": 60, "num_envs": 2}
        return example.train(example.Args(seed=seed, tensorboard=False, **quick))[-1]["mean_return"]

    monkeypatch.setattr(example, "evaluate", weights_instead_of_returns)
    assert learned(seed=3) == learned(seed=3)
    assert learned(seed=3) != learned(seed=4)


def test_the_achieved_goal_is_the_fingertip_of_two_links_of_10_and_11_centimetres(example):
    arm = gym.make("Reacher-v5").unwrapped
    for shoulder, elbow in torch.empty(20, 2).uniform_(-3, 3, generator=torch.Generator().manual_seed(0)).tolist():
        arm.set_state(np.array([shoulder, elbow, 0.05, -0.15]), np.array([1.5, -2.5, 0, 0]))  # joints, then the target
        obs = example.goal_observation(arm._get_obs()[None])
        fingertip = [
            0.1 * math.cos(shoulder) + 0.11 * math.cos(shoulder + elbow),
            0.1 * math.sin(shoulder) + 0.11 * math.sin(shoulder + elbow),
        ]
        angles = [math.cos(shoulder), math.cos(elbow), math.sin(shoulder), math.sin(elbow)]
        assert obs["achieved_goal"][0].tolist() == pytest.approx(fingertip, abs=1e-6)
        assert obs["desired_goal"][0].tolist() == pytest.approx([0.05, -0.15])
        assert obs["observation"][0].tolist() == pytest.approx([*angles, 1.5, -2.5])


def test_the_reward_is_0_within_a_centimetre_of_the_goal_and_minus_1_beyond(example):
    goal = torch.tensor([0.1, -0.1]).expand(4, 2)
    way = torch.tensor([[0.0, 0.0], [0.0099, 0.0], [0.0, -0.0101], [0.008, 0.008]])
    assert example.compute_reward(goal + way, goal).tolist() == [0, 0, -1, -1]


@pytest.mark.parametrize(("bias", "goals"), [(3.0, [0.0, 0.0]), (-10.0, [-10.8, -9.8]), (-1000.0, [-50.0, -50.0])])
def test_the_critic_is_never_told_more_than_0_or_less_than_minus_1_for_ever(example, bias, goals):
    learner = example.Learner(example.Agent(), example.Args(gamma=0.98))
    for parameter in learner.target.critic.parameters():
        parameter.zero_()
    learner.target.critic[-1].bias.fill_(bias)  # the value of everything
    obs = {"observation": torch.randn(2, 6), "achieved_goal": torch.randn(2, 2), "desired_goal": torch.randn(2, 2)}
    batch = {"next_obs": obs, "reward": torch.tensor([-1.0, 0.0]), "discount": torch.tensor([0.98, 0.98])}
    assert learner.goals(batch).tolist() == pytest.approx(goals)


def test_explorers_mix_uniform_with_greedy_actions_and_stay_within_the_arms_bounds(example):
    torch.manual_seed(0)
    agent, obs = example.Agent(), example.goal_observation(torch.randn(4000, 10))
    greedy = agent.act(example.features(obs)).detach()
    assert torch.equal(example.explore(agent, obs, epsilon=0.0, noise=0.0), greedy)
    assert example.explore(agent, obs, epsilon=0.5, noise=5.0).abs().max() == 1
    mixed = (example.explore(agent, obs, epsilon=0.25, noise=0.0) != greedy).any(1).float().mean().item()
    assert mixed == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / 4000))  # five sigma; the seed is fixed


def test_an_arm_that_rests_returns_minus_50_in_every_evaluated_episode(example):
    agent = example.Agent()
    for parameter in agent.actor.parameters():
        torch.nn.init.zeros_(parameter)
    arms = gym.make_vec("Reacher-v5", num_envs=20)
    assert example.evaluate(agent, arms, seed=1) == (-50.0, 0.0)

"""The example of parallel SAC runs, says what it promises to say, and lands."""

import math

import pytest
import torch
from example_programs import curve, evaluations, explanation, imported, succeed
from safetensors.torch import load_file
from torch.distributions import Normal, TanhTransform, TransformedDistribution

NAME = "sac_continuous"

pytest.importorskip("gymnasium")
pytest.importorskip("mujoco")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture
def example(monkeypatch):
    return imported(NAME, monkeypatch)


QUICK = "--total-steps 40 --eval-every 20 --eval-episodes 2 --start-steps 300 --num-explorers 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "most"),
    [
        ("InvertedPendulum-v5", 1000),
        pytest.param("LunarLanderContinuous-v3", 400, marks=pytest.mark.soak),
        pytest.param("Reacher-v5", 0, marks=pytest.mark.soak),
    ],
)
def test_a_run_prints_its_evaluations_and_keeps_the_best_actor_and_a_curve(env, most, tmp_path):
    if env.startswith("Lunar"):
        pytest.importorskip("Box2D")
    flags = f"{QUICK} --env {env} --solved-at 2000 --directory best"
    lines = evaluations(succeed(NAME, tmp_path, *flags.split(), timeout=150))
    assert lines[-1]["step"] == 40
    assert all(line["mean_return"] <= most and not line["solved"] for line in lines)
    assert load_file(tmp_path / "best" / "best.safetensors").keys() == {
        f"body.{layer}.{part}" for layer in (0, 2, 4) for part in ("weight", "bias")
    }
    kept = curve(tmp_path / "runs" / "sac_continuous-seed0")
    assert kept == pytest.approx({line["step"]: line["mean_return"] for line in lines}, abs=1e-2)


def test_it_explains_every_flag(monkeypatch, capsys):
    _, words = explanation(NAME, monkeypatch, capsys)
    assert "learner steps between two evaluations (default: 1000)" in words


@pytest.mark.parametrize("name", ["InvertedPendulum-v5", "Reacher-v5"])
def test_observations_are_float32_and_actions_go_from_minus_1_to_1_whatever_the_environments_range(example, name):
    env = example.make_env(name)
    obs, _ = env.reset(seed=0)
    assert obs.dtype == env.observation_space.dtype == "float32"
    assert env.observation_space.contains(obs)
    assert env.action_space.low.tolist() == [-1.0] * env.action_space.shape[0]
    assert env.action_space.high.tolist() == [1.0] * env.action_space.shape[0]
    env.step(env.action_space.high)
    raw = env.unwrapped
    assert raw.data.ctrl.tolist() == pytest.approx(raw.action_space.high.tolist())


def test_an_environment_without_a_threshold_needs_one(example):
    with pytest.raises(ValueError, match=r"Pendulum-v1 has no reward threshold: .* --solved-at"):
        example.main(example.Args(env="Pendulum-v1", tensorboard=False))


def test_the_density_of_an_action_is_that_of_a_squashed_gaussian(example):
    torch.manual_seed(0)
    actor, obs = example.Actor(8, 2), torch.randn(64, 8)
    with torch.no_grad():
        action, log_density = actor.sample(obs)
        mean, log_std = actor.body(obs).chunk(2, dim=-1)
        expected = TransformedDistribution(Normal(mean.double(), log_std.double().exp()), TanhTransform())
    assert torch.allclose(log_density.double(), expected.log_prob(action.double()).sum(-1), atol=1e-3)


def test_without_noise_an_action_is_the_squashed_mean(example):
    actor, obs = example.Actor(8, 2), torch.randn(5, 8)
    assert torch.equal(actor(obs), actor.body(obs)[:, :2].tanh())


@pytest.mark.slow
@pytest.mark.parametrize("discount", [0.0, 0.99])
def test_the_critics_learn_the_reward_and_the_smaller_value_of_what_follows_if_anything_does(example, discount):
    args = example.Args(learning_rate=1e-3)
    torch.manual_seed(1)
    learner = example.Learner(8, 2, args)
    batch = {
        "obs": torch.randn(32, 8),
        "action": torch.rand(32, 2) * 2 - 1,
        "reward": torch.full((32,), 5.0),
        "next_obs": torch.randn(32, 8),
        "discount": torch.full((32,), discount),
    }
    for critic, constant in zip(learner.target, (10.0, 20.0), strict=True):
        torch.nn.init.zeros_(critic[-1].weight)
        torch.nn.init.constant_(critic[-1].bias, constant)
    args.target_rate = 0.0
    learner.log_alpha.data.fill_(-math.inf)  # no bonus for entropy
    for _ in range(1500):
        learner.step(batch)
        learner.log_alpha.data.fill_(-math.inf)
    values = learner.critics(batch["obs"], batch["action"])
    assert torch.allclose(values, torch.tensor(5.0 + discount * 10.0), atol=0.5)


@pytest.mark.soak
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", range(5))
def test_it_balances_the_pendulum_with_every_seed(seed, tmp_path):
    last = evaluations(succeed(NAME, tmp_path, "--seed", str(seed), "--no-tensorboard", timeout=900))[-1]
    assert last["solved"]
    assert last["mean_return"] >= 950


@pytest.mark.soak
@pytest.mark.timeout(2000)
def test_it_lands(tmp_path):
    pytest.importorskip("Box2D")
    flags = "--env LunarLanderContinuous-v3 --no-tensorboard"
    assert evaluations(succeed(NAME, tmp_path, *flags.split(), timeout=1900))[-1]["mean_return"] >= 200

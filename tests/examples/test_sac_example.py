"""The example of parallel SAC runs, says what it promises to say, and lands."""

import math

import pytest
import torch
from example_programs import evaluations, imported, succeed
from safetensors.torch import load_file
from torch.distributions import Normal, TanhTransform, TransformedDistribution

NAME = "sac_lunarlander"

pytest.importorskip("ray")
pytest.importorskip("Box2D")


@pytest.fixture
def example(monkeypatch):
    return imported(NAME, monkeypatch)


@pytest.mark.slow
def test_a_run_prints_its_evaluations_and_keeps_the_best_actor(tmp_path):
    flags = "--total-steps 40 --eval-every 20 --eval-episodes 2 --start-steps 300 --num-explorers 2 --solved-at 400"
    done = succeed(NAME, tmp_path, *flags.split(), "--directory", "best", timeout=150)
    lines = evaluations(done)
    assert lines[-1]["step"] == 40
    assert all(line["mean_return"] < 400 for line in lines)
    assert "not solved" in done.stderr
    assert (tmp_path / f"{NAME}.png").exists()
    assert load_file(tmp_path / "best" / "best.safetensors").keys() == {
        f"body.{layer}.{part}" for layer in (0, 2, 4) for part in ("weight", "bias")
    }


def test_the_density_of_an_action_is_that_of_a_squashed_gaussian(example):
    torch.manual_seed(0)
    actor, obs = example.Actor(), torch.randn(64, 8)
    with torch.no_grad():
        action, log_density = actor.sample(obs)
        mean, log_std = actor.body(obs).chunk(2, dim=-1)
        expected = TransformedDistribution(Normal(mean.double(), log_std.double().exp()), TanhTransform())
    assert torch.allclose(log_density.double(), expected.log_prob(action.double()).sum(-1), atol=1e-3)


def test_without_noise_an_action_is_the_squashed_mean(example):
    actor, obs = example.Actor(), torch.randn(5, 8)
    assert torch.equal(actor(obs), actor.body(obs)[:, :2].tanh())


@pytest.mark.slow
@pytest.mark.parametrize("discount", [0.0, 0.99])
def test_the_critics_learn_the_reward_and_the_smaller_value_of_what_follows_if_anything_does(example, discount):
    args = example.Args(learning_rate=1e-3)
    torch.manual_seed(1)
    learner = example.Learner(args)
    batch = {
        "obs": torch.randn(32, 8),
        "action": torch.rand(32, 2) * 2 - 1,
        "reward": torch.full((32,), 5.0),
        "next_obs": torch.randn(32, 8),
        "discount": torch.full((32,), discount),
    }
    for critic, constant in zip(learner.target.pair, (10.0, 20.0), strict=True):
        torch.nn.init.zeros_(critic[-1].weight)
        torch.nn.init.constant_(critic[-1].bias, constant)
    args.target_rate = 0.0
    learner.log_alpha.data.fill_(-math.inf)  # no bonus for entropy
    for _ in range(600):
        learner.step(batch)
        learner.log_alpha.data.fill_(-math.inf)
    values = learner.critics(batch["obs"], batch["action"])
    assert torch.allclose(values, torch.tensor(5.0 + discount * 10.0), atol=0.5)


@pytest.mark.soak
@pytest.mark.timeout(2000)
def test_it_lands(tmp_path):
    assert evaluations(succeed(NAME, tmp_path, timeout=1900))[-1]["mean_return"] >= 200

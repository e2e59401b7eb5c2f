"""The continuous offline example makes the right transitions of D4RL's arrays, has the losses of TD3+BC, and learns."""

from statistics import mean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from example_programs import curve, evaluations, imported, refusal, succeed

NAME = "offline_continuous"

gymnasium = pytest.importorskip("gymnasium")
h5py = pytest.importorskip("h5py")
pytest.importorskip("mujoco")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture
def example(monkeypatch):
    return imported(NAME, monkeypatch)


@pytest.mark.parametrize("with_next", [True, False], ids=["with next_observations", "without"])
def test_terminals_and_timeouts_make_the_transitions_that_the_page_says(example, tmp_path, with_next):
    falls, cuts, steps = {3, 11, 17}, {7, 17}, 20
    obs = np.random.default_rng(0).normal(size=(steps, 4)).astype(np.float32)
    ends = sorted(falls | cuts)
    after = np.stack([-obs[t] if t in ends else obs[(t + 1) % steps] for t in range(steps)])
    flags = {name: np.isin(range(steps), [*at]) for name, at in (("terminals", falls), ("timeouts", cuts))}
    with h5py.File(tmp_path / "steps.hdf5", "x") as file:
        file["observations"], file["actions"] = obs, obs[:, :1] / 9
        file["rewards"] = np.arange(steps, dtype=np.float32)
        for name, values in flags.items():
            file[name] = values
        if with_next:
            file["next_observations"] = after
    expected = {}
    for t in range(steps):
        unknown = not with_next and (t in ends or t == steps - 1)
        if unknown and t not in falls:
            continue  # its value would need an observation that nobody has
        expected[t] = (None if t in falls and unknown else after[t].tolist(), 0.0 if t in falls else 0.5)
    with example.filled_buffer(tmp_path / "steps.hdf5", example.Args(gamma=0.5)) as buffer:
        batches = [buffer.sample(10) for _ in range(200)]
    found = set()
    for batch in batches:
        for i, t in enumerate(batch["reward"].int().tolist()):
            found.add(t)
            assert batch["obs"][i].tolist() == obs[t].tolist()
            assert expected[t][0] in (None, batch["next_obs"][i].tolist())
            assert batch["discount"][i] == expected[t][1]
    assert found == set(expected)


@pytest.fixture
def networks(example):
    torch.manual_seed(0)
    space = gymnasium.spaces.Box(np.float32([-1, 0]), np.float32([3, 10]))
    return example.Networks(torch.randn(50, 4) * 3 + 1, space)


@pytest.fixture
def batch():
    torch.manual_seed(1)
    names = {"obs": torch.randn(6, 4), "next_obs": torch.randn(6, 4), "reward": torch.randn(6)}
    action = torch.rand(6, 2) * torch.tensor([4.0, 10.0]) + torch.tensor([-1.0, 0.0])
    return names | {"action": action, "discount": torch.tensor([0.9, 0.0, 0.9, 0.9, 0.0, 0.9])}


def test_actions_of_the_environment_are_those_from_minus_one_to_one_in_its_bounds(networks):
    scaled = networks.scaled(torch.tensor([[-1.0, 0.0], [3.0, 10.0], [1.0, 5.0]]))
    assert scaled.tolist() == [[-1, -1], [1, 1], [0, 0]]
    obs = np.random.default_rng(0).normal(size=(30, 4))
    torch.testing.assert_close(networks.scaled(torch.from_numpy(networks.play(obs))), networks.act(torch.Tensor(obs)))


def test_critics_learn_the_smaller_of_two_values_of_what_follows(example, networks, batch):
    target = example.Networks(torch.randn(50, 4), SimpleNamespace(low=np.float32([-1, 0]), high=np.float32([3, 10])))
    loss = example.critics_loss(networks, target, batch, example.Args(target_noise=0.0)).item()
    errors = []
    with torch.no_grad():
        for i in range(6):
            then, action = batch["next_obs"][i : i + 1], target.act(batch["next_obs"][i : i + 1])
            value = min(float(v) for v in target.values(then, action))
            goal = float(batch["reward"][i] + batch["discount"][i] * value)
            now = networks.values(batch["obs"][i : i + 1], networks.scaled(batch["action"][i : i + 1]))
            errors += [(float(v) - goal) ** 2 for v in now]
    assert loss == pytest.approx(mean(errors), rel=1e-4)


def test_the_actor_s_loss_is_that_of_the_paper_and_without_alpha_behavioural_cloning(example, networks, batch):
    # Equation 5: maximize lambda Q(s, pi(s)) - (pi(s) - a)^2, where lambda is alpha over the mean of |Q|.
    with torch.no_grad():
        action = networks.act(batch["obs"])
        value = networks.values(batch["obs"], action)[0]
        cloning = ((action - networks.scaled(batch["action"])) ** 2).mean().item()
    value = value.tolist()
    advantage = 2.5 * mean(value) / mean(map(abs, value))
    assert example.actor_loss(networks, batch, 0.0).item() == pytest.approx(cloning, rel=1e-5)
    assert example.actor_loss(networks, batch, 2.5).item() == pytest.approx(cloning - advantage, rel=1e-4)


def test_a_task_that_the_player_does_not_know_needs_data(monkeypatch, capsys):
    said = refusal(NAME, monkeypatch, capsys, "--env", "Hopper-v5")
    assert "env='Hopper-v5' without data: give --data" in said


@pytest.mark.slow
def test_it_does_better_than_the_player_from_a_file_alone_and_tensorboard_says_so(tmp_path):
    flags = "--seed 1 --total-steps 1000 --eval-every 500 --eval-episodes 3 --solved-at 100000"
    lines = evaluations(succeed(NAME, tmp_path, *flags.split(), timeout=150))
    assert [line["step"] for line in lines] == [500, 1000]
    assert lines[-1]["mean_return"] > 4 * lines[-1]["recorded"]  # of at most 100
    kept = curve(tmp_path / "runs" / f"{NAME}-seed1")
    assert kept == pytest.approx({line["step"]: line["mean_return"] for line in lines}, abs=1e-2)

"""The example of several agents runs, says what it promises to say, and learns what takes all of them."""

from itertools import product

import pytest
import torch
from example_programs import curve, evaluations, explanation, imported, succeed

NAME = "multi_agent"
BEST = 1 - 0.05 * sum(max(min(d, 7 - d) for d in start) for start in product(range(7), repeat=2)) / 48
ZOMBIES = "--env butterfly/knights_archers_zombies-v11"

pytest.importorskip("pettingzoo")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture
def example(monkeypatch):
    return imported(NAME, monkeypatch)


class Knowing(torch.nn.Module):
    """Moves towards the other along an axis, as one who knows the game."""

    def __init__(self, axis):
        super().__init__()
        self.axis = axis

    def forward(self, obs):
        distance = int(obs[0, 7 * self.axis : 7 * (self.axis + 1)].argmax())
        return torch.tensor([[distance == 0, distance > 3, 0 < distance <= 3]]).float()


def test_the_torus_is_a_parallel_environment_of_pettingzoo(example, capsys):
    from pettingzoo.test import parallel_api_test

    parallel_api_test(example.Torus(), num_cycles=200)
    assert "Passed" in capsys.readouterr().out


def test_both_see_the_distances_and_get_the_same_reward_until_they_meet_or_time_is_up(example):
    torus = example.Torus()
    obs, _ = torus.reset(seed=example.STARTS.index((1, 6)))
    for agent in ("red", "blue"):
        assert obs[agent].reshape(2, 7).argmax(1).tolist() == [1, 6]
    obs, rewards, terminations, truncations, _ = torus.step({"red": 2, "blue": 0})  # red closes, blue waits
    assert obs["red"].reshape(2, 7).argmax(1).tolist() == [0, 6]
    assert rewards == {"red": -0.05, "blue": -0.05}
    assert not any([*terminations.values(), *truncations.values()])
    _, rewards, terminations, truncations, _ = torus.step({"red": 0, "blue": 1})
    assert rewards == {"red": 0.95, "blue": 0.95}
    assert all(terminations.values())
    assert not any(truncations.values())
    assert torus.agents == []
    torus.reset(seed=0)
    flags = [torus.step({"red": 0, "blue": 0})[2:4] for _ in range(12)]
    assert [all(truncations.values()) for _, truncations in flags] == [False] * 11 + [True]
    assert not any(any(terminations.values()) for terminations, _ in flags)


def test_the_best_return_is_that_of_policies_that_know_the_game_and_takes_both(example):
    args = example.Args()
    assert example.evaluate({"red": Knowing(0), "blue": Knowing(1)}, args) == pytest.approx(BEST)
    assert args.solved_at < BEST
    idle = torch.nn.Linear(14, 3)
    torch.nn.init.zeros_(idle.weight)
    torch.nn.init.constant_(idle.bias, 0.0)
    assert example.evaluate({"red": Knowing(0), "blue": idle}, args) < 0.0


def test_each_agent_learns_from_its_own_batch_alone(example):
    torch.manual_seed(0)
    networks = example.q_networks(example.Torus())
    learner = example.Learner(networks, example.Args())
    before = {agent: [p.clone() for p in network.parameters()] for agent, network in networks.items()}
    batch = {"obs": torch.rand(8, 14), "next_obs": torch.rand(8, 14), "action": torch.zeros(8, dtype=torch.int64)}
    batch |= {"reward": torch.full((8,), 3.0), "discount": torch.zeros(8), "weight": torch.ones(8)}
    with torch.no_grad():
        expected = 3.0 - networks["red"](batch["obs"])[:, 0]  # nothing follows: the reward is all there is to learn
    errors = learner({"red": batch, "blue": batch | {"weight": torch.zeros(8)}})
    assert torch.allclose(errors["red"], expected)
    moved = {
        agent: any(not torch.equal(a, b) for a, b in zip(before[agent], network.parameters(), strict=True))
        for agent, network in networks.items()
    }
    assert moved == {"red": True, "blue": False}


@pytest.mark.slow
def test_it_prints_one_json_line_per_evaluation_and_keeps_a_curve(tmp_path):
    flags = "--total-steps 20 --eval-every 10 --learning-starts 10 --num-explorers 1 --solved-at 2"
    lines = evaluations(succeed(NAME, tmp_path, *flags.split(), timeout=150))
    assert [line["step"] for line in lines] == [10, 20]
    assert all(-0.6 <= line["mean_return"] <= BEST + 1e-3 for line in lines)
    assert all(line["explorers"] == 1 and line["rows"]["red"] == line["rows"]["blue"] >= 10 for line in lines)
    kept = curve(tmp_path / "runs" / "multi_agent-seed0")
    assert kept == pytest.approx({line["step"]: line["mean_return"] for line in lines}, abs=1e-4)


@pytest.mark.slow
def test_it_plays_an_environment_of_pettingzoo_whose_agents_die_at_different_times(tmp_path):
    pytest.importorskip("pygame", reason="the environment draws with it")
    flags = f"{ZOMBIES} --total-steps 4 --eval-every 2 --eval-episodes 1 --learning-starts 300 --no-tensorboard"
    lines = evaluations(succeed(NAME, tmp_path, *flags.split(), "--solved-at", "1000", timeout=150))
    assert [line["step"] for line in lines] == [2, 4]
    rows = lines[-1]["rows"]
    assert rows.keys() == {"archer_0", "archer_1", "knight_0", "knight_1"}
    assert len(set(rows.values())) > 1  # who dies writes no more, and the others go on
    assert not list(tmp_path.iterdir())


def test_it_explains_every_flag(monkeypatch, capsys):
    _, words = explanation(NAME, monkeypatch, capsys)
    assert "learner steps between two evaluations (default: 250)" in words


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("backend", ["process", "ray"])
def test_both_policies_learn_to_meet(backend, seed, tmp_path):
    flags = ["--seed", str(seed), "--backend", backend, "--no-tensorboard"]
    last = evaluations(succeed(NAME, tmp_path, *flags, timeout=300))[-1]
    assert last["solved"]
    assert last["mean_return"] >= 0.87


@pytest.mark.soak
@pytest.mark.timeout(1000)
def test_four_agents_learn_to_defend_a_gate(example, tmp_path):
    pytest.importorskip("pygame", reason="the environment draws with it")
    args = example.Args(env=ZOMBIES.split()[1], eval_episodes=20)  # who hits one zombie in an episode gets 1
    torch.manual_seed(0)
    untaught = example.evaluate(example.q_networks(example.make_env(args.env)), args)
    flags = f"{ZOMBIES} --total-steps 2000 --eval-every 2000 --eval-episodes 20 --solved-at 1000 --no-tensorboard"
    learned = evaluations(succeed(NAME, tmp_path, *flags.split(), timeout=900))[-1]["mean_return"]
    assert learned >= max(2 * untaught, 0.25)

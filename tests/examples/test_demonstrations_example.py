"""The example of demonstrations runs, says what it promises to say, and learns what its control cannot."""

import json

import pytest
import torch
from example_programs import curve, evaluations, explanation, imported, succeed

import torchreplay as tr

NAME = "demonstrations"

pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture
def example(monkeypatch):
    return imported(NAME, monkeypatch)


def evaluations_of(cwd, *flags):
    return evaluations(succeed(NAME, cwd, *flags, "--no-tensorboard", timeout=150))


@pytest.mark.slow
def test_it_finds_the_treasure_and_prints_one_json_line_per_evaluation(tmp_path):
    lines = evaluations_of(tmp_path, "--seed", "1")
    assert [line["step"] for line in lines] == [100 * (i + 1) for i in range(len(lines))]
    assert lines[-1]["mean_return"] == pytest.approx(0.99)  # 1 for the treasure, 0.01 for the way
    assert all(-0.01 <= line["mean_return"] <= 0 for line in lines[:-1])
    assert lines[-1]["step"] <= 1000
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_without_the_demonstration_it_is_not_found_in_as_many_steps(tmp_path):
    # Random divers find it once in 2^30 episodes; here there are 800.
    lines = evaluations_of(tmp_path, "--seed", "1", "--share", "0", "--total-steps", "1000")
    assert [line["step"] for line in lines] == list(range(100, 1001, 100))
    assert all(line["share"] == 0 and -0.01 <= line["mean_return"] <= 0 for line in lines)


@pytest.mark.slow
def test_the_demonstration_alone_is_enough_too(tmp_path):
    lines = evaluations_of(tmp_path, "--seed", "1", "--share", "1")
    assert lines[-1]["mean_return"] == pytest.approx(0.99)
    assert all(line["share"] == 1 for line in lines)


def test_it_explains_every_flag(monkeypatch, capsys):
    _, words = explanation(NAME, monkeypatch, capsys)
    assert "learner steps between two evaluations (default: 100)" in words
    assert "share of each batch that is the demonstration; 0: none, 1: nothing else (default: 0.25)" in words


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_it_finds_the_treasure_with_every_seed(seed, tmp_path):
    last = evaluations_of(tmp_path, "--seed", str(seed))[-1]
    assert last["solved"]
    assert last["mean_return"] == pytest.approx(0.99)


def test_two_runs_with_the_same_seed_learn_the_same_and_another_seed_learns_another(example, capsys):
    def learned(seed):
        example.main(example.Args(seed=seed, total_steps=60, eval_every=10, size=8, tensorboard=False))
        return [(line["step"], line["mean_return"]) for line in map(json.loads, capsys.readouterr().out.splitlines())]

    assert learned(seed=3) == learned(seed=3)
    assert learned(seed=3) != learned(seed=4)


def test_its_curve_can_be_read_in_tensorboard(example, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    example.main(example.Args(seed=3, total_steps=20, eval_every=10, size=8))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kept = curve(tmp_path / "runs" / "demonstrations-seed3")
    assert kept == pytest.approx({line["step"]: line["mean_return"] for line in lines}, abs=1e-4)


def test_a_diver_drifts_by_the_cells_he_is_in_and_pays_for_drifting_right(example):
    torch.manual_seed(0)
    size = 6
    sea = example.DeepSea(size, seed=2)
    right = sea.guide(torch.arange(sea.cells))
    episode = sea.dive(lambda obs: torch.randint(2, (len(obs),)), divers=200)
    assert {name: tuple(value.shape) for name, value in episode.items()} == {
        "obs": (size + 1, 200),
        **dict.fromkeys(("action", "reward", "terminated", "truncated"), (size, 200)),
    }
    for diver in range(200):
        row = column = 0
        for step in range(size):
            assert episode["obs"][step, diver] == row * size + column
            drifts_right = bool(episode["action"][step, diver] == right[row * size + column])
            found = drifts_right and column == size - 1
            assert float(episode["reward"][step, diver]) == pytest.approx(found - drifts_right * 0.01 / size)
            row, column = row + 1, min(column + 1, size - 1) if drifts_right else max(column - 1, 0)
        assert episode["obs"][size, diver] == row * size + column
    assert episode["terminated"].nonzero()[:, 0].eq(size - 1).all()
    assert episode["terminated"][-1].all()


def test_only_who_always_drifts_right_finds_the_treasure(example):
    sea = example.DeepSea(30, seed=1)
    guided = sea.dive(sea.guide, divers=1)
    assert float(guided["reward"].sum()) == pytest.approx(0.99)
    assert guided["obs"][:-1, 0].tolist() == [row * 30 + row for row in range(30)]
    torch.manual_seed(0)
    assert sea.dive(sea.guide, divers=1000, epsilon=1.0)["reward"].sum(0).max() <= 0


def test_the_td_error_is_that_of_double_q_learning(example):
    q, target = example.QTable(2), example.QTable(2)
    q.weight.data = torch.tensor([[0.1, 0.2], [0.9, 0.5]])
    target.weight.data = torch.tensor([[0.0, 0.0], [0.25, 0.75]])
    batch = tr.ReplayBatch(
        obs=torch.tensor([0, 1]),
        next_obs=torch.tensor([1, 1]),
        action=torch.tensor([1, 0]),
        reward=torch.tensor([-1.0, 1.0]),
        discount=torch.tensor([0.5, 0.0]),
    )
    # The online network prefers action 0 in the next cell, which the target network values at 0.25.
    assert example.td_errors(q, target, batch).tolist() == pytest.approx([-1 + 0.5 * 0.25 - 0.2, 1 - 0.9])

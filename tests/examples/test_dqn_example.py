"""The example in one process learns, and does the same again."""

import json

import pytest
from example_programs import curve, evaluations, imported, succeed

pytest.importorskip("gymnasium")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture
def example(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return imported("dqn", monkeypatch)


def lines_of(example, capsys, **flags):
    """What a short run prints, without its times."""
    example.main(example.Args(total_steps=60, eval_every=20, eval_episodes=4, learning_starts=100, **flags))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_runs_with_the_same_seed_are_the_same_and_with_another_they_are_not(example, capsys):
    first, again = (lines_of(example, capsys, seed=3, tensorboard=False) for _ in range(2))
    assert [line["step"] for line in first] == [20, 40, 60]
    assert first == again
    assert first != lines_of(example, capsys, seed=4, tensorboard=False)


def test_a_second_run_with_the_same_seed_hides_the_curves_of_the_first(example, capsys, tmp_path):
    lines_of(example, capsys, solved_at=0.0)
    assert list(curve(tmp_path / "runs" / "dqn-seed0")) == [20]  # solved at once
    lines_of(example, capsys)
    assert list(curve(tmp_path / "runs" / "dqn-seed0")) == [20, 40, 60]


def test_without_tensorboard_nothing_is_left_behind(example, capsys, tmp_path):
    lines_of(example, capsys, tensorboard=False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_ends_with_the_evaluation_that_solves_the_task(example, capsys):
    lines = lines_of(example, capsys, solved_at=1.0, tensorboard=False)
    assert [(line["step"], line["solved"]) for line in lines] == [(20, True)]


def solves(seed, directory, timeout):
    last = evaluations(succeed("dqn", directory, "--seed", str(seed), "--no-tensorboard", timeout=timeout))[-1]
    return last["solved"] and last["mean_return"] >= 475


@pytest.mark.slow
def test_it_solves_cartpole(tmp_path):
    assert solves(3, tmp_path, timeout=170)


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(5))
def test_it_solves_cartpole_with_five_seeds(seed, tmp_path):
    assert solves(seed, tmp_path, timeout=380)

"""What all examples have in common: flags that explain themselves, one file, CartPole, curves that are kept."""

import ast
from itertools import pairwise

import pytest
import torch
from example_programs import (
    EXAMPLES,
    assert_tensorboard_says,
    evaluations,
    explanation,
    imported,
    parsed,
    refusal,
    succeed,
)

NAMES = [
    "apex",
    "apex_cartpole",
    "camera_frames",
    "cluster",
    "ddp",
    "demonstrations",
    "dqn",
    "dqn_atari",
    "grpo",
    "her",
    "impala",
    "multi_agent",
    "offline",
    "offline_continuous",
    "ppo",
]
NAMES += ["r2d2", "sac_continuous", "sb3"]
CARTPOLE = ["apex", "apex_cartpole", "cluster", "ddp", "dqn", "impala", "ppo"]
NEEDS = {"apex_cartpole": ["ray", "pytorch_lightning"], "cluster": ["ray"], "ddp": ["pytorch_lightning"]}
NEEDS |= {
    "camera_frames": ["PIL"],
    "dqn_atari": ["ale_py"],
    "multi_agent": ["pettingzoo"],
    "offline": ["h5py"],
    "offline_continuous": ["h5py", "mujoco"],
    "sb3": ["stable_baselines3"],
}

pytest.importorskip("gymnasium")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture
def name(request):
    for module in NEEDS.get(request.param, []):
        pytest.importorskip(module)
    return request.param


@pytest.mark.parametrize("name", NAMES, indirect=True)
def test_an_example_explains_every_flag(name, monkeypatch, capsys):
    _, words = explanation(name, monkeypatch, capsys)
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args")
    fields = [(field.target.id, doc) for field, doc in pairwise(body) if isinstance(field, ast.AnnAssign)]
    assert len(fields) >= 15
    for field, doc in fields:
        assert f"--{field.replace('_', '-')}" in words
        assert " ".join(doc.value.value.split()) in words, field
    assert "between two evaluations (default: " in words


@pytest.mark.parametrize("name", NAMES, indirect=True)
def test_a_number_that_no_run_could_use_is_refused_with_what_is_expected(name, monkeypatch, capsys):
    said = refusal(name, monkeypatch, capsys, "--total-steps", "0")
    assert "total_steps=0: expected a whole number of at least 1" in said
    said = refusal(name, monkeypatch, capsys, "--seed", "-1")
    assert "seed=-1: expected a whole number of at least 0" in said
    assert parsed(name, monkeypatch, "--total-steps", "1", "--seed", "0").total_steps == 1


@pytest.mark.parametrize("name", ["apex_cartpole"], indirect=True)
@pytest.mark.parametrize("given", ["gamma=1.5", "gamma=nan", "epsilon=-0.1"])
def test_a_share_that_is_none_is_refused_with_what_is_expected(name, given, monkeypatch, capsys):
    field, value = given.split("=")
    assert f"{given}: expected 0 to 1" in refusal(name, monkeypatch, capsys, f"--{field}", value)


@pytest.mark.parametrize("name", NAMES, indirect=True)
def test_what_is_no_number_or_no_flag_is_refused_by_name(name, monkeypatch, capsys):
    assert "--batch-size: invalid literal for int() with base 10: 'many'" in refusal(
        name, monkeypatch, capsys, "--batch-size", "many"
    )
    assert "Unrecognized options: --steps" in refusal(name, monkeypatch, capsys, "--steps", "3")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_one_file_that_one_reads_from_top_to_bottom(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 250
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    shared = {"progress"} if name == "apex_cartpole" else set()  # only the demo shows a panel and draws a picture
    assert modules & {path.stem for path in EXAMPLES.glob("*.py")} == shared


@pytest.mark.parametrize("name", CARTPOLE, indirect=True)
def test_a_policy_that_always_pushes_one_way_falls_within_a_dozen_steps_in_every_evaluated_episode(name, monkeypatch):
    class AlwaysLeft(torch.nn.Module):
        def forward(self, obs):
            return torch.tensor([1.0, 0.0]).expand(len(obs), 2)

    returns = imported(name, monkeypatch).evaluate(AlwaysLeft(), episodes=20, seed=3)
    assert returns.shape == (20,)
    assert ((returns >= 8) & (returns <= 12)).all()


@pytest.mark.parametrize("name", ["apex", "cluster", "dqn", "dqn_atari"], indirect=True)
def test_the_td_errors_are_those_of_double_q_learning(name, monkeypatch):
    def values(*rows):
        return torch.tensor(rows)

    online, slow = {0: values([1.0, 2.0]), 1: values([5.0, 4.0])}, {1: values([10.0, 20.0])}
    batch = {"obs": 0, "next_obs": 1, "action": torch.tensor([1]), "reward": values(3.0), "discount": values(0.5)}
    error = imported(name, monkeypatch).td_errors(online.get, slow.get, batch)
    assert error.tolist() == [3.0 + 0.5 * 10.0 - 2.0]  # the network chooses the action, the target network values it


@pytest.mark.slow
def test_what_tensorboard_reads_back_is_what_the_lines_said(tmp_path):
    flags = "--total-steps 20 --eval-every 10 --eval-episodes 2 --learning-starts 100 --solved-at 501 --seed 7"
    lines = evaluations(succeed("dqn", tmp_path, *flags.split(), timeout=170))
    assert [line["step"] for line in lines] == [10, 20]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert_tensorboard_says(lines, tmp_path / "runs" / "dqn-seed7")

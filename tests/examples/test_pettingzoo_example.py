"""The example of PettingZoo's parallel environments runs, says what it promises to say, and learns."""

import pytest
from example_programs import evaluations, explanation, succeed

NAME = "pettingzoo_parallel"
pytest.importorskip("pygame", reason="the environment draws with it")


@pytest.mark.slow
def test_it_prints_one_json_line_per_report(tmp_path):
    flags = "--episodes 4 --report-every 2 --learning-starts 50 --seed 3"
    lines = evaluations(succeed(NAME, tmp_path, *flags.split(), timeout=100))
    assert [line["episodes"] for line in lines] == [2, 4]
    assert all(line["mean_return"] >= 0 for line in lines)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # for the environment's import
def test_it_explains_every_flag(monkeypatch, capsys):
    flags, words = explanation(NAME, monkeypatch, capsys)
    assert flags == 9
    assert "rows that each agent's buffer holds (default: 50000)" in words


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_agents_learn_to_defend_the_gate(tmp_path):
    lines = evaluations(succeed(NAME, tmp_path, "--episodes", "120", timeout=300))
    assert lines[-1]["mean_return"] >= 1.5 * max(lines[0]["mean_return"], 1)

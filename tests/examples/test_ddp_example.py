"""The example with several learners runs, says what it promises to say, and learns."""

import os
import signal
import subprocess
import sys

import pytest
from child_processes import children_of, explorers_of, gone
from example_programs import EXAMPLES, assert_tensorboard_says, evaluations, refusal, succeed
from forked import eventually

NAME = "ddp"

pytest.importorskip("pytorch_lightning")
pytest.importorskip("gymnasium")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.mark.slow
def test_two_ranks_print_one_json_line_per_evaluation_and_all_feed_their_td_errors_back(tmp_path):
    flags = "--total-steps 20 --eval-every 10 --eval-episodes 2 --learning-starts 100 --num-explorers 1 --solved-at 501"
    done = succeed(NAME, tmp_path, *flags.split(), timeout=150)
    lines = evaluations(done)
    assert [line["step"] for line in lines] == [10, 20]
    assert all(8 <= line["mean_return"] <= 500 for line in lines)
    assert [line["updated"] for line in lines] == [2_560, 5_120]  # 10 and 20 steps of 2 ranks with 128 each
    assert_tensorboard_says(lines, tmp_path / "runs" / "ddp-seed0")


@pytest.mark.slow
def test_the_death_of_one_rank_ends_the_other_and_all_explorers(tmp_path):
    flags = "--eval-every 10 --eval-episodes 2 --learning-starts 100 --num-explorers 1 --solved-at 501 --no-tensorboard"
    command = [sys.executable, str(EXAMPLES / f"{NAME}.py"), *flags.split()]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as rank_0:
        assert rank_0.stdout.readline().startswith('{"step": 10')
        (rank_1,) = [pid for pid, line in children_of(rank_0.pid).items() if f"{NAME}.py" in line]
        (explorer,) = explorers_of(rank_0.pid)
        os.kill(rank_1, signal.SIGKILL)
        rank_0.communicate(timeout=150)
    assert rank_0.returncode != 0
    eventually(lambda: gone(explorer))


def test_an_unknown_accelerator_is_refused_with_those_there_are(monkeypatch, capsys):
    said = refusal(NAME, monkeypatch, capsys, "--accelerator", "tpu")
    assert "invalid choice 'tpu' for argument '--accelerator'. Expected one of ('cpu', 'gpu')" in said


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(5))
def test_two_ranks_solve_cartpole_within_five_minutes(seed, tmp_path):
    done = succeed(NAME, tmp_path, "--seed", str(seed), timeout=300)
    assert evaluations(done)[-1]["mean_return"] >= 475


@pytest.mark.gpu
def test_the_same_code_trains_on_a_gpu(tmp_path):
    flags = "--accelerator gpu --devices 1 --total-steps 20 --eval-every 10 --eval-episodes 2 --learning-starts 100"
    done = succeed(NAME, tmp_path, *flags.split(), "--num-explorers", "1", "--solved-at", "501", timeout=150)
    assert [line["step"] for line in evaluations(done)] == [10, 20]

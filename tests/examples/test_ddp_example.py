"""The example with several learners runs, says what it promises to say, and learns."""

import pytest
from example_programs import evaluations, succeed

NAME = "ddp_dqn"

pytest.importorskip("pytorch_lightning")
pytest.importorskip("gymnasium")


@pytest.mark.slow
def test_two_ranks_print_one_json_line_per_evaluation_and_leave_one_picture(tmp_path):
    flags = "--total-steps 20 --eval-every 10 --eval-episodes 2 --learning-starts 100 --num-explorers 1 --solved-at 501"
    done = succeed(NAME, tmp_path, *flags.split(), timeout=150)
    lines = evaluations(done)
    assert [line["step"] for line in lines] == [10, 20]
    assert all(8 <= line["mean_return"] <= 500 for line in lines)
    assert "2 cpu ranks, one buffer" in done.stderr
    assert "5,120 updated" in done.stderr  # 20 steps of 2 ranks with 128 each
    assert [path.name for path in tmp_path.iterdir()] == ["ddp_dqn.png"]


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(3))
def test_two_ranks_solve_cartpole_within_five_minutes(seed, tmp_path):
    done = succeed(NAME, tmp_path, "--seed", str(seed), timeout=300)
    assert evaluations(done)[-1]["mean_return"] >= 475


@pytest.mark.gpu
def test_the_same_code_trains_on_a_gpu(tmp_path):
    flags = "--accelerator gpu --devices 1 --total-steps 20 --eval-every 10 --eval-episodes 2 --learning-starts 100"
    done = succeed(NAME, tmp_path, *flags.split(), "--num-explorers", "1", "--solved-at", "501", timeout=150)
    assert [line["step"] for line in evaluations(done)] == [10, 20]

"""The example of camera frames runs with each form of frames, keeps what it promises to keep, and learns."""

import json
import math

import numpy as np
import pytest
import torch
from example_programs import assert_tensorboard_says, imported, succeed

import torchreplay as tr

NAME = "camera_frames"

pytest.importorskip("gymnasium")
pytest.importorskip("tyro")
pytest.importorskip("PIL")
pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture
def example(monkeypatch):
    return imported(NAME, monkeypatch)


def frames_of(example, n):
    """What the camera sees of the first steps of an episode whose gripper stays."""
    env = example.Catch(64)
    obs, _ = env.reset(seed=3)
    return np.stack([obs, *(env.step(1)[0] for _ in range(n - 1))])


@pytest.mark.parametrize(("form", "decibels"), [("png", math.inf), ("jpeg", 30)])
def test_png_keeps_every_pixel_and_jpeg_is_close_to_them(example, form, decibels):
    frames = frames_of(example, 5)
    with tr.ReplayBuffer({"obs": tr.Ragged(torch.uint8)}, 10, ragged_bytes=1 << 20) as buffer:
        keys = buffer.extend(obs=example.encoded(frames, form, 90))
        batch = example.decoded(buffer.gather(keys))
    assert batch["obs"].dtype == torch.uint8
    error = np.square(batch["obs"].numpy().astype(float) - frames).mean()  # its peak signal-to-noise ratio:
    assert (10 * math.log10(255**2 / error) if error else math.inf) >= decibels


def test_who_always_goes_below_the_ball_has_the_return_that_the_example_says(example):
    # From each of the 64 places alike: with d places to go the gripper is there after max(d, 1) steps of seven.
    expected = np.mean([(8 - max(abs(ball - gripper), 1)) / 7 for ball in range(8) for gripper in range(8)])
    assert round(expected, 2) == 0.75
    env = example.Catch(64)
    for ball in range(8):
        for gripper in range(8):
            env.reset(seed=0)
            env._ball, env._gripper = ball, gripper
            steps = [env.step(1 + np.sign(ball - env._gripper)) for _ in range(7)]
            assert [step[2] for step in steps] == [False] * 6 + [True]
            assert sum(step[1] for step in steps) == pytest.approx((8 - max(abs(ball - gripper), 1)) / 7)


SMALL = "--total-steps 4 --eval-every 2 --eval-episodes 2 --timed-batches 2 --num-envs 2 --learning-starts 20"


@pytest.mark.slow
def test_it_learns_from_each_form_and_prints_a_table_of_them(tmp_path):
    done = succeed(NAME, tmp_path, *SMALL.split(), "--batch-size", "4", "--solved-at", "2", "--seed", "7", timeout=170)
    *lines, head, raw, png, jpeg = done.stdout.splitlines()
    assert [evaluation["step"] for evaluation in evaluations_of(lines)] == [2, 4] * 3
    assert " ".join(head.split()) == "frames bytes a transition batches a second return learner steps"
    assert [row.split()[0] for row in (raw, png, jpeg)] == ["raw", "png", "jpeg"]
    of_raw, of_png, of_jpeg = (int(row.split()[1].replace(",", "")) for row in (raw, png, jpeg))
    assert 64 * 64 * 3 < of_raw < 64 * 64 * 3 * 1.1
    assert of_jpeg < of_png / 2 < of_raw / 2
    for k, form in enumerate(["raw", "png", "jpeg"]):
        assert_tensorboard_says(evaluations_of(lines)[2 * k : 2 * k + 2], tmp_path / "runs" / f"{NAME}-{form}-seed7")
    assert not done.stderr


@pytest.mark.soak
@pytest.mark.timeout(700)
@pytest.mark.parametrize("seed", range(3))
def test_it_learns_to_catch_from_every_form(seed, tmp_path):
    done = succeed(NAME, tmp_path, "--seed", str(seed), "--total-steps", "1500", "--no-tensorboard", timeout=600)
    assert all(float(row.split()[3]) >= 0.65 for row in done.stdout.splitlines()[-3:])


def evaluations_of(lines):
    return [json.loads(line) for line in lines]

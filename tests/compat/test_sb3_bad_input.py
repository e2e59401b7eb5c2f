"""`compat.sb3`: what is refused, and how."""

import math

import numpy as np
import pytest
from played_steps import BOX, DISCRETE, TORQUE, steps
from sb3_buffers import filled, step_of
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer

from torchreplay.compat.sb3 import (
    SharedDictReplayBuffer,
    SharedNStepReplayBuffer,
    SharedReplayBuffer,
)


@pytest.mark.parametrize("part", ["obs", "next_obs", "action", "reward"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("how", [{}, {"n_steps": 2}])
def test_nan_is_refused_with_a_sentence_and_nothing_is_written(part, value, how):
    buffer = SharedReplayBuffer(30, BOX, TORQUE, device="cpu", **how)
    step = dict(zip(("obs", "next_obs", "action", "reward", "done", "infos"), *steps(BOX, TORQUE, 1, 1), strict=True))
    step[part].ravel()[-1] = value
    with pytest.raises(ValueError, match=f"{part} has 1 NaN or infinite numbers"):
        buffer.add(**step)
    assert len(buffer.shared) == 0


def test_large_numbers_are_not_taken_for_infinite():
    buffer = SharedReplayBuffer(30, BOX, DISCRETE, device="cpu")
    buffer.add(*step_of(3e38, -3e38, reward=3e38))
    assert buffer.size() == 1


@pytest.mark.parametrize("part", range(4))
def test_values_of_too_many_environments_are_refused_as_by_the_peer(part):
    (step,) = steps(BOX, TORQUE, 1, 1)
    step = [np.concatenate([v, v]) if i == part else v for i, v in enumerate(step[:4])] + list(step[4:])
    for kind in (ReplayBuffer, SharedReplayBuffer, SharedNStepReplayBuffer):
        with pytest.raises(ValueError):
            kind(30, BOX, TORQUE, device="cpu").add(*step)


def test_what_the_peer_refuses_is_refused():
    for kind in (ReplayBuffer, SharedReplayBuffer):
        with pytest.raises(ValueError):
            kind(30, BOX, DISCRETE).sample(4)
        with pytest.raises(ValueError):
            filled(kind(30, BOX, DISCRETE), count=3).sample(-1)
    for kind in (DictReplayBuffer, SharedDictReplayBuffer):
        with pytest.raises(AssertionError):
            kind(30, BOX, DISCRETE)


def test_an_index_out_of_range_is_refused():
    buffer = filled(SharedReplayBuffer(30, BOX, DISCRETE), count=3)
    assert buffer._get_samples(np.array([2, 0])).rewards.ravel().tolist() == [3.0, 1.0]
    for index in (3, -1):
        with pytest.raises(ValueError, match="out of range"):
            buffer._get_samples(np.array([index]))

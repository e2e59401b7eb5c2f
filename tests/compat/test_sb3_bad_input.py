"""`compat.sb3`: what is refused, and how."""

import copy
import itertools
import math

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from played_steps import BOX, DISCRETE, IMAGE, MANY, TORQUE, steps
from sb3_buffers import everything_of, filled, known_by_reward, own_class, step_of
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize, VecTransposeImage

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


WIDE = spaces.Box(-1, 1, (2, 3), np.float32)
PICTURE = spaces.Box(0, 255, (3, 4, 5), np.uint8)
PARTS = spaces.Dict(picture=PICTURE, vector=BOX, number=DISCRETE)
NAMES = ("obs", "next_obs", "action", "reward", "done")


def shapes_like(shape):
    """Shapes of as many numbers: axes in another order, axes of 1 more or fewer, flat, and in two other blocks."""
    size = math.prod(shape)
    found = {*itertools.permutations(shape), (1, *shape), (*shape, 1), (size,), (size, 1), (1, size)}
    found |= {tuple(n for n in shape if n > 1), (2, size // 2) if size % 2 == 0 else (size,)}
    return sorted(found)


def variants(step):
    """Yields a name and a step, for each other shape of each value."""
    for name, value in zip(NAMES, step[:5], strict=True):
        parts = value if isinstance(value, dict) else {"": value}
        for part, array in parts.items():
            for shape in shapes_like(array.shape):
                for other in {0: array.reshape(shape), 1: transposed(array, shape)}.values():
                    changed = {**parts, part: other} if isinstance(value, dict) else other
                    place = NAMES.index(name)
                    yield name, part, shape, [*step[:place], changed, *step[place + 1 :]]


def transposed(array, shape):
    """The array with its axes in the order that has this shape, where there is one."""
    for axes in itertools.permutations(range(array.ndim)):
        if tuple(array.shape[i] for i in axes) == shape:
            return array.transpose(axes)
    return array.reshape(shape)


def outcome(buffer, step):
    try:
        buffer.add(*copy.deepcopy(step))
    except (ValueError, AttributeError):  # a list has no reshape
        return None
    return (
        everything_of(buffer)
        if type(buffer) in (ReplayBuffer, DictReplayBuffer)
        else known_by_reward(buffer.sample(64))
    )


@pytest.mark.parametrize("n_envs", [1, 2, 3])
@pytest.mark.parametrize(
    ("observation", "action"),
    [(BOX, DISCRETE), (PICTURE, TORQUE), (PARTS, MANY), (DISCRETE, WIDE), (MANY, TORQUE), (IMAGE, DISCRETE)],
)
def test_values_of_other_shapes_are_refused_where_the_peer_refuses_them(observation, action, n_envs):
    (step,) = steps(observation, action, n_envs, 1, seed=3, ends=0.5)
    taken = refused = 0
    for name, part, shape, changed in variants(step):
        own = own_class(observation)(n_envs, observation, action, n_envs=n_envs, device="cpu")
        ours = SharedReplayBuffer(n_envs, observation, action, n_envs=n_envs, device="cpu")
        expected, found = outcome(own, changed), outcome(ours, changed)
        if found is None and name == "action":  # the peer takes any, and mixes up [number, env]
            assert shape not in (action.shape and {(n_envs, *action.shape), (n_envs, math.prod(action.shape))})
        else:
            assert found == expected, (name, part, shape)
        taken, refused = taken + (found is not None), refused + (found is None)
        if found is None:
            assert len(ours.shared) == 0
    assert min(taken, refused) > 3


def test_flags_of_one_more_axis_end_episodes_as_in_the_peer():
    (step,) = steps(BOX, DISCRETE, 1, 1)
    for done in (True, np.array([[True]]), np.array([[1.0]], np.float32), [True]):
        for kind in (ReplayBuffer, SharedReplayBuffer):
            buffer = kind(4, BOX, DISCRETE, device="cpu")
            buffer.add(*step[:4], done, [{}])
            assert buffer.sample(1).dones.tolist() == [[1.0]]


class Pictures(gymnasium.Env):
    """Pictures of 36 x 36 pixels whose channels come last."""

    observation_space, action_space = spaces.Box(0, 255, (36, 36, 3), np.uint8), TORQUE

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ReplayBuffer, SharedReplayBuffer])
def test_a_learner_stops_at_pictures_whose_channels_come_last(kind):
    def learner(env):
        options = {"learning_starts": 100, "buffer_size": 20, "device": "cpu", "policy_kwargs": {"net_arch": [4]}}
        return SAC("MlpPolicy", env, replay_buffer_class=kind, **options)

    with pytest.raises(
        ValueError, match="broadcast" if kind is ReplayBuffer else r"obs has shape \(1, 36, 36, 3\).*Vec"
    ):
        learner(VecNormalize(DummyVecEnv([Pictures]), norm_obs=False)).learn(3)
    inside = VecTransposeImage(DummyVecEnv([Pictures]))
    assert learner(VecNormalize(inside, norm_obs=False)).learn(3).replay_buffer.size() == 3


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

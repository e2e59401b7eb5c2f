"""Bad trajectories: an error that names field and expectation, nothing written, and every stream where it was."""

import numpy as np
import pytest
import torch
from linked_rows import NESTED, PLAIN, buffer_of, observation, pairs, spec_of
from tensordict import TensorDict

import torchreplay as tr

STEP = {"action": 0, "reward": 1.0, "terminated": False, "truncated": False}
NAN = float("nan")


@pytest.fixture
def buffer():
    return buffer_of(tr.Transitions(), sampler=tr.Prioritized())


def assert_goes_on(buffer, writer, rows=1):
    """The refused call wrote nothing, and the writer's episode continues as if it had not been."""
    assert buffer.stats().rows_written == writer.rows == rows
    writer.step(**observation(rows), **STEP)
    assert pairs(buffer) == [(t, t + 1) for t in range(rows)]


# The order of calls


def test_a_step_before_the_first_reset_is_refused(buffer):
    with buffer.writer() as writer:
        with pytest.raises(ValueError, match=r"step\(\) before the first reset\(\): .* by writer.reset\(obs=obs\)$"):
            writer.step(**observation(0), **STEP)
        writer.reset(**observation(0))
        assert_goes_on(buffer, writer)


def test_the_reset_that_a_message_asks_for_has_the_names_of_the_observation_fields():
    view = tr.Transitions(observation=("pixels", "speed"))
    steps = {name: PLAIN[name] for name in PLAIN if name != "obs"}
    buffer = buffer_of(view, {"pixels/left": ((2,), np.uint8), "speed": ((), np.float32), **steps})
    values = {"pixels": {"left": np.zeros(2, np.uint8)}, "speed": 0.0, **STEP}
    with buffer.writer() as writer, pytest.raises(ValueError, match=r"writer.reset\(pixels=pixels, speed=speed\)"):
        writer.step(**values)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_a_step_after_the_end_of_an_episode_is_refused(buffer, end):
    with buffer.writer() as writer:
        writer.reset(**observation(9))
        writer.step(**observation(10), **STEP | {end: True})
        with pytest.raises(ValueError, match=r"after the end of the episode: call writer.reset\(obs=obs\) first"):
            writer.step(**observation(11), **STEP)
        assert buffer.stats().rows_written == 2
        writer.reset(**observation(0))
        writer.step(**observation(1), **STEP)
    assert pairs(buffer) == [(9, 10), (0, 1)]


def test_a_row_by_itself_is_refused_by_a_buffer_of_trajectories(buffer):
    with buffer.writer() as writer:
        writer.reset(**observation(0))
        with pytest.raises(ValueError, match=r"use reset\(\) and step\(\)"):
            writer.append(**observation(1), **STEP)
        assert_goes_on(buffer, writer)


def test_a_trajectory_is_refused_by_a_buffer_of_rows():
    buffer = tr.ReplayBuffer(spec_of(PLAIN), 8, seed=0)
    with buffer.writer() as writer:
        with pytest.raises(ValueError, match=r"view is Rows\(\).*append"):
            writer.reset(**observation(0))
        with pytest.raises(ValueError, match=r"view is Rows\(\).*append"):
            writer.step(**observation(0), **STEP)
        with pytest.raises(ValueError, match=r"num_envs.*Rows\(\)"):
            buffer.writer(num_envs=2)
        assert writer.append(**observation(0), **STEP) == 0
    assert len(buffer) == 1


def test_a_closed_writer_of_trajectories_says_how_to_get_another(buffer):
    with buffer.writer() as writer:
        writer.reset(**observation(0))
    for call in (lambda: writer.reset(**observation(1)), lambda: writer.step(**observation(1), **STEP)):
        with pytest.raises(ValueError, match=r"buffer.writer\(\)"):
            call()
    assert buffer.stats().rows_written == 1


# Values


BAD_RESETS = [
    ({}, "missing field 'obs'"),
    ({"obs": np.zeros(2), "action": 1}, "unknown field 'action'"),
    ({"obs": np.zeros(2), "final_obs": None}, "unknown field 'final_obs'"),
    ({"obs": np.zeros(2), "priority": 1.0}, "unknown field 'priority'"),
    ({"obs": np.zeros(3)}, r"'obs': got float64 of shape \(3,\), expected float32 of shape \(2,\)"),
    ({"obs": np.zeros((1, 2))}, r"'obs': got float64 of shape \(1, 2\), expected float32 of shape \(2,\)"),
    ({"obs": None}, "'obs': got a value of type NoneType"),
    ({"obs": np.zeros((3, 2))}, r"one environment; buffer.writer\(envs\) .* num_envs=3"),
    ({"obs": np.zeros(2), "mask": np.array([True])}, "mask belongs to a writer with num_envs"),
]


@pytest.mark.parametrize(("values", "message"), BAD_RESETS, ids=[message[:40] for _, message in BAD_RESETS])
def test_a_bad_reset_is_refused_and_the_trajectory_goes_on(buffer, values, message):
    with buffer.writer() as writer:
        writer.reset(**observation(0))
        with pytest.raises(ValueError, match=message):
            writer.reset(**values)
        assert_goes_on(buffer, writer)


GOOD = {"obs": np.ones(2), **STEP}
BAD_STEPS = [
    ({name: value for name, value in GOOD.items() if name != "action"}, "missing field 'action'"),
    ({name: value for name, value in GOOD.items() if name != "obs"}, "missing field 'obs'"),
    ({name: value for name, value in GOOD.items() if name != "truncated"}, "missing field 'truncated'"),
    (
        GOOD | {"next_obs": np.ones(2)},
        "unknown field 'next_obs'.* 'obs' takes the new observation.* 'next_obs' is made",
    ),
    (GOOD | {"next_action": 1}, "unknown field 'next_action': expected exactly 'obs', .*'truncated'$"),
    (GOOD | {"obs": np.ones((8, 2))}, r"this writer is of one environment; buffer.writer\(envs\) .* num_envs=8"),
    (GOOD | {"reward": np.ones(8)}, r"this writer is of one environment; buffer.writer\(envs\) .* num_envs=8"),
    (GOOD | {"obs": [[1.0, 2.0], [1.0]]}, "'obs': got a list whose parts are of different lengths: pad them"),
    (GOOD | {"mask": None}, "unknown field 'mask'"),
    (GOOD | {"obs": np.ones(3)}, r"'obs': got float64 of shape \(3,\), expected float32 of shape \(2,\)"),
    (GOOD | {"obs": np.ones(2, complex)}, "'obs': got an array of a dtype that a row cannot hold"),
    (GOOD | {"action": 1.5}, "'action': a Python float does not cast to int64"),
    (GOOD | {"action": np.array([1])}, r"'action': got int64 of shape \(1,\), expected int64 of shape \(\)"),
    (GOOD | {"action": 2**63}, "'action': got a Python int that is out of range for int64"),
    (GOOD | {"reward": "much"}, "'reward': got a value of type str"),
    (GOOD | {"reward": None}, "'reward': got a value of type NoneType"),
    (GOOD | {"terminated": 1}, r"'terminated': a Python int does not cast to bool .*, such as bool\(terminated\)$"),
    (GOOD | {"truncated": 0.0}, r"'truncated': a Python float does not cast to bool .*, such as bool\(truncated\)$"),
    (GOOD | {"truncated": np.int8(0)}, r"'truncated': int8 does not cast to bool .*, such as bool\(truncated\)$"),
    (GOOD | {"terminated": None}, "'terminated': got a value of type NoneType"),
    (GOOD | {"truncated": np.array([True])}, r"'truncated': got bool of shape \(1,\), expected bool of shape \(\)"),
    (GOOD | {"priority": NAN}, "priority is NaN or infinite"),
    (GOOD | {"priority": float("inf")}, "priority is NaN or infinite"),
    (GOOD | {"priority": "high"}, "priority is not one number"),
    (GOOD | {"priority": [1.0, 2.0]}, "priority is not one number"),
    (GOOD | {"final_obs": np.ones(2)}, "final_obs belongs to a writer with num_envs and autoreset='same_step'"),
]


@pytest.mark.parametrize(("values", "message"), BAD_STEPS, ids=[message[:40] for _, message in BAD_STEPS])
def test_a_bad_step_is_refused_and_the_trajectory_goes_on(buffer, values, message):
    with buffer.writer() as writer:
        writer.reset(**observation(0))
        with pytest.raises(ValueError, match=message):
            writer.step(**values)
        assert_goes_on(buffer, writer)


def test_a_bad_nested_observation_is_named_by_its_path():
    buffer = buffer_of(tr.Transitions(), NESTED)
    image = np.zeros((32, 36), np.uint8)
    with buffer.writer() as writer:
        for obs, message in [
            ({"image": image}, "missing field 'obs/goal'"),
            ({"image": image, "goal": 1.0, "more": 2.0}, "unknown field 'obs/more'"),
            ({"image": image[1:], "goal": 1.0}, r"'obs/image': got uint8 of shape \(31, 36\)"),
            (image, "'obs' is nested: expected a dict, got a value of type ndarray$"),
            (
                TensorDict(image=torch.zeros(32, 36), goal=0.0),
                r"'obs' is nested: .* TensorDict: pass its .to_dict\(\)$",
            ),
        ]:
            with pytest.raises(ValueError, match=message):
                writer.reset(obs=obs)
        assert writer.reset(obs={"image": image, "goal": 1.0}) == 0


def test_fields_of_a_trajectory_are_keyword_arguments_only(buffer):
    with buffer.writer() as writer:
        with pytest.raises(TypeError, match=r"reset\(\) takes the fields as keyword arguments"):
            writer.reset(np.zeros(2))
        with pytest.raises(TypeError, match=r"step\(\) takes the fields as keyword arguments"):
            writer.step(np.zeros(2))
    assert buffer.stats().rows_written == 0


# Whole episodes


def episode(length, **changes):
    values = {"obs": np.zeros((length + 1, 2)), "action": np.zeros(length, int), "reward": np.zeros(length)}
    return values | {"terminated": np.zeros(length, bool), "truncated": np.zeros(length, bool)} | changes


def block(length, num_envs, **changes):
    values = {"obs": np.zeros((length + 1, num_envs, 2)), "action": np.zeros((length, num_envs), int)}
    flags = {name: np.zeros((length, num_envs), bool) for name in ("terminated", "truncated")}
    return values | {"reward": np.zeros((length, num_envs))} | flags | changes


EARLY = np.array([False, True, False])
BAD_EPISODES = [
    (episode(3, terminated=EARLY), "episode ends at step 1 of 3"),
    (episode(3, truncated=EARLY), "episode ends at step 1 of 3"),
    (episode(3, obs=np.zeros((3, 2))), "'obs': got 3 observations, expected one more than steps, which have 3"),
    (episode(3, obs=np.zeros((5, 2))), "'obs': got 5 observations, expected one more than steps, which have 3"),
    (episode(3, reward=np.zeros(4)), "'(reward|action)': got [34] rows, .* have [34]"),
    (episode(3, terminated=np.zeros(2, bool)), "'terminated': got 2 rows, .* have 3"),
    (
        episode(3, obs=np.zeros((4, 3))),
        r"'obs': got float64 of shape \(4, 3\), expected float32 of shape \(n \+ 1, 2\)",
    ),
    (episode(3, obs=np.zeros(2)), r"'obs': got float64 of shape \(2,\), expected float32 of shape \(n \+ 1, 2\)"),
    (episode(3, action=0), r"'action': got a Python int, expected int64 of shape \(n,\)"),
    (episode(3, truncated=False), r"'truncated': got a Python bool, expected bool of shape \(n,\)"),
    (episode(3, terminated=np.zeros(3)), "'terminated': float64 does not cast to bool"),
    (episode(3, priority=np.zeros(4)), r"priority: got float64 of shape \(4,\), .* one for each of the 3 rows"),
    (episode(3, priority=np.zeros((3, 1))), r"priority: got float64 of shape \(3, 1\)"),
    (episode(3, priority=np.array([1.0, NAN, 1.0])), "priority is NaN or infinite"),
    ({name: value for name, value in episode(3).items() if name != "reward"}, "missing field 'reward'"),
    (episode(3, next_obs=np.zeros((3, 2))), "unknown field 'next_obs'"),
    (episode(3, final_obs=np.ones(2)), r"extend\(\) takes no final_obs"),
    (block(3, 2, final_obs=np.ones((3, 2, 2))), r"extend\(\) takes no final_obs"),
    (block(3, 2, obs=np.zeros((3, 2, 2))), "'obs': got 3 observations, expected one more than steps, which have 3"),
    (block(3, 2, obs=np.zeros((4, 1, 2))), r"'obs': got .*\(4, 1, 2\), expected float32 of shape \(n \+ 1, 2, 2\)"),
    (block(3, 2, reward=np.zeros((3, 3))), r"'reward': got .*\(3, 3\), expected float32 of shape \(n, 2\)"),
    (block(3, 2, reward=np.zeros(3)), r"'reward': got .*\(3,\), expected float32 of shape \(n, 2\)"),
    (block(3, 2, priority=np.zeros(6)), r"priority: got float64 of shape \(6,\)"),
    (block(3, 2, priority=np.zeros((2, 3))), r"priority: got float64 of shape \(2, 3\)"),
]


@pytest.mark.parametrize(("values", "message"), BAD_EPISODES, ids=[message[:40] for _, message in BAD_EPISODES])
def test_a_bad_episode_or_block_is_refused_as_a_whole(buffer, values, message):
    with pytest.raises(ValueError, match=message):
        buffer.extend(**values)
    assert buffer.stats().rows_written == 0
    assert buffer.extend(**episode(2)).tolist() == [0, 1, 2]


# Gather


@pytest.mark.parametrize("keys", [torch.tensor([0.0]), torch.tensor([[0]]), torch.tensor([True]), "0", None, 0])
def test_keys_to_gather_that_are_no_int64_vector_are_refused(buffer, keys):
    buffer.extend(**episode(2))
    with pytest.raises(ValueError, match=r"expected int64 of shape \(n,\)"):
        buffer.gather(keys)


@pytest.mark.parametrize("key", [-1, 3, 2**62, 2**63 - 1, -(2**63)])
def test_keys_never_issued_anchor_nothing_to_gather(buffer, key):
    buffer.extend(**episode(2))
    assert buffer.gather(torch.tensor([key, 1, key]))["key"].tolist() == [1]

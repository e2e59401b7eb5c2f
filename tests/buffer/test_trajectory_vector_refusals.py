"""Bad trajectories of vector environments: what is refused leaves every environment where it was."""

import warnings
from enum import Enum

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from linked_rows import NESTED, PLAIN, STEPS, buffer_of, pairs
from numbered_environments import LENGTHS, environments, policy

import torchreplay as tr

ENDS = np.array([True, False])
NO = np.zeros(2, bool)


def observed(*numbers):
    return np.repeat(np.array(numbers, np.float32)[:, None], 2, axis=1)


def step_of(first, second, **changes):
    values = {"obs": observed(first, second), "action": np.zeros(2, int), "reward": np.zeros(2)}
    return values | {"terminated": NO, "truncated": NO} | changes


@pytest.fixture
def buffer():
    return buffer_of(tr.Transitions(), sampler=tr.Prioritized())


def started(buffer, autoreset):
    writer = buffer.writer(num_envs=2, autoreset=autoreset)
    writer.reset(obs=observed(0, 10))
    return writer


def assert_goes_on(buffer, writer):
    """The refused call wrote nothing, and both environments continue as if it had not been."""
    assert buffer.stats().rows_written == writer.rows == 2
    assert writer.step(**step_of(1, 11)).tolist() == [2, 3]
    assert pairs(buffer) == [(0, 1), (10, 11)]


ONE = r"this writer is of 2 environments; buffer.writer\(\) makes one of a single environment"
BAD_STEPS = [
    (
        step_of(1, 11, obs=np.zeros(2)),
        rf"'obs': got float64 of shape \(2,\), expected float32 of shape \(2, 2\): {ONE}",
    ),
    (step_of(1, 11, obs=np.zeros((3, 2))), r"'obs': got .*\(3, 2\), expected float32 of shape \(2, 2\)"),
    (step_of(1, 11, action=0), r"'action': got a Python int, expected int64 of shape \(2,\)"),
    (step_of(1, 11, reward=np.zeros(1)), r"'reward': got .*\(1,\), expected float32 of shape \(2,\)"),
    (step_of(1, 11, reward=np.zeros((2, 1))), r"'reward': got .*\(2, 1\), expected float32 of shape \(2,\)"),
    (step_of(1, 11, terminated=False), r"'terminated': got a Python bool, expected bool of shape \(2,\)"),
    (step_of(1, 11, truncated=np.zeros(2)), "'truncated': float64 does not cast to bool"),
    (step_of(1, 11, terminated=[False, None]), "'terminated': got a value of type list"),
    (step_of(1, 11, priority=np.zeros(3)), r"priority: got float64 of shape \(3,\)"),
    (step_of(1, 11, priority=np.zeros((1, 2))), r"priority: got float64 of shape \(1, 2\)"),
    (step_of(1, 11, priority=np.array([1.0, np.inf])), "priority is NaN or infinite"),
    (step_of(1, 11, priority="high"), "priority"),
]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize(("values", "message"), BAD_STEPS, ids=[message[:40] for _, message in BAD_STEPS])
def test_a_bad_step_of_a_trajectory_in_lanes_is_refused(buffer, values, message, autoreset):
    with started(buffer, autoreset) as writer:
        with pytest.raises(ValueError, match=message):
            writer.step(**values)
        assert_goes_on(buffer, writer)


BAD_MASKS = [
    *(np.array([True]), np.array([True, False, True]), np.array([1, 0]), np.array([[True, False]]), True, "both"),
    *(np.array([1.0, 0.0]), torch.ones(2), [True], ...),
]


@pytest.mark.parametrize("mask", BAD_MASKS, ids=repr)
def test_a_bad_mask_is_refused_and_says_what_is_expected(buffer, mask):
    with started(buffer, "disabled") as writer:
        with pytest.raises(ValueError, match=r"mask: got .*, expected one bool for each of the 2 environments"):
            writer.reset(obs=observed(5, 15), mask=mask)
        assert_goes_on(buffer, writer)


def test_a_bad_reset_of_a_trajectory_in_lanes_is_refused(buffer):
    with started(buffer, "disabled") as writer:
        with pytest.raises(ValueError, match=r"'obs': got .*\(2,\), expected float32 of shape \(2, 2\)"):
            writer.reset(obs=np.zeros(2))
        with pytest.raises(ValueError, match="unknown field 'reward'"):
            writer.reset(obs=observed(5, 15), reward=np.zeros(2))
        assert_goes_on(buffer, writer)


def test_a_step_is_refused_while_a_lane_has_not_been_reset(buffer):
    with buffer.writer(num_envs=2) as writer:
        with pytest.raises(ValueError, match=r"before the first reset\(\) in environment 0"):
            writer.step(**step_of(0, 10))
        writer.reset(obs=observed(0, 10), mask=ENDS)
        with pytest.raises(ValueError, match=r"before the first reset\(\) in environment 1"):
            writer.step(**step_of(0, 10))
        assert buffer.stats().rows_written == 1
        writer.reset(obs=observed(5, 10), mask=~ENDS)
        assert_goes_on(buffer, writer)


def test_a_lane_that_ended_must_be_reset_before_the_next_step_if_autoreset_is_disabled(buffer):
    with started(buffer, "disabled") as writer:
        writer.step(**step_of(1, 11, truncated=~ENDS))
        with pytest.raises(
            ValueError, match=r"after the end of the episode in environment 1: call writer.reset\(obs=obs\) first"
        ):
            writer.step(**step_of(2, 12))
        assert buffer.stats().rows_written == 4
        writer.reset(obs=observed(0, 50), mask=~ENDS)
        writer.step(**step_of(2, 51))
    assert sorted(pairs(buffer)) == [(0, 1), (1, 2), (10, 11), (50, 51)]


# Environments that begin the next episode otherwise than the writer was told

RESET_ROW = r"environment 0 .*autoreset 'next_step'.*buffer.writer\(envs\)"


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_a_step_that_begins_an_episode_and_brings_a_set_flag_is_refused_and_says_what_to_do(buffer, end):
    with started(buffer, "next_step") as writer:
        writer.step(**step_of(1, 11, terminated=ENDS))
        with pytest.raises(ValueError, match=RESET_ROW):
            writer.step(**step_of(50, 12, **{end: ENDS}))
        assert buffer.stats().rows_written == writer.rows == 4
        writer.step(**step_of(50, 12, **{end: ~ENDS}))
        writer.step(**step_of(51, 13))
    assert sorted(pairs(buffer)) == [(0, 1), (10, 11), (11, 12), (50, 51)]


def test_an_environment_that_resets_in_the_same_step_is_found_by_a_writer_of_the_other_mode():
    envs = environments(SyncVectorEnv, AutoresetMode.SAME_STEP)
    writer = buffer_of(tr.Transitions(), {"obs": ((3,), np.float32), **STEPS}).writer(num_envs=3)

    def play():
        obs, _ = envs.reset()
        writer.reset(obs=obs)
        for _ in range(20):
            obs, reward, terminated, truncated, _ = envs.step(action := policy(obs))
            writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)

    assert any(1 in lengths for lengths in LENGTHS), "an episode ends with its first step"
    with pytest.warns(UserWarning, match="autoreset"), pytest.raises(ValueError, match=RESET_ROW.replace("0", ".")):
        play()
    writer.close()


REWARDED = [
    tr.Transitions(reward="gain"),
    tr.Hindsight(None, achieved="obs", desired="goal", observation=("obs", "goal"), reward="gain"),
]


@pytest.mark.parametrize("view", [*REWARDED, tr.Sequences(2)], ids=lambda view: type(view).__name__)
def test_a_reward_of_a_step_that_begins_an_episode_is_warned_about_once(view):
    name = getattr(view, "reward", "reward")
    fields = {"obs": PLAIN["obs"], "goal": PLAIN["obs"]} | {k: PLAIN[k] for k in ("action", "terminated", "truncated")}
    buffer = buffer_of(view, fields | {name: ((2,), np.float32)})

    def step(writer, reward, ends=NO):
        values = {"action": np.zeros(2, int), "truncated": NO, name: np.repeat(np.array(reward)[:, None], 2, 1)}
        goal = {"goal": observed(0, 0)}
        writer.step(obs=observed(1, 11), **goal, **values, terminated=ends)

    with buffer.writer(num_envs=2) as writer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        observation = {"obs": observed(0, 10), **({} if isinstance(view, tr.Transitions | tr.Sequences) else GOAL)}
        writer.reset(**observation)
        step(writer, [1.0, 1.0], ENDS)
        step(writer, [-0.0, 1.0], ~ENDS)
        step(writer, [1.0, 0.0], ENDS)
        assert [str(warning.message) for warning in caught] == []
        for _ in range(3):
            step(writer, [0.5, 1.0])
            step(writer, [1.0, 1.0], ENDS)
        assert len(caught) == 1
        assert caught[0].filename == __file__
    text = str(caught[0].message)
    assert all(part in text for part in (name, "environment 0", "next_step", "buffer.writer(envs)"))


GOAL = {"goal": observed(0, 0)}


@pytest.mark.filterwarnings("error")
def test_a_warning_of_a_reward_that_is_made_an_error_writes_nothing(buffer):
    with started(buffer, "next_step") as writer:
        writer.step(**step_of(1, 11, terminated=ENDS))
        for _ in range(2):
            with pytest.raises(UserWarning, match="reward"):
                writer.step(**step_of(50, 12, reward=np.ones(2)))
        assert buffer.stats().rows_written == writer.rows == 4
        writer.step(**step_of(50, 12))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("autoreset", ["same_step", "disabled"])
def test_rewards_and_flags_of_first_steps_are_taken_where_an_episode_begins_without_a_step(buffer, autoreset):
    with started(buffer, autoreset) as writer:
        for _ in range(2):
            final = {"final_obs": observed(9, 9)} if autoreset == "same_step" else {}
            writer.step(**step_of(1, 11, terminated=ENDS, reward=np.ones(2)), **final)
            if autoreset == "disabled":
                writer.reset(obs=observed(2, 0), mask=ENDS)


# Episodes of a data set, one after the other, in a block


def flat_block(ends, rewards):
    """Three episodes, of 3, 1 or 2 and of 3 observations, of D4RL's form: without their last observations."""
    numbers = [0, 1, 2, *range(100, 100 + len(ends) - 6), 200, 201, 202]
    steps = {"action": np.zeros((len(ends), 1), int), "reward": np.array(rewards, float)[:, None]}
    flags = {"terminated": np.array(ends)[:, None], "truncated": np.zeros((len(ends), 1), bool)}
    return {"obs": np.repeat(np.array([*numbers, 0.0])[:, None, None], 2, 2), **steps, **flags}


@pytest.mark.parametrize("through", ["the buffer", "a writer"])
def test_a_block_of_flat_episodes_in_which_one_of_one_step_follows_an_end_is_refused(buffer, through):
    block = flat_block([False, False, True, True, False, False, True], np.zeros(7))
    with buffer.writer(num_envs=1) as writer:
        extend = buffer.extend if through == "the buffer" else writer.extend
        with pytest.raises(ValueError, match=r"step 3 of 7 in environment 0 .*: pass every episode by itself") as info:
            extend(**block)
    assert all(part in str(info.value) for part in ("first observation", "flat arrays, such as D4RL's"))
    assert buffer.stats().rows_written == 0


@pytest.mark.parametrize("through", ["the buffer", "a writer"])
def test_a_block_of_flat_episodes_that_brings_a_reward_after_an_end_is_warned_about_once(buffer, through):
    block = flat_block([False, False, True, False, True, False, False, True], [0, 0, 0, 1, 0, 1, 0, 0])
    with buffer.writer(num_envs=1) as writer:
        extend = buffer.extend if through == "the buffer" else writer.extend
        with pytest.warns(UserWarning, match="'reward' is not 0 in environment 0") as caught:
            extend(**block)
        assert len(caught) == 1


def test_flat_episodes_given_as_one_are_refused_and_the_text_says_what_a_block_is(buffer):
    flat = {name: values[:, 0] for name, values in flat_block([False, False, True] * 2 + [True], np.zeros(7)).items()}
    with pytest.raises(ValueError, match=r"ends at step 2 of 7: pass every episode by itself") as info:
        buffer.extend(**flat)
    assert "T steps with T + 1 observations" in str(info.value)
    assert "brings the next episode's first observation" in str(info.value)
    assert buffer.stats().rows_written == 0


def test_episodes_cut_as_the_text_says_come_back_as_they_are(buffer):
    block = flat_block([False, False, True, True, False, False, True], np.zeros(7))
    ends = np.flatnonzero(block["terminated"][:, 0]) + 1
    for first, end in zip([0, *ends], ends, strict=False):
        steps = {name: values[first:end, 0] for name, values in block.items()}
        buffer.extend(**steps | {"obs": np.concatenate([steps["obs"], np.full((1, 2), 300.0 + first)])})
    assert pairs(buffer) == [(0, 1), (1, 2), (2, 300), (100, 303), (200, 201), (201, 202), (202, 304)]


# Last observations


def test_a_lane_that_ends_in_the_same_step_needs_its_last_observation(buffer):
    with started(buffer, "same_step") as writer:
        for arguments in ({}, {"final_obs": None}):
            with pytest.raises(ValueError, match=r"ends in environment 0 and autoreset is 'same_step': pass final_obs"):
                writer.step(**step_of(50, 11, terminated=ENDS), **arguments)
        assert_goes_on(buffer, writer)


@pytest.mark.parametrize(
    "final",
    [
        [None, np.zeros(2)],
        [np.zeros(3), None],
        [np.zeros((1, 2)), None],
        [np.zeros(2)],
        [np.zeros(2), None, None],
        [np.zeros(2, complex), None],
        ["last", None],
        [{"obs": np.zeros(2)}, None],
        np.array([None, None], object),
        np.zeros((2, 3)),
        np.zeros(2),
        {"obs": np.zeros((2, 2))},
        "last",
        1.0,
    ],
    ids=repr,
)
def test_a_bad_last_observation_is_refused_by_name(buffer, final):
    with started(buffer, "same_step") as writer:
        with pytest.raises(ValueError, match="obs"):
            writer.step(**step_of(50, 11, terminated=ENDS), final_obs=final)
        assert_goes_on(buffer, writer)


@pytest.mark.parametrize(
    "final",
    [
        [{"image": np.zeros((32, 36), np.uint8)}, None],
        [{"image": np.zeros((32, 36), np.uint8), "goal": np.zeros(2)}, None],
        [{"image": np.zeros((32, 36)), "goal": 1.0}, None],
        [np.zeros((32, 36), np.uint8), None],
        {"image": np.zeros((2, 32, 36), np.uint8)},
    ],
    ids=["a part is missing", "a shape", "a dtype", "no dict", "a part of all environments is missing"],
)
def test_a_bad_part_of_a_nested_last_observation_is_refused(final):
    buffer = buffer_of(tr.Transitions(), NESTED)
    obs = {"image": np.zeros((2, 32, 36), np.uint8), "goal": np.zeros(2)}
    values = {"obs": obs, "action": np.zeros(2, int), "reward": np.zeros((2, 2)), "state": {"h": np.zeros((2, 3))}}
    with buffer.writer(num_envs=2, autoreset="same_step") as writer:
        writer.reset(obs=obs)
        with pytest.raises(ValueError, match=r"obs"):
            writer.step(**values, terminated=ENDS, truncated=NO, final_obs=final)
        assert buffer.stats().rows_written == 2
        writer.step(**values, terminated=NO, truncated=NO)
    assert len(pairs_of_goals(buffer)) == 2


def pairs_of_goals(buffer):
    batch = buffer.gather(torch.arange(buffer.stats().rows_written))
    return list(zip(batch["obs"]["goal"].tolist(), batch["next_obs"]["goal"].tolist(), strict=True))


@pytest.mark.parametrize("autoreset", ["next_step", "disabled"])
def test_a_last_observation_is_refused_where_episodes_do_not_end_and_begin_in_one_step(buffer, autoreset):
    with started(buffer, autoreset) as writer:
        with pytest.raises(ValueError, match="final_obs belongs to a writer with num_envs and autoreset='same_step'"):
            writer.step(**step_of(1, 11, terminated=ENDS), final_obs=observed(1, 11))
        assert_goes_on(buffer, writer)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_block_has_no_place_for_last_observations(buffer, steps):
    no = np.zeros((steps, 2), bool)
    values = {"action": no.astype(int), "reward": no.astype(float), "terminated": no, "truncated": no}
    block = values | {"obs": np.zeros((steps + 1, 2, 2))}
    ended = no.copy()
    ended[-1, 1] = True
    with started(buffer, "same_step") as writer:
        with pytest.raises(ValueError, match=r"ends in environment 1 .*: extend\(\) takes streams of 'next_step' only"):
            writer.extend(**block | {"truncated": ended})
        with pytest.raises(ValueError, match=r"extend\(\) takes no final_obs"):
            writer.extend(**block | {"truncated": ended, "final_obs": observed(1, 11)})
        assert_goes_on(buffer, writer)
        assert writer.extend(**block).shape == (steps + 1, 2)


# Making the writer


@pytest.mark.parametrize("num_envs", [0, -1, 2.5, "two", True, 2**40])
def test_a_bad_number_of_environments_is_a_value_error(buffer, num_envs):
    with pytest.raises(ValueError, match="num_envs is"):
        buffer.writer(num_envs=num_envs)


@pytest.mark.parametrize("autoreset", ["nextstep", "NEXT_STEP", 0, "", Enum("Mode", {"OTHER": "Other"}).OTHER])
def test_a_bad_autoreset_is_a_value_error_that_lists_the_three(buffer, autoreset):
    with pytest.raises(ValueError, match=r"autoreset is .*: expected one of 'next_step', 'same_step', 'disabled'"):
        buffer.writer(num_envs=2, autoreset=autoreset)


@pytest.mark.parametrize("autoreset", ["same_step", "disabled", "SameStep"])
def test_an_autoreset_without_lanes_is_a_value_error_that_says_what_is_missing(buffer, autoreset):
    for given in (buffer, buffer_of(tr.Rows())):
        with pytest.raises(ValueError, match=f"autoreset is '{autoreset}', but num_envs is missing"):
            given.writer(autoreset=autoreset)
    buffer.writer(autoreset="next_step").close()


@pytest.mark.parametrize(
    ("autoreset", "observation", "other", "refused"),
    [
        ("disabled", "mask", "hidden", "'mask', and so is an argument of reset"),
        ("same_step", "final_obs", "hidden", "'final_obs', and so is an argument of step"),
        ("same_step", "obs", "final_obs", "'final_obs', and so is an argument of step"),
        ("disabled", "obs", "mask", None),
        ("disabled", "final_obs", "hidden", None),
        ("same_step", "mask", "hidden", None),
        ("next_step", "mask", "final_obs", None),
    ],
)
def test_a_writer_with_an_argument_that_a_field_is_named_as_is_refused(autoreset, observation, other, refused):
    steps = {name: PLAIN[name] for name in PLAIN if name != "obs"}
    buffer = buffer_of(tr.Transitions(observation=observation), {observation: PLAIN["obs"], other: ((), bool)} | steps)
    with buffer.writer() as writer:  # whose calls have no such argument
        writer.reset(**{observation: np.zeros(2)})
    if refused is None:
        buffer.writer(num_envs=2, autoreset=autoreset).close()
    else:
        with pytest.raises(ValueError, match=refused):
            buffer.writer(num_envs=2, autoreset=autoreset)

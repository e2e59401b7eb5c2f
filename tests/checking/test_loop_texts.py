"""Loops that write values of any length: a right one has no finding, and each mistake is named."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from mistaken_loops import MODES, Talk, before, findings, one_env, only, unchanged, vector_env


def encoded(value):
    """What a loop makes of texts, of one environment or of several, before it writes them."""
    if isinstance(value, dict):
        return {name: encoded(inner) for name, inner in value.items()}
    if isinstance(value, (tuple, list, np.ndarray)) and len(value) and isinstance(value[0], (str, dict, type(None))):
        return [encoded(inner) for inner in value]
    return value.encode() if isinstance(value, str) else value


def talking(change=unchanged):
    """The values of a step as `change` leaves them, with bytes in the place of texts."""

    def at_step(values, history):
        values = change(values, history)
        return values | {name: encoded(values[name]) for name in ("obs", "action", "final_obs") if name in values}

    return at_step


def talks(change=unchanged, mode=None, **options):
    """The findings of a loop over texts, in which only `change` is wrong."""
    if mode is None:
        return findings(one_env(talking(change), encoded), Talk(), episodes=20, **options)
    return findings(vector_of_talks(mode, change), vector_env(Talk, mode), episodes=20, **options)


def vector_of_talks(mode, change):
    def loop(env, buffer):
        with buffer.writer(num_envs=env.num_envs, autoreset=mode) as writer:
            obs, _ = env.reset()
            writer.reset(obs=encoded(obs))
            history = []
            while True:
                action = env.action_space.sample()
                obs, reward, terminated, truncated, infos = env.step(action)
                values = {"obs": obs, "action": action, "reward": reward}
                values |= {"terminated": terminated, "truncated": truncated}
                if mode == AutoresetMode.SAME_STEP:
                    values["final_obs"] = infos.get("final_obs")
                history.append(values)
                writer.step(**talking(change)(dict(values), history))
                over = terminated | truncated
                if mode == AutoresetMode.DISABLED and over.any():
                    obs, _ = env.reset(options={"reset_mask": over})
                    writer.reset(obs=encoded(obs), mask=over)

    return loop


@pytest.mark.parametrize("mode", [None, *MODES])
def test_nothing_is_said_of_a_right_loop_over_values_of_any_length(mode):
    assert talks(mode=mode) == ()


def test_nothing_is_said_of_whole_episodes_of_values_of_any_length():
    def loop(env, buffer, packed=False):
        obs, _ = env.reset()
        rows, steps = [encoded(obs)], []
        while True:
            action = env.action_space.sample()
            obs, reward, terminated, truncated, _ = env.step(action)
            rows.append(encoded(obs))
            steps.append((action.encode(), reward, terminated, truncated))
            if terminated or truncated:
                names = ("action", "reward", "terminated", "truncated")
                columns = dict(zip(names, map(list, zip(*steps, strict=True)), strict=True))
                obs = {name: [row[name] for row in rows] for name in ("says", "seen")}
                if packed:
                    lengths = {"obs": {"says": [len(says) for says in obs["says"]]}}
                    obs["says"] = np.frombuffer(b"".join(obs["says"]), np.uint8)
                    columns["lengths"] = lengths
                buffer.extend(obs=obs, **columns)
                rows, steps = [encoded(env.reset()[0])], []

    assert findings(loop, Talk()) == ()
    assert findings(lambda env, buffer: loop(env, buffer, True), Talk()) == ()


@pytest.mark.parametrize("mode", [None, *MODES])
def test_the_text_of_the_step_before_is_named(mode):
    def change(values, history):
        before = history[-2] if len(history) > 1 else values
        return values | {"obs": before["obs"]}

    found = talks(change, mode)
    assert {finding.what.split(":")[0] for finding in found} >= {"field 'obs/says'"}, found


def test_texts_that_are_cut_are_named_unless_all_are_to_one_length():
    def change(values, history):
        return values | {"obs": values["obs"] | {"says": values["obs"]["says"][:-1]}}

    only(talks(change), "field 'obs/says': the value is cut", "writer.step(**at_step")

    def to_ten(obs):
        return obs | {"says": obs["says"][:10]}

    loop = one_env(
        talking(lambda values, history: values | {"obs": to_ten(values["obs"])}), lambda obs: encoded(to_ten(obs))
    )
    assert findings(loop, Talk()) == ()


def test_a_text_in_the_place_of_another_is_named():
    def change(values, history):
        return values | {"obs": values["obs"] | {"says": values["action"]}}

    found = talks(change)
    only(found, "field 'obs/says': the observation is none that the environment gave", "writer.step(**at_step")


def test_texts_of_environments_in_another_order_are_named():
    def change(values, history):
        says = values["obs"]["says"]
        return values | {"obs": values["obs"] | {"says": (*says[1:], says[0])}}

    for mode in MODES:
        found = talks(change, mode)
        assert any("another environment" in finding.what for finding in found), (mode, found)


def test_the_text_that_was_an_action_of_the_step_before_is_named():
    found = talks(before("action"))
    assert {finding.what.split(":")[0] for finding in found} == {"the action is that of the step before"}


def test_a_text_that_is_always_the_same_is_named():
    found = talks(lambda values, history: values | {"action": "no"})
    only(found, "every action that is written is the same", "writer.step(**at_step")

"""Mistakes of a loop that writes linked rows, one by one: each is named, with the line."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from mistaken_loops import (
    MODES,
    Goals,
    Noise,
    Parts,
    Pictures,
    before,
    findings,
    goal_buffer,
    one_env,
    only,
    played,
    vector,
    vector_env,
)

import torchreplay as tr

# Observations


def test_the_next_episodes_first_observation_in_the_place_of_the_last_is_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            obs, _ = env.reset()
            writer.reset(obs=obs)
            while True:
                action = env.action_space.sample()
                obs, reward, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    obs, _ = env.reset()
                writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
                if terminated or truncated:
                    writer.reset(obs=obs)

    for env in (Noise(), Pictures()):
        only(findings(loop, env), "first observation of the next episode", "writer.step(obs=obs, action=action")


@pytest.mark.parametrize("changed", [np.tanh, lambda obs: obs / 10 - 0.5])
def test_the_same_is_named_where_the_loop_changes_observations(changed):
    def loop(env, buffer):
        with buffer.writer() as writer:
            obs, _ = env.reset()
            writer.reset(obs=changed(obs))
            while True:
                action = env.action_space.sample()
                obs, reward, terminated, truncated, _ = env.step(action)
                ends = {"terminated": terminated, "truncated": truncated}
                if terminated or truncated:
                    obs, _ = env.reset()
                writer.step(obs=changed(obs), action=action, reward=reward, **ends)
                if terminated or truncated:
                    writer.reset(obs=changed(obs))

    only(findings(loop, Noise()), "first observation of the next episode", "writer.step(obs=changed(obs)")


def zeros(obs):
    return {name: zeros(part) for name, part in obs.items()} if isinstance(obs, dict) else np.zeros_like(obs)


@pytest.mark.parametrize("env", [Noise, Pictures])
def test_zeros_as_observations_are_named(env):
    def change(values, history):
        return values | {"obs": zeros(values["obs"])}

    found = findings(one_env(change), env())
    only(found, "every row holds the same observation", "writer.step(**at_step")
    found = findings(one_env(change, zeros), env())
    assert all("every row holds the same observation" in finding.what for finding in found)
    assert len(found) == 2  # the lines of reset and of step


def test_observations_that_are_changed_in_step_and_not_in_reset_are_named():
    def change(values, history):
        return values | {"obs": np.tanh(values["obs"])}

    only(findings(one_env(change), Noise()), "none that the environment gave", "writer.step(**at_step")
    only(findings(one_env(at_reset=np.tanh), Noise()), "none that the environment gave", "writer.reset(obs=at_reset")


@pytest.mark.parametrize("mode", MODES)
def test_zeros_as_observations_of_a_vector_environment_are_named(mode):
    def change(values, history):
        return values | {"obs": zeros(values["obs"])}

    assert any("observation" in finding.what for finding in findings(vector(mode, change), vector_env(Noise, mode)))


def test_zeros_in_a_part_of_the_observation_are_named_with_the_field():
    def change(values, history):
        cameras = values["obs"]["cameras"]
        return values | {"obs": values["obs"] | {"cameras": cameras | {"left": zeros(cameras["left"])}}}

    only(findings(one_env(change), Parts()), "field 'obs/cameras/left': ", "writer.step(**at_step")


def test_parts_that_are_exchanged_are_named():
    def change(values, history):
        cameras = values["obs"]["cameras"]
        exchanged = {"left": cameras["right"], "right": cameras["left"]}
        return values | {"obs": values["obs"] | {"cameras": exchanged}}

    found = findings(one_env(change), Parts())
    assert {finding.what.split(":")[0] for finding in found} == {
        "field 'obs/cameras/left'",
        "field 'obs/cameras/right'",
    }


def test_a_goal_in_the_place_of_another_is_named():
    def change(values, history):
        return values | {"obs": values["obs"] | {"achieved_goal": values["obs"]["desired_goal"]}}

    only(findings(one_env(change), Goals(), goal_buffer()), "field 'obs/achieved_goal': ", "writer.step(**at_step")


def test_the_goal_of_the_episode_before_is_named():
    goals = []

    def change(values, history):
        if len(history) == 1:
            goals.append(values["obs"]["desired_goal"])
        return values | {"obs": values["obs"] | {"desired_goal": goals[max(0, len(goals) - 2)]}}

    only(findings(one_env(change), Goals(), goal_buffer()), "field 'obs/desired_goal': ", "writer.step(**at_step")


def test_the_observation_before_the_step_is_named():
    def change(values, history):
        return values | {"obs": history[-1]["before"]}

    for env in (Noise(), Pictures()):
        only(findings(one_env(change), env), "before the step is stored again", "writer.step(**at_step")


def test_each_number_of_an_observation_that_is_a_tuple_of_numbers_is_compared():
    def change(values, history):
        return values | {"obs": history[-1]["before"]}

    env = gymnasium.make("Blackjack-v1")
    found = findings(one_env(change), env, episodes=40)
    assert any(finding.what.startswith("field 'obs/0': the observation before the step") for finding in found)
    found = findings(one_env(at_reset=lambda obs: (0, 0, 0)), env, episodes=40)
    assert [finding.what.split(":")[0] for finding in found] == [f"field 'obs/{k}'" for k in range(3)]


def test_the_observation_before_the_last_step_alone_is_named():
    def change(values, history):
        over = values["terminated"] or values["truncated"]
        return values | ({"obs": history[-1]["before"]} if over else {})

    only(findings(one_env(change), Noise()), "before the step is stored again", "writer.step(**at_step")


def test_a_reset_with_an_observation_of_the_episode_before_is_named():
    last = []

    def first(obs):
        last.append(obs)
        return last[max(0, len(last) - 2)]

    only(findings(one_env(at_reset=first), Noise()), "is that of another step", "writer.reset(obs=at_reset")


def test_memory_that_the_environment_reuses_is_named():
    class Reused(Noise):
        memory = np.zeros(3)

        def observe(self):
            self.memory[:] = super().observe()
            return self.memory

    def loop(env, buffer):
        while True:
            obs, _ = env.reset()
            observed, steps, over = [obs], [], False
            while not over:
                action = env.action_space.sample()
                obs, reward, terminated, truncated, _ = env.step(action)
                observed.append(obs)
                steps.append((action, reward, terminated, truncated))
                over = terminated or truncated
            names = ("action", "reward", "terminated", "truncated")
            columns = {name: np.array(column) for name, column in zip(names, zip(*steps, strict=True), strict=True)}
            buffer.extend(obs=np.stack(observed), **columns)

    found = findings(loop, Reused())
    assert any("needs a copy" in finding.what for finding in found), found


def test_the_rows_of_environments_in_another_order_are_named():
    def change(values, history):
        return values | {"obs": np.roll(values["obs"], 1, axis=0)}

    for mode in MODES:
        found = findings(vector(mode, change), vector_env(Noise, mode))
        assert any("another environment" in finding.what for finding in found), (mode, found)


def test_a_final_observation_that_is_the_next_episodes_is_named():
    def change(values, history):
        return values | {"final_obs": values["obs"]}

    mode = AutoresetMode.SAME_STEP
    only(
        findings(vector(mode, change), vector_env(Noise, mode)),
        "first observation of the next episode",
        "writer.step(**at_step",
    )
    assert all("next episode" in finding.what for finding in findings(vector(mode, change), vector_env(Parts, mode)))


def test_steps_beyond_an_end_without_a_reset_are_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            obs, _ = env.reset()
            writer.reset(obs=obs)
            while True:
                action = env.action_space.sample()
                obs, reward, terminated, truncated, _ = env.step(action)
                writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
                if terminated or truncated:
                    writer.reset(obs=obs)

    class Endless(Noise):
        def step(self, action):
            obs, reward, *_ = super().step(action)
            over = self.t % 5 == 0
            return obs, reward, False, over, {}

    only(findings(loop, Endless()), "after the episode's end", "env.step(action)")


# Autoreset


@pytest.mark.parametrize(
    ("mode", "own"), [(mode, own) for mode in MODES for own in MODES if mode != own], ids=lambda mode: mode.value
)
@pytest.mark.parametrize("kind", [SyncVectorEnv, pytest.param(AsyncVectorEnv, marks=pytest.mark.slow)])
def test_a_writer_with_another_autoreset_than_the_environments_is_named_and_nothing_else(mode, own, kind):
    def loop(env, buffer):
        writer = buffer.writer(num_envs=3, autoreset=own)
        obs, _ = env.reset()
        writer.reset(obs=obs)
        while True:
            action = env.action_space.sample()
            obs, reward, terminated, truncated, infos = env.step(action)
            over = terminated | truncated
            last = {"final_obs": infos.get("final_obs", obs)} if own == AutoresetMode.SAME_STEP else {}
            if mode == AutoresetMode.DISABLED and over.any():
                obs, _ = env.reset(options={"reset_mask": over})
                last = {"final_obs": obs} if last else {}
            ends = {"terminated": terminated, "truncated": truncated}
            writer.step(obs=obs, action=action, reward=reward, **ends, **last)

    envs = vector_env(Noise, mode, kind=kind)
    try:
        found = findings(loop, envs, episodes=20)
    finally:
        envs.close()
    only(found, f"['autoreset_mode'] is {own_name(mode)!r}, the writer's autoreset is {own_name(own)!r}", "writer(")
    assert f"autoreset={own_name(mode)!r}" in found[0].what


def own_name(mode):
    return {"NextStep": "next_step", "SameStep": "same_step", "Disabled": "disabled"}[mode.value]


def test_an_error_of_the_loop_that_is_not_the_writers_stays_the_users():
    def loop(env, buffer):
        buffer.writer(num_envs=3)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        findings(loop, vector_env(Noise, AutoresetMode.SAME_STEP))


# Actions, rewards, flags


@pytest.mark.parametrize("env", [Noise, Pictures, Parts])
def test_the_action_of_the_step_before_is_named(env):
    found = findings(one_env(before("action")), env(), episodes=20)
    assert {finding.what.split(":")[0] for finding in found} == {"the action is that of the step before"}


def test_the_action_of_another_environment_is_named():
    def change(values, history):
        return values | {"action": np.roll(values["action"], -1, axis=0)}

    for mode in MODES:
        found = findings(vector(mode, change), vector_env(Noise, mode), episodes=20)
        only(found, "the action is that of another environment", "writer.step(**at_step")


def test_an_action_that_is_always_the_same_is_named():
    def change(values, history):
        return values | {"action": np.zeros(2, np.float32)}

    only(findings(one_env(change), Noise()), "every action that is written is the same", "writer.step(**at_step")


@pytest.mark.parametrize("factor", [1.0, 0.1])
def test_the_reward_of_the_step_before_is_named(factor):
    def change(values, history):
        made = before("reward")(values, history)
        return made | {"reward": factor * made["reward"]}

    only(findings(one_env(change), Noise(), episodes=20), "the reward is that of the step before", "writer.step(**")


def test_the_return_in_the_place_of_the_reward_is_named():
    def change(values, history):
        return values | {"reward": sum(step["reward"] for step in history)}

    only(findings(one_env(change), Noise()), "the sum since the episode began", "writer.step(**at_step")


def test_rewards_of_other_environments_are_named():
    def change(values, history):
        return values | {"reward": np.roll(values["reward"], -1)}

    for mode in MODES:
        found = findings(vector(mode, change), vector_env(Noise, mode), episodes=20)
        only(found, "the reward is that of another environment", "writer.step(**at_step")


def test_rewards_that_are_always_0_are_named():
    def change(values, history):
        return values | {"reward": 0.0}

    only(findings(one_env(change), Noise()), "every reward that is written is 0", "writer.step(**at_step")


def test_flags_that_are_exchanged_are_named():
    def change(values, history):
        return values | {"terminated": values["truncated"], "truncated": values["terminated"]}

    said = " ".join(finding.what for finding in findings(one_env(change), Noise()))
    assert "'terminated' is True where a time limit cut" in said
    assert "'terminated' is False where the episode ended for good" in said


@pytest.mark.parametrize("mode", MODES)
def test_flags_that_are_exchanged_in_a_vector_environment_are_named(mode):
    def change(values, history):
        return values | {"terminated": values["truncated"], "truncated": values["terminated"]}

    said = " ".join(finding.what for finding in findings(vector(mode, change), vector_env(Noise, mode), episodes=20))
    assert "'terminated' is True where a time limit cut" in said
    assert "'terminated' is False where the episode ended for good" in said


def test_an_end_in_each_step_is_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            while True:
                obs, _ = env.reset()
                over = False
                while not over:
                    writer.reset(obs=obs)
                    action = env.action_space.sample()
                    obs, reward, terminated, truncated, _ = env.step(action)
                    writer.step(obs=obs, action=action, reward=reward, terminated=True, truncated=truncated)
                    over = terminated or truncated

    said = [finding.what for finding in findings(loop, Noise())]
    assert any("is True in most steps, though the episode goes on" in what for what in said)


# Rewards that are set later


def relabelling(keys_of):
    """A right loop that sets rewards anew; `keys_of(buffer, batch, is_first)` says where."""

    def loop(env, buffer):
        firsts = set()
        with buffer.writer() as writer:
            while True:
                obs, _ = env.reset()
                firsts.add(int(writer.reset(obs=obs)))
                for step in played(env):
                    writer.step(**step)
                batch = buffer.sample(16)
                keys = keys_of(buffer, batch, np.array([int(key) in firsts for key in batch["key"]]))
                buffer.rewrite(keys, reward=np.zeros(len(keys)))

    return loop


def test_rewards_that_are_set_by_the_keys_of_some_items_are_named():
    loop = relabelling(lambda buffer, batch, is_first: batch["key"][~is_first][1:])
    only(findings(loop, Noise(), episodes=20), "each one row too early", "buffer.rewrite(keys, reward=")


def test_rewards_that_are_set_by_the_rows_of_the_steps_are_no_finding():
    loop = relabelling(lambda buffer, batch, is_first: buffer.rows_of(batch)[:, 1][~is_first][1:])
    assert findings(loop, Noise(), episodes=20) == ()


# Rows that are not linked


def test_zeros_as_observations_of_rows_are_named():
    def loop(env, buffer):
        with buffer.writer() as writer:
            while True:
                obs, _ = env.reset()
                over = False
                while not over:
                    action = env.action_space.sample()
                    next_obs, reward, terminated, truncated, _ = env.step(action)
                    ends = {"terminated": terminated, "truncated": truncated}
                    row = {"obs": obs, "next_obs": np.zeros(3), "action": action, "reward": reward}
                    writer.append(**row, **ends)
                    obs, over = next_obs, terminated or truncated

    buffer = tr.ReplayBuffer(tr.spec_from_env(Noise(), next_obs=True), 2000)
    only(findings(loop, Noise(), buffer), "field 'next_obs': every row holds the same", "writer.append(**row")


def test_rows_that_are_appended_when_the_episode_is_over_are_no_finding():
    def loop(env, buffer):
        with buffer.writer() as writer:
            while True:
                obs, _ = env.reset()
                rows, over = [], False
                while not over:
                    action = env.action_space.sample()
                    next_obs, reward, terminated, truncated, _ = env.step(action)
                    ends = {"terminated": terminated, "truncated": truncated}
                    rows.append({"obs": obs, "next_obs": next_obs, "action": action, "reward": reward} | ends)
                    obs, over = next_obs, terminated or truncated
                for row in rows:
                    writer.append(**row)

    buffer = tr.ReplayBuffer(tr.spec_from_env(Noise(), next_obs=True), 2000)
    assert findings(loop, Noise(), buffer) == ()

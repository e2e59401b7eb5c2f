"""Right loops that write linked rows, in many ways: none has a finding."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from mistaken_loops import (
    MODES,
    Goals,
    Noise,
    Parts,
    Pictures,
    findings,
    goal_buffer,
    linked,
    one_env,
    played,
    vector,
    vector_env,
)

import torchreplay as tr


@pytest.mark.parametrize("env", [Noise, Pictures, Parts])
@pytest.mark.parametrize("view", [tr.Transitions(), tr.Transitions(n_step=3), tr.Sequences(4)])
def test_nothing_is_said_of_a_right_loop(env, view):
    assert findings(one_env(), env(), linked(env(), view)) == ()


@pytest.mark.parametrize("env", [Noise, Pictures, Parts])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_said_of_a_right_loop_over_a_vector_environment(env, mode):
    envs = vector_env(env, mode)
    assert findings(vector(mode), envs, episodes=20) == ()


@pytest.mark.parametrize("name", ["CliffWalking-v1", "Blackjack-v1"])  # observations come again
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_said_of_a_right_loop_over_an_environment_with_few_states(name, mode):
    envs = SyncVectorEnv([lambda: gymnasium.make(name, max_episode_steps=20)] * 3, autoreset_mode=mode)
    assert findings(vector(mode), envs, episodes=20) == ()


def test_nothing_is_said_of_a_right_loop_of_goals():
    assert findings(one_env(), Goals(), goal_buffer()) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_narrower_float_is_no_finding(dtype):
    def narrow(values, history):
        return values | {"obs": torch.as_tensor(values["obs"]).to(dtype)}

    def first(obs):
        return torch.as_tensor(obs).to(dtype)

    with pytest.warns(UserWarning, match="values are rounded"):
        found = findings(one_env(narrow, first), Noise(), linked(Noise(), obs=tr.Field((3,), dtype)))
    assert found == ()


@pytest.mark.parametrize("scaled", [lambda obs: obs / 255, lambda obs: obs.astype(np.float32) / 127.5 - 1])
def test_pictures_that_are_scaled_are_no_finding(scaled):
    def change(values, history):
        return values | {"obs": scaled(values["obs"])}

    buffer = linked(Pictures(), obs=tr.Field((8, 8, 1)))
    assert findings(one_env(change, scaled), Pictures(), buffer) == ()


@pytest.mark.parametrize("changed", [np.tanh, lambda obs: np.clip(obs, -0.5, 0.5), lambda obs: np.sign(obs)])
def test_observations_that_the_loop_changes_in_its_own_way_are_no_finding(changed):
    def change(values, history):
        return values | {"obs": changed(values["obs"])}

    assert findings(one_env(change, changed), Noise()) == ()


def test_rewards_that_are_clipped_and_actions_that_are_scaled_are_no_finding():
    def change(values, history):
        return values | {"reward": np.sign(values["reward"]), "action": values["action"] / 2}

    assert findings(one_env(change), Noise()) == ()


def test_episodes_that_are_written_step_by_step_when_they_are_over_are_no_finding():
    def loop(env, buffer):
        with buffer.writer() as writer:
            while True:
                first, _ = env.reset()
                steps = list(played(env))
                writer.reset(obs=first)
                for step in steps:
                    writer.step(**step)

    assert findings(loop, Noise()) == ()


def test_a_writer_for_each_environment_of_a_vector_environment_is_no_finding():
    def loop(env, buffer):
        writers = [buffer.writer() for _ in range(env.num_envs)]
        obs, _ = env.reset()
        for i, writer in enumerate(writers):
            writer.reset(obs=obs[i])
        over = np.zeros(env.num_envs, bool)
        while True:
            action = env.action_space.sample()
            obs, reward, terminated, truncated, _ = env.step(action)
            for i, writer in enumerate(writers):
                if over[i]:
                    writer.reset(obs=obs[i])
                    continue
                ends = {"terminated": terminated[i], "truncated": truncated[i]}
                writer.step(obs=obs[i], action=action[i], reward=reward[i], **ends)
            over = (terminated | truncated) & ~over

    assert findings(loop, vector_env(Noise, AutoresetMode.NEXT_STEP), episodes=20) == ()


def test_blocks_of_a_vector_environment_are_no_finding():
    def loop(env, buffer):
        obs, _ = env.reset()
        while True:
            observed, steps = [obs], []
            for _ in range(5):
                action = env.action_space.sample()
                obs, *rest, _ = env.step(action)
                observed.append(obs)
                steps.append((action, *rest))
            names = ("action", "reward", "terminated", "truncated")
            columns = {name: np.stack(column) for name, column in zip(names, zip(*steps, strict=True), strict=True)}
            buffer.extend(obs=np.stack(observed), **columns)

    assert findings(loop, vector_env(Noise, AutoresetMode.NEXT_STEP), episodes=20) == ()


@pytest.mark.parametrize("env", [Noise, Parts])
def test_a_loop_that_makes_one_autoreset_of_another_is_no_finding(env):
    def loop(env, buffer):
        with buffer.writer(num_envs=env.num_envs, autoreset="disabled") as writer:
            obs, _ = env.reset()
            writer.reset(obs=obs)
            while True:
                action = env.action_space.sample()
                obs, reward, terminated, truncated, infos = env.step(action)
                over = terminated | truncated
                last = with_finals(obs, infos.get("final_obs"), over)
                writer.step(obs=last, action=action, reward=reward, terminated=terminated, truncated=truncated)
                if over.any():
                    writer.reset(obs=obs, mask=over)

    def with_finals(obs, finals, over):
        if isinstance(obs, dict):
            each = [None if finals is None else [final and final[name] for final in finals] for name in obs]
            return {name: with_finals(obs[name], part, over) for name, part in zip(obs, each, strict=True)}
        made = obs.copy()
        for i in np.flatnonzero(over):
            made[i] = finals[i]
        return made

    assert findings(loop, vector_env(env, AutoresetMode.SAME_STEP), episodes=20) == ()


def test_an_environment_that_is_reset_as_a_whole_may_have_a_next_step_writer():
    class Five(Noise):
        def reset(self, **given):
            obs, info = super().reset(**given)
            self.length = 5
            return obs, info

    def loop(env, buffer):
        with buffer.writer(num_envs=env.num_envs) as writer:
            over = np.ones(env.num_envs, bool)
            while True:
                if over.all():
                    writer.reset(obs=env.reset()[0])
                action = env.action_space.sample()
                obs, reward, terminated, truncated, _ = env.step(action)
                writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
                over = terminated | truncated

    assert findings(loop, vector_env(Five, AutoresetMode.DISABLED), episodes=20) == ()

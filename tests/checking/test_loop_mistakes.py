"""Mistakes of a loop that writes linked rows, one by one: each is named, with the line; right loops have no finding."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import torchreplay as tr
from torchreplay.schema.spec import flatten

MODES = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)


class Noise(gymnasium.Env):
    """Observations, rewards that differ in each step; episodes of a few steps end in one way or the other by turns."""

    observation_space = spaces.Box(-100, 100, (3,), np.float64)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.episode = 0, getattr(self, "episode", -1) + 1
        self.length = int(self.np_random.integers(3, 7))
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        over, good = self.t == self.length, self.episode % 2 == 0
        return self.observe(), float(self.np_random.normal(2)), over and good, over and not good, {}

    def observe(self):
        return self.np_random.normal(size=3)


class Pictures(Noise):
    observation_space = spaces.Box(0, 255, (8, 8, 1), np.uint8)
    action_space = spaces.Discrete(50)

    def observe(self):
        return self.np_random.integers(0, 256, (8, 8, 1)).astype(np.uint8)


class Parts(Noise):
    observation_space = spaces.Dict(
        {
            "joints": spaces.Box(-100, 100, (3,), np.float64),
            "cameras": spaces.Dict({"left": Pictures.observation_space, "right": Pictures.observation_space}),
        }
    )
    action_space = spaces.Dict({"arm": spaces.Box(-1, 1, (2,), np.float32), "grip": spaces.Discrete(9)})

    def observe(self):
        draw = self.np_random
        return {
            "joints": draw.normal(size=3),
            "cameras": {side: draw.integers(0, 256, (8, 8, 1)).astype(np.uint8) for side in ("left", "right")},
        }


class Goals(Noise):
    observation_space = spaces.Dict(
        {name: spaces.Box(-100, 100, (2,), np.float64) for name in ("observation", "achieved_goal", "desired_goal")}
    )

    def reset(self, **given):
        self.goal = np.random.default_rng(getattr(self, "episode", 0)).normal(size=2)
        return super().reset(**given)

    def observe(self):
        draw = self.np_random
        return {"observation": draw.normal(size=2), "achieved_goal": draw.normal(size=2), "desired_goal": self.goal}


class Talk(Noise):
    """Texts, and sequences of numbers that go with them."""

    observation_space = spaces.Dict(says=spaces.Text(30, min_length=2), seen=spaces.Sequence(spaces.Discrete(99)))
    action_space = spaces.Text(9, min_length=1)

    def observe(self):
        draw = self.np_random
        seen = tuple(draw.integers(0, 99, draw.integers(0, 7)))
        return {"says": "".join(draw.choice(list("abcdefgh"), draw.integers(5, 30))), "seen": seen}


def linked(env, view=None, **dtypes):
    spec = tr.spec_from_env(env) | dtypes
    room = 1 << 20 if any(isinstance(column, tr.Ragged) for column in flatten(spec).values()) else None
    return tr.ReplayBuffer(spec, 2000, view=view or tr.Transitions(), ragged_bytes=room)


def findings(loop, env, buffer=None, episodes=8, **options):
    with buffer or linked(env) as made:
        return tr.check(env, made, episodes=episodes, loop=loop, **options).findings


def only(found, text, line):
    """The one finding, which says `text` and names the line of the loop that has `line`."""
    assert len(found) == 1, found
    assert text in found[0].what
    file, number = found[0].where.rsplit(":", 1)
    assert file == __file__
    assert line in Path(file).read_text().splitlines()[int(number) - 1]


def unchanged(values, history):
    return values


def one_env(at_step=unchanged, at_reset=lambda obs: obs):
    """A right loop, but for what it does to the values of a step, which has the earlier ones' values at hand."""

    def loop(env, buffer):
        with buffer.writer() as writer:
            while True:
                obs, _ = env.reset()
                writer.reset(obs=at_reset(obs))
                history, over = [], False
                while not over:
                    action = env.action_space.sample()
                    before, (obs, reward, terminated, truncated, _) = obs, env.step(action)
                    over = terminated or truncated
                    values = {"obs": obs, "action": action, "reward": reward}
                    values |= {"terminated": terminated, "truncated": truncated}
                    history.append(values | {"before": before})
                    writer.step(**at_step(dict(values), history))

    return loop


def vector(mode, at_step=unchanged):
    """The same of a vector environment, with a writer that knows its autoreset."""

    def loop(env, buffer):
        with buffer.writer(num_envs=env.num_envs, autoreset=mode) as writer:
            obs, _ = env.reset()
            writer.reset(obs=obs)
            history = []
            while True:
                action = env.action_space.sample()
                before, (obs, reward, terminated, truncated, infos) = obs, env.step(action)
                values = {"obs": obs, "action": action, "reward": reward}
                values |= {"terminated": terminated, "truncated": truncated}
                if mode == AutoresetMode.SAME_STEP:
                    values["final_obs"] = infos.get("final_obs")
                history.append(values | {"before": before})
                writer.step(**at_step(dict(values), history))
                over = terminated | truncated
                if mode == AutoresetMode.DISABLED and over.any():
                    obs, _ = env.reset(options={"reset_mask": over})
                    writer.reset(obs=obs, mask=over)

    return loop


def vector_env(env, mode, n=3, kind=SyncVectorEnv):
    return kind([env] * n, autoreset_mode=mode)


# Right loops


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


def goal_buffer():
    spec = tr.spec_from_env(Goals())
    view = tr.Hindsight(
        compute_reward=lambda achieved, desired, _: -((achieved - desired) ** 2).sum(-1),
        achieved="obs/achieved_goal",
        desired="obs/desired_goal",
    )
    return tr.ReplayBuffer(spec, 2000, view=view)


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
                steps, over = [], False
                while not over:
                    action = env.action_space.sample()
                    obs, reward, terminated, truncated, _ = env.step(action)
                    over = terminated or truncated
                    ends = {"terminated": terminated, "truncated": truncated}
                    steps.append({"obs": obs, "action": action, "reward": reward} | ends)
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


def before(name):
    def change(values, history):
        return values | {name: history[-2][name] if len(history) > 1 else values[name]}

    return change


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


# Values of any length


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

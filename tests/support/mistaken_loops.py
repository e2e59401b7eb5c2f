"""Environments whose values do not come again, and loops over them that are right but for one thing."""

from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from paths import TESTS

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
    assert Path(file).is_relative_to(TESTS)
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


def played(env):
    """Plays the episode that has begun; yields its steps, as a writer takes them."""
    over = False
    while not over:
        action = env.action_space.sample()
        obs, reward, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
        yield {"obs": obs, "action": action, "reward": reward, "terminated": terminated, "truncated": truncated}


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


def goal_buffer():
    spec = tr.spec_from_env(Goals())
    view = tr.Hindsight(
        compute_reward=lambda achieved, desired, _: -((achieved - desired) ** 2).sum(-1),
        achieved="obs/achieved_goal",
        desired="obs/desired_goal",
    )
    return tr.ReplayBuffer(spec, 2000, view=view)


def before(name):
    def change(values, history):
        return values | {name: history[-2][name] if len(history) > 1 else values[name]}

    return change

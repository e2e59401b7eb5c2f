"""`compat.pettingzoo`: a buffer for each agent of a parallel environment."""

from functools import cache

import gymnasium
import numpy as np
import pytest
import torch
from pettingzoo import ParallelEnv
from pettingzoo.test import parallel_api_test

import torchreplay as tr
from torchreplay.compat.pettingzoo import ParallelWriter, buffers_for, specs_from_env
from torchreplay.ray import ExplorerContext


class Ladder(ParallelEnv):
    """Agent k climbs k + 2 rungs, then it leaves; a time limit ends those that are there after four steps.

    An observation is (agent, episode, rung), so each row says where it belongs.
    """

    metadata = {"name": "ladder"}  # noqa: RUF012
    limit = 4

    def __init__(self, agents=3, late=None):
        self.possible_agents = [f"climber_{k}" for k in range(agents)]
        self.agents, self.episode, self.late = [], -1, late

    @cache  # noqa: B019
    def observation_space(self, agent):
        return gymnasium.spaces.Box(0, 100, (3,), np.float32)

    @cache  # noqa: B019
    def action_space(self, agent):
        return gymnasium.spaces.Discrete(2 + int(agent[-1]))

    def reset(self, seed=None, options=None):
        self.episode, self.time = self.episode + 1, 0
        self.agents = [agent for agent in self.possible_agents if agent != self.late]
        return self.seen(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.time += 1
        there = list(self.agents)
        terminated = {a: self.time == int(a[-1]) + 2 for a in there}
        truncated = {a: self.time == self.limit and not terminated[a] for a in there}
        rewards = {a: float(self.time) for a in there}
        self.agents = [a for a in there if not (terminated[a] or truncated[a])]
        if self.late is not None and self.time == 1:
            self.agents.append(self.late)
            there.append(self.late)
            for flags in (terminated, truncated):
                flags[self.late] = False
            rewards[self.late] = 0.0
        return self.seen(there), rewards, terminated, truncated, {a: {} for a in there}

    def seen(self, agents):
        return {a: np.array([int(a[-1]), self.episode, self.time], np.float32) for a in agents}


def played(env, writer, episodes=1, steps=None):
    """Plays at random; `steps` is after how many the program stops."""
    for _ in range(episodes):
        observations, _ = env.reset()
        writer.reset(observations)
        while env.agents and (steps is None or env.time < steps):
            actions = {agent: env.action_space(agent).sample() for agent in env.agents}
            writer.step(actions, *env.step(actions)[:4])


@pytest.fixture
def env():
    return Ladder()


@pytest.fixture
def buffers(env):
    buffers = buffers_for(env, 100, view=tr.Transitions(n_step=2, gamma=0.5))
    yield buffers
    for buffer in buffers.values():
        buffer.close()


def everything(buffer):
    return buffer.gather(buffer.keys())


def test_each_buffer_has_its_agents_name(env, buffers):
    assert {agent: buffer.name for agent, buffer in buffers.items()} == {agent: agent for agent in env.possible_agents}
    named = buffers_for(env, 10, name="run 7")
    assert [buffer.name for buffer in named.values()] == [f"run 7/{agent}" for agent in env.possible_agents]
    for buffer in named.values():
        buffer.close()


def test_the_environment_of_these_tests_is_a_parallel_environment(env):
    parallel_api_test(env, num_cycles=20)


def test_specs_are_those_of_each_agents_spaces(env):
    specs = specs_from_env(env)
    assert list(specs) == env.possible_agents
    assert specs["climber_2"] == {
        "obs": tr.Field(3),
        "action": tr.Field(dtype=torch.int64),
        "reward": tr.Field(),
        "terminated": tr.Field(dtype=torch.bool),
        "truncated": tr.Field(dtype=torch.bool),
    }


def test_each_agents_rows_are_its_own_until_it_leaves(env, buffers):
    with ParallelWriter(buffers) as writer:
        played(env, writer, episodes=3)
        assert writer.running == ()
    for k, buffer in enumerate(buffers.values()):
        length = min(k + 2, Ladder.limit)
        items = everything(buffer)
        assert items["obs"].tolist() == [[k, episode, t] for episode in range(3) for t in range(length)]
        last = [min(t + 2, length) for _ in range(3) for t in range(length)]
        assert items["next_obs"][:, 2].tolist() == last
        ended = [t == length for t in last]
        assert items["terminated"].tolist() == [over and k + 2 <= Ladder.limit for over in ended]
        assert items["truncated"].tolist() == [over and k + 2 > Ladder.limit for over in ended]
        returns = [sum(0.5**i * r for i, r in enumerate(range(t + 1, min(t + 2, length) + 1))) for t in range(length)]
        assert items["reward"].tolist() == returns * 3


def test_agents_may_share_a_buffer(env):
    shared = tr.ReplayBuffer(specs_from_env(env)["climber_0"], 200, view=tr.Transitions())
    with shared, ParallelWriter(dict.fromkeys(env.possible_agents, shared)) as writer:
        played(env, writer, episodes=2)
        items = everything(shared)
        assert (items["obs"][:, :2] == items["next_obs"][:, :2]).all()
        assert (items["obs"][:, 2] + 1 == items["next_obs"][:, 2]).all()
        assert len(items["key"]) == 2 * (2 + 3 + 4)


def test_an_explorer_writes_with_the_writers_of_its_context(env, buffers):
    ctx = ExplorerContext(buffers)
    with ParallelWriter({agent: ctx.writer(name=agent) for agent in ctx.buffer}) as writer:
        played(env, writer, episodes=2)
        assert ctx.rows == sum(len(buffer) for buffer in buffers.values()) == 2 * (3 + 4 + 5)


def test_agents_that_come_later_begin_then():
    env = Ladder(2, late="climber_1")
    buffers = buffers_for(env, 50)
    with ParallelWriter(buffers) as writer:
        played(env, writer, episodes=2)
    assert everything(buffers["climber_1"])["obs"].tolist() == [[1, e, t] for e in range(2) for t in (1, 2)]


def test_a_reset_in_mid_episode_truncates(env, buffers):
    with ParallelWriter(buffers) as writer:
        played(env, writer, episodes=2, steps=1)
        assert writer.running == tuple(env.possible_agents)
        writer.end_episode()
    for buffer in buffers.values():
        items = everything(buffer)
        assert items["next_obs"][:, 2].tolist() == [1, 1]
        assert items["truncated"].all()
        assert not items["terminated"].any()


def test_an_agent_that_is_gone_without_a_word_is_truncated_where_it_stood(env, buffers):
    with ParallelWriter(buffers) as writer:
        observations, _ = env.reset()
        writer.reset(observations)
        for _ in range(2):
            actions = dict.fromkeys(env.agents, 0)
            dicts = [dict(values) for values in env.step(actions)[:4]]
            if env.time == 2:
                for values in dicts:
                    del values["climber_2"]
            writer.step(actions, *dicts)
        assert writer.running == ("climber_1",)
    items = everything(buffers["climber_2"])
    assert items["next_obs"][:, 2].tolist() == [1]
    assert items["truncated"].tolist() == [True]


def test_further_fields_come_by_agent(env):
    specs = {agent: spec | {"log_prob": tr.Field()} for agent, spec in specs_from_env(env).items()}
    buffers = {agent: tr.ReplayBuffer(spec, 50, view=tr.Transitions()) for agent, spec in specs.items()}
    with ParallelWriter(buffers) as writer:
        observations, _ = env.reset()
        writer.reset(observations)
        actions = dict.fromkeys(env.agents, 1)
        extra = {agent: {"log_prob": -float(agent[-1])} for agent in env.agents}
        writer.step(actions, *env.step(actions)[:4], extra=extra)
    assert everything(buffers["climber_1"])["log_prob"].tolist() == [-1]


def test_a_mixed_dataset_hands_out_a_batch_for_each_agent(env, buffers):
    with ParallelWriter(buffers) as writer:
        played(env, writer, episodes=5)
    batches = next(iter(tr.MixedDataset(buffers, batch_size=16, prefetch=0)))
    for k, agent in enumerate(env.possible_agents):
        assert (batches[agent]["obs"][:, 0] == k).all()


def test_what_does_not_fit_is_refused(env, buffers):
    with pytest.raises(ValueError, match="buffers are empty"):
        ParallelWriter({})
    with (
        tr.ReplayBuffer({"obs": tr.Field(3)}, 10) as rows,
        pytest.raises(ValueError, match=r"'a' is of Rows\(\): expected a view that links rows"),
    ):
        ParallelWriter({"a": rows})
    with ParallelWriter(buffers) as writer:
        observations, _ = env.reset()
        with pytest.raises(KeyError, match="'stranger' has no buffer"):
            writer.reset(observations | {"stranger": np.zeros(3)})
        assert writer.running == ()
        actions = dict.fromkeys(env.agents, 0)
        step = env.step(actions)[:4]
        with pytest.raises(ValueError, match="'climber_0' acts, but its episode is not under way"):
            writer.step(actions, *step)
        writer.reset(observations)
        with pytest.raises(KeyError, match="'climber_1' has no reward"):
            writer.step(actions, step[0], {"climber_0": 1.0, "climber_2": 1.0}, *step[2:])
        assert [len(buffer) for buffer in buffers.values()] == [1, 1, 1]
        assert repr(writer) == "ParallelWriter(3 agents, 3 under way)"
    with pytest.raises(ValueError, match="closed"):
        writer.reset(observations)

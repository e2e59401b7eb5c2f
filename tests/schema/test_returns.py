"""Returns, discounts and stacks against plain loops, stable-baselines3's n-step buffer and Tianshou's stacking."""

import math

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.buffers import NStepReplayBuffer
from tianshou.data import Batch
from tianshou.data import ReplayBuffer as TianshouBuffer

import torchreplay as tr

ENDS = ["terminated", "truncated", "none"]


def buffer_of(view, reward=torch.float32, obs=(), capacity=1000):
    flag = tr.Field((), torch.bool)
    spec = {"obs": tr.Field(obs), "action": tr.Field((), torch.int64), "reward": tr.Field((), reward)}
    return tr.ReplayBuffer(spec | {"terminated": flag, "truncated": flag}, capacity, view=view, seed=0)


def write(buffer, rewards, end, start=0):
    """An episode with observations start, start + 1, ... and actions of the same numbers."""
    with buffer.writer() as writer:
        keys = [writer.reset(obs=np.full(buffer.spec["obs"].shape, start))]
        for t, reward in enumerate(rewards):
            last = t == len(rewards) - 1
            keys.append(
                writer.step(
                    obs=np.full(buffer.spec["obs"].shape, start + t + 1),
                    action=start + t,
                    reward=reward,
                    terminated=last and end == "terminated",
                    truncated=last and end == "truncated",
                )
            )
    return keys


@given(
    rewards=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=12),
    n=st.integers(1, 15),
    gamma=st.floats(0, 1),
    end=st.sampled_from(ENDS),
)
def test_n_step_returns_and_discounts_of_a_trajectory_are_the_exact_sums_rounded_once(rewards, n, gamma, end):
    buffer = buffer_of(tr.Transitions(n_step=n, gamma=gamma))
    keys = write(buffer, rewards, end)
    batch = buffer.gather(torch.tensor(keys))
    drawable = range(len(rewards) if end != "none" else max(0, len(rewards) - n + 1))
    assert batch["key"].tolist() == [keys[t] for t in drawable]
    for i, t in enumerate(drawable):
        steps = rewards[t : t + n]
        terms = [gamma**k * reward for k, reward in enumerate(steps)]
        # Half a unit of float32 for the one rounding, and what a float64 sum of these terms may lose at most.
        rounding = 0.5 * float(np.spacing(np.float32(abs(math.fsum(terms)))))
        lost = (len(terms) + 2) * 2.0**-52 * math.fsum(map(abs, terms))
        assert abs(batch["reward"][i].item() - math.fsum(terms)) <= rounding + lost
        ends_here = t + n >= len(rewards)
        assert batch["terminated"][i].item() == (ends_here and end == "terminated")
        assert batch["truncated"][i].item() == (ends_here and end == "truncated")
        discount = 0.0 if batch["terminated"][i] else gamma ** len(steps)
        assert abs(batch["discount"][i].item() - discount) <= np.spacing(np.float32(discount))
        assert batch["next_obs"][i].item() == t + len(steps)


def test_the_return_of_a_trajectory_is_added_up_in_float64():
    for rewards in ([1e8, 1.0, -1e8], [2.0**30, 2.0**-10, -(2.0**30)]):
        buffer = buffer_of(tr.Transitions(n_step=3, gamma=1.0))
        write(buffer, rewards, "terminated")
        assert buffer.gather(torch.tensor([0]))["reward"].tolist() == [rewards[1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_return_of_a_trajectory_has_the_reward_fields_dtype(dtype):
    buffer = buffer_of(tr.Transitions(n_step=2, gamma=0.5), reward=dtype)
    write(buffer, [1.0, 3.0], "none")
    batch = buffer.gather(torch.tensor([0]))
    assert (batch["reward"].dtype, batch["reward"].tolist()) == (dtype, [2.5])
    assert batch["discount"].dtype == torch.float32


def test_a_window_longer_than_the_trajectory_gives_the_monte_carlo_return_of_the_backward_recursion():
    chance = np.random.default_rng(0)
    rewards = chance.normal(size=50)
    buffer = buffer_of(tr.Transitions(n_step=64, gamma=0.97), reward=torch.float64)
    keys = write(buffer, rewards, "terminated")
    returns = np.zeros(51)
    for t in reversed(range(50)):
        returns[t] = rewards[t] + 0.97 * returns[t + 1]
    np.testing.assert_allclose(buffer.gather(torch.tensor(keys))["reward"], returns[:-1], rtol=1e-12)


def episodes(seed, n=12):
    """(start, rewards, end) of random episodes; no two observations of different episodes are the same."""
    chance = np.random.default_rng(seed)
    for i in range(n):
        yield 100 * i, chance.normal(size=chance.integers(1, 9)).astype(np.float32), ENDS[i % 2]


@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_trajectory_returns_agree_with_the_n_step_buffer_of_stable_baselines3(n):
    box = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    peer = NStepReplayBuffer(1000, box, gymnasium.spaces.Discrete(10_000), device="cpu", n_steps=n, gamma=0.9)
    buffer = buffer_of(tr.Transitions(n_step=n, gamma=0.9), obs=(2,))
    for start, rewards, end in episodes(n):
        write(buffer, rewards, end, start)
        for t, reward in enumerate(rewards):
            last = t == len(rewards) - 1
            peer.add(
                np.full((1, 2), start + t),
                np.full((1, 2), start + t + 1),
                np.array([[start + t]]),
                np.array([reward]),
                np.array([last]),
                [{"TimeLimit.truncated": last and end == "truncated"}],
            )
    batch = buffer.gather(torch.arange(len(buffer)))
    row_of = {action: i for i, action in enumerate(batch["action"].tolist())}
    theirs = peer.sample(500)
    ours = [row_of[action] for action in theirs.actions[:, 0].tolist()]
    assert torch.equal(batch["obs"][ours], theirs.observations)
    assert torch.equal(batch["next_obs"][ours], theirs.next_observations)
    assert torch.equal(batch["terminated"][ours].float(), theirs.dones[:, 0])
    torch.testing.assert_close(batch["reward"][ours], theirs.rewards[:, 0], rtol=1e-5, atol=1e-5)
    # Its targets multiply by 1 - dones, which our discount has in it.
    torch.testing.assert_close(
        batch["discount"][ours], (theirs.discounts * (1 - theirs.dones))[:, 0], check_dtype=False
    )


@pytest.mark.parametrize("frames", [1, 2, 4])
def test_stacked_frames_of_a_trajectory_agree_with_tianshous(frames):
    peer = TianshouBuffer(1000, stack_num=frames, ignore_obs_next=True)
    buffer = buffer_of(tr.Transitions(stack={"obs": frames}))
    index = {}  # of Tianshou's buffer by action
    for start, rewards, end in episodes(frames):
        write(buffer, rewards, end, start)
        for t, reward in enumerate(rewards):
            last = t == len(rewards) - 1
            index[start + t] = len(peer)
            flags = {"terminated": last and end == "terminated", "truncated": last and end == "truncated"}
            peer.add(Batch(obs=start + t, obs_next=start + t + 1, act=start + t, rew=reward, info={}, **flags))
    batch = buffer.gather(torch.arange(len(buffer)))
    theirs = np.array([index[action] for action in batch["action"].tolist()])
    assert len(theirs) == len(peer)
    shape = (len(peer), frames)  # with one frame Tianshou has no axis for it
    assert np.array_equal(batch["obs"], peer.get(theirs, "obs").reshape(shape))
    # Stored once, its next observation at an episode's end is the observation: the true last one is not there.
    inside = ~(batch["terminated"] | batch["truncated"]).numpy()
    assert np.array_equal(batch["next_obs"][inside], peer[theirs].obs_next.reshape(shape)[inside])

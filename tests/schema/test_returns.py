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


DISCOUNT_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def discounted(view, rewards, discounts, end, dtype=torch.float64, name="discount"):
    """A buffer with an episode of steps that have discounts of their own, and its keys."""
    spec = {"obs": tr.Field(), "action": tr.Field((), torch.int64), "reward": tr.Field((), torch.float64)}
    spec |= {name: tr.Field((), dtype), **dict.fromkeys(("terminated", "truncated"), tr.Field((), torch.bool))}
    buffer = tr.ReplayBuffer(spec, 100, view=view, seed=0)
    with buffer.writer() as writer:
        keys = [writer.reset(obs=0)]
        for t, reward in enumerate(rewards):
            ends = {flag: end == flag and t == len(rewards) - 1 for flag in ("terminated", "truncated")}
            keys.append(writer.step(obs=t + 1, action=t, reward=reward, **{name: discounts[t]}, **ends))
    return buffer, keys


@given(
    steps=st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1)), min_size=1, max_size=12),
    n=st.integers(1, 15),
    gamma=st.floats(0, 1),
    end=st.sampled_from(ENDS),
)
def test_steps_with_discounts_of_their_own_give_the_returns_of_the_backward_recursion(steps, n, gamma, end):
    rewards, discounts = map(list, zip(*steps, strict=True))
    view = tr.Transitions(n_step=n, gamma=gamma, discount="discount")
    buffer, keys = discounted(view, rewards, discounts, end)
    batch = buffer.gather(torch.tensor(keys))
    drawable = range(len(rewards) if end != "none" else max(0, len(rewards) - n + 1))
    assert batch["key"].tolist() == [keys[t] for t in drawable]
    for i, t in enumerate(drawable):
        # dm_env: what follows a step counts for its discount. Backwards, R = r + gamma d R, with R = V at the end.
        returned, size, of_value = 0.0, 0.0, 1.0
        for reward, discount in reversed(steps[t : t + n]):
            returned = reward + gamma * discount * returned
            size = abs(reward) + gamma * discount * size
            of_value = gamma * discount * of_value
        assert abs(batch["reward"][i].item() - returned) <= 64 * 2.0**-53 * size
        wanted = np.float32(0.0 if batch["terminated"][i] else of_value)
        assert abs(batch["discount"][i].item() - wanted) <= np.spacing(wanted)
        assert batch["next_obs"][i].item() == min(t + n, len(rewards))
        assert batch["action"][i].item() == t


@pytest.mark.parametrize("end", ENDS)
def test_discounts_of_one_give_the_batches_of_a_view_without_them_and_those_of_gamma_too(end):
    rewards = np.random.default_rng(1).normal(size=9)
    plain, keys = discounted(tr.Transitions(n_step=3, gamma=0.9), rewards, [5.0] * 9, end, name="own")
    ones, _ = discounted(tr.Transitions(n_step=3, gamma=0.9, discount="own"), rewards, [1.0] * 9, end, name="own")
    gammas, _ = discounted(tr.Transitions(n_step=3, gamma=1.0, discount="own"), rewards, [0.9] * 9, end, name="own")
    wanted = plain.gather(torch.tensor(keys))
    assert wanted["own"].eq(5.0).all()  # a field of no role is there
    for buffer in (ones, gammas):
        batch = buffer.gather(torch.tensor(keys))
        assert set(batch) == set(wanted) - {"own"}
        for name, values in batch.items():
            assert torch.equal(values, wanted[name]), name


@pytest.mark.parametrize("dtype", DISCOUNT_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["discount", "time/decay"])
def test_a_discount_may_be_of_any_floating_dtype_and_name_and_the_batchs_own_is_float32(dtype, name):
    spec = {"obs": tr.Field(), "reward": tr.Field(), "time": {"decay": tr.Field((), dtype)}}
    spec |= dict.fromkeys(("terminated", "truncated"), tr.Field((), torch.bool))
    if name == "discount":
        spec["discount"] = spec.pop("time")["decay"]
    buffer = tr.ReplayBuffer(spec, 10, view=tr.Transitions(n_step=2, gamma=0.5, discount=name), seed=0)
    with buffer.writer() as writer:
        writer.reset(obs=0.0)
        for t, own in enumerate([0.5, 0.25]):
            given = {"discount": own} if name == "discount" else {"time": {"decay": own}}
            writer.step(obs=t + 1.0, reward=2.0, terminated=False, truncated=False, **given)
    batch = buffer.gather(torch.tensor([0]))
    assert set(batch) - {"key", "weight", "probability"} == {*spec, "next_obs", "discount"} - {"time"}
    assert (batch["discount"].dtype, batch["discount"].tolist()) == (torch.float32, [0.25 * 0.125])
    assert batch["reward"].tolist() == [2.0 + 0.25 * 2.0]


def test_a_discount_that_is_no_number_makes_its_items_none_either():
    buffer, keys = discounted(
        tr.Transitions(n_step=2, discount="discount"), [1.0, 1.0, 1.0], [1.0, math.nan, 0.5], "truncated"
    )
    batch = buffer.gather(torch.tensor(keys))
    assert batch["discount"].isnan().tolist() == [True, True, False]
    assert batch["reward"].isnan().tolist() == [False, True, False]


def test_a_sequence_has_the_discounts_as_they_were_written():
    buffer, _ = discounted(tr.Sequences(4), [1.0] * 3, [0.5, 0.25, 0.125], "truncated")
    assert buffer.gather(torch.tensor([0]))["discount"].tolist() == [[0.5, 0.25, 0.125, 0.0]]


def test_a_view_with_discounts_travels_with_its_buffer(tmp_path):
    view = tr.Transitions(n_step=2, gamma=0.9, discount="discount")
    buffer, keys = discounted(view, [1.0, 2.0, 4.0], [0.5, 0.25, 1.0], "truncated")
    wanted = buffer.gather(torch.tensor(keys))
    buffer.save(tmp_path / "saved")
    with (
        tr.ReplayBuffer.load(tmp_path / "saved") as loaded,
        tr.ReplayBuffer.attach(buffer.handle()) as attached,
    ):
        for other in (loaded, attached):
            assert other.view == view
            assert torch.equal(other.gather(torch.tensor(keys))["reward"], wanted["reward"])
            assert torch.equal(other.gather(torch.tensor(keys))["discount"], wanted["discount"])
        for batch in tr.ReplayDataset(buffer, 8, steps=1, prefetch=1):
            same = buffer.gather(batch["key"])
            assert torch.equal(batch["reward"], same["reward"])
            assert torch.equal(batch["discount"], same["discount"])


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

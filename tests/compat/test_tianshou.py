"""`compat.tianshou`: buffers beside Tianshou's own, step by step."""

import copy

import numpy as np
import pytest
import tianshou.data as theirs
import torch
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.data import Batch
from tianshou_steps import equal, filled, step

from torchreplay.compat.tianshou import (
    SharedReplayBuffer,
    SharedVectorReplayBuffer,
)

# One environment: everything as in Tianshou


@pytest.mark.parametrize("count", [1, 30, 50, 51, 140])
def test_indexes_neighbours_and_returns_are_those_of_tianshou(count):
    ours, own = SharedReplayBuffer(50), theirs.ReplayBuffer(50)
    rng = np.random.default_rng(count)
    for _ in range(count):
        given = step(rng)
        for mine, its in zip(ours.add(copy.deepcopy(given)), own.add(copy.deepcopy(given)), strict=True):
            assert np.array_equal(mine, its)
        every = np.arange(len(own))
        assert len(ours) == len(own)
        assert np.array_equal(ours.next(every), own.next(every))
        assert np.array_equal(ours.prev(every), own.prev(every))
        assert np.array_equal(ours.unfinished_index(), own.unfinished_index())
    assert np.array_equal(ours.sample_indices(0), own.sample_indices(0))
    assert equal(ours[:], own[:])
    assert equal(ours[:7], own[:7])
    assert equal(ours[0], own[0])


@pytest.mark.slow  # Tianshou compiles its function
@pytest.mark.parametrize("n_step", [1, 3, 7])
def test_n_step_targets_are_those_of_tianshou(n_step):
    ours, own = SharedReplayBuffer(50), theirs.ReplayBuffer(50)
    filled(120, ours, own)

    def value(buffer, indices):
        return torch.as_tensor(buffer[indices].obs_next).sum(1)

    batch, indices = ours.sample(64)
    for buffer in (ours, own):
        target = Algorithm.compute_nstep_return(batch, buffer, indices, value, 0.9, n_step).returns.clone()
        if buffer is ours:
            found = target
    assert torch.equal(found, target)


@pytest.mark.parametrize(
    "options",
    [
        {"stack_num": 4},
        {"stack_num": 4, "ignore_obs_next": True},
        {"ignore_obs_next": True},
        {"stack_num": 3, "sample_avail": True},
        {"stack_num": 3, "sample_avail": True, "ignore_obs_next": True},
    ],
)
def test_stacks_and_next_observations_are_those_of_tianshou(options):
    ours, own = SharedReplayBuffer(50, **options), theirs.ReplayBuffer(50, **options)
    filled(120, ours, own)
    batch, indices = ours.sample(40)
    assert equal(batch, own[indices])
    assert np.array_equal(ours.sample_indices(0), own.sample_indices(0))
    assert set(indices) <= set(own.sample_indices(0))


def test_only_the_newest_frame_is_stored_where_asked_for():
    options = {"stack_num": 4, "ignore_obs_next": True, "save_only_last_obs": True}
    ours, own = SharedReplayBuffer(50, **options), theirs.ReplayBuffer(50, **options)
    filled(120, ours, own, obs=lambda rng, shape: rng.integers(0, 255, (*shape, 4, 5, 5), np.uint8))
    assert ours.obs.shape == (50, 5, 5)
    batch, indices = ours.sample(40)
    assert equal(batch, own[indices])


def test_nested_observations_come_back_as_batches():
    ours, own = SharedReplayBuffer(20), theirs.ReplayBuffer(20)
    nested = {"obs": lambda rng, shape: Batch(near=rng.random((*shape, 2)), mask=rng.random((*shape, 3)) < 0.5)}
    filled(30, ours, own, **nested)
    batch, indices = ours.sample(10)
    assert equal(batch, own[indices])


def test_rows_of_another_buffer_are_added():
    ours, own = SharedReplayBuffer(50), theirs.ReplayBuffer(50)
    for buffer in (ours, own):
        filled(30, buffer)
    more = theirs.ReplayBuffer(40)
    filled(60, more, seed=1)
    assert np.array_equal(ours.update(more), own.update(more))
    assert equal(ours[:], own[:])


def test_columns_become_a_buffer():
    own = theirs.ReplayBuffer(20)
    filled(20, own)
    columns = {name: own[:][name] for name in ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next")}
    assert equal(SharedReplayBuffer.from_data(**columns)[:], own[:])
    with pytest.raises(ValueError, match=r"have \[19, 20\] rows"):
        SharedReplayBuffer.from_data(**columns | {"rew": own[:].rew[1:]})


def test_after_a_reset_it_is_as_new():
    ours, own = SharedReplayBuffer(20), theirs.ReplayBuffer(20)
    filled(33, ours, own)
    for buffer in (ours, own):
        buffer.reset()
        assert len(buffer) == 0
    for mine, its in zip(*filled(7, ours, own, seed=3), strict=True):
        assert np.array_equal(mine, its)
    assert equal(ours[:], own[:])


def test_rewards_may_be_vectors():
    ours, own = SharedReplayBuffer(20), theirs.ReplayBuffer(20)
    rng = np.random.default_rng(0)
    for _ in range(25):
        given = step(rng)
        given.rew = rng.random(2)
        for mine, its in zip(ours.add(copy.deepcopy(given)), own.add(copy.deepcopy(given)), strict=True):
            assert np.array_equal(mine, its)
    assert equal(ours[:], own[:])


def test_nan_is_stored_and_found_as_tianshou_finds_it():
    ours, own = SharedReplayBuffer(20), theirs.ReplayBuffer(20)
    filled(5, ours, own)
    assert not ours.hasnull()
    bad = step(np.random.default_rng(1))
    bad.rew = np.nan
    for buffer in (ours, own):
        buffer.add(copy.deepcopy(bad))
    assert ours.hasnull()
    assert equal(ours.isnull(), own.isnull())


# Several environments: the same rows in other places


def place(index, n, size):
    """Where Tianshou's vector buffer has the row that ours has at `index`, when all environments step together."""
    return index % n * (size // n) + index // n


@pytest.mark.slow  # Tianshou compiles its functions
@pytest.mark.parametrize("count", [5, 9, 10, 40])
def test_several_environments_have_the_rows_and_neighbours_of_tianshous_vector_buffer(count):
    n, size = 3, 30
    ours, own = SharedVectorReplayBuffer(size, n), theirs.VectorReplayBuffer(size, n)
    added = filled(count, ours, own, n=n)
    assert np.array_equal(place(added[0][0], n, size), added[1][0])
    for mine, its in zip(added[0][1:3], added[1][1:3], strict=True):
        assert np.array_equal(mine, its)
    every = ours.sample_indices(0)
    assert equal(ours[every], own[place(every, n, size)])
    assert np.array_equal(place(ours.next(every), n, size), own.next(place(every, n, size)))
    assert np.array_equal(place(ours.prev(every), n, size), own.prev(place(every, n, size)))
    assert np.array_equal(place(ours.unfinished_index(), n, size), own.unfinished_index())


def test_environments_that_step_at_different_times_keep_their_episodes_apart():
    n, ours = 4, SharedVectorReplayBuffer(40, 4)
    rng = np.random.default_rng(0)
    streams = {env: [] for env in range(n)}  # the rewards of each environment, and whether its episode ended there
    for _ in range(60):
        envs = np.flatnonzero(rng.random(n) < 0.4)
        if len(envs):
            given = step(rng, len(envs))
            ours.add(given, buffer_ids=envs)
            for i, env in enumerate(envs):
                streams[env].append((given.rew[i], given.terminated[i] | given.truncated[i]))
    held = set(ours.rew.tolist())
    after = {}
    for stream in streams.values():
        for (reward, ended), (following, _) in zip(stream, [*stream[1:], (None, None)], strict=True):
            after[reward] = reward if ended or following is None else following
    every = np.arange(40)
    assert ours.rew[ours.next(every)].tolist() == [after[reward] for reward in ours.rew]
    before = {following: reward for reward, following in after.items() if following != reward and reward in held}
    assert ours.rew[ours.prev(every)].tolist() == [before.get(reward, reward) for reward in ours.rew]
    unfinished = [stream[-1][0] for stream in streams.values() if not stream[-1][1] and stream[-1][0] in held]
    assert ours.rew[ours.unfinished_index()].tolist() == unfinished


def test_the_rows_of_an_episode_are_found_from_its_first_and_last():
    ours = SharedVectorReplayBuffer(60, 3)
    rng = np.random.default_rng(5)
    episodes = 0
    rewards = [[] for _ in range(3)]
    for _ in range(50):
        given = step(rng, 3)
        index, _, length, start = ours.add(given)
        for env in range(3):
            rewards[env].append(given.rew[env])
            if length[env]:
                if length[env] * 3 <= 60:
                    found = ours.get_buffer_indices(int(start[env]), int(index[env]) + 1)
                    assert ours.rew[found].tolist() == rewards[env]
                    episodes += 1
                rewards[env] = []
    assert episodes > 5
    with pytest.raises(ValueError, match="in one episode"):
        ours.get_buffer_indices(0, 2)


# What is stored


def test_entries_of_info_and_policy_are_stored_where_they_are_named():
    ours = SharedReplayBuffer(10, keep=("info/lives", "policy/hidden_state/h"))
    given = step(np.random.default_rng(0))
    given.info, given.policy = Batch(lives=3, seen="text"), Batch(hidden_state=Batch(h=np.ones(2)))
    ours.add(given)
    batch, _ = ours.sample(2)
    assert batch.info.lives.tolist() == [3, 3]
    assert batch.policy.hidden_state.h.tolist() == [[1, 1], [1, 1]]
    assert "seen" not in batch.info
    del given.info.__dict__["lives"]
    with pytest.raises(ValueError, match="'info/lives', which keep= names"):
        ours.add(given)

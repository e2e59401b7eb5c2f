"""`compat.tianshou`: buffers beside Tianshou's own, step by step."""

import copy
import os
import pickle
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import tianshou.data as theirs
import torch
from paths import import_path
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.data import Batch

from torchreplay.compat.tianshou import (
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    SharedReplayBuffer,
    SharedVectorReplayBuffer,
)


def step(rng, n=None, obs=lambda rng, shape: rng.random((*shape, 4), np.float32), **others):
    """One step of `n` environments; without a leading dimension where it is None."""
    shape = () if n is None else (n,)
    return Batch(
        obs=obs(rng, shape),
        act=rng.integers(0, 2, shape),
        rew=rng.random(shape),
        terminated=rng.random(shape) < 0.1,
        truncated=rng.random(shape) < 0.1,
        obs_next=obs(rng, shape),
        info={},
        policy=Batch(),
        **others,
    )


def filled(count, *buffers, n=None, seed=0, **how):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        given = step(rng, n, **how)
        added = [buffer.add(copy.deepcopy(given)) for buffer in buffers]
    return added


def equal(a, b):
    """Whether two batches have the same entries with the same values, or two arrays the same values."""
    if isinstance(a, Batch):
        return set(a.get_keys()) == set(b.get_keys()) and all(equal(a[name], b[name]) for name in a.get_keys())
    return np.array_equal(a, b)


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


# Priorities


def test_td_errors_decide_what_is_drawn_and_weighs():
    ours = PrioritizedReplayBuffer(8, alpha=1.0, beta=0.5, random_seed=0)
    filled(8, ours)
    td = np.arange(1.0, 9.0)
    ours.update_weight(np.arange(8), td)
    drawn = np.concatenate([ours.sample(1000)[1] for _ in range(20)])
    counts = np.bincount(drawn, minlength=8)
    expected = 20_000 * td / td.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # chi-square with 7 degrees: 1 in 1,000 at most
    batch, indices = ours.sample(64)
    assert batch.weight == pytest.approx((td[indices] / td[indices].min()) ** -0.5, rel=1e-4)
    assert ours[indices].weight == pytest.approx(batch.weight, rel=1e-6)
    ours.set_beta(1.0)
    batch, indices = ours.sample(64)
    assert batch.weight == pytest.approx(td[indices].min() / td[indices], rel=1e-4)


@pytest.mark.slow  # Tianshou compiles its functions
def test_prioritized_rows_are_read_as_tianshous_are():
    options = {"alpha": 0.6, "beta": 0.4, "stack_num": 3}
    ours, own = PrioritizedReplayBuffer(20, **options), theirs.PrioritizedReplayBuffer(20, **options)
    filled(33, ours, own)
    for buffer in (ours, own):
        buffer.update_weight(np.arange(20), np.linspace(0.5, 4, 20))
    for index in (np.array([3, 9, 9]), slice(None), slice(2, 7), 4):
        mine, its = ours[index], own[index]
        assert np.allclose(mine.pop("weight"), its.pop("weight"), rtol=1e-4)
        assert equal(mine, its)
    assert ours.get_weight(3) / ours.get_weight(4) == pytest.approx(own.get_weight(3) / own.get_weight(4), rel=1e-4)


def test_weights_without_norm_are_relative_to_the_whole_buffer():
    ours = PrioritizedReplayBuffer(8, alpha=1.0, beta=1.0, weight_norm=False)
    filled(8, ours)
    ours.update_weight(np.arange(8), torch.arange(1.0, 9.0).unsqueeze(1))
    batch, indices = ours.sample(3)
    assert batch.weight == pytest.approx(1 / (indices + 1.0), rel=1e-4)


def test_td_errors_of_rows_that_were_overwritten_reach_nobody():
    ours = PrioritizedVectorReplayBuffer(20, 2, alpha=1.0, beta=0.4)
    filled(10, ours, n=2)
    _, indices = ours.sample(16)
    filled(10, ours, n=2, seed=1)
    ours.update_weight(indices, torch.full((16,), 9.0))
    assert ours.replay.priorities(ours.replay.keys()).max() == pytest.approx(1, abs=1e-3)
    ours.update_weight(np.array([3, 4]), np.array([5.0, 6.0]))  # plain numbers name what is there now
    assert np.sort(ours.replay.priorities(ours.replay.keys()))[-2:] == pytest.approx([5, 6], rel=1e-3)


# Pickles and files carry the experience

READS_IT = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    buffer = pickle.load(file)
batch, indices = buffer.sample(8)
buffer.update_weight(indices, batch.rew)
print(len(buffer), float(buffer.rew.sum()), buffer.next(5), float(buffer[:].weight.sum()))
"""


def prioritized():
    buffer = PrioritizedVectorReplayBuffer(40, 2, alpha=0.7, beta=0.4)
    filled(30, buffer, n=2)
    buffer.update_weight(np.arange(40), np.linspace(0.1, 3, 40))
    return buffer


@pytest.mark.slow
def test_a_pickle_is_read_where_the_memory_is_gone(tmp_path):
    buffer = prioritized()
    expected = [len(buffer), float(buffer.rew.sum()), int(buffer.next(5)), float(buffer[:].weight.sum())]
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(buffer))
    buffer.replay.close()
    del buffer
    command = [sys.executable, "-c", READS_IT, str(tmp_path / "buffer.pkl")]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": import_path()}
    ).stdout
    *found, weights = map(float, printed.split())
    assert found == expected[:-1]
    assert weights > 0


def copies(buffer, tmp_path):
    buffer.save_hdf5(str(tmp_path / "buffer.hdf5"))
    loaded = type(buffer).load_hdf5(str(tmp_path / "buffer.hdf5"))
    return [pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer), loaded]


def test_copies_go_on_like_the_original_and_apart_from_it(tmp_path):
    buffer = prioritized()
    more = prioritized()
    for made in (more, *copies(buffer, tmp_path)):
        assert equal(made[:], buffer[:])
        filled(7, made, n=2, seed=9)
        made.set_beta(0.0)
        assert np.array_equal(made.next(np.arange(40)), more.next(np.arange(40)))
        assert np.array_equal(made.rew, more.rew)
        assert not np.array_equal(made.rew, buffer.rew)
        assert (made.sample(5)[0].weight == 1).all()
    assert len(set(buffer.sample(20)[0].weight.tolist())) > 1


def test_an_empty_buffer_is_copied_too(tmp_path):
    for made in copies(SharedReplayBuffer(20), tmp_path):
        filled(3, made)
        assert len(made) == 3


@pytest.mark.parametrize("kind", [SharedReplayBuffer, partial(PrioritizedReplayBuffer, alpha=0.6, beta=0.4)])
def test_entries_that_a_hook_adds_stay_with_the_rows(kind, tmp_path):
    buffer = kind(10)
    filled(10, buffer)
    buffer.set_array_at_key(np.arange(10.0), "returns")
    for made in (buffer, *copies(buffer, tmp_path)):
        assert made[[3, 7]].returns.tolist() == [3, 7]
        batch, indices = made.sample(5)
        assert batch.returns.tolist() == indices.tolist()


# What is kept, and what is refused


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("rew"), "no 'rew'"),
        (lambda b: b.update(obs=np.zeros(5, np.float32)), "'obs'"),
        (lambda b: b.update(act="left"), "act"),
    ],
)
def test_bad_steps_are_refused_and_leave_nothing_behind(change, message):
    ours = SharedReplayBuffer(10)
    filled(3, ours)
    bad = step(np.random.default_rng(1))
    change(bad)
    with pytest.raises(ValueError, match=message):
        ours.add(bad)
    assert len(ours) == 3
    filled(1, ours)
    assert len(ours) == 4


def test_environments_that_are_not_there_are_refused():
    ours = SharedVectorReplayBuffer(10, 2)
    given = step(np.random.default_rng(0), 2)
    for ids in ([0, 2], [-1, 0], []):
        with pytest.raises(ValueError, match="expected numbers from 0 to 1"):
            ours.add(given, buffer_ids=ids)


def test_rows_without_an_environment_are_refused():
    ours = SharedVectorReplayBuffer(10, 2)
    with pytest.raises(ValueError, match=r"shape \(3,\) for 2 environments"):
        ours.add(step(np.random.default_rng(0), 3))
    assert len(ours) == 0
    filled(1, ours, n=2)
    assert len(ours) == 2


def test_rows_of_another_writer_are_noticed():
    ours = SharedReplayBuffer(10)
    filled(3, ours)
    row = ours.replay.gather(ours.replay.keys()[:1])
    ours.replay.extend(**{name: row[name] for name in ours.replay.spec})
    with pytest.raises(RuntimeError, match="another process has written"):
        filled(1, ours)


@pytest.mark.parametrize("td", [np.array([np.nan, 1.0]), np.array([np.inf, 1.0]), np.ones(3)])
def test_bad_td_errors_are_refused(td):
    ours = PrioritizedReplayBuffer(10, alpha=0.6, beta=0.4)
    filled(5, ours)
    with pytest.raises(ValueError, match=r"td|TD"):
        ours.update_weight(np.array([0, 1]), td)
    with pytest.raises(IndexError, match="index 5 is out of range"):
        ours.update_weight(np.array([0, 5]), np.ones(2))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: SharedReplayBuffer(0), "size"),
        (lambda: SharedReplayBuffer(5, stack_num=0), "stack_num"),
        (lambda: SharedVectorReplayBuffer(5, 0), "buffer_num"),
        (lambda: PrioritizedReplayBuffer(5, alpha=-1, beta=0.4), "alpha"),
        (lambda: PrioritizedReplayBuffer(5, alpha=1, beta=float("nan")), "beta"),
        (lambda: SharedReplayBuffer(5).sample(3), "is empty"),
    ],
)
def test_bad_numbers_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        made()


def test_what_cannot_be_done_with_shared_memory_says_so():
    ours = PrioritizedVectorReplayBuffer(10, 2, alpha=0.6, beta=0.4)
    filled(2, ours, n=2)
    refusals = [
        lambda: ours.set_batch(Batch()),
        ours.dropnull,
        lambda: ours.init_weight(0),
        lambda: ours.update(theirs.ReplayBuffer(5)),
    ]
    for refused in refusals:
        with pytest.raises(NotImplementedError, match=r"\w"):
            refused()

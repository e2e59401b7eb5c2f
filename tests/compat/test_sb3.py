"""`compat.sb3`: buffers beside Stable-Baselines3's own, step by step, and its learners with them."""

import copy
import io
import math
import pickle
import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import Forked
from gymnasium import spaces
from paths import import_path
from played_steps import BOX, DICT, DISCRETE, IMAGE, MANY, TORQUE, steps
from stable_baselines3 import DDPG, DQN, SAC, TD3
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import torchreplay as tr
from torchreplay.compat.sb3 import (
    PrioritizedDQN,
    PrioritizedReplayBuffer,
    PrioritizedSAC,
    PrioritizedTD3,
    SharedDictReplayBuffer,
    SharedHerReplayBuffer,
    SharedNStepReplayBuffer,
    SharedReplayBuffer,
)

SPACES = [(BOX, DISCRETE), (BOX, TORQUE), (DISCRETE, MANY), (MANY, DISCRETE), (IMAGE, TORQUE), (DICT, DISCRETE)]


def filled(*buffers, count, seed=0, **how):
    """Gives the same steps to each of the buffers."""
    first = buffers[0]
    for step in steps(first.observation_space, first.action_space, first.n_envs, count, seed, **how):
        for buffer in buffers:
            buffer.add(*copy.deepcopy(step))
    return buffers if len(buffers) > 1 else first


def flat(values):
    return values if isinstance(values, dict) else {"": values}


def rows_of(samples):
    """Yields each sample as bytes, by the name of its part."""
    for i in range(len(samples.rewards)):
        row = {}
        for part, value in samples._asdict().items():
            if part in ("discounts", "weights", "keys") or value is None:
                continue
            row |= {part + name: tensor[i].numpy().tobytes() for name, tensor in flat(value).items()}
        yield row


def known_by_reward(samples):
    return {row["rewards"]: row for row in rows_of(samples)}


def everything_of(theirs):
    """What Stable-Baselines3's buffer holds: each position in each environment, which it draws at random."""
    return known_by_reward(theirs._get_samples(np.repeat(np.arange(theirs.size()), 60)))


def own_class(space):
    return DictReplayBuffer if isinstance(space, spaces.Dict) else ReplayBuffer


# What is drawn


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(("observation", "action"), SPACES)
@pytest.mark.parametrize("handle", [True, False])
def test_what_is_drawn_is_what_the_peer_holds(observation, action, n_envs, handle):
    set_random_seed(0)
    arguments = {"n_envs": n_envs, "handle_timeout_termination": handle, "device": "cpu"}
    theirs = own_class(observation)(20 * n_envs, observation, action, **arguments)
    ours = SharedReplayBuffer(20 * n_envs, observation, action, **arguments)
    filled(theirs, ours, count=31)
    expected, drawn = everything_of(theirs), known_by_reward(ours.sample(2000))
    assert len(expected) == 20 * n_envs
    assert drawn == expected
    assert ours.size() == theirs.size()
    assert (ours.pos, ours.full) == (theirs.pos, theirs.full)


@pytest.mark.parametrize(("observation", "action"), SPACES)
def test_samples_have_the_types_shapes_and_dtypes_of_the_peer(observation, action):
    theirs = own_class(observation)(20, observation, action, device="cpu")
    ours = SharedReplayBuffer(20, observation, action, device="cpu")
    filled(theirs, ours, count=9)
    theirs, ours = theirs.sample(7), ours.sample(7)
    assert type(ours) is type(theirs)
    assert type(ours) in (ReplayBufferSamples, DictReplayBufferSamples)
    for value, other in zip(ours, theirs, strict=True):
        for tensor, peer in zip(flat(value).values(), flat(other).values(), strict=True):
            assert tensor is peer is None or (tensor.shape, tensor.dtype) == (peer.shape, peer.dtype)


@pytest.mark.parametrize("observation", [BOX, DICT, DISCRETE])
def test_observations_stored_once_come_back_as_those_stored_twice(observation):
    both = SharedReplayBuffer(300, observation, DISCRETE, n_envs=3, device="cpu")
    once = SharedReplayBuffer(300, observation, DISCRETE, n_envs=3, device="cpu", optimize_memory_usage=True)
    filled(both, once, count=50)
    assert known_by_reward(once.sample(3000)) == known_by_reward(both.sample(3000))
    assert "next_obs" not in once.shared.spec


@pytest.mark.parametrize("n_steps", [2, 3, 5])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_n_step_returns_are_those_of_the_peer(n_envs, n_steps):
    arguments = {"n_envs": n_envs, "n_steps": n_steps, "gamma": 0.9, "device": "cpu"}
    theirs = NStepReplayBuffer(90 * n_envs, BOX, DISCRETE, **arguments)
    ours = SharedNStepReplayBuffer(90 * n_envs, BOX, DISCRETE, **arguments)
    filled(theirs, ours, count=40)
    batch = ours.sample(3000)
    expected = theirs._get_samples(np.repeat(np.arange(theirs.size()), 60))
    of_start = {tuple(obs.tolist()): i for i, obs in enumerate(expected.observations)}
    found = torch.tensor([of_start[tuple(obs.tolist())] for obs in batch.observations])
    assert len(found.unique()) > 36 * n_envs
    assert torch.allclose(batch.rewards, expected.rewards[found])
    assert torch.equal(batch.dones, expected.dones[found])
    assert torch.equal(batch.actions, expected.actions[found])
    assert torch.equal(batch.next_observations, expected.next_observations[found])
    goes_on = 1 - batch.dones
    assert torch.allclose(batch.discounts * goes_on, expected.discounts[found] * goes_on)


def test_an_n_step_buffer_of_dicts_is_no_error():
    buffer = filled(SharedNStepReplayBuffer(60, DICT, DISCRETE, device="cpu", n_steps=2), count=20)
    batch = buffer.sample(8)
    assert isinstance(batch, DictReplayBufferSamples)
    assert batch.discounts.shape == (8, 1)


def step_of(obs, next_obs, reward=1.0, done=False, **info):
    """The arguments of `add` for one environment whose observations are single numbers."""
    values = (np.full((1, 3), obs, np.float32), np.full((1, 3), next_obs, np.float32))
    return *values, np.array([0]), np.array([reward], np.float32), np.array([done]), [info]


def test_no_return_spans_an_episode_that_was_broken_off():
    buffer = SharedNStepReplayBuffer(50, BOX, DISCRETE, device="cpu", n_steps=3, gamma=1.0)
    for t in range(4):
        buffer.add(*step_of(t, t + 1))
    for t in range(10, 14):  # env.reset() in mid-episode
        buffer.add(*step_of(t, t + 1))
    batch = buffer.sample(200)
    reached = {(int(o[0]), int(n[0])) for o, n in zip(batch.observations, batch.next_observations, strict=True)}
    assert reached == {(0, 3), (1, 4), (2, 4), (3, 4), (10, 13), (11, 14)}
    assert not batch.dones.any()


def test_a_time_limit_without_done_ends_an_n_step_return_as_in_the_peer():
    buffer = SharedNStepReplayBuffer(50, BOX, DISCRETE, device="cpu", n_steps=3, gamma=1.0)
    buffer.add(*step_of(0, 1, **{"TimeLimit.truncated": True}))
    buffer.add(*step_of(1, 2, done=True))
    batch = buffer.sample(64)
    ends = {(int(o[0]), int(n[0]), float(d)) for o, n, d in zip(*batch[:1], batch[2], batch.dones, strict=True)}
    assert ends == {(0, 1, 0.0), (1, 2, 1.0)}


def test_an_episode_may_begin_where_another_one_ended():
    buffer = SharedReplayBuffer(50, BOX, DISCRETE, device="cpu", optimize_memory_usage=True)
    buffer.add(*step_of(0, 1, done=True))
    buffer.add(*step_of(1, 2, reward=2.0))
    assert sorted(known_by_reward(buffer.sample(64))) == sorted(np.float32(r).tobytes() for r in (1, 2))


def test_values_of_other_shapes_are_taken_as_the_peer_takes_them():
    theirs, ours = (kind(50, DISCRETE, DISCRETE, device="cpu") for kind in (ReplayBuffer, SharedReplayBuffer))
    once = SharedReplayBuffer(50, DISCRETE, DISCRETE, device="cpu", n_steps=2)
    for buffer in (theirs, ours, once):
        for t in range(3):
            buffer.add(np.array([[t]]), np.array([[t + 1]]), np.array([[1]]), t + 1.0, np.array([0.0]), [{}])
    assert known_by_reward(ours.sample(64)) == everything_of(theirs)
    assert once.sample(64).rewards.unique().tolist() == pytest.approx([1 + 0.99 * 2, 2 + 0.99 * 3])


# VecNormalize


def normalizer(clip_reward=10.0):
    env = VecNormalize(make_vec_env("Pendulum-v1"), clip_reward=clip_reward)
    env.obs_rms.mean, env.obs_rms.var = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0])
    env.ret_rms.var = np.array(7.0)
    return env


@pytest.mark.parametrize("n_steps", [1, 3])
def test_samples_are_normalised_as_the_peer_normalises_them(n_steps):
    env = normalizer()
    kinds = (NStepReplayBuffer, SharedNStepReplayBuffer) if n_steps > 1 else (ReplayBuffer, SharedReplayBuffer)
    more = {"n_steps": n_steps} if n_steps > 1 else {}
    theirs, ours = filled(*(kind(30, BOX, TORQUE, device="cpu", **more) for kind in kinds), count=9)
    batch, expected = ours.sample(200, env), theirs._get_samples(np.arange(9), env)
    of_start = {tuple(obs.tolist()): i for i, obs in enumerate(expected.observations)}
    found = [of_start[tuple(obs.tolist())] for obs in batch.observations]
    for name in ("next_observations", "rewards"):
        assert getattr(batch, name).dtype == torch.float32
        assert torch.allclose(getattr(batch, name), getattr(expected, name)[found])


def test_a_normalised_return_is_clipped_where_as_many_clipped_rewards_would_end():
    env = normalizer(clip_reward=0.5)
    buffer = SharedNStepReplayBuffer(30, BOX, DISCRETE, device="cpu", n_steps=3, gamma=0.5)
    for t in range(3):
        buffer.add(*step_of(t, t + 1, reward=1e6))
    assert buffer.sample(4, env).rewards.ravel().tolist() == [0.5 + 0.25 + 0.125] * 4


# Hindsight


class Corridor(BitFlippingEnv):
    """Goals are numbers on a line; the reward says whether they are the same."""

    def compute_reward(self, achieved, desired, infos):
        assert len(infos) == len(achieved)
        return -(np.asarray(achieved) != np.asarray(desired)).any(axis=-1).astype(np.float32)


PLACE = spaces.Box(-1, 99, (1,), np.float32)
GOALS = spaces.Dict(observation=PLACE, achieved_goal=PLACE, desired_goal=PLACE)


def hindsight(**how):
    env = DummyVecEnv([Corridor])
    return SharedHerReplayBuffer(200, GOALS, DISCRETE, env=env, device="cpu", **how)


def walk(buffer, start, count, ends=True):
    def at(t):
        return {name: np.full((1, 1), -1 if name == "desired_goal" else t, np.float32) for name in GOALS.spaces}

    for t in range(start, start + count):
        done = ends and t == start + count - 1
        info = {"TimeLimit.truncated": done}
        buffer.add(at(t), at(t + 1), np.array([0]), np.array([-1.0]), np.array([done]), [info])


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_another_goal_is_one_that_the_episode_reached(strategy):
    buffer = hindsight(goal_selection_strategy=strategy)
    walk(buffer, 0, 5)
    walk(buffer, 20, 5)
    batch = buffer.sample(4000)
    at, goal = batch.observations["observation"].ravel(), batch.observations["desired_goal"].ravel()
    assert torch.equal(goal, batch.next_observations["desired_goal"].ravel())
    first = at.div(20, rounding_mode="floor") * 20
    other = goal != -1
    low = {"future": at + 1, "final": first + 5, "episode": first}[strategy]
    assert ((goal >= low) & (goal <= first + 5))[other].all()
    assert torch.equal(batch.rewards.ravel(), torch.where(other & (goal == at + 1), 0.0, -1.0))
    assert not batch.dones.any()
    spread = math.sqrt(0.8 * 0.2 / 4000)
    assert abs(other.float().mean() - 0.8) < 4.9 * spread  # false alarm: 1e-6, two-sided


def test_hindsight_waits_for_the_end_of_an_episode_and_says_so():
    buffer = hindsight()
    walk(buffer, 0, 3, ends=False)
    with pytest.raises(RuntimeError, match="larger learning_starts"):
        buffer.sample(4)
    with pytest.warns(UserWarning, match="truncated"):
        buffer.truncate_last_trajectory()
    assert buffer.sample(4).rewards.shape == (4, 1)


def test_a_loaded_hindsight_buffer_needs_an_environment_and_takes_one():
    buffer = hindsight()
    walk(buffer, 0, 3)
    loaded = pickle.loads(pickle.dumps(buffer))
    with pytest.raises(AssertionError, match="set_env"):
        loaded.sample(64)
    loaded.set_env(buffer.env)
    assert loaded.sample(64).rewards.shape == (64, 1)
    with pytest.raises(ValueError, match="already"):
        loaded.set_env(buffer.env)


def test_infos_are_refused():
    with pytest.raises(NotImplementedError, match="copy_info_dict"):
        hindsight(copy_info_dict=True)
    with pytest.raises(NotImplementedError, match="one-step"):
        hindsight(n_steps=3)
    with pytest.raises(KeyError):
        hindsight(goal_selection_strategy="nearest")


# Pickles and copies

LOADING = """
import pickle, sys
buffer = pickle.load(open(sys.argv[1], "rb"))
print(sorted(set(buffer.sample(2000).rewards.ravel().tolist())))
"""


@pytest.mark.parametrize("kind", [SharedReplayBuffer, PrioritizedReplayBuffer])
def test_a_pickle_is_the_experience_and_outlives_the_process(kind, tmp_path):
    buffer = filled(kind(30, BOX, DISCRETE, n_envs=2, device="cpu"), count=12)
    _ = buffer.shared
    path = tmp_path / "buffer.pkl"
    path.write_bytes(pickle.dumps(buffer))
    buffer.reset()
    command = [sys.executable, "-c", LOADING, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env={"PYTHONPATH": import_path()})
    assert done.stdout.strip() == str([float(r) for r in range(1, 25)]), done.stderr


@pytest.mark.parametrize("how", [{}, {"n_steps": 2}])
def test_a_deep_copy_goes_its_own_way(how):
    buffer = filled(SharedReplayBuffer(30, BOX, DISCRETE, device="cpu", **how), count=6, ends=0)
    copied = copy.deepcopy(buffer)
    filled(copied, count=6, seed=5, ends=0)
    assert buffer.size() * 2 == copied.size()


def test_priorities_and_their_schedule_travel_with_a_pickle():
    beta = tr.LinearSchedule(0.4, 1.0, 100)
    buffer = filled(PrioritizedReplayBuffer(30, BOX, DISCRETE, device="cpu", beta=beta), count=6)
    batch = buffer.sample(16)
    buffer.update_priorities(batch, batch.rewards)
    loaded = pickle.loads(pickle.dumps(buffer))
    keys = loaded.shared.keys()
    assert torch.equal(loaded.shared.priorities(keys), buffer.shared.priorities(keys))
    assert loaded.shared.sampler.beta == beta


# Sharing


def explore(buffer):
    rows = {"obs": np.full((4, 3), 9, np.float32), "next_obs": np.full((4, 3), 9, np.float32), "action": [0] * 4}
    buffer.extend(**rows, reward=[100.0] * 4, terminated=[False] * 4, truncated=[False] * 4)


def test_another_process_writes_into_the_buffer():
    buffer = filled(SharedReplayBuffer(30, BOX, DISCRETE, device="cpu"), count=6)
    with Forked(explore, buffer.shared) as explorer:
        assert explorer.wait() == 0
    assert buffer.size() == 10
    assert set(buffer.sample(500).rewards.ravel().tolist()) == {*range(1, 7), 100.0}


def test_arrays_are_the_memory_itself_until_the_buffer_is_shared():
    theirs, ours = (kind(20, DICT, TORQUE, n_envs=2, device="cpu") for kind in (DictReplayBuffer, SharedReplayBuffer))
    filled(theirs, ours, count=13)
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        for value, peer in zip(*(flat(getattr(b, name)).values() for b in (ours, theirs)), strict=True):
            assert (value.shape, value.dtype) == (peer.shape, peer.dtype)
            assert (value == peer).all()
    ours.rewards[:] = 5.0
    assert set(ours.sample(50).rewards.ravel().tolist()) == {5.0}
    _ = ours.shared
    for name in ("observations", "actions", "rewards", "dones"):
        with pytest.raises(RuntimeError, match=r"other processes .*gather"):
            getattr(ours, name)


def test_linked_rows_have_no_arrays():
    buffer = filled(SharedNStepReplayBuffer(30, BOX, DISCRETE, device="cpu"), count=6)
    for name in ("observations", "rewards", "timeouts"):
        with pytest.raises(RuntimeError, match="linked"):
            getattr(buffer, name)
    for use in (np.asarray, lambda dones: dones[0], lambda dones: dones.sum()):
        with pytest.raises(RuntimeError, match="linked"):
            use(buffer.dones)


def test_reset_takes_all_rows_away():
    buffer = filled(SharedReplayBuffer(30, BOX, DISCRETE, device="cpu"), count=6)
    buffer.reset()
    assert buffer.size() == 0
    filled(buffer, count=2)
    assert set(buffer.sample(50).rewards.ravel().tolist()) == {1.0, 2.0}


# Bad input


@pytest.mark.parametrize("part", ["obs", "next_obs", "action", "reward"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("how", [{}, {"n_steps": 2}])
def test_nan_is_refused_with_a_sentence_and_nothing_is_written(part, value, how):
    buffer = SharedReplayBuffer(30, BOX, TORQUE, device="cpu", **how)
    step = dict(zip(("obs", "next_obs", "action", "reward", "done", "infos"), *steps(BOX, TORQUE, 1, 1), strict=True))
    step[part].ravel()[-1] = value
    with pytest.raises(ValueError, match=f"{part} has 1 NaN or infinite numbers"):
        buffer.add(**step)
    assert len(buffer.shared) == 0


def test_large_numbers_are_not_taken_for_infinite():
    buffer = SharedReplayBuffer(30, BOX, DISCRETE, device="cpu")
    buffer.add(*step_of(3e38, -3e38, reward=3e38))
    assert buffer.size() == 1


@pytest.mark.parametrize("part", range(4))
def test_values_of_too_many_environments_are_refused_as_by_the_peer(part):
    (step,) = steps(BOX, TORQUE, 1, 1)
    step = [np.concatenate([v, v]) if i == part else v for i, v in enumerate(step[:4])] + list(step[4:])
    for kind in (ReplayBuffer, SharedReplayBuffer, SharedNStepReplayBuffer):
        with pytest.raises(ValueError):
            kind(30, BOX, TORQUE, device="cpu").add(*step)


def test_what_the_peer_refuses_is_refused():
    for kind in (ReplayBuffer, SharedReplayBuffer):
        with pytest.raises(ValueError):
            kind(30, BOX, DISCRETE).sample(4)
        with pytest.raises(ValueError):
            filled(kind(30, BOX, DISCRETE), count=3).sample(-1)
    for kind in (DictReplayBuffer, SharedDictReplayBuffer):
        with pytest.raises(AssertionError):
            kind(30, BOX, DISCRETE)


def test_an_index_out_of_range_is_refused():
    buffer = filled(SharedReplayBuffer(30, BOX, DISCRETE), count=3)
    assert buffer._get_samples(np.array([2, 0])).rewards.ravel().tolist() == [3.0, 1.0]
    for index in (3, -1):
        with pytest.raises(ValueError, match="out of range"):
            buffer._get_samples(np.array([index]))


# Priorities


def test_a_prioritized_sample_has_weights_and_keys_in_columns():
    buffer = filled(PrioritizedReplayBuffer(30, BOX, DISCRETE, n_envs=2, device="cpu"), count=9)
    batch = buffer.sample(7)
    assert batch.weights.shape == batch.rewards.shape == batch.dones.shape == (7, 1)
    assert batch.weights.dtype == torch.float32
    assert batch.keys.shape == (7,)


def test_large_td_errors_are_drawn_more_often_with_smaller_weights():
    buffer = filled(PrioritizedReplayBuffer(10, BOX, DISCRETE, device="cpu", alpha=1.0, beta=1.0), count=10)
    keys = buffer.shared.keys()
    buffer.update_priorities(keys, np.where(np.arange(10) == 3, 9.0, 1.0).reshape(-1, 1))
    batch = buffer.sample(1800)
    large = batch.rewards.ravel() == 4.0
    assert abs(int(large.sum()) - 900) <= 1  # draws are stratified
    assert batch.weights[large].unique().tolist() == pytest.approx([1 / 9])
    assert batch.weights[~large].unique().tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("errors", [[math.nan] * 4, [math.inf] * 4, [1.0] * 3])
def test_bad_td_errors_are_refused(errors):
    buffer = filled(PrioritizedReplayBuffer(10, BOX, DISCRETE, device="cpu"), count=10)
    with pytest.raises(ValueError):
        buffer.update_priorities(buffer.sample(4), torch.tensor(errors))
    with pytest.raises(ValueError):
        buffer.update_priorities(np.array([99]), [1.0])


# Learners


def parameters(model):
    return torch.cat([p.detach().ravel() for p in model.policy.parameters()])


def learner(kind, env, **how):
    policy = {"net_arch": [16]}
    more = {"batch_size": 16, "learning_starts": 20, "buffer_size": 200, "seed": 3, "device": "cpu"}
    return kind("MlpPolicy", env, policy_kwargs=policy, **(more | how))


LEARNERS = [
    (DQN, PrioritizedDQN, "CartPole-v1"),
    (SAC, PrioritizedSAC, "Pendulum-v1"),
    (TD3, PrioritizedTD3, "Pendulum-v1"),
]


@pytest.mark.parametrize(("theirs", "ours", "env"), LEARNERS)
def test_with_equal_weights_an_update_is_that_of_the_peer(theirs, ours, env):
    models = [learner(kind, env) for kind in (theirs, ours)]
    buffer = PrioritizedReplayBuffer(64, models[0].observation_space, models[0].action_space, device="cpu", alpha=0.0)
    filled(buffer, count=40)
    batches = [buffer.sample(16) for _ in range(4)]
    fed_back = []
    for model in models:
        drawn = iter(batches)
        model.replay_buffer = SimpleNamespace(
            sample=lambda *_, drawn=drawn, **__: next(drawn), update_priorities=lambda b, td: fed_back.append((b, td))
        )
        model._setup_learn(10)
        torch.manual_seed(0)
        model.train(gradient_steps=4, batch_size=16)
    assert torch.allclose(parameters(models[0]), parameters(models[1]), atol=1e-6)
    assert not torch.equal(parameters(models[0]), parameters(learner(theirs, env)))
    assert [b for b, _ in fed_back] == batches
    logs = [model.logger.name_to_value for model in models]
    assert logs[0].keys() == logs[1].keys()
    for name, value in logs[0].items():
        assert name.startswith("time") or logs[1][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_a_sample_of_weight_0_teaches_nothing():
    model = learner(PrioritizedDQN, "CartPole-v1")
    buffer = filled(PrioritizedReplayBuffer(64, model.observation_space, model.action_space, device="cpu"), count=40)
    batch = buffer.sample(16)
    model.replay_buffer = SimpleNamespace(
        sample=lambda *_, **__: batch._replace(weights=torch.zeros(16, 1)), update_priorities=lambda *_: None
    )
    model._setup_learn(10)
    before = parameters(model)
    model.train(gradient_steps=2, batch_size=16)
    assert torch.equal(parameters(model), before)


@pytest.mark.parametrize(("kind", "env"), [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1"), (DDPG, "Pendulum-v1")])
@pytest.mark.parametrize("how", [{}, {"optimize_memory_usage": True}])
def test_a_learner_learns_saves_loads_and_learns_on(kind, env, how):
    model = learner(kind, env, replay_buffer_class=SharedReplayBuffer, train_freq=2, **how)
    model.learn(40)
    file = io.BytesIO()
    model.save_replay_buffer(file)
    file.seek(0)
    size = model.replay_buffer.size()
    model.load_replay_buffer(file)
    assert model.replay_buffer.size() == size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peer warns that it truncates the last trajectory
        model.learn(20)
    assert model.replay_buffer.size() == 60


@pytest.mark.parametrize(("kind", "env"), [row[1:] for row in LEARNERS])
def test_a_prioritized_learner_learns_saves_and_loads_itself(kind, env, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = learner(kind, VecNormalize(make_vec_env(env, n_envs=2, seed=0)), n_steps=3, gamma=0.9)
    assert (model.replay_buffer.n_steps, model.replay_buffer.gamma) == (3, 0.9)
    model.learn(60)
    shared = model.replay_buffer.shared
    assert len(shared.priorities(shared.keys()).unique()) > 5
    model.save(tmp_path / "model")
    loaded = kind.load(tmp_path / "model", env=model.get_env())
    assert torch.equal(parameters(loaded), parameters(model))
    assert loaded.replay_buffer.n_steps == 3
    loaded.learn(30)


def test_learners_with_the_same_seed_learn_the_same():
    runs = [learner(PrioritizedDQN, "CartPole-v1").learn(60) for _ in range(2)]
    assert torch.equal(*map(parameters, runs))


def test_hindsight_teaches_a_learner_of_several_environments():
    env = make_vec_env(lambda: BitFlippingEnv(n_bits=3, continuous=True), n_envs=2)
    model = SAC("MultiInputPolicy", env, replay_buffer_class=SharedHerReplayBuffer, learning_starts=20, device="cpu")
    model.learn(30)
    assert model.replay_buffer.size() > 5


def test_prioritized_learners_refuse_buffers_that_cannot_be_fed_back_to():
    with pytest.raises(TypeError, match="PrioritizedReplayBuffer"):
        learner(PrioritizedDQN, "CartPole-v1", replay_buffer_class=SharedReplayBuffer)

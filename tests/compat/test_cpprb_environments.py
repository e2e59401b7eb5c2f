"""What cpprb makes of an environment, and its loop of playing and learning."""

import types

import cpprb
import numpy as np
import pytest
from gymnasium import spaces

from torchreplay.compat import cpprb as adapter


def environment(observation, action):
    return types.SimpleNamespace(observation_space=observation, action_space=action)


BOX = spaces.Box(-1, 1, (3, 2))
SPACES = [
    (BOX, spaces.Discrete(4)),
    (BOX, spaces.MultiDiscrete([2, 3])),
    (spaces.MultiBinary(5), spaces.Box(-1, 1, (2,))),
    (spaces.Tuple([BOX, spaces.Discrete(3)]), spaces.Discrete(2)),
    (spaces.Dict(a=BOX, b=spaces.Discrete(3)), spaces.Dict(move=spaces.Discrete(2), turn=spaces.Box(-1, 1, (1,)))),
]


def as_arrays(env_dict):
    return {name: (tuple(np.ravel(defs["shape"])), np.dtype(defs["dtype"])) for name, defs in env_dict.items()}


@pytest.mark.parametrize(("observation", "action"), SPACES, ids=str)
@pytest.mark.parametrize("types", [{}, {"int_type": np.int8, "float_type": np.float64}], ids=["default", "given"])
def test_the_columns_of_an_environment_are_those_of_cpprb(observation, action, types):
    env = environment(observation, action)
    assert as_arrays(adapter.create_env_dict(env, **types)) == as_arrays(cpprb.create_env_dict(env, **types))


@pytest.mark.parametrize(("observation", "action"), SPACES, ids=str)
def test_what_is_taken_apart_fits_the_columns(observation, action):
    env = environment(observation, action)
    buffer = adapter.ReplayBuffer(4, adapter.create_env_dict(env))
    before_add = adapter.create_before_add_func(env)
    obs, next_obs = observation.sample(), observation.sample()
    buffer.add(**before_add(obs=obs, act=action.sample(), next_obs=next_obs, rew=1.5, done=True))
    held = buffer.get_all_transitions()
    assert held["rew"].tolist() == [[1.5]]
    first = next(name for name in held if name.startswith("next_"))
    value = next_obs[0] if isinstance(observation, spaces.Tuple) else next_obs
    value = value["a"] if isinstance(observation, spaces.Dict) else value
    np.testing.assert_allclose(held[first][0], value, rtol=1e-6)


def test_a_space_without_a_shape_is_refused_as_cpprb_does():
    for library in (adapter, cpprb):
        with pytest.raises(NotImplementedError):
            library.create_env_dict(environment(spaces.Text(4), spaces.Discrete(2)))


class Count:
    """Counts to three, over and over; `style` says how many values `step` returns."""

    def __init__(self, style):
        self.style, self.at = style, 0

    def reset(self):
        self.at = 0
        return (0.0, {}) if self.style == 5 else 0.0

    def step(self, action):
        self.at += 1
        end = self.at == 3
        flags = (False, end) if self.style == 5 else (end,)  # Gymnasium's says that it is a time limit
        return (float(self.at), 1.0, *flags, {})


@pytest.mark.parametrize("style", [4, 5])
@pytest.mark.parametrize("kind", ["ReplayBuffer", "PrioritizedReplayBuffer", "MPPrioritizedReplayBuffer"])
def test_train_plays_adds_draws_and_feeds_back(kind, style):
    buffer = getattr(adapter, kind)(32, {name: {} for name in ("obs", "act", "rew", "next_obs", "done")})
    learned, ended, warm = [], [], []

    def get_action(obs, step, episode, is_warmup):
        warm.append(is_warmup)
        return 0

    def update_policy(sample, step, episode):
        learned.append((step, episode, len(sample["obs"])))
        return np.full(len(sample["obs"]), 5.0)

    adapter.train(
        buffer,
        Count(style),
        get_action,
        update_policy,
        max_steps=10,
        batch_size=4,
        n_warmups=2,
        episode_callback=lambda *figures: ended.append(figures),
    )
    assert warm == [True] * 2 + [False] * 8
    assert learned == [(step, step // 3, 4) for step in range(2, 10)]
    assert ended == [(0, 2, 3.0), (1, 2, 3.0), (2, 2, 3.0)]
    held = buffer.get_all_transitions()
    assert held["obs"].ravel().tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert held["done"].ravel().tolist() == [0, 0, style == 4] * 3 + [0]
    if kind != "ReplayBuffer":
        assert buffer.get_max_priority() == 5.0


def test_train_takes_functions_for_what_differs_and_stops_after_so_many_episodes():
    buffer = adapter.ReplayBuffer(32, {"state": {}})
    rewards = []
    adapter.train(
        buffer,
        Count(5),
        lambda *_: 0,
        lambda *_: None,
        max_episodes=2,
        after_step=lambda obs, action, returned, step, episode: {"state": returned[0], "gain": 2.0},
        done_check=lambda made: made["state"] == 2,
        obs_update=lambda made: made["state"],
        rew_sum=lambda total, made: total + made["gain"],
        episode_callback=lambda episode, step, reward: rewards.append(reward),
    )
    assert rewards == [4.0, 4.0]
    assert buffer.get_stored_size() == 4

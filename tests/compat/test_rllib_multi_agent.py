"""`compat.rllib`: multi-agent episode buffers beside RLlib's own, and its DQN with them."""

import pickle
from collections import Counter

import gymnasium
import numpy as np
import pytest

pytest.importorskip("tree", reason="RLlib needs dm-tree")
from ray.rllib.connectors.learner import (
    AddColumnsFromEpisodesToTrainBatch,
    AddObservationsFromEpisodesToBatch,
    AgentToModuleMapping,
)
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers import MultiAgentEpisodeReplayBuffer as TheirBuffer
from ray.rllib.utils.replay_buffers import MultiAgentPrioritizedEpisodeReplayBuffer as TheirPrioritizedBuffer

from torchreplay.compat.rllib import MultiAgentEpisodeReplayBuffer, MultiAgentPrioritizedEpisodeReplayBuffer

MODULES = {"ann": "walkers", "bob": "walkers", "cat": "flyer"}
SIZES = {"walkers": 3, "flyer": 2}
OBS = {agent: gymnasium.spaces.Box(-1, 1, (SIZES[module],)) for agent, module in MODULES.items()}
ACT = dict.fromkeys(MODULES, gymnasium.spaces.Discrete(4))
PATH = "torchreplay.compat.rllib.MultiAgentPrioritizedEpisodeReplayBuffer"
PEERS = {
    MultiAgentEpisodeReplayBuffer: TheirBuffer,
    MultiAgentPrioritizedEpisodeReplayBuffer: TheirPrioritizedBuffer,
}
KINDS = pytest.mark.parametrize("kind", PEERS)


def begun():
    return MultiAgentEpisode(
        observation_space=OBS, action_space=ACT, agent_to_module_mapping_fn=lambda agent, episode, **_: MODULES[agent]
    )


def lived(rng, length, part=None, turns=0.0, lookback=1, leaves=True):
    """The parts of an episode of random steps, as an `EnvRunner` hands them over; all in one where `part` is None.

    An agent gets no observation in a step with probability `turns`, and may leave before the others.
    """
    observe = {agent: lambda agent=agent: rng.random(SIZES[MODULES[agent]], np.float32) for agent in MODULES}
    episode, parts, there = begun(), [], list(MODULES)
    episode.add_env_reset(observations={agent: observe[agent]() for agent in there}, infos={})
    for i in range(length):
        last = i == length - 1
        actions = {agent: np.int64(rng.integers(4)) for agent in sorted(episode.get_agents_to_act())}
        seen = [agent for agent in there if last or rng.random() >= turns]
        gone = [agent for agent in seen if leaves and not last and len(there) > 1 and rng.random() < 0.05][:1]
        episode.add_env_step(
            {agent: observe[agent]() for agent in seen},
            actions,
            {agent: float(rng.random()) for agent in there},
            {},
            terminateds=dict.fromkeys(gone, True) | {"__all__": last and length % 2 == 0},
            truncateds={"__all__": last and length % 2 == 1},
        )
        there = [agent for agent in there if agent not in gone]
        if part and not last and (i + 1) % part == 0:
            parts.append(episode)
            episode = episode.cut(len_lookback_buffer=lookback)
    return [*parts, episode]


def expected(episodes, n_step=1, gamma=0.99):
    """The n-step transitions of whole episodes (Sutton 1988), by module, episode, agent and time."""
    found = {}
    for whole in episodes:
        for agent, episode in whole.agent_episodes.items():
            obs, rewards = episode.get_observations(), episode.get_rewards()
            for t in range(len(episode)):
                m = min(n_step, len(episode) - t)
                last = t + m == len(episode)
                found[MODULES[agent], whole.id_, agent, t] = (
                    obs[t].tobytes(),
                    obs[t + m].tobytes(),
                    int(episode.get_actions(t)),
                    pytest.approx(sum(gamma**k * rewards[t + k] for k in range(m)), rel=1e-5),
                    (last and episode.is_terminated, last and episode.is_truncated),
                    m,
                )
    return found


def transitions(sample):
    """What a sample has, by module, episode, agent and time."""
    found = {}
    for episode in sample:
        assert len(episode) == 1
        first, following = episode.get_observations()
        found[episode.module_id, episode.multi_agent_episode_id, episode.agent_id, episode.t_started] = (
            np.asarray(first).tobytes(),
            np.asarray(following).tobytes(),
            int(episode.get_actions(0)),
            episode.get_rewards(0),
            (episode.is_terminated, episode.is_truncated),
            episode.get_extra_model_outputs("n_step", 0),
        )
    return found


@pytest.mark.parametrize("n_step", [1, 3])
@KINDS
def test_transitions_are_those_of_the_agents_and_of_the_right_module(kind, n_step):
    rng = np.random.default_rng(0)
    episodes = [lived(rng, length, turns=0.3)[0] for length in (1, 2, 7, 20, 25)]
    buffer = kind(200, n_step=n_step, gamma=0.9, seed=0)
    buffer.add(episodes[0])
    buffer.add([episode.to_numpy() for episode in episodes[1:]])
    drawn = buffer.sample(1500, n_step=n_step, gamma=0.9, beta=0.4, sample_episodes=True)
    assert Counter(episode.module_id for episode in drawn) == {"walkers": 1500, "flyer": 1500}
    truth = expected(episodes, n_step, 0.9)
    assert transitions(drawn) == truth
    assert buffer.get_num_agent_timesteps() == len(truth)
    for module in SIZES:
        assert buffer.get_num_timesteps(module) == sum(key[0] == module for key in truth)
    spaces = {episode.agent_id: (episode.observation_space, episode.action_space) for episode in drawn}
    assert spaces == {agent: (OBS[agent], ACT[agent]) for agent in MODULES}


@pytest.mark.parametrize(("part", "turns", "lookback"), [(1, 0.0, 0), (1, 0.4, 1), (4, 0.4, 1), (5, 0.0, 3)])
@KINDS
def test_parts_are_joined_as_rllibs_own_buffer_joins_them(kind, part, turns, lookback):
    rng = np.random.default_rng(1)
    ours, own = kind(500, seed=0), PEERS[kind](500)
    streams = [lived(rng, 17 + i, part, turns, lookback, leaves=turns == 0) for i in range(4)]
    for i in range(max(map(len, streams))):
        given = [parts[i] for parts in streams if i < len(parts)]
        ours.add(given)
        own.add(given)
    truth = expected(own.episodes)
    assert len(truth) > 100
    assert transitions(ours.sample(2500)) == truth
    assert (ours.gaps, ours.repeated_timesteps) == (0, 0)
    for figure in ("get_num_episodes", "get_num_timesteps", "get_added_timesteps", "get_num_episodes_evicted"):
        for which in (None, *SIZES):
            assert getattr(ours, figure)(which) == getattr(own, figure)(which), (figure, which)
    for figure in ("get_num_agent_timesteps", "get_added_agent_timesteps"):
        assert getattr(ours, figure)() == getattr(own, figure)()
    assert set(ours.get_module_ids()) == set(own.get_module_ids())


@KINDS
def test_what_rllib_draws_is_drawn_alike(kind):
    rng = np.random.default_rng(2)
    ours, own = kind(500, n_step=3, gamma=0.9), PEERS[kind](500)
    episodes = [lived(rng, 15)[0] for _ in range(2)]
    ours.add(episodes)
    own.add(episodes)
    beta = {} if own.__class__ is TheirBuffer else {"beta": 0.4}
    its = {
        key: (*value[:3], pytest.approx(value[3], rel=1e-5), *value[4:])
        for key, value in transitions(own.sample(300, n_step=3, gamma=0.9, **beta)).items()
    }
    assert len(its) > 50
    assert its.items() <= transitions(ours.sample(1000, n_step=3, gamma=0.9, **beta)).items()


def test_modules_may_be_drawn_from_by_name():
    buffer = MultiAgentEpisodeReplayBuffer(100, batch_size_B=7)
    buffer.add(lived(np.random.default_rng(3), 9))
    assert {episode.module_id for episode in buffer.sample(modules_to_sample=["flyer"])} == {"flyer"}
    assert len(buffer.sample()) == 14
    assert [buffer.get_sampled_timesteps(which) for which in (None, "flyer", "walkers")] == [14, 14, 7]
    assert buffer.sample(2, to_numpy=True)[0].is_numpy


def test_a_module_without_transitions_is_left_out_until_it_has_some():
    rng = np.random.default_rng(4)
    episode = begun()
    episode.add_env_reset(observations={"ann": rng.random(3, np.float32)}, infos={})
    for _ in range(3):
        episode.add_env_step({"ann": rng.random(3, np.float32)}, {"ann": np.int64(0)}, {"ann": 1.0}, {})
    buffer = MultiAgentEpisodeReplayBuffer(100)
    buffer.add(episode)
    assert {each.module_id for each in buffer.sample(9)} == {"walkers"}
    with pytest.raises(ValueError, match=r"modules_to_sample has 'flyer'.*there are those of 'walkers'"):
        buffer.sample(9, modules_to_sample=["walkers", "flyer"])


def learner_order(sample):
    """The observations of each module's batch, as the connectors of RLlib's learner make it."""
    batch = {}
    for connector in (
        AddObservationsFromEpisodesToBatch(as_learner_connector=True),
        AddColumnsFromEpisodesToTrainBatch(),
        AgentToModuleMapping(
            rl_module_specs=dict.fromkeys(SIZES),
            agent_to_module_mapping_fn=lambda agent, episode, **_: MODULES[agent],
            as_learner_connector=True,
        ),
    ):
        batch = connector(rl_module={}, batch=batch, episodes=sample, shared_data={})
    return {module: [np.asarray(obs).tobytes() for obs in columns["obs"]] for module, columns in batch.items()}


def test_td_errors_in_the_order_of_rllibs_learner_reach_their_transitions():
    rng = np.random.default_rng(5)
    buffer = MultiAgentPrioritizedEpisodeReplayBuffer(200, alpha=1.0, seed=0)
    episodes = [lived(rng, 10, leaves=False)[0] for _ in range(4)]
    buffer.add(episodes)
    error = {value[0]: 1.0 + rng.random() for value in expected(episodes).values()}
    batch = learner_order(buffer.sample(1500))
    for module, observations in batch.items():
        assert len(observations) == 1500
        buffer.update_priorities(np.array([error[obs] for obs in observations]), module)
    for module, replay in buffer.replays.items():
        keys = replay.keys()
        rows = replay.gather(keys)["obs"]
        assert replay.stats().updated == 1500
        truth = [error[row.numpy().tobytes()] for row in rows]
        assert len(truth) == {"walkers": 80, "flyer": 40}[module]
        assert replay.priorities(keys).tolist() == pytest.approx(truth, rel=1e-3)


def test_new_steps_may_come_with_a_priority_for_each_module():
    buffer = MultiAgentPrioritizedEpisodeReplayBuffer(100)
    rng = np.random.default_rng(6)
    buffer.add(lived(rng, 5, leaves=False), weight={"flyer": 7.0})
    buffer.add(lived(rng, 5, leaves=False), weight=3.0)
    held = {which: replay.priorities(replay.keys()).tolist() for which, replay in buffer.replays.items()}
    assert held["flyer"] == pytest.approx([7.0] * 5 + [3.0] * 5, rel=1e-3)
    assert held["walkers"] == pytest.approx([1.0] * 10 + [3.0] * 10, rel=1e-3)


def test_a_lost_part_and_one_that_comes_again_are_counted():
    parts = lived(np.random.default_rng(7), 12, part=3, leaves=False)
    buffer = MultiAgentEpisodeReplayBuffer(100)
    buffer.add(parts[0])
    with pytest.warns(UserWarning, match="does not follow"):
        buffer.add(parts[2])
    with pytest.warns(UserWarning, match="had come before"):
        buffer.add(parts[2])
    assert buffer.gaps == 3
    assert buffer.repeated_timesteps == 9
    assert buffer.get_num_timesteps() == buffer.get_added_timesteps() == 6
    assert buffer.get_num_episodes() == 1
    assert {episode.t_started for episode in buffer.sample(300)} == {0, 1, 2, 6, 7, 8}


def test_what_is_remembered_of_episodes_goes_with_their_rows():
    rng = np.random.default_rng(8)
    buffer = MultiAgentEpisodeReplayBuffer(55)
    for _ in range(20):
        buffer.add(lived(rng, 10, part=4, leaves=False))
    assert (buffer.get_num_episodes("flyer"), buffer.get_num_episodes_evicted("flyer")) == (5, 15)
    assert (buffer.get_num_episodes("walkers"), buffer.get_num_episodes_evicted("walkers")) == (
        6,
        34,
    )  # both of the third-last
    assert (buffer.get_num_episodes(), buffer.get_num_episodes_evicted()) == (5, 15)
    assert (buffer.get_num_timesteps(), buffer.get_added_timesteps()) == (50, 200)
    assert {key[1] for key in transitions(buffer.sample(500))} == set(buffer._env_steps)
    assert sum(len(module._origins) for module in buffer._modules.values()) == 11
    metrics = buffer.get_metrics()
    assert metrics["num_episodes_evicted"].peek() == 15
    assert metrics["num_env_steps_evicted"].peek() == 150
    assert metrics["num_agent_episodes_evicted"]["cat"].peek() == 15
    assert metrics["num_module_steps_evicted"]["walkers"].peek() == 340


@KINDS
def test_metrics_have_the_names_and_counts_of_rllibs(kind):
    rng = np.random.default_rng(9)
    episodes = [lived(rng, 10, leaves=False)[0] for _ in range(3)]
    found = []
    for buffer in (kind(100), PEERS[kind](100)):
        buffer.add(episodes)
        buffer.sample(20, n_step=1, beta=0.4)
        found.append(buffer.get_metrics())
    ours, own = found
    assert ours.keys() == own.keys()
    for name in own:
        if "added" in name or "stored" in name or name in ("num_env_steps_sampled", "num_module_steps_sampled"):
            mine, its = (
                value.peek() if hasattr(value, "peek") else {which: part.peek() for which, part in value.items()}
                for value in (ours[name], own[name])
            )
            assert mine == its, name


def test_a_state_and_a_pickle_bring_rows_names_priorities_and_counts_back():
    rng = np.random.default_rng(10)
    buffer = MultiAgentPrioritizedEpisodeReplayBuffer(60, n_step=2)
    for _ in range(6):
        buffer.add(lived(rng, 10))
    held = transitions(buffer.sample(2000))
    buffer.sample(30)
    buffer.update_priorities(np.linspace(1, 5, 30), "walkers")
    other = MultiAgentPrioritizedEpisodeReplayBuffer(60, n_step=2)
    other.add(lived(rng, 3))
    state = buffer.get_state()
    other.set_state(state)
    copies = other, pickle.loads(pickle.dumps(buffer))
    assert [copied.capacity for copied in copies] == [60, 60]
    for copied in copies:
        for which, replay in buffer.replays.items():
            keys = replay.keys()
            assert (copied.replays[which].keys() == keys).all()
            assert (copied.replays[which].priorities(keys) == replay.priorities(keys)).all()
        for figure in ("num_episodes", "num_episodes_evicted", "num_timesteps", "added_timesteps", "sampled_timesteps"):
            for which in (None, *SIZES):
                assert getattr(copied, f"get_{figure}")(which) == getattr(buffer, f"get_{figure}")(which)
        assert transitions(copied.sample(4000, beta=0.0)) == held
        copied.add(lived(rng, 10))
    assert buffer.get_state()["_env_steps"] == state["_env_steps"]  # what copies add is theirs
    other.set_state(MultiAgentPrioritizedEpisodeReplayBuffer().get_state())
    assert (len(other), other.get_module_ids()) == (0, [])


def test_rows_of_other_writers_have_the_modules_name():
    buffer = MultiAgentEpisodeReplayBuffer(100)
    buffer.add(lived(np.random.default_rng(11), 4, leaves=False))
    writer = buffer.replays["flyer"].writer()
    writer.reset(obs=np.full(2, 9, np.float32), t=0)
    writer.step(obs=np.full(2, 9, np.float32), t=1, action=1, reward=0.5, terminated=True, truncated=False, episode=-1)
    found = transitions(buffer.sample(200))
    assert {key for key, value in found.items() if value[0] == np.full(2, 9, np.float32).tobytes()} == {
        ("flyer", None, "flyer", 0)
    }
    assert len(learner_order(buffer.sample(50))["flyer"]) == 50


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"n_step": 3}, ValueError, r"sample is of n_step=3.*in replay_buffer_config"),
        ({"n_step": (1, 3)}, ValueError, "n_step"),
        ({"batch_length_T": 20}, ValueError, "batch_length_T is 20"),
        ({"include_infos": True}, ValueError, "include_infos"),
        ({"include_extra_model_outputs": True}, ValueError, "include_extra_model_outputs"),
        ({"sample_episodes": False}, ValueError, "sample_episodes=False"),
        ({"replay_mode": "synchronized"}, ValueError, "replay_mode is 'synchronized': expected 'independent'"),
        ({"modules_to_sample": "flyer"}, TypeError, r"such as \['flyer'\]"),
        ({"modules_to_sample": ["swimmer"]}, ValueError, "'swimmer'.*those of 'walkers', 'flyer'"),
        ({"batch_size_B": 3}, ValueError, "give one of them"),
        ({"beta": -1.0}, ValueError, "beta"),
    ],
)
def test_samples_that_the_buffer_does_not_hold_are_refused(asked, error, message):
    buffer = MultiAgentPrioritizedEpisodeReplayBuffer(100)
    buffer.add(lived(np.random.default_rng(0), 5, leaves=False))
    with pytest.raises(error, match=message):
        buffer.sample(4, **asked)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (([{"obs": 1}],), TypeError, "expected a MultiAgentEpisode"),
        ((SingleAgentEpisode(),), TypeError, "SingleAgentEpisode: expected a MultiAgentEpisode"),
        ((7,), TypeError, "int: expected a MultiAgentEpisode"),
        (([], -1.0), ValueError, "weight is -1.0"),
        (([], {"flyer": float("nan")}), ValueError, "weight is nan"),
        (([], [1.0]), TypeError, "weight is"),
    ],
)
def test_what_is_no_episode_and_no_weight_is_refused(given, error, message):
    buffer = MultiAgentEpisodeReplayBuffer(100)
    episodes, *rest = given
    good = lived(np.random.default_rng(0), 5)
    with pytest.raises(error, match=message):
        buffer.add([*good, *episodes] if isinstance(episodes, list) else episodes, *rest)
    assert (buffer.get_added_timesteps(), buffer.replays) == (0, {})


def test_an_empty_buffer_and_td_errors_of_no_sample_are_refused():
    buffer = MultiAgentPrioritizedEpisodeReplayBuffer(100, n_step=3)
    with pytest.raises(ValueError, match="add episodes first"):
        buffer.sample(4)
    buffer.add(lived(np.random.default_rng(0), 5, leaves=False))
    with pytest.raises(ValueError, match=r"sample\(\) comes before each update"):
        buffer.update_priorities(np.ones(4), "flyer")
    buffer.sample(4)
    with pytest.raises(ValueError, match=r"module_id is 'swimmer'.*'walkers', 'flyer'"):
        buffer.update_priorities(np.ones(4), "swimmer")
    for bad in (np.ones(5), np.array([1, 1, 1, np.nan])):
        with pytest.raises(ValueError, match=r"td|TD"):
            buffer.update_priorities(bad, "flyer")
    for wrong in ({"capacity": 1}, {"n_step": (1, 3)}, {"seed": -1}, {"batch_size_B": 0}, {"alpha": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            MultiAgentPrioritizedEpisodeReplayBuffer(**wrong)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rllibs_dqn_of_several_agents_learns_and_feeds_its_td_errors_back(ray):
    from ray.rllib.algorithms.dqn import DQNConfig
    from ray.rllib.env.multi_agent_env import make_multi_agent

    config = (
        DQNConfig()
        .environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 3})
        .env_runners(num_env_runners=0)
        .multi_agent(
            policies={"shared", "own"},
            policy_mapping_fn=lambda agent, episode, **_: "own" if agent == 2 else "shared",
        )
        .training(
            lr=1e-3,
            n_step=3,
            gamma=0.99,
            train_batch_size_per_learner=32,
            training_intensity=None,
            num_steps_sampled_before_learning_starts=100,
            replay_buffer_config={
                "type": PATH,
                "capacity": 5_000,
                "alpha": 0.6,
                "beta": 0.4,
                "n_step": 3,
                "gamma": 0.99,
            },
        )
        .reporting(min_sample_timesteps_per_iteration=200, min_time_s_per_iteration=0)
        .debugging(seed=1, log_level="ERROR")
    )
    algorithm = config.build_algo()
    try:
        for _ in range(3):
            result = algorithm.train()
        buffer = algorithm.local_replay_buffer
        assert isinstance(buffer, MultiAgentPrioritizedEpisodeReplayBuffer)
        assert set(buffer.get_module_ids()) == {"shared", "own"}
        assert buffer.gaps == buffer.repeated_timesteps == 0
        assert {"shared", "own"} <= result["learners"].keys()
        assert result["replay_buffer"]["num_module_steps_sampled"].keys() == {"shared", "own"}
        steps = {which: buffer.get_added_timesteps(which) for which in ("shared", "own")}
        assert steps["shared"] > steps["own"] > 100
        for replay in buffer.replays.values():
            stats = replay.stats()
            assert stats.updated == stats.sampled > 32 * 100
            assert len(set(replay.priorities(replay.keys()).tolist())) > 100
    finally:
        algorithm.stop()

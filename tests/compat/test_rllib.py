"""`compat.rllib`: episode buffers beside RLlib's own, and its DQN with them."""

import os
import pickle
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from paths import import_path

pytest.importorskip("tree", reason="RLlib needs dm-tree")
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers import EpisodeReplayBuffer as TheirBuffer
from ray.rllib.utils.replay_buffers import PrioritizedEpisodeReplayBuffer as TheirPrioritizedBuffer

from torchreplay.compat.rllib import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer, module_replay

OBS = gymnasium.spaces.Box(-1, 1, (3,))
ACT = gymnasium.spaces.Discrete(4)
PATH = "torchreplay.compat.rllib.PrioritizedEpisodeReplayBuffer"


def lived(rng, length, terminated=True, observation=lambda rng: rng.random(3, np.float32), spaces=(OBS, ACT)):
    """An episode of random steps."""
    episode = SingleAgentEpisode(observation_space=spaces[0], action_space=spaces[1])
    episode.add_env_reset(observation(rng))
    for i in range(length):
        last = i == length - 1
        ends = {"terminated": last and terminated, "truncated": last and not terminated}
        episode.add_env_step(observation(rng), np.int64(rng.integers(4)), float(rng.random()), {}, **ends)
    return episode


def parts(rng, length, part):
    """An episode in parts, as an `EnvRunner` hands them over."""
    whole = lived(rng, length)
    return whole, [whole[i : min(i + part, length)] for i in range(0, length, part)]


def transitions(sample):
    """What a sample has, by the action's observation."""
    found = {}
    for episode in sample:
        assert len(episode) == 1
        first, following = episode.get_observations()
        found[np.asarray(first).tobytes()] = (
            np.asarray(following).tobytes(),
            int(episode.get_actions(0)),
            pytest.approx(episode.get_rewards(0), rel=1e-5),
            (episode.is_terminated, episode.is_truncated),
            episode.t_started,
            episode.get_extra_model_outputs("n_step", 0),
        )
    return found


def expected(episodes, n_step, gamma):
    """The n-step transitions of episodes, by their definition (Sutton 1988)."""
    found = {}
    for episode in episodes:
        obs, rewards = episode.get_observations(), episode.get_rewards()
        for t in range(len(episode)):
            m = min(n_step, len(episode) - t)
            last = t + m == len(episode)
            found[obs[t].tobytes()] = (
                obs[t + m].tobytes(),
                int(episode.get_actions(t)),
                sum(gamma**k * rewards[t + k] for k in range(m)),
                (last and episode.is_terminated, last and episode.is_truncated),
                t,
                m,
            )
    return found


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("kind", [EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer])
def test_transitions_are_those_of_the_episodes(kind, n_step):
    rng = np.random.default_rng(0)
    episodes = [lived(rng, length, terminated=length % 2 == 0) for length in (1, 2, 7, 20)]
    buffer = kind(100, n_step=n_step, gamma=0.9, seed=0)
    buffer.add(episodes[:2])
    buffer.add([episode.to_numpy() for episode in episodes[2:]])
    assert len(buffer) == buffer.get_num_timesteps() == 30
    assert buffer.get_num_episodes() == 4
    found = transitions(buffer.sample(1000, n_step=n_step, gamma=0.9, beta=0.4, sample_episodes=True))
    assert found == expected(episodes, n_step, 0.9)


@pytest.mark.parametrize("n_step", [1, 3])
def test_what_rllib_draws_is_drawn_alike(n_step):
    rng = np.random.default_rng(1)
    ours, own = PrioritizedEpisodeReplayBuffer(200, n_step=n_step, gamma=0.9), TheirPrioritizedBuffer(200)
    _, pieces = parts(rng, 30, 4)
    for episode in (lived(rng, 12), *pieces):
        for buffer in (ours, own):
            buffer.add(episode)
    its = transitions(own.sample(800, n_step=n_step, gamma=0.9))  # one is missing in a run of a million
    found = transitions(ours.sample(2000))
    assert its.items() <= found.items()
    assert len(found) == 42
    assert len(its) == 42 - 2 * (n_step - 1)  # RLlib leaves out the last steps of an episode


@pytest.mark.parametrize("part", [1, 4, 7])
def test_parts_of_many_episodes_go_on_where_they_ended(part):
    rng = np.random.default_rng(2)
    streams = [parts(rng, 20 + i, part) for i in range(5)]
    buffer = EpisodeReplayBuffer(300, n_step=2, gamma=0.9, seed=0)
    for i in range(max(len(pieces) for _, pieces in streams)):
        buffer.add([pieces[i] for _, pieces in streams if i < len(pieces)])
    assert buffer.get_num_episodes() == 5
    assert transitions(buffer.sample(3000)) == expected([whole for whole, _ in streams], 2, 0.9)


def pairs(episode, first=0, stop=None):
    """The transitions of an episode's steps, as observation, time, action and next observation."""
    obs, actions = episode.get_observations(), episode.get_actions()
    return {
        (obs[t].tobytes(), episode.t_started + t, int(actions[t]), obs[t + 1].tobytes())
        for t in range(first, len(episode) if stop is None else stop)
    }


def drawn_pairs(buffer, n=2000, **arguments):
    return set().union(*(pairs(episode.to_numpy()) for episode in buffer.sample(n, n_step=1, **arguments)))


def refuses(buffer, part):
    try:
        buffer.add(part)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("kind", [EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer])
def test_no_transition_spans_a_lost_part(kind):
    whole = lived(np.random.default_rng(20), 12)
    buffer, own = kind(100), (TheirBuffer if kind is EpisodeReplayBuffer else TheirPrioritizedBuffer)(100)
    own.add(whole[0:3])
    assert refuses(own, whole[6:9])
    buffer.add(whole[0:3])
    with pytest.warns(UserWarning, match="does not follow.*sample_timeout_s"):
        buffer.add(whole[6:9])
    buffer.add(whole[9:12])
    assert drawn_pairs(buffer) == pairs(whole, 0, 3) | pairs(whole, 6)
    assert (buffer.gaps, buffer.repeated_timesteps, buffer.get_num_episodes()) == (1, 0, 1)
    ends = {e.t_started: (e.is_terminated, e.is_truncated) for e in buffer.sample(500)}
    assert (ends[2], ends[11]) == ((False, True), (True, False))


def test_parts_that_come_again_are_not_written_again():
    whole = lived(np.random.default_rng(21), 12)
    buffer, own = EpisodeReplayBuffer(100), TheirBuffer(100)
    for part in (whole[0:3], whole[3:6]):
        buffer.add(part)
        own.add(part)
    assert refuses(own, whole[3:6])
    with pytest.warns(UserWarning, match=r"had come before \(3 of 3 in this part\)"):
        buffer.add(whole[3:6])
    buffer.add([whole[0:3], whole[4:8], whole[8:12]])  # one before the last, and one that goes further
    buffer.add(whole[8:12])  # of an episode that has ended
    assert drawn_pairs(buffer) == pairs(whole)
    assert buffer.get_num_timesteps() == buffer.get_added_timesteps() == 12
    assert buffer.replay.next_key == 13
    assert (buffer.gaps, buffer.repeated_timesteps, buffer.get_num_episodes()) == (0, 12, 1)


def test_parts_of_one_id_with_another_observation_at_the_joint_are_not_joined():
    rng = np.random.default_rng(22)
    whole, other = lived(rng, 6), lived(rng, 6)
    other.id_ = whole.id_
    buffer, own = EpisodeReplayBuffer(100), TheirBuffer(100)
    own.add(whole[0:3])
    assert refuses(own, other[3:6])
    buffer.add(whole[0:3])
    with pytest.warns(UserWarning, match="does not follow"):
        buffer.add(other[3:6])
    assert drawn_pairs(buffer) == pairs(whole, 0, 3) | pairs(other, 3)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore:.*does not follow", "ignore:.*had come before")
def test_parts_in_any_order_make_no_transition_that_no_episode_had(seed):
    rng = np.random.default_rng(100 + seed)
    episodes = [lived(rng, int(rng.integers(5, 30)), terminated=bool(rng.integers(2))) for _ in range(4)]
    buffers = {n: EpisodeReplayBuffer(2000, n_step=n, gamma=0.9, seed=seed) for n in (1, 3)}
    own, follows, seen = TheirBuffer(2000), True, set()
    cursors = [0] * len(episodes)
    while any(cursor < len(episode) for cursor, episode in zip(cursors, episodes, strict=True)):
        k = int(rng.integers(len(episodes)))
        whole = episodes[k]
        start = min(cursors[k], len(whole) - 1)
        if seed and rng.random() < 0.4:  # lost, repeated, overlapping or late; seed 0: as RLlib wants them
            start = int(rng.integers(len(whole)))
        elif cursors[k] == len(whole):
            continue
        stop = min(start + int(rng.integers(1, 6)), len(whole))
        cursors[k] = max(cursors[k], stop)
        part = whole[start:stop]
        for buffer in buffers.values():
            buffer.add(part if rng.integers(2) else part.to_numpy())
        follows = follows and not refuses(own, part)
        seen |= pairs(whole, start, stop)
    assert drawn_pairs(buffers[1], 4000) == seen
    assert buffers[1].get_added_timesteps() == len(seen)
    assert follows == (seed == 0)
    if follows:
        assert {p for e in own.sample(4000, n_step=1, sample_episodes=True) for p in pairs(e.to_numpy())} == seen
    true = expected(episodes, 1, 0.9)
    chains = [(e.get_observations(), e.get_rewards()) for e in episodes]
    place = {obs[t].tobytes(): (obs, rewards, t) for obs, rewards in chains for t in range(len(rewards))}
    for first, (following, action, reward, _, t, m) in transitions(buffers[3].sample(4000)).items():
        obs, rewards, at = place[first]
        assert (at, action, obs[at + m].tobytes()) == (t, true[first][1], following)
        assert reward == sum(0.9**k * rewards[at + k] for k in range(m))


def test_lookback_of_a_part_is_not_written():
    rng = np.random.default_rng(23)
    whole = lived(rng, 12)
    first = whole[0:4]
    buffer, own = EpisodeReplayBuffer(100), TheirBuffer(100)
    part = first.cut(len_lookback_buffer=3)
    for t in range(4, 12):
        ends = {"terminated": t == 11}
        part.add_env_step(whole.get_observations(t + 1), whole.get_actions(t), whole.get_rewards(t), {}, **ends)
    for each in (first, part.to_numpy()):
        buffer.add(each)
        own.add(each)
    assert drawn_pairs(buffer) == pairs(whole)
    assert {p for e in own.sample(2000, n_step=1, sample_episodes=True) for p in pairs(e.to_numpy())} == pairs(whole)
    assert (buffer.gaps, buffer.repeated_timesteps) == (0, 0)


def test_a_value_that_does_not_fit_ends_the_stream_and_the_part_may_come_again():
    whole = lived(np.random.default_rng(24), 9)
    buffer = EpisodeReplayBuffer(100)
    buffer.add(whole[0:3])
    bad = whole[3:6]
    bad.observations[2] = np.zeros(5, np.float32)
    with pytest.raises(ValueError, match="obs"):
        buffer.add(bad)
    with pytest.warns(UserWarning, match=r"had come before \(1 of 3 in this part\)"):
        buffer.add([whole[3:6], whole[6:9]])
    assert drawn_pairs(buffer) == pairs(whole)
    begins_badly = lived(np.random.default_rng(25), 3, observation=lambda rng: rng.random(5, np.float32))
    for _ in range(5):
        with pytest.raises(ValueError, match="obs"):
            buffer.add(begins_badly)
    assert len(buffer._module._idle) <= 2  # their writer is used again


def test_what_is_remembered_of_episodes_goes_with_their_rows():
    rng = np.random.default_rng(26)
    buffer = EpisodeReplayBuffer(55)
    for _ in range(50):
        whole, pieces = parts(rng, 10, 3)
        buffer.add(pieces)
    assert buffer.get_num_episodes() == len(buffer._module._held) == 5
    assert not buffer._module._running
    other = EpisodeReplayBuffer(55)
    other.set_state(buffer.get_state())
    with pytest.warns(UserWarning, match="had come before"):
        other.add(pieces)
    assert other.get_num_timesteps() == 50
    assert len(whole) == other.repeated_timesteps == 10


def test_an_episode_under_way_waits_for_its_window():
    rng = np.random.default_rng(3)
    _, pieces = parts(rng, 10, 5)
    buffer = EpisodeReplayBuffer(300, n_step=3)
    buffer.add(pieces[0])
    assert buffer.get_num_timesteps() == 3
    buffer.add(pieces[1])
    assert buffer.get_num_timesteps() == 10


def test_dicts_and_tuples_come_back_as_they_were():
    rng = np.random.default_rng(4)
    spaces = gymnasium.spaces.Dict(near=OBS, far=gymnasium.spaces.Tuple((OBS, gymnasium.spaces.Discrete(3))))

    def observation(rng):
        return {"near": rng.random(3, np.float32), "far": (rng.random(3, np.float32), np.int64(rng.integers(3)))}

    episodes = [lived(rng, 6, True, observation, (spaces, ACT)) for _ in range(2)]
    buffer = EpisodeReplayBuffer(100)
    buffer.add([episodes[0], episodes[1].to_numpy()])
    seen = {obs["near"].tobytes(): obs for e in (episodes[0],) for obs in e.get_observations()}
    matched = 0
    for episode in buffer.sample(200):
        first = episode.get_observations(0)
        assert isinstance(first["far"], tuple)
        if first["near"].tobytes() in seen:
            matched += 1
            assert (first["far"][0] == seen[first["near"].tobytes()]["far"][0]).all()
            assert first["far"][1] == seen[first["near"].tobytes()]["far"][1]
    assert matched > 0
    assert buffer.sample(3, to_numpy=True)[0].is_numpy


def test_old_episodes_make_room():
    rng = np.random.default_rng(5)
    buffer = EpisodeReplayBuffer(55)
    for _ in range(20):
        buffer.add(lived(rng, 10))
    assert buffer.get_num_episodes() == 5
    assert buffer.get_num_episodes_evicted() == 15
    assert buffer.get_num_timesteps() == 50
    assert buffer.get_added_timesteps() == 200
    buffer.sample(7)
    assert buffer.get_sampled_timesteps() == 7
    metrics = buffer.get_metrics()
    assert metrics["num_episodes_evicted"].peek() == 15
    assert metrics["num_env_steps_evicted"].peek() == 20 * 11 - 55  # rows: an episode has one more than steps


def test_metrics_have_the_names_and_counts_of_rllibs():
    rng = np.random.default_rng(6)
    episodes = [lived(rng, 10) for _ in range(3)]
    found = []
    for buffer in (EpisodeReplayBuffer(100), TheirBuffer(100)):
        buffer.add(episodes)
        buffer.sample(20, n_step=1, sample_episodes=True)
        found.append(buffer.get_metrics())
    ours, own = found
    assert ours.keys() == own.keys()
    counted = [name for name in own if "added" in name or "stored" in name or "evicted" in name or name.endswith("led")]
    for name in counted:
        mine, its = (r[name] for r in found)
        peeked = [v.peek() if hasattr(v, "peek") else {k: w.peek() for k, w in v.items()} for v in (mine, its)]
        assert peeked[0] == peeked[1], name


def test_too_many_episodes_under_way_end_the_oldest(monkeypatch):
    monkeypatch.setattr(module_replay, "MAX_RUNNING", 3)
    rng = np.random.default_rng(7)
    buffer = EpisodeReplayBuffer(300, n_step=5)
    pieces = [parts(rng, 20, 4)[1] for _ in range(4)]
    for first, *_ in pieces:
        buffer.add(first)
    assert buffer.get_num_timesteps() == 4  # the first one's, cut short; the others wait for five steps
    buffer.add(pieces[0][1])
    assert any(episode.t_started == 2 and episode.is_truncated for episode in buffer.sample(100))


# Priorities


def test_td_errors_reach_the_transitions_of_the_last_sample():
    rng = np.random.default_rng(8)
    buffer = PrioritizedEpisodeReplayBuffer(100, alpha=1.0, beta=1.0, seed=0)
    buffer.add(lived(rng, 20))
    sample = buffer.sample(400, beta=0.0)
    assert {episode.get_extra_model_outputs("weights", 0) for episode in sample} == {1.0}
    buffer.update_priorities(np.array([episode.t_started + 1.0 for episode in sample]))
    drawn = buffer.sample(8_000)
    counts = np.bincount([episode.t_started for episode in drawn], minlength=20)
    mean = 8_000 * np.arange(1, 21) / 210
    assert ((counts - mean) ** 2 / mean).sum() < 43.8  # chi-square with 19 degrees: 1 in 1,000 at most
    for episode in drawn[:50]:
        assert episode.get_extra_model_outputs("weights", 0) == pytest.approx(1 / (episode.t_started + 1), rel=1e-3)


def test_new_steps_may_come_with_a_priority():
    rng = np.random.default_rng(9)
    buffer = PrioritizedEpisodeReplayBuffer(100)
    buffer.add(lived(rng, 5), weight=7.0)
    assert buffer.replay.priorities(buffer.replay.keys()).tolist() == pytest.approx([7] * 5, rel=1e-3)


def test_td_errors_without_a_sample_or_that_do_not_fit_are_refused():
    buffer = PrioritizedEpisodeReplayBuffer(100)
    buffer.add(lived(np.random.default_rng(0), 5))
    with pytest.raises(ValueError, match=r"sample\(\) comes before each update"):
        buffer.update_priorities(np.ones(3))
    buffer.sample(3)
    for bad in (np.ones(4), np.array([1, np.nan, 1])):
        with pytest.raises(ValueError, match=r"td|TD"):
            buffer.update_priorities(bad)
    buffer.update_priorities(np.ones(3))
    with pytest.raises(ValueError, match=r"sample\(\) comes before each update"):
        buffer.update_priorities(np.ones(3))


# State

READS_IT = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    buffer = pickle.load(file)
sample = buffer.sample(500)
print(len(buffer), buffer.get_num_episodes(), len({episode.get_observations(0).tobytes() for episode in sample}))
"""


@pytest.mark.slow
def test_a_pickle_is_read_where_the_memory_is_gone(tmp_path):
    buffer = PrioritizedEpisodeReplayBuffer(100)
    buffer.add([lived(np.random.default_rng(0), 12), lived(np.random.default_rng(1), 8)])
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(buffer))
    buffer.replay.close()
    command = [sys.executable, "-c", READS_IT, str(tmp_path / "buffer.pkl")]
    env = os.environ | {"PYTHONPATH": import_path()}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    assert printed.split() == ["20", "2", "20"]


def test_a_pickle_keeps_the_capacity_and_the_counts():
    buffer = EpisodeReplayBuffer(55, batch_size_B=5)
    buffer.add([lived(np.random.default_rng(i), 10) for i in range(9)])
    buffer.sample()
    copied = pickle.loads(pickle.dumps(buffer))
    assert (copied.capacity, copied.replay.capacity, copied.batch_size_B) == (55, 55, 5)
    assert (copied.get_added_timesteps(), copied.get_sampled_timesteps(), copied.get_num_episodes()) == (90, 5, 5)


def test_a_state_brings_rows_priorities_and_counts_back():
    rng = np.random.default_rng(10)
    buffer = PrioritizedEpisodeReplayBuffer(60, n_step=2)
    for _ in range(9):
        buffer.add(lived(rng, 10))
    buffer.sample(30)
    buffer.update_priorities(np.linspace(1, 5, 30))
    other = PrioritizedEpisodeReplayBuffer(60, n_step=2)
    other.add(lived(rng, 3))
    other.set_state(buffer.get_state())
    keys = buffer.replay.keys()
    assert (other.replay.keys() == keys).all()
    assert (other.replay.priorities(keys) == buffer.replay.priorities(keys)).all()
    for figure in ("get_num_episodes", "get_num_episodes_evicted", "get_added_timesteps", "get_sampled_timesteps"):
        assert getattr(other, figure)() == getattr(buffer, figure)()
    other.add(lived(rng, 10))
    assert len(transitions(other.sample(1000))) == other.get_num_timesteps()
    empty = EpisodeReplayBuffer()
    other.set_state(empty.get_state())
    assert len(other) == 0


# What is refused


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"n_step": 3}, r"sample is of n_step=3.*in replay_buffer_config"),
        ({"n_step": (1, 3)}, "n_step"),
        ({"batch_length_T": 20}, "batch_length_T is 20"),
        ({"include_infos": True}, "include_infos"),
        ({"include_extra_model_outputs": True}, "include_extra_model_outputs"),
        ({"sample_episodes": False}, "sample_episodes=False"),
        ({"lookback": 1}, "lookback"),
        ({"min_batch_length_T": 5}, "min_batch_length_T"),
        ({"batch_size_B": 3}, "give one of them"),
        ({"beta": -1.0}, "beta"),
    ],
)
def test_samples_that_the_buffer_does_not_hold_are_refused(asked, message):
    buffer = PrioritizedEpisodeReplayBuffer(100)
    buffer.add(lived(np.random.default_rng(0), 5))
    with pytest.raises(ValueError, match=message):
        buffer.sample(4, **asked)


def test_another_gamma_is_refused_where_it_matters():
    buffer = EpisodeReplayBuffer(100, n_step=2, gamma=0.9)
    buffer.add(lived(np.random.default_rng(0), 5))
    with pytest.raises(ValueError, match=r"gamma=0\.99, and the buffer of n_step=2, gamma=0\.9"):
        buffer.sample(4, n_step=2, gamma=0.99)
    one = EpisodeReplayBuffer(100, gamma=0.9)
    one.add(lived(np.random.default_rng(0), 5))
    assert len(one.sample(4, n_step=1, gamma=0.99)) == 4


def test_an_empty_buffer_and_what_is_no_episode_are_refused():
    buffer = EpisodeReplayBuffer(100, n_step=3)
    with pytest.raises(ValueError, match="add episodes first"):
        buffer.sample(4)
    _, pieces = parts(np.random.default_rng(0), 10, 2)
    buffer.add(pieces[0])
    with pytest.raises(ValueError, match="nothing to sample yet"):
        buffer.sample(4)
    with pytest.raises(TypeError, match="expected a SingleAgentEpisode"):
        buffer.add([{"obs": 1}])
    with pytest.raises(ValueError, match="obs"):
        buffer.add(lived(np.random.default_rng(0), 3, observation=lambda rng: rng.random(5, np.float32)))
    with pytest.raises(ValueError, match="n_step"):
        EpisodeReplayBuffer(100, n_step=(1, 3))


# The whole


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rllibs_dqn_learns_cartpole_and_feeds_its_td_errors_back(ray):
    from ray.rllib.algorithms.dqn import DQNConfig

    config = (
        DQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
        .training(
            lr=1e-3,
            gamma=0.99,
            n_step=3,
            train_batch_size_per_learner=64,
            training_intensity=None,
            num_steps_sampled_before_learning_starts=500,
            target_network_update_freq=200,
            replay_buffer_config={
                "type": PATH,
                "capacity": 20_000,
                "alpha": 0.6,
                "beta": 0.4,
                "n_step": 3,
                "gamma": 0.99,
            },
        )
        .debugging(seed=1, log_level="ERROR")
    )
    algorithm = config.build_algo()
    try:
        buffer = algorithm.local_replay_buffer
        assert isinstance(buffer, PrioritizedEpisodeReplayBuffer)
        best = 0.0
        for _ in range(12):
            result = algorithm.train()
            best = max(best, result["env_runners"].get("episode_return_mean", 0))
            if best > 60:
                break
        assert best > 60  # a random policy gets about 22
        stats = buffer.replay.stats()
        assert stats.updated == stats.sampled > 64 * 200
        assert len(set(buffer.replay.priorities(buffer.replay.keys()).tolist())) > 100
    finally:
        algorithm.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rllibs_sac_learns_from_continuous_actions(ray):
    from ray.rllib.algorithms.sac import SACConfig

    config = (
        SACConfig()
        .environment("Pendulum-v1")
        .env_runners(num_env_runners=0)
        .training(
            train_batch_size_per_learner=32,
            num_steps_sampled_before_learning_starts=100,
        )
        .reporting(min_sample_timesteps_per_iteration=200, min_time_s_per_iteration=0)
        .debugging(seed=1, log_level="ERROR")
    )
    algorithm = config.build_algo()
    algorithm.local_replay_buffer = PrioritizedEpisodeReplayBuffer(5_000, alpha=0.6)
    try:
        for _ in range(2):
            algorithm.train()
        stats = algorithm.local_replay_buffer.replay.stats()
        assert stats.sampled >= 32 * 200
        assert stats.updated == stats.sampled
        rows = algorithm.local_replay_buffer.replay.sample(64)
        assert rows["action"].shape == (64, 1)
        assert len(rows["action"].unique()) > 20
    finally:
        algorithm.stop()

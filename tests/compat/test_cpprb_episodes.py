"""Transitions that share memory, n-step transitions, hindsight and reverse order: as cpprb has them, or better."""

import cpprb
import numpy as np
import pytest

from torchreplay.compat import cpprb as adapter

BOTH = (adapter, cpprb)


def same(ours, theirs):
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        assert ours[name].dtype == values.dtype, name
        np.testing.assert_array_equal(ours[name], values, err_msg=name)


def sizes(buffer):
    return buffer.get_stored_size(), buffer.get_next_index(), buffer.get_current_episode_len()


def episodes(lengths, value):
    """Yields the steps of episodes of these lengths; `value(i)` is observation i."""
    i = 0
    for length in lengths:
        yield [{"obs": value(k), "act": k, "rew": k, "next_obs": value(k + 1), "done": 0} for k in range(i, i + length)]
        i += length + 20


def play(buffer, lengths, value):
    for steps in episodes(lengths, value):
        for one in steps:
            buffer.add(**one)
        buffer.on_episode_end()


def flat(i):
    return np.arange(i, i + 3)


def stacked(i):
    return np.stack([np.full((2, 2), i + k) for k in range(4)], axis=-1)


FLAT = {"obs": {"shape": 3}, "act": {"dtype": np.int32}, "rew": {}, "done": {}}
STACKED = {"obs": {"shape": (2, 2, 4), "dtype": np.uint8}, "act": {"dtype": np.int32}, "rew": {}, "done": {}}
SHARED = {
    "next_of": (FLAT, {"next_of": "obs"}, flat),
    "stack": (STACKED, {"stack_compress": "obs"}, stacked),
    "stack, next_of": (STACKED, {"stack_compress": "obs", "next_of": "obs"}, stacked),
    "two stacks": ({**STACKED, "next_obs": STACKED["obs"]}, {"stack_compress": ["obs", "next_obs"]}, stacked),
    "one of two stacks": ({**STACKED, "next_obs": STACKED["obs"]}, {"stack_compress": ["next_obs"]}, stacked),
}


LENGTHS = [[5], [4, 3], [1, 1, 1, 2], [8], [9, 7], [3, 3, 3, 3, 3], [30], [10, 1, 4]]
WRONG_THERE = {"stack, next_of": LENGTHS[5:]}
"""Where cpprb mixes frames of two episodes."""


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", SHARED)
def test_shared_memory_holds_the_newest_transitions_as_they_were_added(kind, lengths):
    env, options, value = SHARED[kind]
    buffers = [library.ReplayBuffer(8, env, **options) for library in BOTH]
    for buffer in buffers:
        play(buffer, lengths, value)
    assert sizes(buffers[0]) == sizes(buffers[1])
    held = buffers[0].get_all_transitions()
    slots = {}
    for i, one in enumerate(one for steps in episodes(lengths, value) for one in steps):
        slots[i % 8] = one
    for name, values in held.items():
        np.testing.assert_array_equal(values, np.reshape([slots[i][name] for i in sorted(slots)], values.shape))
    if lengths not in WRONG_THERE.get(kind, []):
        same(held, buffers[1].get_all_transitions())
    picked = buffers[0]._encode_sample([0, 2, 2])
    same(picked, {name: values[[0, 2, 2]] for name, values in held.items()})


@pytest.mark.parametrize("kind", ["next_of", "stack", "stack, next_of"])
def test_several_transitions_at_once_are_as_one_by_one(kind):
    env, options, value = SHARED[kind]
    single, several = (adapter.ReplayBuffer(16, env, **options) for _ in range(2))
    play(single, [6], value)
    numbers = np.arange(6)
    obs, next_obs = (np.stack([value(i + k) for i in numbers]) for k in (0, 1))
    assert several.add(obs=obs, act=numbers, rew=numbers, next_obs=next_obs, done=np.zeros(6)) == 0
    same(*(buffer.get_all_transitions() for buffer in (several, single)))


def test_a_forgotten_end_of_an_episode_is_seen():
    ours, theirs = (library.ReplayBuffer(8, FLAT, next_of="obs") for library in BOTH)
    for buffer in (ours, theirs):
        for i in (1, 2, 100, 101):
            buffer.add(obs=flat(i), act=i, rew=i, next_obs=flat(i + 1), done=0)
    assert ours.get_all_transitions()["next_obs"][:, 0].tolist() == [2, 3, 101, 102]
    assert theirs.get_all_transitions()["next_obs"][:, 0].tolist() == [2, 100, 101, 102]  # what comes of it there


@pytest.mark.parametrize("kind", ["next_of", "stack, next_of"])
def test_priorities_go_with_the_transitions_that_share_memory(kind):
    env, options, value = SHARED[kind]
    buffer = adapter.PrioritizedReplayBuffer(64, env, eps=1e-30, **options)
    for i in range(12):
        buffer.add(obs=value(i), act=i, rew=i, next_obs=value(i + 1), done=0, priorities=float(i == 7))
    batch = buffer.sample(16)
    assert (batch["act"] == 7).all()
    assert (batch["indexes"] == 7).all()
    buffer.update_priorities([7, 3], [0.0, 1.0])
    batch = buffer.sample(16)
    assert (batch["act"] == 3).all()
    np.testing.assert_array_equal(batch["next_obs"][0], value(4))
    with pytest.raises(ValueError, match="index 12 is out of range"):
        buffer.update_priorities([12], [1.0])


def test_frames_are_stored_once():
    env = {"obs": {"shape": (84, 84, 4), "dtype": np.uint8}, "act": {}, "rew": {}, "done": {}}
    plain = adapter.ReplayBuffer(1000, {**env, "next_obs": env["obs"]})
    # Up to 4,096 transitions fit in episodes of one step, which takes five rows for each.
    small = adapter.ReplayBuffer(1000, env, next_of="obs", stack_compress="obs")
    large = adapter.ReplayBuffer(100_000, env, next_of="obs", stack_compress="obs")
    assert small.replay.nbytes < 5.2 / 8 * plain.replay.nbytes
    assert large.replay.nbytes / 100_000 < 1.3 * 84 * 84


@pytest.mark.parametrize("kind", ["next_of", "stack_compress"])
def test_a_column_that_is_not_there_is_a_key_error(kind):
    with pytest.raises(KeyError, match="obj"):
        adapter.ReplayBuffer(8, FLAT, **{kind: "obj"})
    buffer = adapter.ReplayBuffer(8, FLAT, next_of="obs")
    with pytest.raises(KeyError, match="next_obs"):
        buffer.add(obs=flat(0), act=0, rew=0, done=0)


# n steps

NSTEP = {"obs": {}, "rew": {}, "gain": {"shape": 2, "dtype": np.float64}, "next_obs": {}, "done": {}}


def nstep_buffers(n, kind="ReplayBuffer", size=64, **more):
    steps = {"size": n, "rew": ["rew", "gain"], "gamma": 0.9, "next": "next_obs"}
    return [getattr(library, kind)(size, NSTEP, Nstep=steps, **more) for library in BOTH]


def step(i, done=0):
    return {"obs": i, "rew": i + 1, "gain": [i, -i], "next_obs": i + 1, "done": done}


def returns(n, lengths, done):
    """Returns what n-step transitions are by definition: obs, reward, next observation, done of the last step."""
    found = []
    first = 0
    for length in lengths:
        for t in range(length):
            last = min(t + n, length) - 1
            reward = sum(0.9**k * (first + t + k + 1) for k in range(last - t + 1))
            found.append((first + t, reward, first + last + 1, float(done and last == length - 1)))
        first += length
    return np.array(found)


@pytest.mark.parametrize("done", [0, 1])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("at_once", [1, 3, 5])
def test_n_step_transitions_are_what_they_are_by_definition(n, done, at_once):
    lengths = [6, 1, 3, 9]
    buffer = nstep_buffers(n)[0]
    i = 0
    for length in lengths:
        steps = [step(i + k, done and k == length - 1) for k in range(length)]
        for start in range(0, length, at_once):
            part = steps[start : start + at_once]
            buffer.add(**{name: np.array([s[name] for s in part]) for name in NSTEP})
        buffer.on_episode_end()
        i += length
    held, expected = buffer.get_all_transitions(), returns(n, lengths, done)
    assert buffer.get_stored_size() == 19
    for column, name in enumerate(["obs", "rew", "next_obs", "done"]):
        np.testing.assert_allclose(held[name][:, 0], expected[:, column], rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(held["gain"][:, 0], -held["gain"][:, 1])
    assert {name: values.shape for name, values in held.items()} == {
        name: (19, 2) if name == "gain" else (19, 1) for name in NSTEP
    }


@pytest.mark.parametrize("n", [2, 3, 5])
def test_where_no_episode_ends_cpprb_agrees(n):
    ours, theirs = nstep_buffers(n, size=32)
    for i in range(50):
        assert ours.add(**step(i)) == theirs.add(**step(i))
        assert ours.get_stored_size() == theirs.get_stored_size()
        assert ours.get_next_index() == theirs.get_next_index()
    held = [buffer.get_all_transitions() for buffer in (ours, theirs)]
    for name in NSTEP:
        np.testing.assert_allclose(held[0][name], held[1][name], rtol=1e-5, err_msg=name)
    assert ours.is_Nstep()
    assert theirs.is_Nstep()


def test_a_truncated_episode_bootstraps_from_its_last_observation_and_cpprb_from_a_constant():
    ours, theirs = nstep_buffers(3)
    for buffer in (ours, theirs):
        for i in range(10, 15):
            buffer.add(**step(i))
        buffer.on_episode_end()
    assert ours.get_all_transitions()["next_obs"].ravel().tolist() == [13, 14, 15, 15, 15]
    assert theirs.get_all_transitions()["next_obs"].ravel().tolist() == [13, 14, 15, 1, 1]


def test_done_says_whether_the_last_step_ended_the_episode_and_cpprb_leaves_that_step_out():
    ours, theirs = nstep_buffers(3)
    for buffer in (ours, theirs):
        for i in range(5):
            buffer.add(**step(i, done=i == 4))
        buffer.on_episode_end()
    assert ours.get_all_transitions()["done"].ravel().tolist() == [0, 0, 1, 1, 1]
    assert theirs.get_all_transitions()["done"].ravel().tolist() == [0, 0, 0, 1, 1]


def test_n_step_transitions_keep_the_priorities_that_they_were_added_with():
    buffer = nstep_buffers(3, "PrioritizedReplayBuffer", eps=1e-30)[0]
    priorities = [0, 0, 0, 5, 0, 0]
    for i, priority in enumerate(priorities):
        buffer.add(**step(i), priorities=float(priority))
    assert (buffer.sample(8)["obs"] == 3).all()
    buffer.on_episode_end()
    assert (buffer.sample(8)["obs"] == 3).all()
    assert buffer.get_max_priority() == 5


def test_next_of_and_n_steps_go_together():
    env = {name: defs for name, defs in NSTEP.items() if name != "next_obs"}
    buffer = adapter.ReplayBuffer(16, env, next_of="obs", Nstep={"size": 2, "rew": "rew", "next": "next_obs"})
    for i in range(4):
        buffer.add(**step(i))
    assert buffer.get_all_transitions()["next_obs"].ravel().tolist() == [2, 3, 4]


@pytest.mark.parametrize("env", [{"rew": {}, "done": {}}, {"done": {}}])
def test_n_steps_take_done_and_nothing_else(env):
    buffer = adapter.ReplayBuffer(16, env, Nstep={"size": 2, **({"rew": "rew"} if "rew" in env else {})})
    for i in range(4):
        buffer.add(**{name: 0 if name == "done" else i for name in env})
    assert buffer.get_stored_size() == 3
    with pytest.raises(KeyError, match="done"):
        adapter.ReplayBuffer(16, {"rew": {}}, Nstep={"size": 2, "rew": "rew"})


def test_clear_forgets_the_steps_under_way():
    for buffer in nstep_buffers(3):
        for i in range(5):
            buffer.add(**step(i))
        buffer.clear()
        assert [buffer.add(**step(i)) for i in range(3)] == [None, None, 0]
        assert buffer.get_all_transitions()["obs"].tolist() == [[0]]


# Reverse order


@pytest.mark.parametrize(("size", "adds", "stride"), [(20, 15, 3), (20, 20, 7), (20, 33, 3), (10, 40, 2), (6, 6, 4)])
def test_reverse_draws_are_those_of_cpprb(size, adds, stride):
    ours, theirs = (library.ReverseReplayBuffer(size, {"a": {}}, stride=stride) for library in BOTH)
    for i in range(adds):
        for buffer in (ours, theirs):
            buffer.add(a=i)
    for i in range(12):
        np.testing.assert_array_equal(ours.sample(4)["a"], theirs.sample(4)["a"], err_msg=str(i))


def test_reverse_draws_of_nothing_are_an_index_error():
    for library in BOTH:
        with pytest.raises(IndexError):
            library.ReverseReplayBuffer(6, {"a": {}}).sample(2)


# Hindsight

HER = {"obs": {}, "act": {}, "next_obs": {}}


def reached(states, actions, goals):
    return -np.linalg.norm(states - goals, axis=1)


def hindsight(library, strategy, **options):
    options = {"size": 200, "env_dict": HER, "max_episode_len": 6, "reward_func": reached, **options}
    return library.HindsightReplayBuffer(strategy=strategy, **options)


def lived(buffer, n, start=0):
    for i in range(start, start + n):
        buffer.add(obs=i, act=0, next_obs=i + 1)
    buffer.on_episode_end(50)


@pytest.mark.parametrize("prioritized", [True, False])
@pytest.mark.parametrize("strategy", ["future", "episode", "random", "final"])
def test_goals_are_those_that_the_strategy_allows(strategy, prioritized):
    ours, theirs = (hindsight(library, strategy, prioritized=prioritized) for library in BOTH)
    for buffer in (ours, theirs):
        assert buffer.get_stored_size() == 0
        lived(buffer, 6)
        lived(buffer, 4, start=20)
    assert ours.get_stored_size() == theirs.get_stored_size() == 10 * (2 if strategy == "final" else 5)
    held = ours.get_all_transitions()
    assert {name: values.shape for name, values in held.items()} == {
        name: values.shape for name, values in theirs.get_all_transitions().items()
    }
    obs, goal = held["obs"].ravel(), held["goal"].ravel()
    own = goal == 50
    assert own.sum() == 10
    np.testing.assert_array_equal(held["rew"][:, 0], reached(held["next_obs"], None, held["goal"]))
    obs, goal = obs[~own], goal[~own]
    if strategy == "final":
        np.testing.assert_array_equal(goal, np.where(obs < 20, 6, 24))
    elif strategy == "future":
        assert ((goal > obs) & (goal <= np.where(obs < 20, 6, 24))).all()
    elif strategy == "episode":
        assert ((goal < 10) == (obs < 20)).all()
    else:
        assert set(goal) <= {*range(1, 7), *range(21, 25)}


def test_goals_have_the_shape_and_come_by_the_function_that_was_given():
    env = {"obs": {"shape": 4}, "act": {}, "next_obs": {"shape": 4}}
    buffer = hindsight(adapter, "final", env_dict=env, goal_shape=(2,), goal_func=lambda s: s[:, :2])
    buffer.reward_func = lambda states, actions, goals: goals.sum(axis=1)
    buffer.add(obs=np.ones(4), act=0, next_obs=[1, 2, 3, 4])
    buffer.on_episode_end([7, 8])
    assert buffer.get_all_transitions()["goal"].tolist() == [[7, 8], [1, 2]]
    assert buffer.get_all_transitions()["rew"].tolist() == [[15], [3]]


def test_an_episode_that_is_too_long_is_refused():
    for library in BOTH:
        buffer = hindsight(library, "future")
        for i in range(6):
            buffer.add(obs=i, act=0, next_obs=i + 1)
        with pytest.raises(ValueError, match=r"(?i)max.*episode"):
            buffer.add(obs=6, act=0, next_obs=7)
    buffer = hindsight(adapter, "future")
    with pytest.raises(ValueError, match="exceed"):  # cpprb keeps the last six
        buffer.add(obs=np.arange(7), act=np.zeros(7), next_obs=np.arange(7))


def test_hindsight_without_priorities_has_none():
    for library in BOTH:
        buffer = hindsight(library, "future", prioritized=False)
        lived(buffer, 3)
        assert set(buffer.sample(4)) == {"obs", "act", "next_obs", "rew", "goal"}
        for call in (buffer.get_max_priority, lambda b=buffer: b.update_priorities([0], [1.0])):
            with pytest.raises(ValueError):
                call()
        with pytest.raises(ValueError):
            hindsight(library, "past")


def test_hindsight_takes_feedback_and_forgets():
    buffer = hindsight(adapter, "future")
    lived(buffer, 3)
    batch = buffer.sample(8, beta=0.5)
    buffer.update_priorities(batch["indexes"], np.full(8, 6.0))
    assert buffer.get_max_priority() == 6.0
    buffer.add(obs=0, act=0, next_obs=0)
    buffer.clear()
    buffer.on_episode_end(1)
    assert (buffer.get_stored_size(), buffer.get_buffer_size()) == (0, 200)


# Large batches


@pytest.mark.parametrize("name", ["LaBERmean", "LaBERlazy", "LaBERmax"])
@pytest.mark.parametrize("priorities", [np.ones(12), np.arange(12.0), np.eye(12)[3]], ids=["equal", "rising", "one"])
def test_laber_gives_the_weights_of_cpprb(name, priorities):
    found = {}
    for library in BOTH:
        laber = getattr(library, name)(3, 4, eps=1e-6)
        large = {"obs": np.arange(24).reshape(12, 2), "rew": np.arange(12)[:, None]}
        for _ in range(100):
            small = laber(priorities=priorities, **large)
            np.testing.assert_array_equal(small["obs"], large["obs"][small["indexes"]])
            np.testing.assert_array_equal(small["rew"], large["rew"][small["indexes"]])
            assert small["weights"].shape == (3,)
            if name != "LaBERmax":
                found.setdefault(library, {}).update(zip(small["indexes"].tolist(), small["weights"], strict=True))
            elif priorities.std() == 0:
                np.testing.assert_array_equal(small["weights"], 1)
    for i in set(found.get(adapter, {})) & set(found.get(cpprb, {})):
        assert found[adapter][i] == pytest.approx(found[cpprb][i], rel=1e-5)


@pytest.mark.parametrize("name", ["LaBERmean", "LaBERlazy", "LaBERmax"])
def test_laber_takes_priorities_alone_and_says_what_it_was_made_of(name):
    found = []
    for library in BOTH:
        laber = getattr(library, name)(2, 3, eps=0)
        small = laber(priorities=[0, 0, 0, 5, 0, 0])
        assert small["indexes"].tolist() == [3, 3]
        assert small["weights"] == pytest.approx({"mean": 1 / 6, "lazy": 1, "max": 1}[name.removeprefix("LaBER")])
        found.append((laber.batch_size, laber.eps, laber.idx.tolist(), sorted(small)))
    assert found[0] == found[1]


@pytest.mark.parametrize("arguments", [{"batch_size": 0}, {"batch_size": 3, "m": 0}, {"batch_size": 3, "eps": -1.0}])
def test_laber_refuses_what_cpprb_refuses(arguments):
    for library in BOTH:
        with pytest.raises(ValueError):
            library.LaBERmean(**arguments)


@pytest.mark.parametrize("bad", [np.ones(11), np.full(12, np.nan), -np.ones(12)])
def test_laber_refuses_priorities_that_do_not_fit(bad):
    with pytest.raises(ValueError, match="priorit"):
        adapter.LaBERmean(3)(priorities=bad, obs=np.zeros(12))


# Episodes one by one


def test_episodes_can_be_taken_out_one_by_one():
    ours, theirs = (library.SelectiveReplayBuffer(4, 2, 1, Nepisodes=3) for library in BOTH)

    def agree():
        for figure in ("get_stored_size", "get_next_index", "get_stored_episode_size", "get_buffer_size"):
            assert getattr(ours, figure)() == getattr(theirs, figure)(), figure
        for i in range(5):
            one, other = ours.get_episode(i), theirs.get_episode(i)
            assert all(len(one[name]) == len(other[name]) for name in other)
            assert all((one[name] == other[name]).all() for name in other)

    def added(i, done):
        assert len({buffer.add([i, i], [i], [i], [i + 1, i + 1], [done]) for buffer in (ours, theirs)}) == 1
        agree()

    for i in range(7):
        added(i, i in (2, 4))
    assert ours.delete_episode(0) == theirs.delete_episode(0) == 3
    agree()
    for i in range(7, 12):
        added(i, i == 8)
    assert ours.delete_episode(7) == theirs.delete_episode(7) == 0
    assert ours.delete_episode(2) == theirs.delete_episode(2)
    agree()
    for i in range(20, 30):  # until it is full, and beyond
        added(i, 0)
    batch = ours.sample(50)
    np.testing.assert_array_equal(batch["obs"][:, 0] + 1, batch["next_obs"][:, 1])
    assert set(batch["act"].ravel()) <= set(range(30))
    for buffer in (ours, theirs):
        buffer.clear()
    agree()


def test_each_done_in_a_call_ends_an_episode():
    buffer = adapter.SelectiveReplayBuffer(4, obs_shape=(2, 2), is_discrete_action=True)
    buffer.add(np.zeros((5, 2, 2)), np.arange(5), np.zeros(5), np.zeros((5, 2, 2)), [0, 1, 0, 1, 0])
    assert [len(buffer.get_episode(i)["done"]) for i in range(4)] == [2, 2, 1, 0]
    assert (buffer.get_obs_shape(), buffer.get_obs_dim()) == ((2, 2), 4)
    assert (buffer.get_act_dim(), buffer.get_rew_dim()) == (1, 1)
    assert buffer.sample(3)["act"].dtype == np.int64

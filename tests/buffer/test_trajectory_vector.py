"""Trajectories of vector environments: lanes, Gymnasium's three ways to begin the next episode, last observations."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from linked_rows import STEPS, buffer_of, everything, pairs
from numbered_environments import Numbered, environments, policy, reward_of

import torchreplay as tr

WHERE = {"obs": ((3,), np.float32), **STEPS}
NESTED = {"obs/where": ((3,), np.float32), "obs/inner/step": ((), np.int64), **STEPS}
SEPARATE = {"where": ((3,), np.float32), "inner/step": ((), np.int64), **STEPS}
MODES = list(AutoresetMode)
KINDS = [SyncVectorEnv, AsyncVectorEnv]


def explore(envs, writer, arranged, where, times):
    """Writes what `envs` do; returns the (environment, episode, step) at which an action was taken."""
    mode = envs.metadata["autoreset_mode"]
    observed, _ = envs.reset()
    writer.reset(**arranged(observed))
    ended = np.zeros(envs.num_envs, bool)
    taken = []
    for _ in range(times):
        before = where(observed).copy()
        acts = ~ended if mode is AutoresetMode.NEXT_STEP else np.ones(envs.num_envs, bool)
        observed, reward, terminated, truncated, infos = envs.step(policy(before))
        arguments = {"final_obs": infos.get("final_obs")} if mode is AutoresetMode.SAME_STEP else {}
        flags = {"terminated": terminated, "truncated": truncated}
        writer.step(**arranged(observed), action=policy(before), reward=reward, **flags, **arguments)
        taken += [tuple(row) for row in before[acts].astype(int).tolist()]
        ended = terminated | truncated
        if mode is AutoresetMode.DISABLED and ended.any():
            observed, _ = envs.reset(options={"reset_mask": ended})
            writer.reset(**arranged(observed), mask=ended)
    return taken


def assert_transitions(taken, where, action, reward, next_where):
    """Each action taken is there once, with the observation of its time and the true one that followed."""
    assert sorted(taken) == sorted(tuple(row) for row in where.int().tolist())
    assert torch.equal(next_where, where + torch.tensor([0.0, 0.0, 1.0]))
    assert action.tolist() == policy(where).tolist()
    assert reward.tolist() == [reward_of(*row) for row in next_where.tolist()]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_transition_of_a_vector_environment_is_drawn_with_its_true_next_observation(kind, mode):
    buffer = buffer_of(tr.Transitions(), WHERE, capacity=400)
    envs = environments(kind, mode)
    with buffer.writer(num_envs=3, autoreset=mode) as writer:
        taken = explore(envs, writer, lambda observed: {"obs": observed}, lambda observed: observed, 40)
    envs.close()
    batch = everything(buffer)
    assert_transitions(taken, batch["obs"], batch["action"], batch["reward"], batch["next_obs"])
    ends = batch["terminated"] | batch["truncated"]
    assert batch["terminated"].any()
    assert batch["truncated"].any()
    assert torch.equal(batch["terminated"][ends], batch["obs"][ends, 1] % 2 == 0)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_dict_observations_of_a_vector_environment_are_taken_as_they_come(kind, mode):
    buffer = buffer_of(tr.Transitions(), NESTED, capacity=400)
    envs = environments(kind, mode, nested=True)
    with buffer.writer(num_envs=3, autoreset=mode.value) as writer:
        taken = explore(envs, writer, lambda observed: {"obs": observed}, lambda observed: observed["where"], 25)
    envs.close()
    batch = everything(buffer)
    obs, following = batch["obs"], batch["next_obs"]
    assert_transitions(taken, obs["where"], batch["action"], batch["reward"], following["where"])
    assert torch.equal(obs["inner"]["step"], obs["where"][:, 2].long())
    assert torch.equal(following["inner"]["step"], following["where"][:, 2].long())


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_dict_observations_of_a_vector_environment_may_be_several_fields(mode):
    buffer = buffer_of(tr.Transitions(observation=("where", "inner")), SEPARATE, capacity=400)
    envs = environments(SyncVectorEnv, mode, nested=True)
    with buffer.writer(num_envs=3, autoreset=mode.name.lower()) as writer:
        taken = explore(envs, writer, dict, lambda observed: observed["where"], 25)
    envs.close()
    batch = everything(buffer)
    assert_transitions(taken, batch["where"], batch["action"], batch["reward"], batch["next_where"])
    assert torch.equal(batch["next_inner"]["step"], batch["next_where"][:, 2].long())


# By hand


def observed(*numbers):
    return np.repeat(np.array(numbers, np.float32)[:, None], 2, axis=1)


def step(writer, obs, terminated=None, **arguments):
    lanes = len(obs["where"] if isinstance(obs, dict) else obs)
    none = np.zeros(lanes, bool)
    ends = none if terminated is None else np.array(terminated)
    zeros = {"action": np.zeros(lanes, int), "reward": np.zeros(lanes)}
    return writer.step(obs=obs, terminated=ends, truncated=none, **zeros, **arguments)


def test_lanes_return_int64_keys_in_the_order_of_the_lanes():
    buffer = buffer_of(tr.Transitions())
    with buffer.writer(num_envs=3) as writer:
        first, second = writer.reset(obs=observed(0, 10, 20)), step(writer, observed(1, 11, 21))
        assert (first.dtype, first.tolist()) == (torch.int64, [0, 1, 2])
        assert (second.dtype, second.tolist()) == (torch.int64, [3, 4, 5])
        assert writer.rows == 6
    assert pairs(buffer) == [(0, 1), (10, 11), (20, 21)]


def test_one_lane_keeps_its_dimension():
    buffer = buffer_of(tr.Transitions())
    with buffer.writer(num_envs=1) as writer:
        assert writer.reset(obs=observed(0)).tolist() == [0]
        assert step(writer, observed(1)).tolist() == [1]
    assert pairs(buffer) == [(0, 1)]


def test_a_reset_of_some_lanes_leaves_the_others_in_their_episodes():
    buffer = buffer_of(tr.Transitions())
    with buffer.writer(num_envs=3, autoreset="disabled") as writer:
        writer.reset(obs=observed(0, 10, 20))
        step(writer, observed(1, 11, 21), [True, False, False])
        keys = writer.reset(obs=observed(50, 60, 70), mask=np.array([True, False, True]))
        assert (keys.dtype, keys.tolist()) == (torch.int64, [6, -1, 7])
        assert step(writer, observed(51, 12, 71)).tolist() == [8, 9, 10]
    assert sorted(pairs(buffer)) == [(0, 1), (10, 11), (11, 12), (20, 21), (50, 51), (70, 71)]


@pytest.mark.parametrize("mask", [np.array([False, True]), torch.tensor([False, True])], ids=["numpy", "torch"])
def test_lanes_may_be_reset_one_after_the_other(mask):
    buffer = buffer_of(tr.Transitions())
    with buffer.writer(num_envs=2) as writer:
        assert writer.reset(obs=observed(0, 10), mask=mask).tolist() == [-1, 0]
        assert writer.reset(obs=observed(1, 11), mask=~mask).tolist() == [1, -1]
        assert writer.reset(obs=observed(2, 12), mask=mask & ~mask).tolist() == [-1, -1]
        step(writer, observed(3, 13))
    assert pairs(buffer) == [(10, 13), (1, 3)]


def test_the_step_after_a_lanes_end_is_a_reset_row_and_its_action_and_priority_are_ignored():
    buffer = buffer_of(tr.Transitions(), sampler=tr.Prioritized(alpha=1.0))
    with buffer.writer(num_envs=2) as writer:
        writer.reset(obs=observed(0, 10))
        step(writer, observed(1, 11), [True, False])
        flags = {"terminated": np.array([False, True]), "truncated": np.array([False, True])}
        writer.step(obs=observed(2, 12), action=np.array([7, 8]), reward=np.array([0.0, 6.0]), **flags, priority=9.0)
        step(writer, observed(3, 13))
    assert pairs(buffer) == [(0, 1), (10, 11), (11, 12), (2, 3)]
    assert buffer.storage["action"][4:6].tolist() == [0, 8]
    assert buffer.storage["reward"][4:6].tolist() == [0, 6]


FINALS = {
    "array": lambda: observed(7, 0),
    "tensor": lambda: torch.from_numpy(observed(7, 0)),
    "list": lambda: [np.full(2, 7.0), None],
    "tensors": lambda: [torch.full((2,), 7.0), None],
    "objects": lambda: np.array([np.full(2, 7.0, np.float32), None], object),
}


@pytest.mark.parametrize("final", FINALS.values(), ids=FINALS.keys())
def test_a_lane_that_ends_in_the_same_step_writes_its_last_observation_and_the_first_of_the_next(final):
    buffer = buffer_of(tr.Transitions())
    with buffer.writer(num_envs=2, autoreset="same_step") as writer:
        writer.reset(obs=observed(0, 10))
        assert step(writer, observed(1, 11), final_obs=None).tolist() == [2, 3]
        assert step(writer, observed(50, 12), [True, False], final_obs=final()).tolist() == [4, 6]
        assert step(writer, observed(51, 13)).tolist() == [7, 8]
        assert writer.rows == 9
    assert sorted(pairs(buffer)) == [(0, 1), (1, 7), (10, 11), (11, 12), (12, 13), (50, 51)]


def unwritable(*values):
    array = np.array(values, np.float32)
    array.flags.writeable = False
    return array


# What writers take as an observation they take as a lane's last one, and make the same of it: type, value, what is held
LIKE_OBSERVATIONS = {
    "reversed": (np.float32, np.array([8.0, 7.0])[::-1], [7.0, 8.0]),
    "of the other byte order": (np.float32, np.array([7.0, 8.0], ">f4"), [7.0, 8.0]),
    "of long doubles": (np.float64, np.array([7.0, 0.1], np.longdouble), [7.0, 0.1]),
    "not to be written to": (np.float32, unwritable(7.0, 8.0), [7.0, 8.0]),
    "of Python's floats": (np.float64, [7.0, 0.1], [7.0, 0.1]),
    "of a narrower unsigned type": (np.uint16, np.array([7, 200], np.uint8), [7, 200]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("dtype", "last", "held"), LIKE_OBSERVATIONS.values(), ids=LIKE_OBSERVATIONS.keys())
def test_a_last_observation_of_a_lane_may_be_whatever_an_observation_may_be(dtype, last, held):
    buffer = buffer_of(tr.Transitions(), {"obs": ((2,), dtype), **STEPS})
    with buffer.writer(num_envs=2, autoreset="same_step") as writer:
        writer.reset(obs=np.zeros((2, 2), dtype))
        step(writer, np.zeros((2, 2), dtype), [True, False], final_obs=[last, None])
    assert everything(buffer)["next_obs"].tolist() == [held, [0, 0]]


SEVENS = np.full(2, 7.0, np.float32)
OF_ONE_FIELD = {
    "dicts": np.array([{"where": SEVENS}, None], object),
    "a dict of arrays": {"where": observed(7, 0)},
    "a dict in a dict": {"obs": {"where": observed(7, 0)}},
    "values": [SEVENS, None],
}


@pytest.mark.parametrize("names", ["obs/where", ("obs/where",)], ids=repr)
@pytest.mark.parametrize("final", OF_ONE_FIELD.values(), ids=OF_ONE_FIELD.keys())
def test_last_observations_may_be_dicts_where_the_view_observes_one_field_of_them(names, final):
    buffer = buffer_of(tr.Transitions(observation=names), {"obs/where": ((2,), np.float32), **STEPS})
    with buffer.writer(num_envs=2, autoreset="same_step") as writer:
        writer.reset(obs={"where": observed(0, 10)})
        step(writer, {"where": observed(50, 11)}, [True, False], final_obs=final)
    assert everything(buffer)["next_obs"]["where"][:, 0].tolist() == [7, 11]


def test_last_observations_of_a_vector_environment_may_be_nested_arrays_of_all_lanes():
    buffer = buffer_of(tr.Transitions(), NESTED)
    with buffer.writer(num_envs=2, autoreset="same_step") as writer:
        writer.reset(obs={"where": np.zeros((2, 3)), "inner": {"step": np.array([0, 0])}})
        obs = {"where": np.full((2, 3), 50.0), "inner": {"step": np.array([50, 50])}}
        final = {"where": np.full((2, 3), 7.0), "inner": {"step": np.array([7, 7])}}
        step_fields = {"action": np.zeros(2, int), "reward": np.zeros(2), "truncated": np.array([False, True])}
        writer.step(obs=obs, **step_fields, terminated=np.zeros(2, bool), final_obs=final)
    batch = everything(buffer)
    assert batch["next_obs"]["inner"]["step"].tolist() == [50, 7]
    assert batch["next_obs"]["where"][:, 0].tolist() == [50, 7]


@pytest.mark.parametrize("priority", [[2.0, -3.0], torch.tensor([2.0, 3.0])], ids=["list", "tensor"])
def test_a_priority_may_be_given_for_each_lane(priority):
    buffer = buffer_of(tr.Transitions(), sampler=tr.Prioritized(alpha=1.0))
    with buffer.writer(num_envs=2) as writer:
        writer.reset(obs=observed(0, 10))
        step(writer, observed(1, 11), priority=np.array(priority) if isinstance(priority, list) else priority)
        step(writer, observed(2, 12), priority=5.0)
    assert len(buffer) == 6
    assert buffer._segment.column(-1)[:4].tolist() == pytest.approx([2, 3, 5, 5], rel=1e-5)


# The environment given to `writer`


def other(envs, **attributes):
    """Something with these attributes alone, for environments that say less."""
    return SimpleNamespace(reset=envs.reset, step=envs.step, **attributes)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_writer_of_a_vector_environment_reads_number_and_mode_from_it(kind, mode, wrapped):
    buffer = buffer_of(tr.Transitions(), WHERE, capacity=400)
    envs = environments(kind, mode)
    envs = RecordEpisodeStatistics(envs) if wrapped else envs
    with buffer.writer(envs) as writer:
        taken = explore(envs, writer, lambda observed: {"obs": observed}, lambda observed: observed, 40)
    envs.close()
    batch = everything(buffer)
    assert_transitions(taken, batch["obs"], batch["action"], batch["reward"], batch["next_obs"])


@pytest.mark.parametrize("says", [AutoresetMode.SAME_STEP, "SameStep", "same_step"], ids=repr)
def test_the_mode_of_an_environment_may_be_gymnasiums_value_or_a_text(says):
    buffer, envs = buffer_of(tr.Transitions()), environments(SyncVectorEnv, AutoresetMode.SAME_STEP)
    given = other(envs, num_envs=2, single_observation_space=None, metadata={"autoreset_mode": says})
    with buffer.writer(given) as writer:
        writer.reset(obs=observed(0, 10))
        assert step(writer, observed(50, 11), [True, False], final_obs=[np.full(2, 7.0), None]).tolist() == [2, 4]


def test_an_environment_without_a_mode_begins_episodes_in_the_next_step_unless_autoreset_says_otherwise():
    buffer, envs = buffer_of(tr.Transitions()), environments(SyncVectorEnv, AutoresetMode.SAME_STEP)
    for metadata in ({}, None, {"render_modes": []}):
        silent = other(envs, num_envs=np.int64(2), single_observation_space=None, metadata=metadata)
        with buffer.writer(silent) as writer, buffer.writer(silent, autoreset="disabled") as disabled:
            for each in (writer, disabled):
                each.reset(obs=observed(0, 10))
                step(each, observed(1, 11), [True, True])
            step(writer, observed(2, 12))
            with pytest.raises(ValueError, match="after the end"):
                step(disabled, observed(2, 12))


def test_a_single_environment_gets_a_writer_without_the_dimension_of_environments():
    buffer, env = buffer_of(tr.Transitions(), WHERE), Numbered(1)
    with buffer.writer(env) as writer:
        obs, _ = env.reset()
        assert writer.reset(obs=obs) == 0
        obs, reward, terminated, truncated, _ = env.step(action := policy([obs])[0])
        assert writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated) == 1


@pytest.mark.parametrize("given", [(2,), (np.int64(2),), (2, "next_step"), (2, AutoresetMode.NEXT_STEP)], ids=repr)
def test_a_number_of_environments_may_be_given_by_its_place(given):
    buffer = buffer_of(tr.Transitions())
    for writer in (buffer.writer(*given), buffer.writer(2, num_envs=2), buffer.writer(num_envs=2, autoreset=None)):
        with writer:
            assert len(writer.reset(obs=observed(0, 10))) == 2


@pytest.mark.parametrize(
    ("envs", "arguments", "message"),
    [
        ("three", {"num_envs": 4}, "num_envs is 4, but envs.num_envs is 3: leave num_envs out"),
        ("three", {"autoreset": "next_step"}, r"autoreset is 'next_step', but .*autoreset_mode.* is 'same_step'"),
        ("single", {"num_envs": 4}, "num_envs is 4, but envs is .*is one environment"),
        ("single", {"autoreset": "same_step"}, "autoreset is 'same_step', but envs is .*is one environment"),
        ("another's", {}, r"envs is .*does not say how it resets: pass autoreset="),
        ("wrong", {}, r"autoreset is 'later': expected one of"),
        (2, {"num_envs": 3}, "num_envs is 3, but envs is 2"),
        (0, {}, "num_envs is 0: expected an int"),
        (True, {}, "num_envs is True: expected an int"),
        ("two", {}, "envs is 'two': expected an environment, a vector environment, or their number"),
        (2.0, {}, "envs is 2.0: expected an environment"),
    ],
    ids=str,
)
def test_environments_that_contradict_the_other_arguments_or_are_none_are_refused(envs, arguments, message):
    three = environments(SyncVectorEnv, AutoresetMode.SAME_STEP)
    made = {
        "three": three,
        "single": Numbered(1),
        "another's": other(three, num_envs=3, metadata={"render_modes": []}),
        "wrong": other(three, num_envs=3, single_observation_space=None, metadata={"autoreset_mode": "later"}),
    }
    buffer = buffer_of(tr.Transitions())
    with pytest.raises(ValueError, match=message):
        buffer.writer(made.get(envs, envs), **arguments)
    assert buffer.stats().writers == 0


def test_an_environment_of_another_library_takes_its_mode_from_autoreset():
    buffer, envs = buffer_of(tr.Transitions()), environments(SyncVectorEnv, AutoresetMode.SAME_STEP)
    with buffer.writer(other(envs, num_envs=2, metadata={}), autoreset="same_step") as writer:
        writer.reset(obs=observed(0, 10))
        with pytest.raises(ValueError, match="final_obs"):
            step(writer, observed(1, 11), [True, False])


def test_a_vector_environment_and_rows_that_are_not_linked_are_refused_and_a_single_one_is_not():
    buffer = buffer_of(tr.Rows())
    with pytest.raises(ValueError, match=r"view is Rows\(\): use extend\(\)"):
        buffer.writer(environments(SyncVectorEnv, AutoresetMode.NEXT_STEP))
    buffer.writer(Numbered(0)).close()


# Environments that answer in any order


class ReadyFirst:
    """Environments behind the asynchronous calls of EnvPool: those that are ready answer first, in any order.

    An environment whose episode has ended begins the next one with the step after, whose action it ignores.
    """

    def __init__(self, num_envs, batch_size, seed):
        self.envs, self.batch_size = [Numbered(number) for number in range(num_envs)], batch_size
        self.rng = np.random.default_rng(seed)
        self.ready = []

    def async_reset(self):
        self.over = [True] * len(self.envs)
        self.send(np.zeros(len(self.envs), int), np.arange(len(self.envs)))

    def send(self, actions, env_ids):
        for action, number in zip(actions, env_ids, strict=True):
            if self.over[number]:
                answer = (self.envs[number].reset()[0], 0.0, False, False)
            else:
                answer = self.envs[number].step(action)[:4]
            self.over[number] = answer[2] or answer[3]
            self.ready.append((number, *answer))

    def recv(self):
        self.rng.shuffle(self.ready)
        now, self.ready = self.ready[: self.batch_size], self.ready[self.batch_size :]
        numbers, *columns = (np.array(column) for column in zip(*now, strict=True))
        return *columns, {"env_id": numbers}


@pytest.mark.parametrize("seed", range(3))
def test_environments_that_answer_in_any_order_have_a_writer_each(seed):
    """The loop that docs/trajectories.md shows for EnvPool."""
    buffer, envs = buffer_of(tr.Transitions(), WHERE, capacity=400), ReadyFirst(3, 2, seed)
    envs.async_reset()
    writers, running = [buffer.writer() for _ in range(3)], [False] * 3
    actions, taken = np.zeros(3, np.int64), []
    for _ in range(60):
        obs, reward, terminated, truncated, info = envs.recv()
        for i, env in enumerate(info["env_id"]):
            if running[env]:
                flags = {"terminated": terminated[i], "truncated": truncated[i]}
                writers[env].step(obs=obs[i], action=actions[env], reward=reward[i], **flags)
                taken.append((*obs[i][:2].astype(int).tolist(), int(obs[i][2]) - 1))
            else:
                writers[env].reset(obs=obs[i])
            running[env] = not (terminated[i] or truncated[i])
        actions[info["env_id"]] = policy(obs)
        envs.send(actions[info["env_id"]], info["env_id"])
    batch = everything(buffer)
    assert_transitions(taken, batch["obs"], batch["action"], batch["reward"], batch["next_obs"])
    assert len(taken) > 60

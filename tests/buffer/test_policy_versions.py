"""Policy versions: who writes them, how old what is drawn is, and what is too old to be drawn."""

import threading
from collections import Counter

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters

import torchreplay as tr
from torchreplay.explorers.explorer_context import ExplorerContext

VERSION = tr.Field((), torch.int64)
SPEC = {"x": tr.Field((), torch.int64), "policy_version": VERSION}
FLAG = tr.Field((), torch.bool)
STEPS = {"obs": tr.Field((), torch.int64), "reward": tr.Field(), "terminated": FLAG, "truncated": FLAG}
STEPS |= {"policy_version": VERSION}
SAMPLERS = {
    "queue": tr.Fifo,
    "queue of two draws": lambda **age: tr.Fifo(max_draws=2, **age),
    "queue with a window": lambda **age: tr.Fifo(window=0.5, **age),
    "uniform": tr.Uniform,
    "epochs": lambda **age: tr.Uniform(replacement=False, **age),
    "three draws": lambda **age: tr.Uniform(max_draws=3, **age),
    "prioritized": tr.Prioritized,
}


def filled(versions, sampler, capacity=100, **options):
    """Rows of these versions, each with its number."""
    buffer = tr.ReplayBuffer(SPEC, capacity, sampler=sampler, seed=0, **options)
    buffer.extend(x=np.arange(len(versions)), policy_version=np.asarray(versions))
    return buffer


def drawn(buffer, batches=1, size=8):
    """What so many batches hold, and their ages."""
    got = [buffer.sample(size) for _ in range(batches)]
    return torch.cat([batch["x"] for batch in got]).tolist(), torch.cat([batch["age"] for batch in got]).tolist()


# Who writes them


def test_rows_that_are_given_no_version_have_the_writers():
    with tr.ReplayBuffer(SPEC, 100) as buffer, buffer.writer() as writer:
        assert writer.policy_version == 0
        keys = [writer.append(x=0)]
        writer.policy_version = 7
        keys += [writer.append(x=1), writer.append(x=2, policy_version=3)]
        keys += writer.extend(x=[3, 4]).tolist() + writer.extend(x=[5, 6], policy_version=[1, 2]).tolist()
        assert buffer.gather(keys)["policy_version"].tolist() == [0, 7, 3, 7, 7, 1, 2]


def test_steps_resets_and_whole_episodes_have_the_writers_version():
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions()) as buffer, buffer.writer() as writer:
        writer.policy_version = 4
        keys = [writer.reset(obs=0)]
        for step in range(3):
            keys.append(writer.step(obs=step, reward=0.0, terminated=step == 2, truncated=False))
        writer.policy_version = 5
        flags = {"terminated": [False, True], "truncated": [False, False]}
        keys += writer.extend(obs=[0, 1, 2], reward=[0.0, 0.0], **flags).tolist()
        column = buffer._segment.column(list(STEPS).index("policy_version"))
        assert column[keys].tolist() == [4] * 4 + [5] * 3


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_every_row_of_a_vector_writer_has_its_version(autoreset):
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions()) as buffer:
        with buffer.writer(3, autoreset) as writer:
            writer.policy_version = 6
            writer.reset(obs=[0, 0, 0])
            ends = {"terminated": [True, False, False], "truncated": [False] * 3}
            final = {"final_obs": [1, 1, 1]} if autoreset == "same_step" else {}
            writer.step(obs=[1, 1, 1], reward=[0.0] * 3, **ends, **final)
            if autoreset == "disabled":
                writer.reset(obs=[0, 0, 0], mask=np.array([True, False, False]))
            writer.step(obs=[2, 2, 2], reward=[0.0] * 3, terminated=[False] * 3, truncated=[False] * 3)
            rows = writer.rows
        column = buffer._segment.column(list(STEPS).index("policy_version"))
        assert column[:rows].tolist() == [6] * rows


def test_a_block_of_streams_and_the_buffers_own_extend_have_the_learners_version():
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions()) as buffer:
        buffer.policy_version = 9
        flags = {"terminated": np.zeros((2, 4), bool), "truncated": np.zeros((2, 4), bool)}
        buffer.extend(obs=np.zeros((3, 4), int), reward=np.zeros((2, 4), np.float32), **flags)
        assert buffer.sample(8)["age"].tolist() == [0] * 8
    with tr.ReplayBuffer(SPEC, 100) as buffer:
        buffer.policy_version = 9
        assert buffer.gather(buffer.extend(x=[1, 2]))["policy_version"].tolist() == [9, 9]


def test_a_spec_of_nothing_else_needs_to_be_told_how_many_rows_come():
    with tr.ReplayBuffer({"policy_version": VERSION}, 100) as buffer:
        buffer.extend(policy_version=[1, 2])
        with pytest.raises(ValueError, match="how many rows"):
            buffer.extend()
        assert buffer.stats().rows_written == 2


# How old what is drawn is


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_batch_says_how_many_versions_each_item_is_behind_the_learner(kind):
    versions = np.array([3, 1, 4, 1, 5, 2, 6, 5, 3, 5])
    with filled(versions, SAMPLERS[kind]()) as buffer:
        buffer.policy_version = 6
        batch = buffer.sample(8)
        assert batch["age"].dtype == torch.int64
        assert batch["age"].tolist() == (6 - versions[batch["x"]]).tolist()
        assert (batch["age"] == 6 - batch["policy_version"]).all()
        (ahead,) = tr.ReplayDataset(buffer, 2, steps=1)
        assert ahead["age"].tolist() == (6 - versions[ahead["x"]]).tolist()


def test_an_item_of_several_steps_is_as_old_as_the_oldest_of_them():
    versions = [5, 2, 7, 7, 3, 8, 8, 8]  # of the steps of one episode
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions(n_step=3)) as buffer:
        buffer.policy_version = 8
        with buffer.writer() as writer:
            writer.reset(obs=0)  # of version 0: no policy has taken a step there
            for step, version in enumerate(versions):
                ends = step == len(versions) - 1
                writer.step(obs=step + 1, reward=0.0, terminated=ends, truncated=False, policy_version=version)
        batch = buffer.gather(np.arange(9))
        expected = [8 - min(versions[first : first + 3]) for first in range(8)]
        assert batch["age"][batch["obs"].argsort()].tolist() == expected


def test_rows_that_begin_an_episode_within_a_window_do_not_make_it_old():
    with tr.ReplayBuffer(STEPS, 100, view=tr.Sequences(4, across_episodes=True)) as buffer, buffer.writer() as writer:
        buffer.policy_version = 5
        for _ in range(4):
            writer.reset(obs=0)
            for step in range(2):
                writer.step(obs=1, reward=0.0, terminated=step == 1, truncated=False, policy_version=5)
        assert buffer.sample(5)["age"].tolist() == [0] * 5


def test_an_age_is_negative_where_nobody_told_the_buffer_the_learners_version():
    with filled([3, 4], tr.Uniform()) as buffer:
        assert buffer.gather([0, 1])["age"].tolist() == [-3, -4]


def test_batches_that_others_give_the_memory_for_have_ages_too():
    with filled([1, 2, 3, 4], tr.Uniform()) as buffer:
        buffer.policy_version = 4
        out = buffer.sample(4)
        out["age"].fill_(-9)
        buffer.sample(4, out=out)
        assert out["age"].tolist() == (4 - out["policy_version"]).tolist()
        del out["age"]
        with pytest.raises(ValueError, match="'age' is missing"):
            buffer.sample(4, out=out)


def test_batches_without_versions_have_no_ages():
    with tr.ReplayBuffer({"x": VERSION, "age": VERSION}, 10) as buffer:
        buffer.extend(x=[1], age=[2])
        assert buffer.sample(1)["age"].tolist() == [2]


# What is too old


@pytest.mark.parametrize("max_age", [0, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_is_too_old_is_never_drawn_and_is_counted(kind, max_age):
    rng = np.random.default_rng(0)
    buffer = tr.ReplayBuffer(SPEC, 2000, sampler=SAMPLERS[kind](max_age=max_age), seed=0)
    with buffer:
        versions = np.zeros(0, int)
        expired = np.zeros(0, bool)
        gone = Counter()
        for learner in range(12):
            buffer.policy_version = learner
            came = np.maximum(0, learner - rng.integers(0, 5, 60))  # some are too old when they come
            buffer.extend(x=len(versions) + np.arange(60), policy_version=came)
            versions = np.concatenate([versions, came])
            old = np.concatenate([expired, np.zeros(60, bool)]) | (learner - versions > max_age)
            most = buffer.sampler.max_draws or 10**9
            expired = np.array(
                [
                    is_old and (was or gone[i] < most)
                    for i, (is_old, was) in enumerate(
                        zip(old, np.concatenate([expired, np.zeros(60, bool)]), strict=True)
                    )
                ]
            )
            numbers, ages = drawn(buffer, size=8)
            assert ages == (learner - versions[numbers]).tolist()
            assert max(ages) <= max_age
            gone.update(numbers)
            if isinstance(buffer.sampler, tr.Fifo):
                buffer.commit()
            stats = buffer.stats()
            assert stats.expired_items == expired.sum()
            left = sum(1 for i in range(len(versions)) if not old[i] and gone[i] < most)
            assert stats.drawable == left
        assert stats.age_max <= max_age
        assert 0 <= stats.age_mean <= max_age
        assert stats.evicted_unsampled == stats.dropped_items == 0


def test_items_expire_by_their_oldest_step():
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions(n_step=2), sampler=tr.Uniform(max_age=1)) as buffer:
        with buffer.writer() as writer:
            writer.reset(obs=0)
            for step, version in enumerate([0, 1, 2, 3, 3]):
                writer.step(obs=step + 1, reward=0.0, terminated=step == 4, truncated=False, policy_version=version)
        buffer.policy_version = 3
        anchors = buffer.gather(np.arange(6))["obs"]
        assert sorted(anchors.tolist()) == [2, 3, 4]
        assert buffer.stats().expired_items == 2


def test_weights_and_probabilities_are_those_among_what_is_left():
    with filled([0] * 50 + [1] * 50, tr.Prioritized(alpha=1.0, max_age=0)) as buffer:
        buffer.policy_version = 1
        batch = buffer.sample(32)
        assert torch.allclose(batch["probability"], torch.tensor(1 / 50))
        assert torch.allclose(batch["weight"], torch.tensor(1.0))


def test_held_items_stay_their_holders_and_do_not_come_again_when_they_are_too_old():
    with filled([0, 0, 1, 1], tr.Fifo(max_age=1)) as queue:
        batch = queue.sample(2)
        queue.policy_version = 2
        assert queue.release(batch) == 2
        assert drawn(queue, size=2) == ([2, 3], [1, 1])
        queue.commit()
        assert (queue.num_items, queue.stats().expired_items) == (0, 2)
    with filled([0, 0, 1, 1], tr.Fifo(max_age=1)) as queue:
        batch = queue.sample(2)
        queue.policy_version = 2
        assert (queue.commit(), queue.stats().expired_items) == (2, 0)


def test_writers_that_wait_for_room_go_on_when_what_is_in_their_way_is_too_old():
    with tr.ReplayBuffer(SPEC, 8, sampler=tr.Fifo(max_age=0)) as queue:
        queue.extend(x=np.arange(8), policy_version=np.zeros(8, int))
        written = []

        def write():
            with queue.writer() as writer:
                writer.policy_version = 1
                written.extend(writer.extend(x=np.arange(8, 16)).tolist())

        thread = threading.Thread(target=write)
        thread.start()
        eventually(lambda: queue._segment.census(False)["waiting"] == 1)
        queue.policy_version = 1
        thread.join()
        assert drawn(queue, size=8) == (list(range(8, 16)), [0] * 8)


def test_a_wait_that_nobody_can_end_names_what_became_too_old():
    with filled([0] * 10, tr.Uniform(max_age=0)) as buffer:
        buffer.policy_version = 1
        with pytest.raises(tr.WouldBlockForever, match="10 items have become too old"):
            buffer.sample(1)


@pytest.mark.parametrize("kind", ["queue", "uniform", "epochs", "three draws", "prioritized"])
def test_batches_that_were_drawn_ahead_are_checked_again_when_they_are_handed_out(kind):
    with filled([0] * 40 + [1] * 40, SAMPLERS[kind](max_age=1)) as buffer:
        buffer.policy_version = 1
        dataset = tr.ReplayDataset(buffer, 4, prefetch=3)
        stream = iter(dataset)
        first = next(stream)
        assert first["age"].tolist() == (1 - first["policy_version"]).tolist()
        eventually(lambda: dataset.ready == 3)
        buffer.policy_version = 2
        batch = next(stream)
        assert batch["age"].tolist() == [1] * 4
        assert batch["policy_version"].tolist() == [1] * 4
        stream.close()


# The learner's version


def test_all_processes_see_the_learners_version():
    told = shared_counters(2)

    def watch(buffer):
        told[0] = 1
        eventually(lambda: buffer.policy_version == 5)
        buffer.policy_version = 6
        told[1] = 1

    with filled([1, 2], tr.Uniform()) as buffer, Forked(watch, buffer):
        eventually(lambda: told[0])
        buffer.policy_version = 5
        eventually(lambda: told[1])
        assert tr.ReplayBuffer.attach(buffer.handle()).policy_version == 6


def test_the_version_only_grows():
    with filled([1, 2], tr.Uniform(), name="rollouts") as buffer:
        buffer.policy_version = 5
        buffer.policy_version = 5
        with pytest.raises(ValueError, match=r"policy_version is 4, and .*rollouts.* is at 5: it only grows"):
            buffer.policy_version = 4
        assert buffer.policy_version == 5


@pytest.mark.parametrize("version", [-1, True, 1.0, None, "2", 1 << 63])
def test_a_version_is_a_natural_number(version):
    with filled([1, 2], tr.Uniform()) as buffer, buffer.writer() as writer:
        for one in (buffer, writer):
            with pytest.raises((ValueError, TypeError), match="policy_version"):
                one.policy_version = version
            assert one.policy_version == 0


@pytest.mark.parametrize("kind", SAMPLERS)
def test_files_checkpoints_and_copies_go_on_from_the_version(kind, tmp_path):
    path = tmp_path / "buffer"
    with filled([1, 2, 3, 4], SAMPLERS[kind](max_age=1), path=path) as buffer:
        buffer.policy_version = 4
        assert buffer.stats().expired_items == 2
        buffer.save(tmp_path / "saved")
        with buffer.copy() as copy:
            assert (copy.policy_version, copy.num_items) == (4, 2)
            assert set(drawn(copy, size=2)[1]) <= {0, 1}
    with tr.ReplayBuffer.open(path) as buffer:
        assert (buffer.policy_version, buffer.num_items) == (4, 2)
        buffer.policy_version = 5
        assert drawn(buffer, size=1)[0] == [3]
    with tr.ReplayBuffer.load(tmp_path / "saved") as buffer:
        assert (buffer.policy_version, buffer.num_items) == (4, 2)
        buffer.policy_version = 5
        assert drawn(buffer, size=1)[0] == [3]


def test_publishing_sets_the_buffers_version_and_pulling_a_writers():
    policy = torch.nn.Linear(2, 1)
    with tr.ReplayBuffer(SPEC, 10) as buffer, buffer.writer() as writer:
        weights = tr.SharedWeights(policy)
        assert (weights.publish(policy, buffer=buffer), buffer.policy_version) == (1, 1)
        weights.publish(policy)
        assert (weights.version, buffer.policy_version) == (2, 1)
        acting = torch.nn.Linear(2, 1)
        assert weights.pull(acting, writer=writer)
        assert writer.policy_version == 2
        assert not weights.pull(acting, writer=writer)
        weights.publish(policy, buffer=buffer)
        key = writer.append(x=0)
        assert buffer.gather([key])["age"].tolist() == [1]


class AdmittedPuller:
    """Pulls as soon as the learner's version grows, as does a writer that waits to be admitted."""

    def __init__(self, weights, policy):
        self.weights, self.policy = weights, policy

    @property
    def policy_version(self):
        return 0

    @policy_version.setter
    def policy_version(self, version):
        assert self.weights.pull(self.policy)


def test_who_begins_when_the_buffers_version_grows_pulls_the_weights_of_that_version():
    policy, acting = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    weights = tr.SharedWeights(policy)
    assert weights.pull(acting)
    torch.nn.init.constant_(policy.weight, 7.0)
    weights.publish(policy, buffer=AdmittedPuller(weights, acting))
    assert (acting.weight == 7.0).all()


class LateVersion:
    """The version of a buffer that another publisher raises just before this one does."""

    def __init__(self, buffer, other):
        self.buffer, self.other = buffer, other

    @property
    def policy_version(self):
        return self.buffer.policy_version

    @policy_version.setter
    def policy_version(self, version):
        self.other()
        self.buffer.policy_version = version


def test_a_publisher_that_another_overtakes_leaves_the_later_version():
    policy = torch.nn.Linear(2, 1)
    with tr.ReplayBuffer(SPEC, 10) as buffer:
        weights = tr.SharedWeights(policy)
        late = LateVersion(buffer, lambda: weights.publish(policy, buffer=buffer))
        assert weights.publish(policy, buffer=late) == 1
        assert (weights.version, buffer.policy_version) == (2, 2)


def test_a_buffer_that_has_no_version_is_refused_and_nothing_is_published():
    policy = torch.nn.Linear(2, 1)
    weights = tr.SharedWeights(policy)
    with pytest.raises(TypeError, match="buffer is 3: expected one with a policy_version, such as a ReplayBuffer"):
        weights.publish(policy, buffer=3)
    assert weights.version == 0


def test_weights_that_begin_below_the_buffers_version_are_not_published():
    policy = torch.nn.Linear(2, 1)
    with tr.ReplayBuffer(SPEC, 10) as buffer:
        buffer.policy_version = 7
        weights = tr.SharedWeights(policy)
        with pytest.raises(ValueError, match="it only grows"):
            weights.publish(policy, buffer=buffer)
        assert (weights.version, buffer.policy_version) == (0, 7)
        weights = tr.SharedWeights(policy, version=buffer.policy_version)
        assert weights.version == 7
        assert (weights.publish(policy, buffer=buffer), buffer.policy_version) == (8, 8)
        assert weights.pull(torch.nn.Linear(2, 1))


def test_an_explorers_rows_have_the_version_of_the_weights_that_it_pulled_last():
    policy = torch.nn.Linear(2, 1)
    weights = tr.SharedWeights(policy, version=3)
    with tr.ReplayBuffer(SPEC, 10) as buffer:
        context = ExplorerContext(buffer, weights)
        before = context.writer()
        assert context.pull_weights(policy)
        keys = [before.append(x=0)]
        weights.publish(policy, buffer=buffer)
        assert context.pull_weights(policy)
        keys += [before.append(x=1), context.writer().append(x=2), int(context.buffer.extend(x=[3]))]
        assert buffer.gather(keys)["policy_version"].tolist() == [3, 4, 4, 4]
        context.close()


def test_of_several_buffers_each_has_the_version_of_the_weights_of_its_name():
    policy = torch.nn.Linear(2, 1)
    weights = {name: tr.SharedWeights(policy, version) for name, version in (("red", 3), ("blue", 5))}
    with tr.ReplayBuffer(SPEC, 10) as red, tr.ReplayBuffer(SPEC, 10) as all_of_them:
        context = ExplorerContext({"red": red, "all": all_of_them}, weights)
        writers = {name: context.writer(name=name) for name in ("red", "all")}
        context.pull_weights(policy, name="blue")
        assert [writer.policy_version for writer in writers.values()] == [0, 5]
        context.pull_weights(policy, name="red")
        assert [writer.policy_version for writer in writers.values()] == [3, 3]
        context.close()


# Bad input


@pytest.mark.parametrize("kind", [tr.Fifo, tr.Uniform, tr.Prioritized])
@pytest.mark.parametrize("max_age", [-1, True, 1.5, "1", 1 << 63])
def test_an_age_that_is_no_natural_number_is_refused(kind, max_age):
    with pytest.raises((ValueError, TypeError), match="max_age"):
        kind(max_age=max_age)


@pytest.mark.parametrize("kind", [tr.Fifo, tr.Uniform, tr.Prioritized])
def test_an_age_needs_rows_that_say_by_which_policy_they_came_about(kind):
    with pytest.raises(ValueError, match="max_age is 1, and the rows do not say"):
        tr.ReplayBuffer({"x": VERSION}, 10, sampler=kind(max_age=1))


@pytest.mark.parametrize(
    "field",
    [tr.Field(), tr.Field((), torch.int32), tr.Field(1, torch.int64), {"a": VERSION}, tr.Ragged(torch.int64)],
)
def test_a_field_of_that_name_is_an_int64_scalar(field):
    with pytest.raises(ValueError, match=r"policy_version.*says by which policy a row came about"):
        tr.ReplayBuffer({"x": VERSION, "policy_version": field}, 10, ragged_bytes=None)


def test_ages_keep_their_name_in_batches_with_versions():
    with pytest.raises(ValueError, match="'age' is reserved"):
        tr.ReplayBuffer({"age": VERSION, "policy_version": VERSION}, 10)


def test_versions_are_of_steps_and_stay_as_they_are():
    with pytest.raises(ValueError, match="'policy_version' is an observation"):
        tr.ReplayBuffer(STEPS, 10, view=tr.Transitions(observation=("obs", "policy_version")))
    with filled([1, 2], tr.Uniform()) as buffer, pytest.raises(ValueError, match="cannot be rewritten"):
        buffer.rewrite([0], policy_version=[5])


def test_whoever_watches_sees_ages_in_versions():
    with filled([1, 2, 3, 4], tr.Uniform(max_age=2)) as buffer:
        buffer.policy_version = 4
        batch = buffer.sample(3)
        report = tr.explain(batch, buffer)
        assert (report.versions.least, report.versions.largest) == (batch["age"].min(), batch["age"].max())
        assert "versions" in str(report)
        stats = buffer.stats()
        assert stats.age_mean == pytest.approx(batch["age"].double().mean().item())
        assert (stats.policy_version, stats.age_max, stats.expired_items) == (4, batch["age"].max(), 1)
        assert "versions" in str(stats)


@pytest.mark.parametrize("sampler", [tr.Uniform(max_age=1), tr.Prioritized(max_age=1)])
def test_items_that_expired_stay_gone_where_a_file_is_closed_and_opened(sampler, tmp_path):
    spec = {"x": tr.Field(), "policy_version": tr.Field((), torch.int64)}
    path = tmp_path / "rows.bin"
    with tr.ReplayBuffer(spec, 8, sampler=sampler, path=path) as buffer:
        buffer.extend(x=np.arange(4), policy_version=np.arange(4))
        buffer.policy_version = 3
        assert set(buffer.sample(32)["x"].tolist()) == {2, 3}
        before = buffer.stats()
        assert (before.expired_items, before.drawable) == (2, 2)
    for _ in range(2):
        with tr.ReplayBuffer.open(path) as buffer:
            assert set(buffer.sample(32)["x"].tolist()) == {2, 3}
            after = buffer.stats()
            assert (after.expired_items, after.inserted) == (2, before.inserted)


@pytest.mark.parametrize("later", ["without a bound", "with a wider one", "with the same"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_became_too_old_stays_gone_wherever_its_checkpoint_is_loaded_and_is_counted_once(kind, later, tmp_path):
    ages = {"without a bound": {}, "with a wider one": {"max_age": 100}, "with the same": {"max_age": 1}}
    with filled([1, 2, 3, 4], SAMPLERS[kind](max_age=1)) as buffer:
        buffer.policy_version = 4
        buffer.save(tmp_path)
    for _ in range(2):
        with tr.ReplayBuffer.load(tmp_path, sampler=SAMPLERS[kind](**ages[later])) as loaded:
            stats = loaded.stats()
            assert (stats.inserted, stats.drawable, stats.expired_items, stats.size) == (4, 2, 2, 4)
            loaded.save(tmp_path)  # and what is saved of that
            assert set(drawn(loaded, size=2)[0]) <= {2, 3}


@pytest.mark.parametrize("view", [tr.Transitions(n_step=2), tr.Sequences(2, stride=1, across_episodes=True)], ids=repr)
@pytest.mark.parametrize("sampler", [tr.Uniform, tr.Prioritized])
def test_items_of_several_steps_that_became_too_old_stay_gone_and_their_rows_stay(sampler, view, tmp_path):
    with tr.ReplayBuffer(STEPS, 40, sampler=sampler(max_age=1), view=view) as buffer:
        flags = {"terminated": [False] * 3 + [True], "truncated": [False] * 4}
        for versions in ([0, 0, 0, 0], [0, 1, 2, 3]):
            buffer.extend(obs=np.arange(5), reward=np.zeros(4), policy_version=versions, **flags)
        buffer.policy_version = 2
        there = buffer.keys().tolist()
        before = buffer.stats()
        assert before.inserted == len(there) + before.expired_items
        assert set(there) >= {6, 7}
        buffer.save(tmp_path)
    with tr.ReplayBuffer.load(tmp_path, sampler=sampler()) as loaded:
        assert set(loaded.keys().tolist()) - {4} == set(there)  # of windows across episodes, one begins at an end
        assert loaded.stats().expired_items == before.expired_items
        assert [episode["policy_version"].tolist() for episode in loaded.episodes()] == [[0] * 4, [0, 1, 2, 3]]

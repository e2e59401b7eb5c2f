"""Rows of a checkpoint seen through another view or sampler: as if they had been written under it from the start."""

import numpy as np
import pytest
import torch
from linked_rows import SEVERAL, flat, nested, parted, row_values, spec_of

import torchreplay as tr

OBSERVED = ("pixels", "speed")
EPS = 1e-6
VIEWS = [
    tr.Transitions(n_step=1, observation=OBSERVED),
    tr.Transitions(n_step=3, gamma=0.5, observation=OBSERVED, stack={"pixels": 3}),
    tr.Transitions(n_step=2, observation=OBSERVED, discount="option/discount"),
    tr.Sequences(4, stride=2, observation=OBSERVED),
    tr.Sequences(3, burn_in=1, observation=OBSERVED, initial=["state/h"], partial=False),
    tr.Sequences(3, across_episodes=True, observation=OBSERVED),
    tr.Hindsight(None, "pixels", "desired", observation=(*OBSERVED, "desired")),
]
CAPACITY = 60


def written(view, sampler, fields=SEVERAL, observed=OBSERVED):
    """A ring turned once, by two streams: episodes of all lengths and ends, given priorities, two that go on."""
    buffer = tr.ReplayBuffer(spec_of(fields), CAPACITY, view=view, sampler=sampler, seed=0)
    chance = np.random.default_rng(0)
    writers = [buffer.writer() for _ in range(2)]
    left = [0, 0]
    for number in range(100):
        i = int(chance.integers(2))
        last = left[i] == 1
        values = row_values(fields, number, terminated=last and number % 2, truncated=last and number % 3 == 0)
        observation, rest = parted(values, observed)
        if left[i] == 0:
            writers[i].reset(**nested(observation))
            left[i] = int(chance.integers(1, 9))
        else:
            priority = number / 10 if number % 5 == 0 else None
            writers[i].step(**nested(observation), **nested(rest), priority=priority)
            left[i] -= 1
    for writer in writers:
        writer.close()
    return buffer


def leaves(buffer):
    len(buffer)
    return buffer._segment.column(-1).double().numpy()


def items(buffer):
    return flat(buffer.gather(buffer.keys()))


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted.keys() - {"weight", "probability"}:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("after", VIEWS[:-1], ids=str)
@pytest.mark.parametrize("before", VIEWS[:-1], ids=str)
def test_items_are_those_of_a_buffer_that_was_written_under_the_other_view(before, after, tmp_path):
    sampler = tr.Prioritized(alpha=0.5, eps=EPS, initial=0.25)
    saved, fresh = written(before, sampler), written(after, sampler)
    keys = saved.keys()[::2]
    td = torch.linspace(0.1, 30.0, len(keys))
    saved.update_priorities(keys, td)
    known = leaves(saved)
    saved.save(tmp_path)
    with tr.ReplayBuffer.load(tmp_path, view=after) as loaded:
        assert loaded.view == after
        assert_same(items(loaded), items(fresh))
        wanted = leaves(fresh)
        wanted = np.where((wanted > 0) & (known > 0), known, wanted)  # an item at the same row keeps its priority
        np.testing.assert_allclose(leaves(loaded), wanted, rtol=1e-6)
        assert loaded.stats().priority_total == pytest.approx(wanted.sum(), rel=1e-5)
        batch = loaded.sample(64)
        assert_same(flat(loaded.gather(batch["key"])), flat(batch))
        with loaded.writer() as writer:
            values = row_values(SEVERAL, 1000)
            observation, rest = parted(values, OBSERVED)
            key = writer.reset(**nested(observation))
            for _ in range(8):
                writer.step(**nested(observation), **nested(rest))
        assert key == 100
        loaded.save(tmp_path / "again")
    with tr.ReplayBuffer.load(tmp_path / "again") as again:
        assert again.view == after


def test_transitions_become_hindsights_and_back(tmp_path):
    fields = SEVERAL | {"desired": SEVERAL["pixels"]}
    observed = (*OBSERVED, "desired")
    sampler = tr.Prioritized(alpha=1.0)
    plain, goals = tr.Transitions(observation=observed), VIEWS[-1]
    for before, after in ((plain, goals), (goals, plain)):
        fresh = written(after, sampler, fields, observed)
        written(before, sampler, fields, observed).save(tmp_path)
        with tr.ReplayBuffer.load(tmp_path, view=after) as loaded:
            assert len(loaded.keys()) > 10
            assert_same(items(loaded), items(fresh))


def test_a_buffer_that_is_there_takes_rows_that_were_written_under_another_view(tmp_path):
    sampler = tr.Prioritized()
    written(VIEWS[0], sampler).save(tmp_path)
    fresh = written(VIEWS[1], sampler)
    with tr.ReplayBuffer(fresh.spec, CAPACITY, view=VIEWS[1], sampler=sampler) as buffer:
        buffer.restore(tmp_path)
        assert_same(items(buffer), items(fresh))


REFUSED = [
    (VIEWS[0], tr.Rows(), "those that begin an episode have no action and no reward; expected a view of episodes"),
    (
        VIEWS[0],
        tr.Transitions(observation="pixels"),
        "a row that begins an episode has these observations only; expected 'pixels', 'speed'",
    ),
    (
        VIEWS[0],
        tr.Transitions(observation=OBSERVED, terminated="truncated", truncated="terminated"),
        "their ends are marked already; expected 'terminated', 'truncated'",
    ),
    (VIEWS[0], tr.Transitions(observation="obs"), "observation 'obs' is no field of the spec"),
    (VIEWS[0], tr.Transitions(observation=OBSERVED, stack={"speed": 100}), "capacity is 60: one item of .* takes 101"),
]


@pytest.mark.parametrize(("before", "after", "reason"), REFUSED, ids=[reason[:40] for *_, reason in REFUSED])
def test_a_view_of_which_the_rows_lack_something_is_refused_with_the_reason(before, after, reason, tmp_path):
    written(before, tr.Uniform()).save(tmp_path)
    with pytest.raises(ValueError, match=reason):
        tr.ReplayBuffer.load(tmp_path, view=after)


def test_rows_by_themselves_make_no_episodes(tmp_path):
    with tr.ReplayBuffer(spec_of(SEVERAL), CAPACITY) as rows:
        rows.save(tmp_path)
    with pytest.raises(ValueError, match=r"were written under Rows\(\): they name no episode; expected Rows\(\)"):
        tr.ReplayBuffer.load(tmp_path, view=VIEWS[0])
    with (
        tr.ReplayBuffer(spec_of(SEVERAL), CAPACITY, view=VIEWS[0]) as linked,
        pytest.raises(tr.CheckpointError, match="they name no episode"),
    ):
        linked.restore(tmp_path)
    assert not list(tmp_path.glob("*unfinished*"))


def test_a_larger_ring_may_be_made_for_a_longer_item(tmp_path):
    written(VIEWS[0], tr.Uniform()).save(tmp_path)
    long = tr.Sequences(80, observation=OBSERVED)
    with tr.ReplayBuffer.load(tmp_path, 100, view=long) as loaded:
        assert (loaded.capacity, loaded.view) == (100, long)


@pytest.mark.parametrize("view", ["n_step=3", 3, tr.Transitions, {"n_step": 3}, np.zeros(3)], ids=str)
def test_what_is_no_view_or_no_sampler_is_a_type_error(view, tmp_path):
    written(VIEWS[0], tr.Uniform()).save(tmp_path)
    with pytest.raises(TypeError, match=r"view is .*: expected"):
        tr.ReplayBuffer.load(tmp_path, view=view)
    with pytest.raises(TypeError, match=r"sampler is .*: expected"):
        tr.ReplayBuffer.load(tmp_path, sampler=view)


def test_another_sampler_takes_over_the_td_errors(tmp_path):
    td = np.linspace(0.0, 20.0, 50)
    with tr.ReplayBuffer({"x": tr.Field()}, 50, sampler=tr.Prioritized(alpha=0.5, eps=0.01)) as buffer:
        buffer.update_priorities(buffer.extend(x=np.arange(50)), torch.from_numpy(td))
        buffer.save(tmp_path)
    with tr.ReplayBuffer.load(tmp_path, sampler=tr.Prioritized(alpha=1.0, eps=0.1)) as loaded:
        np.testing.assert_allclose(leaves(loaded), td + 0.1, rtol=1e-4)
    with tr.ReplayBuffer.load(tmp_path, sampler=tr.Uniform()) as loaded:
        assert loaded.sample(8)["probability"].tolist() == pytest.approx([1 / 50] * 8)


@pytest.mark.parametrize(("initial", "start"), [("max_seen", 3.0), ("max_held", 3.0), (0.5, 0.5)], ids=str)
def test_where_no_td_error_is_known_items_start_as_new_ones(initial, start, tmp_path):
    with tr.ReplayBuffer({"x": tr.Field()}, 4) as uniform:
        with uniform.writer() as writer:
            writer.append(x=0.0, priority=3.0)  # which the row keeps
            writer.append(x=1.0)
            writer.append(x=2.0)
        assert len(uniform) == 3
        uniform.save(tmp_path)
    sampler = tr.Prioritized(alpha=1.0, eps=1e-30, initial=initial)
    with tr.ReplayBuffer.load(tmp_path, sampler=sampler) as loaded:
        assert leaves(loaded).tolist() == [3.0, start, start, 0.0]

"""A linked buffer and the reference model driven side by side, by random writers, and compared."""

import math
from unittest.mock import patch

import numpy as np
import pytest
import reference_model as model
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from linked_rows import NESTED, PLAIN, SEVERAL, flat, nested, parted, row_values, spec_of, stacked

import torchreplay as tr

OBSERVATIONS = [(PLAIN, ("obs",)), (NESTED, ("obs",)), (SEVERAL, ("pixels", "speed"))]
ENDS = [(False, False)] * 9 + [(True, False), (False, True), (True, True)]
RESERVED = {"key", "weight", "probability"}

randoms = st.randoms(use_true_random=True)  # chance within a rule; what Hypothesis shrinks are the rules


class OpenWriter:
    """A writer of the buffer and what the model makes of it; `lanes` is None for one without lanes."""

    def __init__(self, buffer, ring, lanes, autoreset):
        self.lanes = lanes
        self.autoreset = autoreset
        self.real = buffer.writer(num_envs=lanes, autoreset=autoreset) if lanes else buffer.writer()
        self.modelled = model.Lanes(ring, lanes or 1, autoreset if lanes else "disabled")

    @property
    def waiting(self):
        """Which lanes must be reset before the next step."""
        return [self.modelled.must_reset(lane) for lane in range(self.lanes or 1)]

    def arranged(self, rows):
        """A list with a flat dict for each lane as the writer takes it."""
        return nested(stacked(rows) if self.lanes else rows[0])


class LinkedBufferAgainstModel(RuleBasedStateMachine):
    """Every rule does one thing to both; `compare` looks at everything that can be seen from outside.

    A subclass has `views(fields, observation)`: a strategy of views, each with what the model makes of it.
    """

    @initialize(
        data=st.data(),
        spec=st.sampled_from(OBSERVATIONS),
        room=st.integers(0, 30),
        alpha=st.sampled_from([None, 0.5, 1.0]),
        initial=st.sampled_from(["max_seen", "max_held", 0.0, 3.5]),
        one_row_at_a_time=st.booleans(),
        writers=st.integers(1, 4),
        chance=randoms,
    )
    def make(self, data, spec, room, alpha, initial, one_row_at_a_time, writers, chance):
        self.fields, self.observation = spec
        view, modelled = data.draw(type(self).views(self.fields, self.observation))
        capacity = modelled.span + room
        if initial == "max_held" and not one_row_at_a_time:  # what is held, and when, depends on the order of looks
            initial = "max_seen"
        sampler = tr.Uniform() if alpha is None else tr.Prioritized(alpha=alpha, eps=model.EPS, initial=initial)
        self.buffer = tr.ReplayBuffer(spec_of(self.fields), capacity, view=view, sampler=sampler, seed=0)
        self.ring = model.Ring(self.fields, capacity, modelled, alpha, initial)
        self.one_row_at_a_time = one_row_at_a_time  # then the order of looks is defined, and priorities may be large
        self.writers = [self._opened(chance) for _ in range(writers)]
        self.extended = model.Lanes(self.ring)  # the buffer's own writer for this thread
        self.number = self.sampled = 0
        self.compared = True

    def _opened(self, chance):
        lanes = None if self.one_row_at_a_time or chance.random() < 0.3 else chance.randint(1, 3)
        autoreset = chance.choice(["next_step", "same_step", "disabled"])
        return OpenWriter(self.buffer, self.ring, lanes, autoreset)

    def _new_rows(self, flags):
        """Values of a new row for each pair of flags, as two lists: observations and the rest."""
        rows = []
        for terminated, truncated in flags:
            self.number += 1
            rows.append(parted(row_values(self.fields, self.number, terminated, truncated), self.observation))
        return [list(part) for part in zip(*rows, strict=True)]

    def _priority(self, chance):
        """Eighths; only where the order of looks is defined above the largest priority, which is 1 at first."""
        return chance.randint(-400, 400) / 8 if self.one_row_at_a_time else chance.randint(0, 8) / 8

    @rule(chance=randoms)
    def replace_a_writer(self, chance):
        place = chance.randrange(len(self.writers))
        self.writers[place].real.close()
        self.writers[place] = self._opened(chance)

    @rule(chance=randoms, times=st.integers(1, 20))
    def play_one_writer(self, chance, times):
        writer = chance.choice(self.writers)
        for _ in range(times):
            self._play(chance, writer)

    @rule(chance=randoms, times=st.integers(1, 20))
    def play_all_writers(self, chance, times):
        for _ in range(times):
            self._play(chance, chance.choice(self.writers))

    def _play(self, chance, writer):
        if any(writer.waiting) or chance.random() < 0.04:
            self._reset(chance, writer)
        else:
            self._step(chance, writer)
        self.compared = False
        if self.one_row_at_a_time:
            assert len(self.buffer) == min(len(self.ring.rows), self.ring.capacity)
            self.ring.look()

    def _reset(self, chance, writer):
        observed, _ = self._new_rows([(False, False)] * len(writer.waiting))
        arguments = {}
        if writer.lanes and not all(writer.waiting):
            arguments["mask"] = np.array([waiting or chance.random() < 0.3 for waiting in writer.waiting])
        keys = writer.real.reset(**writer.arranged(observed), **arguments)
        assert_keys(keys, writer.modelled.reset(observed, **arguments), writer.lanes)

    def _step(self, chance, writer):
        lanes = len(writer.waiting)
        begins = [writer.modelled.begins(lane) for lane in range(lanes)]
        flags = [(False, False) if first else chance.choice(ENDS) for first in begins]
        observed, others = self._new_rows(flags)
        _without_reward(others, begins)
        each = [self._priority(chance) for _ in range(lanes)]
        given, priorities = chance.choice([(None, None), (each[0], each[:1] * lanes), (np.array(each), each)])
        given = given if writer.lanes or given is None else each[0]
        final, arguments = None, {}
        if writer.lanes and writer.autoreset == "same_step" and any(map(any, flags)):
            final, _ = self._new_rows(flags)
            final = [row if any(flag) else None for row, flag in zip(final, flags, strict=True)]
            arguments["final_obs"] = self._final(chance, final)
        keys = writer.real.step(**writer.arranged(others), **writer.arranged(observed), priority=given, **arguments)
        assert_keys(keys, writer.modelled.step(others, observed, final, priorities), writer.lanes)

    def _final(self, chance, final):
        """The last observations in one of the forms that `final_obs` may take."""
        form = chance.choice(["objects", "list", "arrays"])
        if form == "arrays":  # of all lanes; what lanes have that go on is ignored
            absent = next(row for row in final if row)
            columns = nested(stacked([absent if row is None else row for row in final]))
            return columns["obs"] if self.observation == ("obs",) else columns
        final = [None if row is None else nested(row) for row in final]
        if self.observation == ("obs",):
            final = [None if row is None else row["obs"] for row in final]
        if form == "list":
            return final
        array = np.empty(len(final), object)
        for lane, row in enumerate(final):
            array[lane] = row
        return array

    @precondition(lambda self: not self.one_row_at_a_time)
    @rule(chance=randoms, length=st.integers(1, 60), end=st.sampled_from(ENDS))
    def extend_by_an_episode(self, chance, length, end):
        observed, _ = self._new_rows([(False, False)] * (length + 1))
        _, others = self._new_rows([*[(False, False)] * (length - 1), end])
        each = [self._priority(chance) for _ in range(length)]
        keys = self.buffer.extend(**nested(stacked(observed)), **nested(stacked(others)), priority=np.array(each))
        expected = self.extended.reset(observed[:1])
        for t in range(length):
            expected += self.extended.step(others[t : t + 1], observed[t + 1 : t + 2], priorities=each[t : t + 1])
        assert_keys(keys, expected)
        self.compared = False

    @precondition(lambda self: not self.one_row_at_a_time)
    @rule(chance=randoms, length=st.integers(1, 9), lanes=st.integers(1, 3))
    def extend_by_a_block(self, chance, length, lanes):
        observed, _ = self._new_rows([(False, False)] * ((length + 1) * lanes))
        flags, begins = [], []
        for i in range(length * lanes):
            begins.append(i >= lanes and any(flags[i - lanes]))
            flags.append((False, False) if begins[i] else chance.choice(ENDS))
        _, others = self._new_rows(flags)
        _without_reward(others, begins)
        observed = [observed[i : i + lanes] for i in range(0, len(observed), lanes)]
        others = [others[i : i + lanes] for i in range(0, len(others), lanes)]
        fields = stacked([stacked(rows) for rows in observed]) | stacked([stacked(rows) for rows in others])
        keys = self.buffer.extend(**nested(fields))
        written = model.Lanes(self.ring, lanes, "next_step")
        expected = [written.reset(observed[0])]
        expected += [written.step(others[t], observed[t + 1]) for t in range(length)]
        assert_keys(keys, expected)
        self.compared = False

    @precondition(lambda self: self.ring.rows)
    @rule(chance=randoms, n=st.integers(0, 10))
    def update_priorities(self, chance, n):
        issued = len(self.ring.rows)
        keys = [chance.randrange(max(0, issued - 2 * self.ring.capacity), issued) for _ in range(n)]
        errors = [chance.randint(-400, 400) / 8 for _ in keys]
        self.buffer.update_priorities(torch.tensor(keys, dtype=torch.int64), torch.tensor(errors))
        self.ring.update(keys, errors)
        self.compared = False

    @precondition(lambda self: not self.compared)
    @rule(chance=randoms)
    def compare(self, chance):
        assert len(self.buffer) == min(len(self.ring.rows), self.ring.capacity)
        self.ring.look()
        self._compare_leaves()
        self._compare_stats()
        self._compare_items(chance)
        self._compare_draws()
        self.compared = True

    def _compare_leaves(self):
        slots = np.zeros(self.ring.capacity, np.int64)
        leaves = np.zeros(self.ring.capacity)
        for row in self.ring.seen:
            slots[row.key % self.ring.capacity] = row.key + 1
            leaves[row.key % self.ring.capacity] = self.ring.leaves.get(row.key, 0.0)
        assert self.buffer._segment.column(-2).tolist() == slots.tolist()
        found = self.buffer._segment.column(-1).double().numpy()
        assert ((found > 0) == (leaves > 0)).all()
        np.testing.assert_allclose(found, leaves, rtol=2e-6)

    def _compare_stats(self):
        stats, ring = self.buffer.stats(), self.ring
        assert (stats.size, stats.drawable) == (len(ring.seen), len(ring.leaves))
        assert stats.rows_written == len(ring.rows)
        assert stats.sampled == self.sampled
        assert (stats.stale_updates, stats.unready_updates, stats.redraws) == (ring.stale, ring.unready, 0)
        if self.one_row_at_a_time:
            assert stats.inserted == ring.inserted
        else:  # an item that is overwritten in the same call that completes it may count or not
            assert ring.inserted <= stats.inserted <= sum(map(ring.view.is_complete, ring.rows))
        if ring.alpha is not None:
            assert stats.updated == ring.updated
            np.testing.assert_allclose(stats.priority_max, ring.largest, rtol=1e-6)

    def _compare_items(self, chance):
        keys = [row.key for row in self.ring.rows[-3 * self.ring.capacity :]] * 2
        chance.shuffle(keys)
        batch = flat(self.buffer.gather(torch.tensor(keys, dtype=torch.int64)))
        items = self.ring.items()
        drawable = [key for key in keys if key in items]
        assert batch["key"].tolist() == drawable
        if drawable:
            assert_same_values(batch, stacked([items[key] for key in drawable]))

    def _compare_draws(self):
        """Stratified: with more strata than total / smallest leaf, every item owns at least one whole stratum."""
        leaves = self.ring.leaves
        if not leaves:
            self._refused_draw()
            return
        total, smallest = math.fsum(leaves.values()), min(leaves.values())
        strata = min(2 * math.ceil(total / smallest), 500)
        batch = self.buffer.sample(strata, beta=0.5)
        self.sampled += strata
        keys = batch["key"].tolist()
        assert set(keys) <= set(leaves) if strata == 500 else set(keys) == set(leaves)
        drawn = np.array([leaves[key] for key in keys])
        np.testing.assert_allclose(batch["probability"], drawn / total, rtol=2e-6)
        np.testing.assert_allclose(batch["weight"], (drawn / smallest) ** -0.5, rtol=2e-5)
        items = self.ring.items()
        assert_same_values(flat(batch), stacked([items[key] for key in keys]))

    def _refused_draw(self):
        with pytest.raises(RuntimeError) as refusal, patch("torchreplay.segment.waits.IN_VAIN", 0.0):
            self.buffer.sample(1)
        if refusal.type is not tr.WouldBlockForever:
            assert "the ring turned without completing an item" in str(refusal.value)
            assert len(self.ring.rows) - self.ring.completed >= self.ring.capacity

    def teardown(self):
        if hasattr(self, "writers"):
            for writer in self.writers:
                writer.real.close()
            self.buffer.close()


def _without_reward(rows, begins):
    for row, first in zip(rows, begins, strict=True):
        row["reward"] = row["reward"] * (not first)


def assert_keys(found, expected, lanes=0):
    if lanes is None:
        assert type(found) is int
        assert [found] == expected
    else:
        assert found.dtype == torch.int64
        assert found.tolist() == expected


def assert_same_values(batch, expected):
    """Name by name, byte by byte."""
    assert set(batch) - RESERVED == set(expected)
    for name, value in expected.items():
        found = batch[name]
        assert (name, found.dtype, found.shape) == (name, value.dtype, value.shape)
        assert np.ascontiguousarray(found).tobytes() == value.tobytes(), f"{name}: {found}, expected {value}"

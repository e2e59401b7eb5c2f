"""What the items of numbered episodes must look like, and which can be drawn, computed from nothing but the numbers."""

import abc

import numpy as np
import torch
from linked_rows import flat
from numbered_episodes import CUT, EPISODES, STEPS, WIDE, ending_of, length_of, numbers, successor, taken, wide

import torchreplay as tr

GAMMA = 0.75  # powers and sums of which are exact


def where(real, values):
    """Values with zeros where rows are not real; `real` has their leading dimensions."""
    return {
        name: np.where(real.reshape(real.shape + (1,) * (value.ndim - real.ndim)), value, np.zeros_like(value))
        for name, value in values.items()
    }


def is_wide(given, codes):
    """Whether wide values are those of rows with these codes, and zeros where the code is -1."""
    real = codes >= 0
    return np.array_equal(given[real], wide(codes[real], given.shape[-1])) and not given[~real].any()


class NumberedItems(abc.ABC):
    """Items of one view.

    Attributes:
        view: The buffer's.
        rows: Observations that an item shows.
    """

    @abc.abstractmethod
    def expected(self, anchors, batch):
        """The batch of the items anchored at rows with these codes; for wide fields the rows' codes, -1 for zeros."""

    @abc.abstractmethod
    def complete(self, anchors):
        """(whether they can be drawn at all, codes of the rows that must be held for it: -1 for none)."""

    @property
    def large_batch(self):
        """Items that take more than 8 MiB, which are copied in another way than fewer."""
        return (9 << 20) // (self.rows * 8 * WIDE)

    def assert_exact(self, batch, streams):
        """Every value of the batch is that of one item of one stream."""
        given = flat({name: value for name, value in batch.items() if name not in ("key", "weight", "probability")})
        anchors = self.anchors(given)
        assert ((anchors >= 0) & (anchors < streams * EPISODES * STEPS)).all(), "foreign row"
        assert self.complete(anchors)[0].all(), "an item that there is not"
        expected = self.expected(anchors, given)
        assert given.keys() == expected.keys()
        for name, value in expected.items():
            same = is_wide if name.endswith("/wide") else np.array_equal
            assert same(given[name], value), f"{name} is not that of the item"

    def anchors(self, given):
        return given["obs/code"]

    def drawable(self, held):
        """Of rows with the codes `held`, those that are anchors of complete items."""
        possible, needed = self.complete(held)
        return held[possible & (np.isin(needed, held) | (needed < 0)).all(1)]


class NumberedRows(NumberedItems):
    view = tr.Rows()
    rows = 1

    def complete(self, anchors):
        return np.ones_like(anchors, bool), anchors[:, None]

    def expected(self, anchors, batch):
        return {**flat({"obs": {**numbers(anchors), "wide": anchors}}), **taken(anchors)}


class NumberedTransitions(NumberedItems):
    def __init__(self, n_step, frames):
        self.view = tr.Transitions(n_step, GAMMA, stack={"obs/wide": frames})
        self.n_step = n_step
        self.frames = frames
        self.rows = 2 * frames

    def _steps(self, anchors):
        return np.minimum(self.n_step, length_of(anchors // STEPS) - anchors % STEPS)

    def complete(self, anchors):
        steps = self._steps(anchors)
        possible = (steps == self.n_step) | ((steps > 0) & (ending_of(anchors // STEPS) != CUT))
        offsets = np.arange(1 - self.frames, self.n_step + 1)
        inside = (offsets <= steps[:, None]) & (offsets >= -(anchors % STEPS)[:, None])
        return possible, np.where(inside, anchors[:, None] + offsets, -1)

    def _observed(self, codes):
        start = codes // STEPS * STEPS
        frames = np.maximum(codes[:, None] + np.arange(1 - self.frames, 1), start[:, None])
        return {**numbers(codes), "wide": frames}

    def expected(self, anchors, batch):
        steps = self._steps(anchors)
        last = taken(anchors + steps)
        k = np.arange(self.n_step)
        rewards = (anchors[:, None] + 1 + k) * GAMMA**k
        ends = {name: last[name] for name in ("terminated", "truncated")}
        return {
            **flat({"obs": self._observed(anchors), "next_obs": self._observed(anchors + steps)}),
            **taken(anchors + 1),
            **ends,
            "reward": np.where(k < steps[:, None], rewards, 0).sum(1),
            "discount": np.where(last["terminated"], 0, GAMMA**steps).astype(np.float32),
        }


class NumberedSequences(NumberedItems):
    def __init__(self, length, stride, burn_in, initial=()):
        self.view = tr.Sequences(length, stride, burn_in, initial)
        self.stride, self.burn_in, self.steps = stride, burn_in, burn_in + length
        self.initial = initial
        self.rows = self.steps + 1

    def anchors(self, given):
        return given["obs/code"][:, 0]

    def _left(self, anchors):
        return length_of(anchors // STEPS) - anchors % STEPS

    def complete(self, anchors):
        left = self._left(anchors)
        ended = (ending_of(anchors // STEPS) != CUT) & (left > self.burn_in)
        possible = (anchors % STEPS % self.stride == 0) & ((left >= self.steps) | ended)
        return possible, self._rows(anchors)

    def _rows(self, anchors):
        """The codes of the window's rows `[B, T + 1]`, -1 beyond the episode's end."""
        offsets = np.arange(self.steps + 1)
        return np.where(offsets <= self._left(anchors)[:, None], anchors[:, None] + offsets, -1)

    def expected(self, anchors, batch):
        rows = self._rows(anchors)
        real = rows >= 0
        steps = real[:, 1:] & (rows[:, 1:] % STEPS > 0)
        values = where(steps, taken(rows[:, 1:]))
        for name in self.initial:
            values[name] = values[name][:, 0]
        first = real & (rows % STEPS == 0)
        observations = {**where(real, numbers(rows)), "wide": rows}
        return {**flat({"obs": observations}), **values, "mask": steps, "is_first": first[:, :-1]}


class NumberedSequencesAcrossEpisodes(NumberedSequences):
    def __init__(self, length):
        super().__init__(length, 1, 0)
        self.view = tr.Sequences(length, across_episodes=True)

    def complete(self, anchors):
        return np.ones_like(anchors, bool), self._rows(anchors)

    def _rows(self, anchors):
        rows = [anchors]
        for _ in range(self.steps):
            rows.append(successor(rows[-1]))
        return np.stack(rows, 1)


def hindsight_reward(achieved, desired):
    return (3 * achieved[:, 0] - desired[:, 1]).double()


def hindsight_terminated(achieved, desired):
    return achieved[:, 0] == desired[:, 0]


class NumberedHindsight(NumberedItems):
    def __init__(self, strategy):
        self.strategy = strategy
        self.view = tr.Hindsight(
            hindsight_reward,
            "obs/achieved",
            "obs/desired",
            strategy,
            compute_terminated=hindsight_terminated,
            gamma=GAMMA,
        )
        self.rows = 2

    def complete(self, anchors):
        left = length_of(anchors // STEPS) - anchors % STEPS
        offsets = np.arange(left.max(initial=0) + 1)
        possible = (left > 0) & (ending_of(anchors // STEPS) != CUT)
        return possible, np.where(offsets <= left[:, None], anchors[:, None] + offsets, -1)

    def expected(self, anchors, batch):
        number = anchors // STEPS
        relabelled, goals = batch["relabelled"], batch["obs/desired"]
        reached = goals[:, 0]  # the row whose achieved goal it is
        earliest = anchors + 1 if self.strategy == "future" else number * STEPS + 1
        good = (reached >= earliest) & (reached <= number * STEPS + length_of(number))
        assert good[relabelled].all(), "a goal of another episode, or of the past"
        observations, after = ({**numbers(codes), "wide": codes} for codes in (anchors, anchors + 1))
        for values in (observations, after):
            values["desired"] = np.where(relabelled[:, None], numbers(reached)["achieved"], values["desired"])
        values = taken(anchors + 1)
        achieved, desired = torch.from_numpy(after["achieved"]), torch.from_numpy(after["desired"])
        new = {"reward": hindsight_reward(achieved, desired), "terminated": hindsight_terminated(achieved, desired)}
        for name, value in new.items():
            values[name] = np.where(relabelled, value.numpy(), values[name])
        discount = np.where(values["terminated"], 0, GAMMA).astype(np.float32)
        expected = flat({"obs": observations, "next_obs": after})
        return {**expected, **values, "relabelled": relabelled, "discount": discount}


VIEWS = {
    "transitions": NumberedTransitions(1, 1),
    "3 steps of 4 frames": NumberedTransitions(3, 4),
    "sequences": NumberedSequences(8, 4, 2, initial=("bytes",)),
    "sequences across episodes": NumberedSequencesAcrossEpisodes(8),
    "hindsight": NumberedHindsight("future"),
}


def held_codes(buffer):
    """The codes of the rows that the ring holds."""
    rows = len(buffer)  # looks at what was written
    held = buffer._segment.column(-2).numpy() > 0  # key + 1 of each slot's row
    assert held.sum() == rows
    stored = flat(buffer.storage)
    codes = stored["obs/code"][held]
    assert is_wide(stored["obs/wide"][held], codes), "torn row"
    return codes


def assert_exactly_the_complete_items_can_be_drawn(buffer, items, streams):
    """While nobody writes: what can be drawn follows from the rows that the ring holds. Returns the items' keys."""
    codes = held_codes(buffer)
    key1 = buffer._segment.column(-2)
    batch = buffer.gather(key1[key1 > 0] - 1)
    items.assert_exact(batch, streams)
    assert sorted(items.anchors(flat(batch))) == sorted(items.drawable(codes))
    assert buffer.stats().drawable == len(batch["key"])
    return batch["key"]

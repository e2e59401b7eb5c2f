"""The buffer against a model in plain Python: after any calls in any order, both hold and count the same."""

import math

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import torchreplay as tr

EPS = 1e-6
LARGEST_RAW = float(np.finfo(np.float32).max)  # raw priorities are remembered in float32

errors = st.one_of(
    st.floats(-20, 20, width=32),
    st.sampled_from([0.0, 1e-30, -1e-3, 1.0, 5e3]),
)


class Model:
    """What `ReplayBuffer` documents for `view=Rows()` and one writer, in the plainest way."""

    def __init__(self, capacity, prioritized, alpha, eps):
        self.capacity = capacity
        self.prioritized = prioritized
        self.alpha = alpha
        self.eps = eps
        self.rows = {}  # key -> the value written
        self.leaves = {}  # key -> priority
        self.issued = 0
        self.largest = 1.0
        self.unseen = {}  # priorities of rows that no learner has looked at yet
        self.updated = self.stale = self.sampled = 0
        self.looked_at, self.drawn = set(), set()  # keys: of items that became drawable, and of those drawn
        self.evicted_unsampled = 0
        self.change = 0.0  # of leaves, by updates

    def leaf(self, raw):
        """(|raw| + eps)^alpha, Schaul et al. 2016, section 3.3."""
        return (abs(raw) + self.eps) ** self.alpha if self.prioritized else 1.0

    def append(self, value, priority):
        key = self.issued
        self.issued += 1
        self.rows[key] = value
        if priority is not None:
            self.unseen[key] = priority
        self.leaves[key] = self.leaf(self.largest if priority is None else priority)
        self.rows.pop(key - self.capacity, None)
        self.leaves.pop(key - self.capacity, None)
        return key

    def look(self):
        """A row overwritten before anyone looked never was: its priority is not the largest seen."""
        self.evicted_unsampled += len(self.looked_at - self.rows.keys() - self.drawn)
        self.looked_at = set(self.rows)
        for key, priority in self.unseen.items():
            if key in self.rows:
                self._raise_largest(priority)
        self.unseen.clear()

    def _raise_largest(self, priority):
        self.largest = max(self.largest, min(abs(priority), LARGEST_RAW))

    def update(self, keys, errors):
        before = dict(self.leaves)
        for key, error in zip(keys, errors, strict=True):
            if key in self.rows:
                self.change += abs(self.leaf(error) - before[key])
                self.leaves[key] = self.leaf(error)
                self._raise_largest(error)
                self.updated += 1
            else:
                self.stale += 1

    @property
    def total(self):
        return math.fsum(self.leaves.values())


class BufferAgainstModel(RuleBasedStateMachine):
    """Every rule does one thing to both; the invariants compare all that can be seen from outside."""

    @initialize(
        capacity=st.integers(1, 9),
        prioritized=st.booleans(),
        alpha=st.sampled_from([0.0, 0.5, 0.6, 1.0]),
        weights=st.sampled_from(["buffer", "batch", "none"]),
        scale=st.sampled_from([1.0, 1.0, 1e12, 1e25]),
        seed=st.integers(0, 2**64 - 1),
    )
    def make(self, capacity, prioritized, alpha, weights, scale, seed):
        spec = {"value": tr.Field((), torch.int64), "pair": {"low": tr.Field((2,), torch.float64)}}
        self.weights = weights
        self.scale, eps = scale, EPS * scale
        proportional = tr.Prioritized(alpha=alpha, eps=eps, weights=weights, initial="max_seen")
        sampler = proportional if prioritized else tr.Uniform()
        self.buffer = tr.ReplayBuffer(spec, capacity, sampler=sampler, seed=seed)
        self.model = Model(capacity, prioritized, alpha, eps)
        self.writer = self.buffer.writer()
        self.next_value = 1

    def _new_values(self, n):
        values = np.arange(self.next_value, self.next_value + n)
        self.next_value += n
        return values

    @rule(priority=st.none() | errors)
    def append(self, priority):
        priority = None if priority is None else priority * self.scale
        value = int(self._new_values(1)[0])
        key = self.writer.append(value=value, pair={"low": np.array([value, -value])}, priority=priority)
        assert key == self.model.append(value, priority)
        assert len(self.buffer) == len(self.model.rows)
        self.model.look()

    @rule(
        n=st.integers(0, 25), given=st.sampled_from(["none", "one", "each"]), data=st.data(), own_writer=st.booleans()
    )
    def extend(self, n, given, data, own_writer):
        values = self._new_values(n)
        drawn = data.draw(st.lists(errors, min_size=n, max_size=n)) if given == "each" else None
        each = None if drawn is None else np.array(drawn) * self.scale
        one = data.draw(errors) * self.scale if given == "one" else None
        target = self.buffer if own_writer else self.writer
        keys = target.extend(
            value=values, pair={"low": np.stack([values, -values], 1)}, priority=one if each is None else each
        )
        expected = [
            self.model.append(int(value), one if each is None else float(each[i])) for i, value in enumerate(values)
        ]
        assert keys.tolist() == expected
        assert keys.dtype == torch.int64
        assert len(self.buffer) == len(self.model.rows)
        self.model.look()

    @rule(data=st.data(), dtype=st.sampled_from([torch.float64, torch.float32]), as_list=st.booleans())
    def update(self, data, dtype, as_list):
        if not self.model.issued:
            return
        recent = st.integers(max(0, self.model.issued - 2 * self.model.capacity), self.model.issued - 1)
        keys = data.draw(st.lists(recent, max_size=12))
        td = torch.tensor(data.draw(st.lists(errors, min_size=len(keys), max_size=len(keys))), dtype=torch.float64)
        td = (td * self.scale).to(dtype)
        self.buffer.update_priorities(keys if as_list and keys else torch.tensor(keys, dtype=torch.int64), td)
        self.model.update(keys, td.tolist())

    @rule(n=st.integers(1, 40), beta=st.sampled_from([None, 0.0, 0.4, 1.0]), feedback=st.booleans())
    def sample(self, n, beta, feedback):
        if not self.model.rows:
            return
        batch = self.buffer.sample(n, beta=beta)
        self.model.sampled += n
        keys = batch["key"].tolist()
        self.model.drawn.update(keys)
        assert batch["value"].tolist() == [self.model.rows[key] for key in keys]
        value = batch["value"].double()
        assert torch.equal(batch["pair"]["low"], torch.stack([value, -value], 1))
        leaves = torch.tensor([self.model.leaves[key] for key in keys], dtype=torch.float64)
        probability = leaves / self.model.total
        torch.testing.assert_close(batch["probability"].double(), probability, rtol=2e-6, atol=1e-12)
        if self.model.prioritized:
            exponent = 0.4 if beta is None else beta
            torch.testing.assert_close(
                batch["weight"].double(), self._weights(probability, exponent), rtol=2e-5, atol=0.0
            )
        else:
            assert batch["weight"].eq(1).all()
        if feedback:
            td = torch.linspace(-3, 3, n) * self.scale
            self.buffer.update_priorities(batch, td)
            self.model.update(keys, td.tolist())

    def _weights(self, probability, beta):
        """w_i = (N P(i))^-beta, over its maximum: Schaul et al. 2016, section 3.4."""
        n = len(self.model.rows)
        weight = (n * probability) ** -beta
        if self.weights == "buffer":
            smallest = min(self.model.leaves.values()) / self.model.total
            return weight / (n * smallest) ** -beta
        return weight / weight.max() if self.weights == "batch" else weight

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "buffer"):
            return
        model, stats = self.model, self.buffer.stats()
        assert len(self.buffer) == len(model.rows) == stats.size == stats.drawable
        assert stats.rows_written == model.issued
        assert (stats.sampled, stats.stale_updates, stats.unready_updates) == (model.sampled, model.stale, 0)
        assert (stats.redraws, stats.evicted_unsampled) == (0, model.evicted_unsampled)
        if model.prioritized:
            assert stats.updated == model.updated
            np.testing.assert_allclose(stats.priority_change * model.updated, model.change, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(stats.priority_total, model.total, rtol=2e-6)
            smallest = min(model.leaves.values(), default=0.0)
            np.testing.assert_allclose(model.leaf(stats.priority_min) if smallest else 0.0, smallest, rtol=2e-6)
            np.testing.assert_allclose(stats.priority_max, model.largest, rtol=1e-6)

    @invariant()
    def storage_holds_the_newest_rows(self):
        if not hasattr(self, "buffer"):
            return
        for key, value in self.model.rows.items():
            assert self.buffer.storage["value"][key % self.model.capacity] == value

    @invariant()
    def exactly_the_held_rows_are_drawn(self):
        # Stratified: with more strata than total / smallest leaf, every item owns at least one whole stratum.
        if not getattr(self, "model", None) or not self.model.rows or self.model.issued % 4:  # some are never drawn
            return
        strata = 2 * math.ceil(self.model.total / min(self.model.leaves.values()))
        if strata > 2000:
            return
        batch = self.buffer.sample(strata)
        self.model.sampled += strata
        self.model.drawn.update(self.model.rows)
        assert set(batch["key"].tolist()) == set(self.model.rows)

    def teardown(self):
        if hasattr(self, "buffer"):
            self.writer.close()
            self.buffer.close()


BufferAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class TestBufferAgainstModel(BufferAgainstModel.TestCase):
    """Collected by pytest."""

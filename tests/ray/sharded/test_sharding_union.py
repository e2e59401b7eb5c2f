"""Drawing from several shards as if they were one: P(i) = p_i^alpha / sum over all of them, also when shards change
between the learner's last totals and its draw."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_shards import LocalShards
from scipy import stats

import torchreplay as tr
from torchreplay import _C
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.ray.sharded.batch_block import Layout, RecycledMemory
from torchreplay.ray.sharded.shard_keys import (
    KEY_BITS,
    MAX_SHARDS,
    pack,
    unpack,
)
from torchreplay.ray.sharded.sharded_sampler import rows_of
from torchreplay.ray.sharded.stats import merged_histograms
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.spec import flatten

ALPHA, EPS = 0.6, 1e-6
FALSE_ALARM = 1e-6  # of each chi-square test; the seeds are fixed, so a pass stays a pass


@pytest.fixture
def make():
    made = []

    def make_shards(sizes, sampler, here=None, **options):
        made.append(LocalShards(sizes, sampler, here, **options))
        return made[-1]

    yield make_shards
    for shards in made:
        shards.close()


def prioritized(**options):
    return tr.Prioritized(alpha=ALPHA, eps=EPS, **options)


def spread(shards, seed=1):
    """Gives every item a TD error from six decades, and returns the leaves that equation 1 asks for, by shard."""
    chance, leaves = np.random.default_rng(seed), []
    for number, keys in enumerate(shards.keys):
        td = 10.0 ** chance.uniform(-3, 3, 0 if keys is None else len(keys))
        if keys is not None:
            shards.buffer(number).update_priorities(keys, td)
        leaves.append((td + EPS) ** ALPHA)
    return leaves


def assert_follows(observed, expected):
    """Chi-square of counts; draws are stratified, so that counts vary at most as much as those of independent ones."""
    order = np.argsort(expected)
    groups = np.minimum((np.cumsum(expected[order]) / 60).astype(int), int(expected.sum() / 60) - 1)
    seen, due = (np.bincount(groups, weights=values[order]) for values in (observed, expected))
    seen, due = seen[due > 0], due[due > 0]
    assert len(due) > 5
    assert stats.chi2.sf(((seen - due) ** 2 / due).sum(), len(due) - 1) > FALSE_ALARM


# The arithmetic.


ROWS = {"a": {"b": tr.Field((3, 2), torch.float64), "c": tr.Field((), torch.bool)}, "d": tr.Field((5,), torch.bfloat16)}


def candidates_of(layout, n, total, first, chance):
    """A block of `n` items of random bytes, whose keys count from `first` on."""
    block = layout.new_block(n).random_(0, 2, generator=chance)
    batch = layout.batch_over(block, n)
    batch["key"][:] = torch.arange(first, first + n)
    batch["probability"][:] = 1 / n
    return block, batch, TreeSummary(total, n, total / n)


@given(st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 9), unique=True))
def test_items_found_stand_where_their_keys_were_asked_for(asked, found):
    rows = rows_of(np.array(asked, np.int64), np.array(found, np.int64))
    assert [found[row] for row in rows.tolist()] == [key for key in asked if key in found]


totals = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e9)), min_size=1, max_size=8).filter(any)


def most_of(totals, n):
    """How many of n items may come from each: n strata of which each that a part touches may lie in it."""
    return [min(n, int(n * total / sum(totals)) + 2) if total else 0 for total in totals]


@given(totals, st.integers(1, 600))
def test_shards_that_did_not_change_are_asked_for_enough(parts, n):
    assert _C.UnionDraw.most(parts, n) == most_of(parts, n)
    for slack in (0.0, 1 / 64, 1.0):
        asked = _C.UnionDraw.asked(parts, n, slack)
        assert all(most <= count <= n for most, count in zip(most_of(parts, n), asked, strict=True))


def test_counts_are_the_shards_shares_on_average():
    totals, n, batches = np.array([1e-3, 7.3, 0.0, 92.7]), 10, 20_000
    layout, chance = Layout(flatten({"x": tr.Field()})), torch.Generator()
    parts = [candidates_of(layout, n, total, 100 * k, chance) for k, total in enumerate(totals.tolist())]
    batch, mean = layout.new_batch(n), np.zeros(4)
    for step in range(batches):
        draw = _C.UnionDraw(n, 0.0, "equal", 5, 0, step, layout.tensors(batch))
        assert draw.make([(tree, n, block, 0) for block, _, tree in parts])
        mean += np.bincount(batch["key"].numpy() // 100, minlength=4) / batches
    # A stratum that holds a border varies by at most 1/4, and a part has two borders: 5 standard errors.
    assert (np.abs(mean - n * totals / totals.sum()) <= 5 * np.sqrt(0.5 / batches)).all()
    assert mean[2] == 0


def test_keys_carry_the_shard_and_stay_positive():
    own = np.array([0, 1, (1 << KEY_BITS) - 1])
    for number in (0, 1, MAX_SHARDS - 1):
        keys = own + pack(number)
        assert (keys >= 0).all()
        numbers, back = unpack(keys)
        assert (numbers == number).all()
        assert (back == own).all()


def test_all_items_that_were_found_make_a_batch_with_every_byte():
    layout, chance = Layout(flatten(ROWS)), torch.Generator().manual_seed(1)
    parts = [candidates_of(layout, n, total, 10 * n, chance) for n, total in ((4, 2.0), (1, 5.0), (7, 0.0))]
    batch = layout.new_batch(12)
    draw = _C.UnionDraw(12, 0.5, "batch", 1, 2, 3, layout.tensors(batch))
    trees = [parts[0][2], parts[1][2], TreeSummary(0.0, 0, 0.0)]  # those of the last one have gone since
    found = [(tree, n, block, 0) for tree, n, (block, _, _) in zip(trees, (4, 1, 7), parts, strict=True)]
    draw.take_all([*found, (TreeSummary(9.0, 2, 1.0), 0, None, 0)])
    sources = [layout.tensors(part) for _, part, _ in parts]
    for found, *each in list(zip(layout.tensors(batch), *sources, strict=True))[:-2]:
        assert torch.equal(found.view(torch.uint8), torch.cat(each).view(torch.uint8))
    probability = np.repeat([2 / 16 / 4, 5 / 16, 0.0], (4, 1, 7))
    np.testing.assert_allclose(batch["probability"].numpy(), probability, rtol=1e-6)
    expected = np.repeat([1.0, (5 / 16 / (2 / 16 / 4)) ** -0.5, 0.0], (4, 1, 7))
    np.testing.assert_allclose(batch["weight"].numpy(), expected, rtol=1e-6)
    assert draw.drawn_from == pytest.approx((16.0, 7, 0.5, 0.5))
    with pytest.raises(ValueError, match="the batch is of another number of items"):
        draw.take_all([(parts[0][2], 4, parts[0][0], 0)])


TOKENS = {
    "tokens": tr.Ragged(torch.int32),
    "logprob": tr.Ragged(torch.float32, like="tokens"),
    "points": tr.Ragged(torch.float16, (3,)),
}


def values_of(home, index):
    """The values of row `index` of shard `home`: every eleventh row has none, and no two rows have the same."""
    chance = np.random.default_rng([home, index])
    length = int(chance.integers(1, 40)) if index % 11 else 0
    return {
        "tokens": chance.integers(-(2**31), 2**31, length).astype(np.int32),
        "logprob": chance.random(length, np.float32),
        "points": chance.random((int(chance.integers(0, 4)), 3)).astype(np.float16),
    }


@pytest.mark.parametrize("here", [None, 0, 2])
@pytest.mark.parametrize("sizes", [[50, 3, 200], [1, 0, 7]])
def test_values_of_any_length_of_several_shards_make_one_batch_as_one_buffer_does(make, sizes, here):
    shards = make(sizes, prioritized(), here, ragged=(TOKENS, 1 << 20, values_of))
    leaves = spread(shards)
    total = sum(each.sum() for each in leaves)
    local = shards.buffer(0).sample(1)
    for step in range(6):
        batch = shards.batch(64, step)
        rows = list(zip(batch["home"].tolist(), batch["index"].tolist(), strict=True))
        assert len(rows) == 64
        numbers, own = unpack(batch["key"].numpy())
        assert list(zip(numbers.tolist(), own.tolist(), strict=True)) == rows
        expected = [leaves[home][index] / total for home, index in rows]
        np.testing.assert_allclose(batch["probability"].numpy(), expected, rtol=1e-5)
        assert list(batch) == list(local)
        assert batch.offsets("tokens") is batch.offsets("logprob")
        for name, column in TOKENS.items():
            values = [values_of(home, index)[name] for home, index in rows]
            assert batch[name].dtype == column.dtype
            assert batch.lengths(name).tolist() == [len(value) for value in values]
            ends = batch.offsets(name)
            assert (ends.dtype, ends.tolist()) == (torch.int32, np.cumsum([0, *map(len, values)]).tolist())
            assert np.array_equal(batch[name].numpy(), np.concatenate(values))
        assert batch.padded("tokens").shape == (64, batch.lengths("tokens").max())
        assert batch.nested("tokens").shape[0] == 64


def test_within_a_budget_stay_the_first_items_of_a_random_order_and_always_one(make):
    """Every item is as likely to stay as others of its length, whichever shard it is of."""
    sizes = [60, 20]
    shards = make(sizes, tr.Uniform(), ragged=({"text": TOKENS["tokens"]}, 1 << 20, lambda *_: {"text": [1, 2, 3]}))
    counts = np.zeros(80)
    for step in range(400):
        batch = shards.batch(32, step, budget={"text": 20})
        assert batch.batch_size == 6, "of three elements each"
        assert batch["text"].shape == (18,)
        np.testing.assert_allclose(batch["probability"].numpy(), 1 / 80, rtol=1e-6)
        counts += np.bincount(batch["home"] * 60 + batch["index"], minlength=80)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM
    assert shards.batch(32, 0, budget={"text": 2}).batch_size == 1
    assert shards.batch(32, 0, budget={"text": 96}).batch_size == 32
    assert shards.batch(32, 0, budget={}).batch_size == 32


def test_items_with_values_of_any_length_are_picked_in_any_order():
    view = tr.Sequences(3, stride=1)
    flag = tr.Field((), torch.bool)
    spec = {"obs": {"text": tr.Ragged(torch.uint8)}, "terminated": flag, "truncated": flag, "a": tr.Ragged(torch.int64)}
    buffer = tr.ReplayBuffer(spec, 100, view=view, ragged_bytes=1 << 16)
    with buffer.writer() as writer:
        writer.reset(obs={"text": b"begin"})
        for step in range(9):
            writer.step(obs={"text": b"x" * step}, a=np.arange(step % 3), terminated=False, truncated=False)
    layout = Layout(buffer._config.outputs())
    items = [buffer.gather([key]) for key in buffer.keys().tolist()]
    which = np.array([2, 0, 0, 3, 4, 5, 1], dtype=np.int64)
    whole = buffer.gather(buffer.keys())
    alone = [(layout.packed(items[i]), np.array([0])) for i in which]
    for batch in (layout.picked(whole, which), layout.with_values(layout.fixed(whole, which), alone)):
        assert list(batch) == list(whole)
        assert batch.lengths("obs/text").shape == (7, 4)
        for at, i in enumerate(which):
            assert batch["key"][at] == items[i]["key"][0]
            for name in ("obs/text", "a"):
                assert torch.equal(batch.lengths(name)[at], items[i].lengths(name)[0])
                steps = batch.lengths(name).shape[1]
                begin, end = batch.offsets(name)[at * steps], batch.offsets(name)[(at + 1) * steps]
                assert torch.equal(batch._leaf(name)[begin:end], items[i]._leaf(name))
    none = layout.picked(whole, which[:0])
    assert (none["key"].shape, none["a"].shape, none.offsets("a").tolist()) == ((0,), (0,), [0])


def test_more_elements_than_offsets_can_say_are_refused(monkeypatch):
    monkeypatch.setattr("torchreplay.ray.sharded.batch_block.MOST_ELEMENTS", 5)
    buffer = tr.ReplayBuffer({"tokens": tr.Ragged(torch.int32)}, 10, ragged_bytes=1 << 14)
    batch = buffer.gather(buffer.extend(tokens=[[1, 2, 3], [4, 5, 6]]))
    layout = Layout(buffer._config.outputs())
    assert layout.picked(batch, np.array([0]))["tokens"].tolist() == [1, 2, 3]
    with pytest.raises(OverflowError, match="a batch of 2 items has 6 elements of a ragged field"):
        layout.picked(batch, np.array([0, 1]))


@given(
    st.integers(1, 60),
    st.lists(st.floats(0.01, 100), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_the_native_core_makes_a_batch_of_whole_items_in_the_shards_shares(n, totals, here, step):
    layout, chance = Layout(flatten(ROWS)), torch.Generator().manual_seed(step)
    parts = [candidates_of(layout, n, total, 1000 * k, chance) for k, total in enumerate(totals)]
    batch, total = layout.new_batch(n), sum(totals)
    draw = _C.UnionDraw(n, 0.7, "buffer", 7, 0, step, layout.tensors(batch))
    if here:  # the first one has its items in the batch
        for target, source in zip(layout.tensors(batch), layout.tensors(parts[0][1]), strict=True):
            target[:] = source
    given_ones = [(tree, n, None if here and k == 0 else block, 0) for k, (block, _, tree) in enumerate(parts)]
    assert draw.make(given_ones)
    keys = batch["key"].numpy()
    assert len(set(keys.tolist())) == n
    counts = np.bincount(keys // 1000, minlength=len(parts))
    assert (counts[keys // 1000] > 0).all()
    assert (np.diff(keys // 1000) >= 0).all(), "items of one shard lie together"
    for part, count, most in zip(totals, counts, most_of(totals, n), strict=True):
        assert count <= most
        assert abs(count - n * part / total) < 2 + 1e-6
    for at, key in enumerate(keys.tolist()):
        source = parts[key // 1000][1]
        for target, values in zip(layout.tensors(batch)[:-3], layout.tensors(source)[:-3], strict=True):
            assert torch.equal(target[at].view(torch.uint8), values[key % 1000].view(torch.uint8))
    taken = [np.frombuffer(which, np.int64) + 1000 * k for k, which in enumerate(draw.chosen)]
    assert sorted(keys.tolist()) == np.concatenate(taken).tolist()
    if not here:
        assert keys.tolist() == np.concatenate(taken).tolist(), "the values of these items go with them"
    share = np.array(totals)[keys // 1000] / total
    np.testing.assert_allclose(batch["probability"].numpy(), share / n, rtol=1e-6)
    smallest = min(totals) / n
    expected = (share / n / (smallest / total)) ** -0.7  # over the largest of the union, that of its smallest leaf
    np.testing.assert_allclose(batch["weight"].numpy(), expected, rtol=1e-6)
    assert draw.drawn_from == pytest.approx((total, n * len(totals), smallest, 0.7))


@pytest.mark.parametrize("weights", ["buffer", "batch", "none", "equal"])
def test_the_native_core_weighs_by_the_published_formula(weights):
    layout, chance = Layout(flatten(ROWS)), torch.Generator().manual_seed(3)
    leaves, totals = [np.array([0.5, 2.0, 8.0, 1.0]), np.array([0.25, 4.0, 4.0, 0.75])], [11.5, 9.0]
    parts = []
    for k, each in enumerate(leaves):
        block, batch, _ = candidates_of(layout, 4, totals[k], 10 * k, chance)
        batch["probability"][:] = torch.from_numpy(each / totals[k])
        parts.append((TreeSummary(totals[k], 4, each.min()), 4, block, 1 << 48))
    batch = layout.new_batch(4)
    assert _C.UnionDraw(4, 0.5, weights, 1, 2, 3, layout.tensors(batch)).make(parts)
    own = batch["key"].numpy() - (1 << 48)
    probability = np.concatenate(leaves)[own // 10 * 4 + own % 10] / 20.5
    np.testing.assert_allclose(batch["probability"].numpy(), probability, rtol=1e-6)
    raw = (8 * probability) ** -0.5
    largest = {"buffer": (8 * 0.25 / 20.5) ** -0.5, "batch": raw.max(), "none": 1.0}
    expected = np.ones(4) if weights == "equal" else raw / largest[weights]
    np.testing.assert_allclose(batch["weight"].numpy(), expected, rtol=1e-6)


def test_the_native_core_takes_each_candidate_equally_often():
    layout = Layout(flatten({"x": tr.Field()}))
    one, other = (candidates_of(layout, 20, 10.0, 100 * k, torch.Generator()) for k in range(2))
    batch, counts = layout.new_batch(20), np.zeros(200)
    for step in range(4000):
        draw = _C.UnionDraw(20, 0.0, "equal", 5, 0, step, layout.tensors(batch))
        assert draw.make([(one[2], 20, one[0], 0), (other[2], 20, other[0], 0)])
        counts[batch["key"].numpy()] += 1
    taken = np.concatenate([counts[:20], counts[100:120]])
    assert stats.chisquare(taken).pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (((1.0, 2, 0.5), 4, torch.zeros(256, dtype=torch.uint8), 0), "has not the items"),
        (((1.0, 2, 0.5), 4, torch.zeros(4096), 0), "has not the items"),
        (((1.0, 2, 0.5), -1, torch.zeros(4096, dtype=torch.uint8), 0), "has not the items"),
    ],
)
def test_the_native_core_refuses_what_are_no_candidates(part, why):
    layout = Layout(flatten({"x": tr.Field()}))
    draw = _C.UnionDraw(4, 0.0, "equal", 5, 0, 0, layout.tensors(layout.new_batch(4)))
    with pytest.raises(ValueError, match=why):
        draw.make([part])
    assert not draw.make([])
    with pytest.raises(ValueError, match="not contiguous, or has not one value for each item"):
        _C.UnionDraw(5, 0.0, "equal", 5, 0, 0, layout.tensors(layout.new_batch(4)))


def test_memory_is_used_again_only_when_no_tensor_is_left_over_it():
    memory = RecycledMemory()
    block = memory.take(1 << 20)
    place, part = block.data_ptr(), block[5:7].view(2, 1)
    block.fill_(3)
    del block
    other = memory.take(1 << 20)
    assert other.data_ptr() != place
    other.fill_(4)
    assert part.tolist() == [[3], [3]]
    del part
    assert memory.take(1 << 20).data_ptr() == place
    assert memory.take(100).shape == (100,)


def test_histograms_of_shards_add_up():
    chance = np.random.default_rng(2)
    values = [10 ** chance.uniform(-3, 0, 500), 10 ** chance.uniform(-1, 2, 900)]
    each = []
    for x in values:
        edges = np.logspace(np.log10(x.min()), np.log10(x.max()), 201)
        counts = np.histogram(x, edges)[0]
        counts[-1] += len(x) - counts.sum()  # the largest, if rounding has put it outside
        ages = {"age": torch.tensor([len(x)] + [0] * 199), "age_edges": torch.linspace(0, 10, 201)}
        each.append({"priority": torch.tensor(counts), "priority_edges": torch.tensor(edges), **ages})
    merged = merged_histograms(each, 10)
    assert int(merged["priority"].sum()) == int(merged["age"].sum()) == 1400
    expected = np.histogram(np.concatenate(values), merged["priority_edges"].numpy())[0]
    # A fine bin, of which a coarse one has 25 and more, is on one side of an edge or the other as a whole.
    assert np.abs(merged["priority"].numpy() - expected).max() <= 40


# Batches.


@pytest.mark.parametrize("here", [None, 0, 2])
def test_the_union_is_drawn_from_in_proportion_whatever_the_sizes_of_its_shards(make, here):
    shards = make([6000, 0, 40, 1], prioritized(), here)
    leaves = spread(shards)
    offsets = np.cumsum([0, *map(len, leaves)])
    p = np.concatenate(leaves) / np.concatenate(leaves).sum()
    observed, n, batches = np.zeros(len(p)), 512, 150
    for step in range(batches):
        batch = shards.batch(n, step)
        at = offsets[batch["home"].numpy()] + batch["index"].numpy()
        observed += np.bincount(at, minlength=len(p))
        np.testing.assert_allclose(batch["probability"].numpy(), p[at], rtol=2e-6)
        np.testing.assert_allclose(batch["weight"].numpy(), (p.min() / p[at]) ** 0.4, rtol=2e-6)
        numbers, own = unpack(batch["key"].numpy())
        assert (numbers == batch["home"].numpy()).all()
        assert (own == batch["index"].numpy()).all()
    assert_follows(observed, p * n * batches)
    homes = np.array([observed[a:b].sum() for a, b in pairwise(offsets)])
    share = np.array([p[a:b].sum() for a, b in pairwise(offsets)]) * n * batches
    # Stratified: a shard's count is off by less than 2 in a batch, so by less than 5 * 0.71 * sqrt(batches) in all.
    assert (np.abs(homes - share) < 5 * 0.71 * np.sqrt(batches)).all()


@pytest.mark.parametrize("here", [None, 0, 1])
def test_totals_that_change_between_learning_and_drawing_change_no_probability(make, here):
    # Shard 1's items are worth 100 times as much in every second batch, which the learner hears of with the draw.
    shards = make([400, 300], prioritized(weights="none"), here)
    base = [np.linspace(0.1, 1.0, 400), np.linspace(0.1, 1.0, 300)]
    shards.buffer(0).update_priorities(shards.keys[0], base[0])
    factor = [1.0]

    def swing(number, buffer):
        if number == 1:
            buffer.update_priorities(shards.keys[1], base[1] * factor[0])

    shards.before_draw = swing
    n, batches = 64, 400
    observed, p = [np.zeros(700), np.zeros(700)], []
    for value in (1.0, 100.0):
        leaves = np.concatenate([(base[0] + EPS) ** ALPHA, (base[1] * value + EPS) ** ALPHA])
        p.append(leaves / leaves.sum())
    for step in range(batches):
        factor[0] = (1.0, 100.0)[step % 2]
        batch = shards.batch(n, step, beta=1.0)
        at = 400 * batch["home"].numpy() + batch["index"].numpy()
        observed[step % 2] += np.bincount(at, minlength=700)
        np.testing.assert_allclose(batch["probability"].numpy(), p[step % 2][at], rtol=2e-6)
        np.testing.assert_allclose(batch["weight"].numpy(), 1 / (700 * p[step % 2][at]), rtol=2e-6)
    assert shards.orders > 2.4 * batches  # the swings were too large for what was asked for at first
    for half in (0, 1):
        assert_follows(observed[half], p[half] * n * batches / 2)


@pytest.mark.parametrize("here", [None, 1])
def test_totals_are_learned_with_the_first_batch_and_one_call_a_shard_is_enough_from_then_on(make, here):
    shards = make([2000, 1000], prioritized(), here)
    spread(shards)
    shards.batch(256, 0, slack=1.0)
    before = shards.orders
    for step in range(1, 21):
        batch = shards.batch(256, step)
        shards.buffer(0).update_priorities(shards.keys[0][:50], np.full(50, 0.5))
        assert len(batch["key"]) == 256
    assert shards.orders == before + 2 * 20


def test_new_rows_count_as_the_largest_priority_seen_in_any_shard(make):
    shards = make([10, 10], prioritized(initial="max_seen"))
    shards.buffer(0).update_priorities(shards.keys[0], np.full(10, 50.0))
    shards.batch(4, 0)
    largest = max(figures.stats.priority_max for figures in shards.figures.values())
    assert largest == 50.0
    shards.buffer(1)._segment.raise_largest(largest)
    shards.buffer(1).extend(home=np.full(1, 1), index=np.full(1, 10))
    batch = shards.buffer(1).sample(200)
    new = batch["index"] == 10
    assert batch["probability"][new][0] / batch["probability"][~new][0] == pytest.approx(50**ALPHA, rel=1e-5)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="largest priority"):
            shards.buffer(1)._segment.raise_largest(bad)


def test_uniform_draws_of_the_union_are_uniform_over_its_items(make):
    shards = make([30, 3000], tr.Uniform())
    observed = np.zeros(3030)
    for step in range(100):
        batch = shards.batch(512, step)
        observed += np.bincount(30 * batch["home"].numpy() + batch["index"].numpy(), minlength=3030)
        assert (batch["weight"] == 1).all()
        np.testing.assert_allclose(batch["probability"].numpy(), 1 / 3030, rtol=1e-6)
    assert_follows(observed, np.full(3030, 100 * 512 / 3030))


@pytest.mark.parametrize("here", [None, 0])
def test_a_union_without_items_gives_no_batch(make, here):
    assert make([0, 0], prioritized(), here).batch(8, 0) is None


@pytest.mark.parametrize("here", [None, 0, 1])
def test_a_batch_comes_into_the_place_that_it_is_given(make, here):
    shards = make([50, 70], prioritized(weights="batch"), here)
    leaves = spread(shards)
    p = np.concatenate(leaves) / np.concatenate(leaves).sum()
    place = ReplayBatch(
        {name: torch.full((64,), -1) for name in ("home", "index", "key")}
        | {name: torch.full((64,), -1.0) for name in ("weight", "probability")}
    )
    for step in range(20):
        assert shards.batch(64, step, place=place) is place
        at = 50 * place["home"].numpy() + place["index"].numpy()
        np.testing.assert_allclose(place["probability"].numpy(), p[at], rtol=2e-6)
        np.testing.assert_allclose(place["weight"].numpy(), (p[at].min() / p[at]) ** 0.4, rtol=2e-6)
        assert (unpack(place["key"].numpy())[1] == place["index"].numpy()).all()

"""`MixedDataset` with shares: which items of which buffer a batch has, with which weights, and what does not mix."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mixed_buffers import SPEC, filled, take
from scipy import stats

import torchreplay as tr
from torchreplay.loading.mixture import whole_items


@pytest.fixture
def pair():
    buffers = filled(0), filled(1)
    yield buffers
    for buffer in buffers:
        buffer.close()


# Which items a batch has.


@pytest.mark.parametrize(
    ("shares", "batch_size", "counts"),
    [
        ([1, 1], 8, (4, 4)),
        ([0.75, 0.25], 256, (192, 64)),
        ([0.7, 0.3], 10, (7, 3)),
        ([3], 5, (5,)),
        ([1, 1, 1], 8, (3, 3, 2)),  # equal remainders: the earlier ones
        ([5, 3, 1], 10, (6, 3, 1)),  # quotas 5.56, 3.33, 1.11
        ([1, 3], 2, (1, 1)),  # quotas 0.5, 1.5: whole parts 0 and 1, and of equal remainders the earlier one
        ([np.float32(0.5), 0.5], 3, (2, 1)),
    ],
)
def test_counts_are_the_whole_items_nearest_to_the_shares(shares, batch_size, counts):
    buffers = [filled(home) for home in range(len(shares))]
    dataset = tr.MixedDataset(dict(zip(buffers, shares, strict=True)), batch_size)
    assert dataset.counts == counts
    assert dataset.buffers == tuple(buffers)
    for batch in take(dataset, 5):
        assert batch["home"].bincount(minlength=len(counts)).tolist() == list(counts)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6), st.integers(1, 1000))
def test_counts_sum_to_the_batch_and_none_is_a_whole_item_off_its_share(shares, batch_size):
    try:
        counts = whole_items(shares, batch_size)
    except ValueError:
        assert min(shares) / sum(shares) * batch_size < 1  # a share of one item or more is never refused
        return
    assert sum(counts) == batch_size
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - batch_size * share / sum(shares)) < 1 + 1e-9
        assert count >= 1


def test_a_share_that_is_no_whole_item_is_refused_with_the_batch_size_it_takes(pair):
    with pytest.raises(ValueError, match=r"share of buffer 1 is 0.249 of 64 items.*batches of 257 items or more"):
        tr.MixedDataset({pair[0]: 256, pair[1]: 1}, 64)
    assert tr.MixedDataset({pair[0]: 256, pair[1]: 1}, 257).counts == (256, 1)


@pytest.mark.parametrize(("large", "small"), [(1e300, 1e-300), (1.7e308, 5e-324), (1 << 24, 1)])
def test_a_share_that_no_batch_is_large_enough_for_is_refused_without_a_size(pair, large, small):
    with pytest.raises(
        ValueError, match=r"share of buffer 1 is \S+ of 256 items, .*: give it a larger share$"
    ) as caught:
        tr.MixedDataset({pair[0]: large, pair[1]: small}, 256)
    assert len(str(caught.value)) < 120


def test_items_come_buffer_by_buffer_and_each_says_whose_it_is(pair):
    (batch,) = take(tr.MixedDataset({pair[1]: 1, pair[0]: 3}, 8), 1)
    assert type(batch) is tr.ReplayBatch
    assert batch.batch_size == 8
    assert list(batch) == ["home", "deep", "key", "weight", "probability", "buffer"]
    assert batch["buffer"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert batch["home"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]  # the first buffer of this mixture is pair[1]
    assert torch.equal(batch["deep"]["number"], batch["key"])
    assert batch["deep"]["pixels"].shape == (8, 2, 3)
    assert batch["deep"]["pixels"].dtype == torch.uint8
    assert torch.equal(batch["deep"]["pixels"][:, 1, 2].long(), batch["home"])
    assert (batch["key"].dtype, batch["buffer"].dtype, batch["weight"].dtype) == (
        torch.int64,
        torch.int64,
        torch.float32,
    )


def test_a_batchs_memory_is_its_own(pair):
    first, second = take(tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8), 2)
    kept = copy.deepcopy(second)
    for tensor in (first["home"], first["key"], first["weight"], first["probability"], first["buffer"]):
        tensor.zero_()
    assert all(torch.equal(second[name], kept[name]) for name in ("home", "key", "weight", "probability", "buffer"))


def test_buffers_are_told_apart_by_identity_and_one_is_not_taken_twice(pair):
    assert len({pair[0]: 1, pair[1]: 2, pair[0]: 3}) == 2
    again = tr.ReplayBuffer.attach(pair[0].handle())
    with pytest.raises(ValueError, match="one buffer is there twice"):
        tr.MixedDataset({pair[0]: 1, again: 1}, 8)
    again.close()


def test_transitions_of_different_horizons_mix_and_each_has_its_own_discount():
    spec = {
        "obs": tr.Field(2),
        "reward": tr.Field(),
        **{end: tr.Field((), bool) for end in ("terminated", "truncated")},
    }
    buffers = []
    for n_step in (1, 3):
        buffers.append(tr.ReplayBuffer(spec, 100, view=tr.Transitions(n_step=n_step, gamma=0.5)))
        truncated = torch.arange(9) == 8
        buffers[-1].extend(
            obs=torch.zeros(10, 2),
            reward=torch.ones(9),
            terminated=torch.zeros(9, dtype=torch.bool),
            truncated=truncated,
        )
    (batch,) = take(tr.MixedDataset({buffers[0]: 1, buffers[1]: 1}, 64), 1)
    assert set(batch) - {"key", "weight", "probability", "buffer"} == {*spec, "next_obs", "discount"}
    assert batch["discount"][:32].eq(0.5).all()
    # Of three steps, or of what is left before the end.
    steps = (9 - batch["key"][32:]).clamp(max=3)
    torch.testing.assert_close(batch["discount"][32:], 0.5**steps)


# Probabilities and weights.


def given_priorities(buffer, raw):
    buffer.update_priorities(torch.arange(len(raw)), torch.as_tensor(raw))
    return np.asarray(raw) / np.sum(raw)


def mixture(weights, beta=0.5):
    """A prioritized and a uniform buffer, and one prioritized otherwise, with the shares 2 : 1 : 1 of 64."""
    flat, steep = np.linspace(1.0, 2.0, 50), np.geomspace(0.01, 10.0, 20)
    buffers = (
        filled(0, sampler=tr.Prioritized(1.0, beta, weights=weights)),
        filled(1, 30, sampler=tr.Uniform()),
        filled(2, 20, sampler=tr.Prioritized(1.0, 2 * beta, weights=weights)),
    )
    chances = [given_priorities(buffers[0], flat), np.full(30, 1 / 30), given_priorities(buffers[2], steep)]
    return tr.MixedDataset(dict(zip(buffers, (2, 1, 1), strict=True)), 64), chances


def test_probability_is_the_share_times_that_in_the_items_buffer():
    dataset, chances = mixture("buffer")
    for batch in take(dataset, 5):
        expected = [
            (0.5, 0.25, 0.25)[home] * chances[home][key]
            for home, key in zip(batch["home"].tolist(), batch["key"].tolist(), strict=True)
        ]
        torch.testing.assert_close(batch["probability"].double(), torch.tensor(expected), rtol=1e-3, atol=0)


def test_items_are_drawn_as_often_as_their_probability_says():
    # Draws are stratified, so the counts vary less than independent ones: the false-alarm rate is below 1e-4.
    dataset, chances = mixture("buffer")
    counts = [np.zeros(len(p)) for p in chances]
    for batch in take(dataset, 500):
        for home, key in zip(batch["home"].tolist(), batch["key"].tolist(), strict=True):
            counts[home][key] += 1
    expected = np.concatenate([32 * chances[0], 16 * chances[1], 16 * chances[2]]) * 500
    found = np.concatenate(counts)
    assert found.sum() == 500 * 64
    enough = expected >= 5
    assert stats.chisquare(found[enough], expected[enough] * found[enough].sum() / expected[enough].sum()).pvalue > 1e-4


@pytest.mark.parametrize("weights", ["buffer", "batch", "none"])
def test_weights_of_all_buffers_are_on_one_scale(weights):
    # (N P)^-beta of the item's own buffer; the largest is of all items there are, or in the batch, or none.
    dataset, chances = mixture(weights)
    raw = [(len(p) * p) ** -beta for p, beta in zip(chances, (0.5, 0.0, 1.0), strict=True)]
    assert max(raw[2]) > 10 * max(raw[0])  # or buffers scaled each by itself would pass
    for batch in take(dataset, 5):
        mine = [raw[home][key] for home, key in zip(batch["home"].tolist(), batch["key"].tolist(), strict=True)]
        largest = {"buffer": np.concatenate(raw).max(), "batch": max(mine), "none": 1.0}[weights]
        torch.testing.assert_close(batch["weight"].double(), torch.tensor(mine) / largest, rtol=1e-3, atol=0)


def test_weights_follow_the_schedule_of_beta():
    raw, beta = np.geomspace(0.01, 10.0, 50), tr.LinearSchedule(0.2, 1.0, 5)
    prioritized = filled(0, sampler=tr.Prioritized(1.0, beta))
    chances = given_priorities(prioritized, raw)
    dataset = tr.MixedDataset({prioritized: 1, filled(1, sampler=tr.Uniform()): 1}, 32, prefetch=0)
    for step, batch in enumerate(take(dataset, 8)):
        largest = (50 * chances.min()) ** -beta(step)
        mine = (50 * chances[batch["key"][:16]]) ** -beta(step)
        torch.testing.assert_close(batch["weight"][:16].double(), torch.tensor(mine / largest), rtol=1e-3, atol=0)
        torch.testing.assert_close(
            batch["weight"][16:].double(), torch.full((16,), 1 / largest).double(), rtol=1e-3, atol=0
        )


def test_weights_of_uniform_buffers_are_one():
    dataset = tr.MixedDataset({filled(0, sampler=tr.Uniform()): 1, filled(1, sampler=tr.Uniform()): 1}, 8)
    assert all(batch["weight"].eq(1).all() for batch in take(dataset, 3))


def test_fully_corrected_weights_estimate_the_mean_of_the_buffers_means_by_share():
    # With beta = 1 the weighted mean of any x is, but for the common factor, sum over buffers of share * mean(x).
    # 400 batches of 64 of a bounded x: the estimate is within 2 %, five standard deviations.
    first, second = (filled(home, sampler=tr.Prioritized(1.0, 1.0, weights="none")) for home in range(2))
    given_priorities(first, np.linspace(1.0, 3.0, 50)), given_priorities(second, np.linspace(2.0, 0.5, 50))
    batches = take(tr.MixedDataset({first: 3, second: 1}, 64), 400)
    x = torch.cat([(batch["deep"]["number"] + 100 * batch["home"]) * batch["weight"] for batch in batches])
    assert float(x.double().mean()) == pytest.approx(0.75 * 24.5 + 0.25 * 124.5, rel=0.02)


# Refusals at construction.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"home": tr.Field((), torch.int32)}, "'home' is .*int64.* in the one and .*int32.* in the other"),
        ({"home": tr.Field(1, torch.int64)}, r"'home' is Field\(\(\), .* and Field\(\(1,\)"),
        ({"deep": {"number": tr.Field((), torch.int64)}}, "'deep/pixels' is .* in the one and not there in the other"),
        ({"more": tr.Field()}, "'more' is not there in the one"),
    ],
)
def test_buffers_whose_batches_differ_are_refused_with_the_first_difference(change, message):
    other = tr.ReplayBuffer(SPEC | change, 10)
    with pytest.raises(ValueError, match=f"batches of buffer 0 and buffer 1 differ: {message}"):
        tr.MixedDataset({filled(0): 1, other: 1}, 8)


def test_views_that_make_other_batches_of_the_same_rows_are_refused():
    spec = {
        "obs": tr.Field(2),
        "reward": tr.Field(),
        **{end: tr.Field((), bool) for end in ("terminated", "truncated")},
    }
    views = [tr.Rows(), tr.Transitions(), tr.Transitions(stack={"obs": 2}), tr.Sequences(4), tr.Sequences(5)]
    for first, second in itertools.combinations(views, 2):
        buffers = [tr.ReplayBuffer(spec, 20, view=view) for view in (first, second)]
        with pytest.raises(ValueError, match="batches of buffer 0 and buffer 1 differ"):
            tr.MixedDataset(dict.fromkeys(buffers, 1), 8)


def test_samplers_that_scale_weights_differently_are_refused():
    first, second = filled(0, sampler=tr.Prioritized()), filled(1, sampler=tr.Prioritized(weights="none"))
    with pytest.raises(ValueError, match="weights='buffer' and 'none': expected the same"):
        tr.MixedDataset({first: 1, second: 1}, 8)


@pytest.mark.parametrize("share", [0, -1, float("nan"), float("inf"), None, "much", True])
def test_a_share_that_is_no_positive_number_is_refused(pair, share):
    with pytest.raises(ValueError, match=r"the share of buffer 1 is .*: expected a positive number"):
        tr.MixedDataset({pair[0]: 1, pair[1]: share}, 8)


def test_other_things_than_buffers_with_shares_or_names_are_refused(pair):
    for wrong in ({}, [pair[0]], pair[0], {"red": 1.0}, {1: pair[0]}, {pair[0]: 1, "red": pair[1]}, None):
        with pytest.raises(ValueError, match=r"expected a dict, \{buffer: share, ...\} or \{name: buffer, ...\}"):
            tr.MixedDataset(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: expected an int from 1 to 16777216"),
        ({"batch_size": 1 << 30}, "batch_size is 1073741824: expected an int from 1 to 16777216"),
        ({"steps": 0}, "steps is 0"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"timeout": -1}, "timeout is -1"),
        ({"device": "nowhere"}, "device is 'nowhere'"),
    ],
)
def test_a_bad_argument_is_named_in_a_value_error(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        tr.MixedDataset({pair[0]: 1, pair[1]: 1}, **arguments)


def test_a_field_cannot_have_the_name_that_tells_buffers_apart():
    with pytest.raises(ValueError, match="the field name 'buffer' is reserved"):
        tr.ReplayBuffer({"buffer": tr.Field()}, 10)

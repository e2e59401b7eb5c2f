"""The distribution of draws: at a million rows, P(i) = p_i^alpha / sum to the last item, and no drift."""

import numpy as np
import pytest
import torch
from scipy import stats

import torchreplay as tr

CAPACITY = 1_000_000
ALPHA, BETA, EPS = 0.6, 0.4, 1e-6
FALSE_ALARM = 1e-6  # of each chi-square test; the seeds are fixed, so a pass stays a pass
SPEC = {"index": tr.Field((), torch.int64)}


def filled(**options):
    buffer = tr.ReplayBuffer(SPEC, CAPACITY, seed=11, **options)
    keys = buffer.extend(index=np.arange(CAPACITY))
    return buffer, keys


def draw(buffer, batches, batch_size=4096, beta=None):
    drawn = [buffer.sample(batch_size, beta) for _ in range(batches)]
    return {name: torch.cat([b[name] for b in drawn]).numpy() for name in ("index", "key", "probability", "weight")}


def assert_counts_follow(index, probability, bins=500):
    """Chi-square of the counts over bins of items put together by chance.

    Draws are stratified: the counts of a bin vary at most as much as those of independent draws. So the upper tail of
    the chi-square distribution bounds the false-alarm rate.
    """
    bin_of = np.random.default_rng(1).integers(0, bins, CAPACITY)
    expected = np.bincount(bin_of, weights=probability, minlength=bins) * len(index)
    observed = np.bincount(bin_of[index], minlength=bins)
    assert expected.min() > 50, "too few draws for the chi-square approximation"
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(statistic, bins - 1) > FALSE_ALARM


@pytest.fixture(scope="module")
def six_decades():
    """A buffer with |td| spread evenly over six decades, and the leaves that equation 1 asks for."""
    buffer, keys = filled(sampler=tr.Prioritized(alpha=ALPHA, beta=BETA, eps=EPS))
    td = 10.0 ** np.random.default_rng(7).uniform(-3, 3, CAPACITY) * np.random.default_rng(8).choice([-1, 1], CAPACITY)
    buffer.update_priorities(keys, torch.from_numpy(td))
    return buffer, (np.abs(td) + EPS) ** ALPHA


def test_the_distribution_of_prioritized_draws_is_proportional_over_six_decades(six_decades):
    buffer, leaves = six_decades
    drawn = draw(buffer, 60)
    assert np.array_equal(drawn["index"], drawn["key"])
    probability = leaves / leaves.sum()
    assert_counts_follow(drawn["index"], probability)
    # Leaves are float32 (2^-24), summed exactly.
    np.testing.assert_allclose(drawn["probability"], probability[drawn["index"]], rtol=1e-6)


def test_the_distribution_reaches_each_decade_with_its_share(six_decades):
    buffer, leaves = six_decades
    decade = np.clip(np.floor(np.log10(leaves) / ALPHA), -3, 2).astype(int) + 3
    expected = np.bincount(decade, weights=leaves, minlength=6) / leaves.sum()
    index = draw(buffer, 60)["index"]
    observed = np.bincount(decade[index], minlength=6)
    assert stats.chisquare(observed, expected * len(index)).pvalue > FALSE_ALARM


@pytest.mark.parametrize("weights", ["buffer", "batch", "none"])
def test_the_distribution_is_corrected_by_the_published_weights(weights):
    # w_i = (N P(i))^-beta / max_j w_j: Schaul et al. 2016, section 3.4.
    buffer, keys = filled(sampler=tr.Prioritized(alpha=ALPHA, beta=BETA, eps=EPS, weights=weights))
    td = 10.0 ** np.random.default_rng(3).uniform(-3, 3, CAPACITY)
    buffer.update_priorities(keys, torch.from_numpy(td))
    leaves = (td + EPS) ** ALPHA
    for beta in (BETA, 1.0):
        batch = buffer.sample(1024, beta=beta)
        raw = (CAPACITY * leaves / leaves.sum()) ** -beta
        mine = raw[batch["index"].numpy()]
        expected = mine / {"buffer": raw.max(), "batch": mine.max(), "none": 1.0}[weights]
        np.testing.assert_allclose(batch["weight"].numpy(), expected, rtol=1e-5)


def test_the_distribution_makes_weighted_means_those_of_the_whole_buffer(six_decades):
    # With beta = 1, importance sampling undoes the prioritization: E[w f] / E[w] is the mean over all rows.
    buffer, _ = six_decades
    f = np.random.default_rng(2).normal(size=CAPACITY)
    drawn = draw(buffer, 60, beta=1.0)
    index, weight = drawn["index"], drawn["weight"].astype(np.float64)
    estimate = (weight * f[index]).sum() / weight.sum()
    spread = np.sqrt((weight**2 * (f[index] - estimate) ** 2).sum()) / weight.sum()
    assert abs(estimate - f.mean()) < 5 * spread  # false alarm: 6e-7


def test_the_distribution_of_uniform_draws_is_uniform():
    buffer, _ = filled()
    drawn = draw(buffer, 60)
    assert_counts_follow(drawn["index"], np.full(CAPACITY, 1 / CAPACITY))
    assert (drawn["weight"] == 1).all()
    np.testing.assert_allclose(drawn["probability"], 1 / CAPACITY, rtol=1e-6)


def test_the_distribution_does_not_drift_under_millions_of_updates():
    buffer, _ = filled(sampler=tr.Prioritized(alpha=ALPHA, eps=EPS))
    chance = np.random.default_rng(5)
    leaves = np.ones(CAPACITY)
    for _ in range(60):
        index = chance.integers(0, CAPACITY, 50_000)
        td = 10.0 ** chance.uniform(-3, 3, len(index))
        buffer.update_priorities(torch.from_numpy(index), torch.from_numpy(td))
        leaves[index] = (td + EPS) ** ALPHA  # of equal keys the last one wins, here as there
    drawn = draw(buffer, 30)
    probability = leaves / leaves.sum()
    np.testing.assert_allclose(drawn["probability"], probability[drawn["index"]], rtol=1e-6)
    assert buffer.stats().priority_total == pytest.approx(leaves.sum(), rel=1e-6)
    assert_counts_follow(drawn["index"], probability)

"""The simulation of ages: it is held to sums that anybody can do without it, and it shows what the guide says of it."""

from itertools import islice

import numpy as np
import pytest
from scipy import stats

from benchmarks.staleness import LONGEST, MEAN, SHORTEST, TAIL, Scene, Simulation, distance, lengths

BOUNDS = ["admission", "admission alone", "dropping"]


def test_lengths_are_of_a_pareto_distribution_that_is_cut():
    """By Kolmogorov and Smirnov's test of 20,000 lengths; their seed is fixed, so it cannot fail by chance."""
    drawn = np.array(list(islice(lengths(1), 20_000)))
    expected = stats.pareto(TAIL, scale=SHORTEST)
    assert drawn.max() <= LONGEST
    assert drawn.min() >= SHORTEST
    assert stats.kstest(drawn[drawn < LONGEST] + 0.5, expected.cdf).pvalue > 1e-3
    mean = expected.expect(lambda length: min(length, LONGEST), lb=SHORTEST)
    assert mean == pytest.approx(MEAN, rel=1e-3)
    assert drawn.mean() == pytest.approx(mean, rel=0.05)


def test_the_distance_of_two_samples_is_kolmogorov_and_smirnov_s():
    dice = np.random.default_rng(2)
    one, other = dice.integers(0, 50, 300).tolist(), dice.integers(5, 60, 200).tolist()
    assert distance(one, other) == pytest.approx(stats.ks_2samp(one, other).statistic)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("max_age", [0, 2])
def test_all_time_and_all_rollouts_are_accounted_for(bound, max_age):
    scene = Scene(bound, max_age, steps=30, generators=16, batch_size=16)
    outcome = Simulation(scene).run()
    assert len(outcome.learned) == len(set(outcome.learned)) == 30 * 16
    assert outcome.time == pytest.approx(outcome.learner_waited + 30 * scene.step_time)
    ends = np.array(outcome.begun_at) + np.array(outcome.lengths)
    generated = (np.minimum(ends, outcome.time) - np.array(outcome.begun_at)).sum()
    assert 16 * outcome.time == pytest.approx(outcome.generators_waited + generated)
    assert outcome.lengths == list(islice(lengths(scene.seed), len(outcome.lengths)))


@pytest.mark.parametrize("bound", ["admission", "dropping"])
@pytest.mark.parametrize("max_age", [0, 1, 4])
def test_no_age_is_beyond_the_bound(bound, max_age):
    outcome = Simulation(Scene(bound, max_age, steps=60)).run()
    assert max(outcome.ages) == max_age


def test_with_an_age_of_0_every_step_waits_for_the_longest_rollout_of_its_batch():
    scene = Scene("admission", 0, steps=40)
    outcome = Simulation(scene).run()
    longest = np.array(outcome.lengths[: 40 * 64]).reshape(40, 64).max(1)
    assert outcome.learner_waited == pytest.approx(longest.sum())
    assert outcome.ages == [0] * 40 * 64
    assert outcome.expired == 0


def test_admission_alone_loses_nothing_and_lets_stragglers_grow_older():
    outcome = Simulation(Scene("admission alone", 1, steps=200)).run()
    begun, learned = outcome.early()
    assert begun == learned
    assert outcome.expired == 0
    assert max(outcome.ages) > 1

"""Priorities of any scale are drawn in their proportions: what they are multiplied by changes nothing."""

import contextlib
import os
import signal

import numpy as np
import pytest
import torch
from forked import Forked
from local_shards import LocalShards
from scipy import stats

import torchreplay as tr

FALSE_ALARM = 1e-6  # of each chi-square test; the seeds are fixed, so a pass stays a pass
SPEC = {"index": tr.Field((), torch.int64)}
SCALES = [1e-12, 1e-9, 1e-6, 1e-3, 1.0, 1e3, 1e6, 1e9, 1e12]


def learned(td, alpha, eps, path=None, **options):
    """A full buffer; each row has its own TD error."""
    sampler = tr.Prioritized(alpha, eps=eps, **options)
    buffer = tr.ReplayBuffer(SPEC, len(td), sampler=sampler, seed=3, path=path)
    keys = buffer.extend(index=np.arange(len(td)))
    buffer.update_priorities(keys, torch.as_tensor(td))
    return buffer


def chances(td, alpha, eps):
    """P(i) = p_i / sum p with p = (|td| + eps)^alpha: Schaul et al. 2016, equation 1 and section 3.3."""
    leaves = (np.abs(np.asarray(td, np.float64)) + eps) ** alpha
    return leaves / leaves.sum()


def spread(scale, rows, decades, seed=1):
    return scale * 10.0 ** np.random.default_rng(seed).uniform(-decades / 2, decades / 2, rows)


def shares(buffer):
    """P(i) of every row."""
    return buffer.gather(torch.arange(buffer.capacity))["probability"].double().numpy()


@pytest.mark.parametrize("alpha", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("scale", SCALES)
def test_draws_are_in_proportion_at_any_scale(scale, alpha):
    # Draws are stratified: counts vary at most as much as those of independent draws, so that the upper tail of the
    # chi-square distribution bounds the false-alarm rate.
    rows, draws, eps = 500, 400, 1e-3 * scale
    td = spread(scale, rows, 1.2)
    buffer = learned(td, alpha, eps)
    probability = chances(td, alpha, eps)
    np.testing.assert_allclose(shares(buffer), probability, rtol=1e-6)
    drawn = torch.cat([buffer.sample(512)["index"] for _ in range(draws)]).numpy()
    expected = probability * len(drawn)
    assert expected.min() > 5, "too few draws for the chi-square approximation"
    assert stats.chisquare(np.bincount(drawn, minlength=rows), expected).pvalue > FALSE_ALARM


def killed_after(td, more, path):
    """What the next process finds in the file of one that was killed when it had written more rows, unseen."""

    def live():
        buffer = learned(td, 1.0, 1e-3, path)
        buffer.stats()
        buffer.extend(index=np.arange(len(td), len(td) + more), priority=np.arange(1.0, more + 1))
        os.kill(os.getpid(), signal.SIGKILL)

    with Forked(live) as process:
        assert process.wait() == -signal.SIGKILL
    return tr.ReplayBuffer.open(path)


@pytest.mark.parametrize("outlier", [1e6, 1e14, 1e20, 1e30, 1e38])
@pytest.mark.parametrize("way", ["a copy", "a load", "a death", "writing on"])
def test_without_a_much_larger_one_the_priorities_that_are_left_have_their_proportions(way, outlier, tmp_path):
    td = np.concatenate([[outlier], np.arange(1.001, 1000)])
    buffer = learned(td, 1.0, 1e-3)
    if way == "a copy":
        buffer, td = buffer.copy(500), td[-500:]
    elif way == "a load":
        buffer.save(tmp_path)
        buffer, td = tr.ReplayBuffer.load(tmp_path, 500), td[-500:]
    elif way == "a death":
        buffer, td = killed_after(td, 1, tmp_path / "ring"), np.concatenate([td[1:], [1.0]])
    else:
        buffer.extend(index=[0], priority=1.0)
        td = np.concatenate([td[1:], [1.0]])
    head = buffer._segment.head
    probability = chances(td, 1.0, 1e-3)
    # Until as many were written as there are, a live buffer may keep a grid in which the mean has 2^10 units.
    error = 2.0**-10 * probability.mean() if way == "writing on" else 1e-6 * probability
    found = buffer.gather(torch.arange(head - len(td), head))["probability"].double().numpy()
    assert (np.abs(found - probability) <= error).all()
    drawn = torch.cat([buffer.sample(512)["key"] for _ in range(400)]).numpy() - (head - len(td))
    few = probability * len(drawn) > 5  # enough draws for the chi-square approximation
    expected = np.append(probability[few], probability[~few].sum()) * len(drawn)
    counts = np.bincount(drawn, minlength=len(td))
    counts = np.append(counts[few], counts[~few].sum())
    assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    ("td", "alpha", "eps"),
    [
        (np.where(np.arange(1_000_000) % 2, 1e-9, 1e-10), 1.0, 1e-10),
        (spread(1e-9, 1_000_000, 6.0), 1.0, 1e-8),
        (spread(1e-5, 1000, 4.0), 2.0, 1e-10),
        (spread(1e9, 1_000_000, 6.0), 1.0, 1e-6),
        (spread(1e-30, 1000, 4.0), 1.0, 1e-36),
        (spread(1e-60, 1000, 10.0), 0.5, 1e-70),
        (spread(1e30, 1000, 10.0), 1.0, 1e-6),
    ],
    ids=["two kinds", "small", "squared", "large", "smallest floats", "roots of no floats", "largest floats"],
)
def test_every_probability_is_the_items_share(td, alpha, eps):
    np.testing.assert_allclose(shares(learned(td, alpha, eps)), chances(td, alpha, eps), rtol=1e-5)


def test_an_item_of_2_to_the_minus_36_of_the_largest_keeps_its_proportion_in_a_million_rows():
    td = np.where(np.arange(1_000_000) % 2, 1e-6, 1e-6 * 2.0**-36)
    np.testing.assert_allclose(shares(learned(td, 1.0, 1e-30)), chances(td, 1.0, 1e-30), rtol=0.02)


@pytest.mark.parametrize("weights", ["buffer", "batch", "none"])
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_weights_are_those_of_the_published_formula_at_any_scale(scale, weights):
    td, eps, beta = spread(scale, 1000, 4.0), 1e-6 * scale, 0.7
    batch = learned(td, 1.0, eps, weights=weights).sample(256, beta=beta)
    weight = (len(td) * chances(td, 1.0, eps)) ** -beta  # section 3.4
    mine = weight[batch["key"].numpy()]
    expected = mine / {"buffer": weight.max(), "batch": mine.max(), "none": 1.0}[weights]
    np.testing.assert_allclose(batch["weight"].numpy(), expected, rtol=1e-5)


def learn_for_a_while(factor):
    """The batches of a learner that meets priorities of many scales, all times a factor."""
    sampler = tr.Prioritized(1.0, eps=1e-6 * factor)
    buffer = tr.ReplayBuffer(SPEC, 300, sampler=sampler, seed=5)
    chance = np.random.default_rng(2)
    batches = []
    for step in range(60):
        given = (1 + chance.integers(0, 1024, 40) / 1024) * 2.0 ** chance.integers(-3, 3) * factor
        buffer.extend(index=np.arange(40), priority=given)
        batches.append(buffer.sample(64))
        td = (1 + chance.integers(0, 1024, 64) / 1024) * 2.0 ** (step % 13 - 6) * factor
        buffer.update_priorities(batches[-1], torch.from_numpy(td))
    return batches


@pytest.mark.parametrize("exponent", [-80, -20, 13, 70])
def test_priorities_times_a_power_of_two_give_the_same_batches(exponent):
    for batch, expected in zip(learn_for_a_while(2.0**exponent), learn_for_a_while(1.0), strict=True):
        for name in ("key", "weight", "probability"):
            assert torch.equal(batch[name], expected[name])


def test_the_same_seed_and_calls_give_the_same_batches_while_the_scale_changes():
    for batch, expected in zip(learn_for_a_while(1e-9), learn_for_a_while(1e-9), strict=True):
        assert all(torch.equal(batch[name], expected[name]) for name in batch)


def test_new_rows_among_ones_learned_from_do_not_take_their_proportions_away():
    # A new row has the largest priority seen, 1.0 at first.
    td, eps = spread(1e-9, 1000, 2.0), 1e-15
    buffer = learned(td, 1.0, eps, initial="max_seen")
    expected = np.append(1.0, td[1:]) + eps
    buffer.extend(index=np.zeros(1, np.int64))
    found = buffer.gather(torch.arange(1, 1001))["probability"].double().numpy()
    np.testing.assert_allclose(found, np.roll(expected, -1) / expected.sum(), rtol=1e-4)
    expected[0] = 1e-9 + eps
    buffer.update_priorities(torch.arange(1, 1001), torch.from_numpy(np.roll(expected, -1) - eps))
    found = buffer.gather(torch.arange(1, 1001))["probability"].double().numpy()
    np.testing.assert_allclose(found, np.roll(expected, -1) / expected.sum(), rtol=1e-5)


def coarse():
    """A buffer whose grid is that of larger priorities than it holds."""
    buffer = learned(np.where(np.arange(1000) < 500, 1e-3, 1e3), 1.0, 1e-9)
    buffer.update_priorities(torch.arange(500, 1000), torch.from_numpy(spread(1e-3, 500, 2.0)))
    return buffer


def test_a_loaded_buffer_draws_on_as_the_saved_one_does(tmp_path):
    buffer = coarse()
    buffer.sample(8)
    buffer.save(tmp_path)
    loaded = tr.ReplayBuffer.load(tmp_path)
    assert loaded._segment.counts() == buffer._segment.counts()
    for _ in range(10):
        one, other = buffer.sample(256), loaded.sample(256)
        assert all(torch.equal(one[name], other[name]) for name in one)
        for each, batch in ((buffer, one), (loaded, other)):
            each.update_priorities(batch, torch.linspace(1e-9, 1e-6, 256))


def test_priorities_of_another_sampler_are_loaded_at_their_own_scale(tmp_path):
    td = spread(1e6, 1000, 4.0)
    learned(td, 1.0, 1e-3).save(tmp_path)
    buffer = tr.ReplayBuffer(SPEC, 1000, sampler=tr.Prioritized(0.1, eps=1e-3))
    buffer.restore(tmp_path)
    np.testing.assert_allclose(shares(buffer), chances(td, 0.1, 1e-3), rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_a_buffer_in_a_file_draws_on_after_it_was_opened_again(scale, tmp_path):
    td = spread(scale, 1000, 4.0)
    buffer = learned(td, 1.0, 1e-6 * scale, tmp_path / "buffer")
    before = shares(buffer)
    np.testing.assert_allclose(before, chances(td, 1.0, 1e-6 * scale), rtol=1e-5)
    buffer.close()
    with tr.ReplayBuffer.open(tmp_path / "buffer") as opened:
        assert np.array_equal(shares(opened), before)


def test_learners_attached_before_find_the_grid_as_others_have_changed_it():
    td = spread(1.0, 1000, 4.0)
    buffer = learned(td, 1.0, 1e-30)
    learners = [tr.ReplayBuffer.attach(buffer.handle()) for _ in range(2)]

    def look_and_change():
        mine = learners[0]
        for scale in (1e12, 1e-12, 1e24, 1.0):
            learners[1].sample(8)
            mine.update_priorities(torch.arange(1000), torch.from_numpy(td * scale))
            np.testing.assert_allclose(shares(learners[1]), chances(td, 1.0, 1e-30), rtol=1e-5)
            np.testing.assert_allclose(shares(mine), chances(td, 1.0, 1e-30), rtol=1e-5)

    for body in (look_and_change, look_and_change):
        with Forked(body) as learner:
            assert learner.wait() == 0
        np.testing.assert_allclose(shares(buffer), chances(td, 1.0, 1e-30), rtol=1e-5)
        buffer.update_priorities(torch.arange(1000), torch.from_numpy(td * 1e15))
    batches = [next(iter(tr.ReplayDataset(each, 256, prefetch=2))) for each in learners]
    for batch in batches:
        np.testing.assert_allclose(batch["probability"], chances(td, 1.0, 1e-30)[batch["key"]], rtol=1e-5)


@pytest.mark.parametrize("weights", ["buffer", "batch", "none"])
def test_shards_of_different_scales_are_one_buffer(weights):
    beta, eps = 0.4, 1e-9
    sampler = tr.Prioritized(1.0, eps=eps, weights=weights)
    td = [spread(scale, 1000, 4.0, seed) for seed, scale in enumerate([1e-3, 1.0, 1e3])]
    with contextlib.closing(LocalShards([1000] * 3, sampler)) as shards:
        for number, errors in enumerate(td):
            shards.buffer(number).update_priorities(shards.keys[number], torch.from_numpy(errors))
        probability = chances(np.concatenate(td), 1.0, eps)
        weight = (3000 * probability) ** -beta
        for step in range(20):
            batch = shards.batch(256, step, beta)
            items = (batch["home"] * 1000 + batch["index"]).numpy()
            np.testing.assert_allclose(batch["probability"].numpy(), probability[items], rtol=1e-5)
            largest = {"buffer": weight.max(), "batch": weight[items].max(), "none": 1.0}[weights]
            np.testing.assert_allclose(batch["weight"].numpy(), weight[items] / largest, rtol=1e-5)

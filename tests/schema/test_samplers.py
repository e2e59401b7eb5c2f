"""Samplers: schedules, leaves and weights, by the formulas they cite."""

import multiprocessing

import numpy as np
import pytest
import torch

import torchreplay as tr
from torchreplay.schema.config import Config
from torchreplay.schema.spec import ELEMENTS

SPEC = {"x": tr.Field()}


def filled(n, **options):
    buffer = tr.ReplayBuffer(SPEC, n, seed=0, **options)
    return buffer, buffer.extend(x=np.arange(n))


def test_linear_goes_from_start_to_end_in_equal_steps_and_stays():
    schedule = tr.LinearSchedule(0.4, 1.0, 6)
    assert [schedule(step) for step in (0, 1, 3, 6, 1000)] == pytest.approx([0.4, 0.5, 0.7, 1.0, 1.0])
    assert tr.LinearSchedule(1.0, 0.0, 2)(1) == 0.5


def test_a_schedule_that_was_described_under_its_old_name_is_read():
    sampler = tr.Prioritized(beta=tr.LinearSchedule(0.4, 1.0, 10))
    text = Config.of(SPEC, 8, sampler, None, None).to_text()
    assert '"LinearSchedule"' in text
    assert Config.from_text(text.replace("LinearSchedule", "Linear")).sampler == sampler


def test_beta_follows_the_batches_drawn_by_all_learners():
    buffer, keys = filled(
        2, sampler=tr.Prioritized(alpha=1.0, eps=1e-9, beta=tr.LinearSchedule(0.0, 1.0, 2), weights="buffer")
    )
    buffer.update_priorities(keys, torch.tensor([1.0, 4.0]))
    other = tr.ReplayBuffer.attach(buffer.handle())
    for learner, beta in ((buffer, 0.0), (other, 0.5), (buffer, 1.0), (other, 1.0)):
        batch = learner.sample(20)
        expected = torch.where(batch["key"] == 0, 1.0, 0.25**beta)
        torch.testing.assert_close(batch["weight"], expected.float())


def test_a_beta_given_to_sample_wins_as_a_number_or_a_schedule():
    buffer, keys = filled(2, sampler=tr.Prioritized(alpha=1.0, beta=0.0))
    buffer.update_priorities(keys, torch.tensor([1.0, 4.0]))
    for beta in (1.0, 1, np.float32(1), lambda step: 1.0, tr.LinearSchedule(1.0, 1.0, 1)):
        assert buffer.sample(20, beta=beta)["weight"].min() == pytest.approx(0.25, rel=1e-5)
    assert buffer.sample(20)["weight"].eq(1).all()


@pytest.mark.parametrize("ends", [(0.4, -1.0), (-1.0, 0.4)], ids=str)
def test_a_schedule_of_beta_with_a_negative_end_is_refused_before_it_comes_there(ends):
    with pytest.raises(ValueError, match=r"beta is -1\.0: expected a finite number >= 0"):
        tr.Prioritized(beta=tr.LinearSchedule(*ends, 3))


def test_numpy_scalars_are_numbers_as_others_are():
    sampler = tr.Prioritized(alpha=np.float32(0.5), beta=np.float64(0.4), eps=np.float32(1e-3))
    limiter = tr.SamplesPerInsert(np.float32(4), min_size=1, tolerance=np.float32(3000))
    buffer, _ = filled(2, sampler=sampler, limiter=limiter)
    attached = tr.ReplayBuffer.attach(buffer.handle())
    assert (attached.sampler, attached.limiter) == (sampler, limiter)


def test_uniform_draws_evenly_with_weight_one_and_checks_td_errors_without_using_them():
    buffer, keys = filled(10)
    buffer.update_priorities(keys, torch.arange(10.0))
    with pytest.raises(ValueError, match="NaN"):
        buffer.update_priorities(keys, torch.full((10,), torch.nan))
    batch = buffer.sample(100)
    assert batch["weight"].eq(1).all()
    torch.testing.assert_close(batch["probability"], torch.full((100,), 0.1))
    # Stratified: ten strata lie wholly in each item.
    assert torch.bincount(batch["key"], minlength=10).tolist() == [10] * 10


@pytest.mark.parametrize("sampler", [tr.Prioritized(alpha=0.6, eps=1e-50), tr.Prioritized(alpha=9.0)], ids=str)
def test_an_item_without_any_error_can_still_be_drawn(sampler):
    # (0 + eps)^alpha is positive, however little a float32 may hold of it.
    buffer, keys = filled(3, sampler=sampler)
    buffer.update_priorities(keys, torch.zeros(3))
    assert buffer.stats().drawable == 3
    assert set(buffer.sample(64)["key"].tolist()) == {0, 1, 2}


EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", [*(d for d in ELEMENTS if d != torch.bool), *EIGHT_BITS], ids=str)
def test_td_errors_are_numbers_of_any_dtype(dtype):
    buffer, keys = filled(3, sampler=tr.Prioritized(alpha=1.0, eps=1e-9))
    buffer.update_priorities(keys, torch.tensor([1.0, 2.0, 4.0]).to(dtype))
    torch.testing.assert_close(buffer.gather(keys)["probability"], torch.tensor([1.0, 2.0, 4.0]) / 7)


@pytest.mark.parametrize("raw", [1e39, 1e300, -1e300])
def test_priorities_beyond_float32_saturate_and_stay_finite(raw):
    updated, keys = filled(2, sampler=tr.Prioritized())
    updated.update_priorities(keys, torch.tensor([raw, 0.0], dtype=torch.float64))
    written, _ = filled(2, sampler=tr.Prioritized())
    with written.writer() as writer:
        writer.append(x=0.0, priority=raw)
    for buffer in (updated, written):
        stats = buffer.stats()
        assert stats.priority_max == pytest.approx(torch.finfo(torch.float32).max)
        assert np.isfinite(stats.priority_total)
        batch = buffer.sample(8)
        assert batch["weight"].isfinite().all()
        assert batch["probability"].isfinite().all()


def test_alpha_zero_is_uniform():
    buffer, keys = filled(4, sampler=tr.Prioritized(alpha=0.0))
    buffer.update_priorities(keys, torch.tensor([0.0, 1.0, 100.0, 1e30]))
    torch.testing.assert_close(buffer.sample(8)["probability"], torch.full((8,), 0.25))


def test_new_items_start_from_the_largest_priority_held_unless_initial_says_otherwise():
    buffer, keys = filled(3, sampler=tr.Prioritized())
    buffer.update_priorities(keys, torch.tensor([7.0, 2.0, 5.0]))
    buffer.update_priorities(keys[:1], torch.tensor([3.0]))
    assert buffer.priorities(buffer.extend(x=[0.0])).item() == pytest.approx(5.0)


def test_a_dropped_td_error_does_not_raise_the_initial_priority():
    buffer, keys = filled(2, sampler=tr.Prioritized(alpha=1.0))
    buffer.extend(x=np.zeros(1))
    buffer.update_priorities(keys, torch.tensor([50.0, 2.0]))
    stats = buffer.stats()
    assert (stats.stale_updates, stats.updated, stats.priority_max) == (1, 1, 2.0)


def share_of_the_newest(initial):
    """P of each of 200 rows that come, one by one, after an outlier that was corrected at once; 100 rows are held."""
    buffer, keys = filled(100, sampler=tr.Prioritized(alpha=1.0, initial=initial))
    buffer.update_priorities(keys, torch.full((100,), 0.01))
    buffer.update_priorities(keys[:1], torch.tensor([1e4]))
    buffer.update_priorities(keys[:1], torch.tensor([0.01]))
    shares = []
    for n in range(200):
        key = buffer.extend(x=[float(n)])
        shares.append(buffer.gather(key)["probability"].item())
        buffer.update_priorities(key, torch.tensor([0.01]))
    return shares


def test_an_outlier_that_was_corrected_at_once_makes_new_items_likely_for_ever_unless_what_is_held_counts():
    assert min(share_of_the_newest("max_seen")) > 0.999
    assert share_of_the_newest("max_held") == pytest.approx([0.01] * 200)
    assert share_of_the_newest(0.03) == pytest.approx([0.03 / (0.03 + 99 * 0.01)] * 200, rel=1e-3)


@pytest.mark.parametrize(("rows", "falls"), [(32, True), (64, False)])
def test_the_largest_held_falls_where_a_batch_has_more_items_than_came_since_the_one_before(rows, falls):
    # Of 64 draws none leaves out one of 33 items that share P = 1: each spans a whole stratum. Of 65 items one is left.
    buffer, keys = filled(1_000, sampler=tr.Prioritized(alpha=1.0))
    buffer.update_priorities(keys, torch.full((1_000,), 1e-9))
    buffer.update_priorities(keys[-1:], torch.tensor([1e4]))
    for _ in range(5):
        buffer.extend(x=np.zeros(rows))
        buffer.update_priorities(buffer.sample(64), torch.full((64,), 1e-9))
    start = buffer.priorities(buffer.extend(x=np.zeros(1))).item()
    assert start == pytest.approx(1e-9 if falls else 1e4, rel=1e-6, abs=1e-6)


def leaves_of(buffer):
    return buffer._segment.column(-1).tolist()


def exact(initial, n=4):
    """A full buffer of leaves 7, 2, 5, 3 with one more row to come into the place of the 7."""
    buffer, keys = filled(n, sampler=tr.Prioritized(alpha=1.0, eps=1e-30, initial=initial))
    buffer.update_priorities(keys, torch.tensor([7.0, 2.0, 5.0, 3.0]))
    return buffer, keys


def test_what_overwrites_the_largest_item_starts_from_the_largest_of_the_others():
    buffer, _ = exact("max_held")
    buffer.extend(x=[0.0])
    assert len(buffer) == 4
    assert leaves_of(buffer) == [5.0, 2.0, 5.0, 3.0]


def test_priorities_that_fall_take_the_start_of_new_items_with_them_and_an_empty_buffer_starts_from_1():
    buffer, keys = exact("max_held")
    buffer.update_priorities(keys, torch.tensor([0.25, 0.5, 0.125, 0.125]))
    buffer.extend(x=[0.0])
    assert len(buffer) == 4
    assert leaves_of(buffer) == [0.5, 0.5, 0.125, 0.125]
    buffer.clear()
    buffer.extend(x=[0.0])
    assert len(buffer) == 1
    assert sorted(leaves_of(buffer)) == [0.0, 0.0, 0.0, 1.0]


def write_one(buffer):
    buffer.extend(x=[0.0])
    len(buffer)


@pytest.mark.parametrize("way", ["fork", "load", "open", "smaller"])
@pytest.mark.parametrize(("initial", "start"), [("max_held", 5.0), (0.5, 0.5), ("max_seen", 7.0)], ids=str)
def test_how_new_items_start_is_the_same_in_every_process_and_after_a_checkpoint(tmp_path, way, initial, start):
    path = tmp_path / "ring" if way == "open" else None
    buffer = tr.ReplayBuffer(SPEC, 4, seed=0, sampler=tr.Prioritized(alpha=1.0, eps=1e-30, initial=initial), path=path)
    keys = buffer.extend(x=np.arange(4))
    buffer.update_priorities(keys, torch.tensor([7.0, 2.0, 5.0, 3.0]))
    if way == "fork":
        child = multiprocessing.get_context("fork").Process(target=write_one, args=(buffer,))
        child.start()
        child.join()
    elif way == "open":
        buffer.close()
        buffer = tr.ReplayBuffer.open(path)
    else:
        buffer.save(tmp_path / "saved")
        buffer = tr.ReplayBuffer.load(tmp_path / "saved", capacity=3 if way == "smaller" else None)
    assert buffer.sampler.initial == initial
    if way != "fork":
        write_one(buffer)
    if way == "smaller":  # keys 1, 2, 3, in slots 1, 2, 0; the new one overwrites key 1
        assert leaves_of(buffer) == [3.0, start, 5.0]
    else:
        assert leaves_of(buffer) == [start, 2.0, 5.0, 3.0]


@pytest.mark.parametrize(
    "initial", ["max", "", None, True, -1, -0.5, float("nan"), float("inf"), 1e39, [1.0], b"max_held"]
)
def test_another_start_of_new_items_is_refused(initial):
    with pytest.raises((ValueError, TypeError), match=r"initial is .*: expected"):
        tr.Prioritized(initial=initial)


def test_samplers_travel_with_the_buffer():
    scheduled = tr.Prioritized(alpha=0.7, beta=tr.LinearSchedule(0.1, 0.9, 50), weights="none")
    for sampler in (tr.Uniform(), scheduled, tr.Prioritized(initial="max_held"), tr.Prioritized(initial=2)):
        buffer, _ = filled(2, sampler=sampler)
        assert tr.ReplayBuffer.attach(buffer.handle()).sampler == sampler

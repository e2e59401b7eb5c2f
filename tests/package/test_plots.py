"""The plots of a run, and the history they are drawn from."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

import torchreplay as tr
from torchreplay.plots import AGE_BINS, ReplayHistory, replay_health

PNG = b"\x89PNG\r\n\x1a\n"


def filled(rows=500, capacity=1000, **options):
    buffer = tr.ReplayBuffer({"obs": tr.Field((2,))}, capacity, seed=1, **options)
    buffer.extend(obs=torch.zeros(rows, 2))
    return buffer


def test_importing_the_plots_does_not_import_matplotlib():
    code = "import sys, torchreplay.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_ages_count_the_rows_written_after_each_drawn_item():
    buffer = filled(rows=100, capacity=100)
    history = ReplayHistory(buffer)
    history.observe(tr.ReplayBatch({"key": torch.tensor([99, 99, 90, 0])}))
    assert {age: n for age, n in enumerate(history.age_counts.tolist()) if n} == {0: 2, 9: 1, 99: 1}


def test_an_item_overwritten_since_its_draw_counts_as_the_oldest():
    buffer = filled(rows=250, capacity=100)
    history = ReplayHistory(buffer)
    history.observe(tr.ReplayBatch({"key": torch.tensor([3])}))
    assert history.age_counts[-1] == 1


def test_an_item_of_a_shard_has_its_age_in_that_shard_and_none_where_the_shard_is_lost():
    pytest.importorskip("ray")
    from torchreplay.ray.sharded.stats import ShardStats

    shards = [ShardStats(number, "", filled(rows, capacity=100).stats()) for number, rows in ((0, 100), (5, 250))]
    told = SimpleNamespace(size=200, rows_written=350, shards=shards)
    figures = {"capacity": 200, "limiter": tr.MinSize(), "sampler": tr.Uniform()}
    history = ReplayHistory(SimpleNamespace(**figures, stats=lambda: told))
    keys = [0, 99, *((5 << 48) + row for row in (150, 240, 249)), 7 << 48]
    history.observe(tr.ReplayBatch({"key": torch.tensor(keys)}))
    assert {age: n for age, n in enumerate(history.age_counts.tolist()) if n} == {0: 2, 9: 1, 99: 2}
    assert history.age_uniform.tolist() == pytest.approx([6 / AGE_BINS] * AGE_BINS)


def test_uniform_draws_have_the_ages_expected_of_uniform_draws_while_the_buffer_fills():
    # A chi-square test at a false-alarm rate of one in a million; the seed is fixed.
    buffer = tr.ReplayBuffer({"obs": tr.Field((2,))}, 1000, seed=5)
    history = ReplayHistory(buffer)
    for _ in range(15):
        buffer.extend(obs=torch.zeros(100, 2))
        for _ in range(20):
            history.observe(buffer.sample(64))
    counts, expected = history.age_counts.double(), history.age_uniform
    assert float(expected.sum()) == pytest.approx(15 * 20 * 64)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # Strata make the counts of one batch less variable than independent draws: the test is one-sided.
    assert statistic < stats.chi2.isf(1e-6, AGE_BINS - 1)


def test_a_moment_holds_the_statistics_of_its_time():
    buffer = filled(rows=10)
    history = ReplayHistory(buffer)
    moment = history.record(7, 12.5, [1.0, 2.0])
    buffer.extend(obs=torch.zeros(5, 2))
    assert (moment.step, moment.mean_return, moment.explorer_returns) == (7, 12.5, (1.0, 2.0))
    assert moment.stats.inserted == 10
    assert history.record(8).stats.inserted == 15


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampler": tr.Prioritized(), "limiter": tr.SamplesPerInsert(1.0, 400, tolerance=1.0)},
    ],
    ids=["uniform", "prioritized"],
)
def test_the_picture_of_a_run_is_a_png(tmp_path, options):
    buffer = filled(**options)
    history = ReplayHistory(buffer)
    for step in range(1, 4):
        history.observe(buffer.sample(32))
        history.record(step, mean_return=10.0 * step, explorer_returns=(5.0, float("nan")))
    path = tmp_path / "health.png"
    replay_health(history, path, "a run", solved=25.0)
    assert path.read_bytes().startswith(PNG)


def test_a_dark_picture_is_dark_and_a_light_one_is_not(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    history = ReplayHistory(filled())
    for step in range(3):
        history.record(step, mean_return=float(step), explorer_returns=(1.0, 2.0))
    brightness = {}
    for dark in (False, True):
        replay_health(history, tmp_path / "health.png", "a run", dark=dark)
        brightness[dark] = image.imread(tmp_path / "health.png")[..., :3].mean()
    assert brightness[True] < 0.25 < 0.75 < brightness[False]


def test_a_run_without_draws_or_returns_can_be_drawn_too(tmp_path):
    history = ReplayHistory(filled(rows=0))
    history.record(0)
    replay_health(history, tmp_path / "health.png")
    assert (tmp_path / "health.png").read_bytes().startswith(PNG)


def test_drawing_an_empty_history_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"history\.record\(step\)"):
        replay_health(ReplayHistory(filled()), tmp_path / "health.png")

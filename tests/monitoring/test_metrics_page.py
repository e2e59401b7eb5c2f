"""The page on metrics has every figure, and the sick runs show what it says."""

import re

import pytest
from paths import ROOT

from torchreplay.monitoring.metrics import COUNTERS, GAUGES, HISTOGRAMS, RATES

PAGE = (ROOT / "docs" / "metrics.md").read_text()
TABLE = PAGE.split("## Figures")[1].split("`tr.explain")[0]


def test_every_figure_has_a_line_and_no_other_has():
    told = {name for row in re.findall(r"^\| ([^|]+) \|", TABLE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert told == {*COUNTERS, *GAUGES, *HISTOGRAMS, *(f"{name}_per_second" for name in RATES)}


def test_every_picture_is_there():
    pictures = re.findall(r"\]\((metrics_\w+\.png)\)", PAGE)
    assert len(pictures) == 7
    for picture in pictures:
        assert (ROOT / "docs" / picture).is_file(), picture


@pytest.fixture(scope="module")
def sick_runs():
    pytest.importorskip("matplotlib")
    from benchmarks import sick_runs

    return sick_runs


def test_a_large_alpha_draws_few_items_and_leaves_fewer_an_effect(sick_runs):
    healthy, sick = sick_runs.draws(0.6, 60, 4000), sick_runs.draws(2.0, 60, 4000)
    assert min(healthy.values["distinct"]) > 200 > 150 > sick.values["distinct"][-1]
    assert healthy.values["effective"][-1] > 3 * sick.values["effective"][-1]


def test_a_cut_written_as_an_end_keeps_values_low_and_priorities_high(sick_runs):
    (healthy, (edges, _)), (sick, (sick_edges, sick_counts)) = (sick_runs.valued(w, 1000) for w in (False, True))
    assert healthy.values["value"][-1] == pytest.approx(sick_runs.VALUE, rel=0.02)
    assert sick.values["value"][-1] < sick_runs.VALUE / 3
    assert edges[-1] < sick_edges[sick_counts.argmax()]  # the largest of all is below the commonest
    # Rows at the cut, one of 25, have about the values for errors.
    assert sick_counts[sick_edges[:-1] > 4].sum() == pytest.approx(sick_counts.sum() / sick_runs.LIMIT, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "arguments", "figure", "worse"),
    [
        ("starving", (3_000.0, 250.0), "sample_wait_share", 1),
        ("bereft", (False, True), "writers", -1),
        ("belated", (0.0, 0.7), "late_share", 1),
    ],
)
def test_explorers_that_fall_short_are_seen(sick_runs, run, arguments, figure, worse):
    healthy, sick = (getattr(sick_runs, run)(argument, 3.0).values[figure][-1] for argument in arguments)
    assert worse * sick > worse * healthy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("healthy", "sick", "figure", "worse"),
    [
        ((0.1, 4_000, False), (0.4, 1_000, False), "insert_wait_share", 1),
        ((0.1, 4_000, False), (0.4, 4_000, False), "oldest_age", 1),
        ((0.2, 1_500, False), (0.2, 1_500, True), "drawable", -1),
    ],
    ids=["slow learner, waits", "slow learner, ages", "dead explorer"],
)
def test_sick_queues_are_seen(sick_runs, healthy, sick, figure, worse):
    well, ill = (sick_runs.queued(*arguments, 5.0).values[figure][-1] for arguments in (healthy, sick))
    assert worse * ill > worse * well

"""Rates and shares of time, from snapshots whose figures are known."""

from dataclasses import replace

import pytest
from watched_buffers import look_at, make

from torchreplay.monitoring.snapshot import Participant
from torchreplay.monitoring.timeline import KEPT, Timeline


@pytest.fixture(scope="module")
def empty():
    buffer = make()
    with look_at(buffer) as live:
        return live.snapshot()


def timeline(empty, moments):
    made = Timeline()
    for time, values in moments:
        made.add(replace(empty, time=time, **values))
    return made


def people(writers, learners=0, rows=0, pid=1):
    roles = ["writer"] * writers + ["learner"] * learners
    return tuple(Participant(i, role, True, False, pid, rows, 0.0, 0.0) for i, role in enumerate(roles, 2))


def test_a_rate_is_the_growth_over_the_time(empty):
    made = timeline(empty, [(100 + t / 10, {"head": 50 * t}) for t in range(200)])
    assert made.rate("head") == pytest.approx(500)
    assert made.rate("head", 1.0) == pytest.approx(500)
    assert made.change("head", 1.0) == pytest.approx(500)
    assert made.span == pytest.approx(19.9)


def test_a_rate_is_that_of_late(empty):
    made = timeline(empty, [(t, {"draws": min(t, 50)}) for t in range(61)])
    assert made.rate("draws", 10.0) == 0
    assert made.rate("draws", 20.0) == pytest.approx(0.5)


def test_one_snapshot_has_no_rate(empty):
    made = timeline(empty, [(1.0, {"head": 100})])
    assert (made.rate("head"), made.change("head"), made.span) == (0, 0, 0)


def test_a_counter_that_is_taken_back_does_not_run_backwards(empty):
    made = timeline(empty, [(0.0, {"sampled": 10}), (1.0, {"sampled": 5})])
    assert made.rate("sampled") == 0


def test_shares_of_time_are_those_of_one_participant_on_average(empty):
    made = timeline(
        empty,
        [
            (0.0, {"participants": people(4, 2)}),
            (10.0, {"participants": people(4, 2), "insert_wait": 8.0, "sample_wait": 5.0}),
        ],
    )
    assert made.insert_wait_share(10.0) == pytest.approx(0.2)
    assert made.sample_wait_share(10.0) == pytest.approx(0.25)


def test_those_who_have_just_left_still_count_for_the_time_that_was_waited(empty):
    made = timeline(empty, [(0.0, {"participants": people(4)}), (10.0, {"participants": (), "insert_wait": 8.0})])
    assert made.insert_wait_share(10.0) == pytest.approx(0.2)


def test_a_share_of_two_counters_is_that_of_their_growth(empty):
    made = timeline(empty, [(0.0, {"stale_updates": 100, "updated": 0}), (1.0, {"stale_updates": 120, "updated": 60})])
    assert made.share("stale_updates", "feedback") == pytest.approx(0.25)
    assert made.share("unready_updates", "inserted") == 0


def test_the_rate_of_a_participant_starts_anew_when_its_place_has_another(empty):
    made = timeline(
        empty, [(0.0, {"participants": people(1, rows=900)}), (2.0, {"participants": people(1, rows=1000)})]
    )
    assert made.participant_rate(2) == pytest.approx(50)
    made.add(replace(empty, time=4.0, participants=people(1, rows=40, pid=2)))
    assert made.participant_rate(2) == pytest.approx(10)
    assert made.participant_rate(77) == 0


def test_snapshots_of_a_minute_are_kept(empty):
    made = timeline(empty, [(t / 2, {"head": t}) for t in range(2000)])
    assert KEPT <= made.span <= 2 * KEPT
    assert made.since(0).head == made.now.head == 1999
    assert made.since(1e9) is made.snapshots[0]

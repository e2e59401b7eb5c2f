"""The reference model against items and drawable sets worked out by hand."""

import numpy as np
import pytest
from reference_model import Lanes, Ring, Sequences, SequencesAcrossEpisodes, Transitions

FIELDS = {
    "obs": ((), np.float32),
    "reward": ((), np.float32),
    "terminated": ((), np.bool_),
    "truncated": ((), np.bool_),
    "state": ((), np.int8),
}


def ring_of(view, capacity=100, alpha=1.0):
    return Ring(FIELDS, capacity, view, alpha)


def play(ring, writer, length, end="terminated", priorities=(), look=True):
    """An episode whose observations are 0, 1, 2, ..., its rewards 1, 2, 3, ..., its states 11, 12, 13, ..."""
    writer.reset([{"obs": 0}])
    for t in range(1, length + 1):
        last = t == length
        values = {
            "reward": t,
            "terminated": last and end == "terminated",
            "truncated": last and end == "truncated",
            "state": 10 + t,
        }
        priority = priorities[t - 1] if priorities else None
        writer.step([values], [{"obs": t}], priorities=[priority])
        if look:
            ring.look()


def listed(items):
    return {key: {name: value.tolist() for name, value in item.items()} for key, item in items.items()}


def test_three_steps_of_a_terminated_episode_are_three_transitions_of_two_steps():
    ring = ring_of(Transitions(n_step=2, gamma=0.5))
    play(ring, Lanes(ring), 3)
    end = {"terminated": True, "truncated": False, "discount": 0.0, "next_obs": 3.0}
    assert listed(ring.items()) == {
        0: {
            "obs": 0.0,
            "state": 11,
            "reward": 1 + 0.5 * 2,
            "next_obs": 2.0,
            "terminated": False,
            "truncated": False,
            "discount": 0.25,
        },
        1: {"obs": 1.0, "state": 12, "reward": 2 + 0.5 * 3, **end},
        2: {"obs": 2.0, "state": 13, "reward": 3.0, **end},
    }


@pytest.mark.parametrize(("end", "discounts"), [("truncated", [0.25, 0.25, 0.5]), ("none", [0.25, 0.25])])
def test_a_truncated_episode_bootstraps_and_an_unfinished_one_lacks_its_last_items(end, discounts):
    ring = ring_of(Transitions(n_step=2, gamma=0.5))
    play(ring, Lanes(ring), 3, end)
    assert [item["discount"] for item in ring.items().values()] == discounts


def test_stacks_repeat_the_first_frame_and_end_with_the_frames_evicted():
    ring = ring_of(Transitions(stack={"obs": 3}), capacity=5)
    writer = Lanes(ring)
    play(ring, writer, 4)
    items = listed(ring.items())
    assert [item["obs"] for item in items.values()] == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3]]
    assert [item["next_obs"] for item in items.values()] == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    writer.reset([{"obs": 9}])  # takes the slot of key 0, a frame of the items 0, 1 and 2
    ring.look()
    assert list(ring.items()) == [3]


def test_sequences_start_at_strides_and_the_tail_is_padded_if_it_goes_beyond_the_burn_in():
    ring = ring_of(Sequences(2, stride=2, burn_in=1, initial=("state",)))
    play(ring, Lanes(ring), 4)
    items = listed(ring.items())
    assert list(items) == [0, 2]
    assert items[0]["obs"] == [0, 1, 2, 3]
    assert items[0]["is_first"] == [True, False, False]
    assert items[2] == {
        "obs": [2, 3, 4, 0],
        "reward": [3, 4, 0],
        "terminated": [False, True, False],
        "truncated": [False] * 3,
        "state": 13,
        "mask": [True, True, False],
        "is_first": [False] * 3,
    }
    play(ring, Lanes(ring), 3)
    assert list(ring.items()) == [0, 2, 5], "one step from 7 to the end: nothing is left after the burn-in"


def test_windows_across_episodes_have_no_step_into_the_first_observation():
    ring = ring_of(SequencesAcrossEpisodes(3))
    writer = Lanes(ring)
    play(ring, writer, 2)
    play(ring, writer, 1, "none")
    items = listed(ring.items())
    assert list(items) == [0, 1]
    assert items[1] == {
        "obs": [1, 2, 0, 1],
        "reward": [2, 0, 1],
        "terminated": [True, False, False],
        "truncated": [False] * 3,
        "state": [12, 0, 11],
        "mask": [True, False, True],
        "is_first": [False, False, True],
    }


def test_two_streams_are_kept_apart_whatever_the_order_of_their_rows():
    ring = ring_of(Transitions())
    lanes = Lanes(ring, 2, "next_step")
    assert lanes.reset([{"obs": 0}, {"obs": 10}]) == [0, 1]
    step = {"reward": 1, "terminated": False, "truncated": False, "state": 1}
    assert lanes.step([step | {"terminated": True}, step], [{"obs": 1}, {"obs": 11}]) == [2, 3]
    assert lanes.step([step, step], [{"obs": 5}, {"obs": 12}]) == [4, 5]
    ring.look()
    pairs = {key: (item["obs"], item["next_obs"]) for key, item in ring.items().items()}
    assert pairs == {0: (0, 1), 1: (10, 11), 3: (11, 12)}


def test_a_lane_that_ends_in_the_same_step_writes_two_rows():
    ring = ring_of(Transitions())
    lanes = Lanes(ring, 2, "same_step")
    lanes.reset([{"obs": 0}, {"obs": 10}])
    step = {"reward": 1, "terminated": False, "truncated": False, "state": 1}
    final = [{"obs": 7}, None]
    assert lanes.step([step | {"truncated": True}, step], [{"obs": 1}, {"obs": 11}], final) == [2, 4]
    ring.look()
    pairs = {key: (item["obs"], item["next_obs"]) for key, item in ring.items().items()}
    assert pairs == {0: (0, 7), 1: (10, 11)}


def test_priorities_belong_to_the_items_completed_and_only_theirs_raise_the_largest():
    ring = ring_of(Transitions(n_step=3))
    play(ring, Lanes(ring), 4, priorities=[9.0, None, 2.0, 3.0])
    assert ring.leaves == pytest.approx({0: 2.0, 1: 3.0, 2: 3.0, 3: 3.0}, abs=1e-5)
    assert (ring.largest, ring.inserted) == (3.0, 4)
    ring = ring_of(Sequences(2))
    play(ring, Lanes(ring), 5, "none", priorities=[9.0, None, None, None, 20.0])
    assert ring.leaves == pytest.approx({0: 9.0, 2: 9.0}, abs=1e-5)
    ring.update([0, 1, 2, 2], [1.0, 50.0, -2.0, 4.0])
    assert ring.leaves == pytest.approx({0: 1.0, 2: 4.0}, abs=1e-5)
    assert (ring.largest, ring.updated, ring.unready, ring.stale) == (9.0, 3, 1, 0)


def test_rows_overwritten_before_anyone_looked_never_were():
    ring = ring_of(Transitions(), capacity=3)
    play(ring, Lanes(ring), 9, "none", priorities=[100.0] * 7 + [2.0] * 2, look=False)
    ring.look()
    assert list(ring.leaves) == [7, 8]
    assert (ring.inserted, ring.largest) == (2, 2.0)

"""Trajectories of one process: what `reset` and `step` write, and which items come of it."""

import pickle

import numpy as np
import pytest
import torch
from linked_rows import (
    NESTED,
    buffer_of,
    everything,
    flat,
    nested,
    observation,
    pairs,
    parted,
    play,
    row_values,
    stacked,
)

import torchreplay as tr

# Writing


def test_every_observation_of_a_trajectory_is_stored_once_and_reset_and_step_return_its_key():
    buffer = buffer_of(tr.Transitions())
    with buffer.writer() as writer:
        keys = play(writer, 4)
        assert keys == list(range(5))
        assert all(type(key) is int for key in keys)
        assert writer.rows == 5
    assert len(buffer) == 5
    assert buffer.storage["obs"][:5, 0].tolist() == [0, 1, 2, 3, 4]
    assert (buffer.stats().drawable, buffer.stats().inserted, buffer.stats().size) == (4, 4, 5)


def test_a_row_of_a_trajectory_holds_what_led_to_it_and_a_reset_row_zeros():
    buffer = buffer_of(tr.Transitions(), NESTED, capacity=3)
    rows = [row_values(NESTED, 10 + i, truncated=i == 2) for i in range(6)]
    with buffer.writer() as writer:
        for i, row in enumerate(rows):
            observed, others = parted(row, ["obs"])
            if i in (0, 3):
                writer.reset(**nested(observed))
                rows[i] = {name: np.zeros_like(value) for name, value in row.items()} | observed
            else:
                writer.step(**nested(observed), **nested(others))
    stored = flat(buffer.storage)
    for name in NESTED:
        assert np.array_equal(stored[name], stacked(rows[3:])[name])


def test_the_transition_at_an_observation_has_the_action_taken_there_and_what_came_of_it():
    buffer = buffer_of(tr.Transitions())
    with buffer.writer() as writer:
        play(writer, 3)
    batch = everything(buffer)
    assert batch["key"].tolist() == [0, 1, 2]
    assert batch["obs"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch["action"].tolist() == [0, 1, 2]
    assert batch["next_obs"].tolist() == [[1, 1], [2, 2], [3, 3]]
    assert batch["terminated"].tolist() == [False, False, True]
    assert batch["discount"].tolist() == pytest.approx([0.99, 0.99, 0.0])
    names = {"obs", "action", "reward", "terminated", "truncated", "next_obs", "discount"}
    assert names <= set(batch) <= names | {"key", "weight", "probability"}


@pytest.mark.parametrize("leave", ["close", "reset", "nothing"])
def test_a_trajectory_broken_off_leaves_its_complete_items_drawable_and_nothing_else(leave):
    buffer = buffer_of(tr.Transitions(n_step=3))
    writer = buffer.writer()
    play(writer, 5, "none")
    if leave == "close":
        writer.close()
    if leave == "reset":
        play(writer, 2, "none", start=50)
    assert pairs(buffer) == [(0, 3), (1, 4), (2, 5)]
    with buffer.writer() as another:
        play(another, 1, start=90)
    assert pairs(buffer) == [(0, 3), (1, 4), (2, 5), (90, 91)]


def test_no_transition_joins_two_trajectories_of_one_writer_or_of_several():
    buffer = buffer_of(tr.Transitions(n_step=2))
    with buffer.writer() as a, buffer.writer() as b:
        a.reset(**observation(0))
        b.reset(**observation(50))
        for t in range(3):
            for writer, start in ((a, 0), (b, 50)):
                ends = writer is a and t == 2
                flags = {"terminated": False, "truncated": ends}
                writer.step(**observation(start + t + 1), action=0, reward=1.0, **flags)
        play(a, 2, start=10)
    assert sorted(pairs(buffer)) == [(0, 2), (1, 3), (2, 3), (10, 12), (11, 12), (50, 52), (51, 53)]


@pytest.mark.parametrize(
    ("terminated", "truncated", "discount"), [(True, False, 0.0), (False, True, 0.5), (True, True, 0.0)]
)
def test_a_trajectory_bootstraps_from_its_true_last_observation_unless_it_terminated(terminated, truncated, discount):
    buffer = buffer_of(tr.Transitions(n_step=9, gamma=0.5))
    with buffer.writer() as writer:
        writer.reset(**observation(0))
        writer.step(**observation(1), action=0, reward=1.0, terminated=terminated, truncated=truncated)
        writer.reset(**observation(7))
    batch = everything(buffer)
    assert batch["next_obs"].tolist() == [[1, 1]]
    assert (batch["terminated"].item(), batch["truncated"].item()) == (terminated, truncated)
    assert batch["discount"].tolist() == [discount]


def test_a_trajectory_longer_than_the_ring_keeps_its_newest_items_while_it_goes_on():
    buffer = buffer_of(tr.Transitions(n_step=2, stack={"obs": 3}), capacity=7)
    with buffer.writer() as writer:
        play(writer, 40, "none")
        batch = everything(buffer)
    # Keys 34 to 40 are held; an item has 2 frames before its anchor and 2 steps after it.
    assert batch["key"].tolist() == [36, 37, 38]
    assert batch["obs"][..., 0].tolist() == [[34, 35, 36], [35, 36, 37], [36, 37, 38]]
    assert batch["next_obs"][..., 0].tolist() == [[36, 37, 38], [37, 38, 39], [38, 39, 40]]


def test_a_trajectorys_items_go_one_by_one_as_their_rows_are_overwritten():
    buffer = buffer_of(tr.Transitions(n_step=2), capacity=6)
    with buffer.writer() as writer:
        play(writer, 5)
        left = []
        for t in range(5):
            writer.reset(**observation(50 + t))
            left.append(everything(buffer)["key"].tolist())
    assert left == [[1, 2, 3, 4], [2, 3, 4], [3, 4], [4], []]


# Names and nested fields


def test_the_fields_of_a_trajectory_may_have_other_names():
    fields = {
        "x": ((2,), np.float32),
        "z": ((), np.int32),
        "gain": ((), np.float32),
        "dead": ((), np.bool_),
        "late": ((), np.bool_),
    }
    names = {"observation": ("x", "z"), "reward": "gain", "terminated": "dead", "truncated": "late"}
    buffer = buffer_of(tr.Transitions(n_step=2, gamma=0.5, **names), fields)
    with buffer.writer() as writer:
        writer.reset(x=np.zeros(2), z=0)
        writer.step(x=np.ones(2), z=1, gain=1.0, dead=False, late=False)
        writer.step(x=np.full(2, 2.0), z=2, gain=3.0, dead=False, late=True)
    batch = everything(buffer)
    assert batch["gain"].tolist() == [2.5, 3.0]
    assert (batch["dead"].tolist(), batch["late"].tolist()) == ([False, False], [True, True])
    assert (batch["z"].tolist(), batch["next_z"].tolist()) == ([0, 1], [2, 2])
    assert batch["next_x"].tolist() == [[2, 2], [2, 2]]
    assert "next_gain" not in batch


def test_of_a_nested_observation_the_first_name_gets_the_prefix_and_one_part_may_be_stacked():
    buffer = buffer_of(tr.Transitions(stack={"obs/goal": 2}), NESTED)
    with buffer.writer() as writer:
        for i in range(3):
            observed, others = parted(row_values(NESTED, i), ["obs"])
            if i == 0:
                writer.reset(**nested(observed))
            else:
                writer.step(**nested(observed), **nested(others))
    batch = everything(buffer)
    goals = [row_values(NESTED, i)["obs/goal"].item() for i in range(3)]
    assert batch["obs"]["goal"].tolist() == [[goals[0], goals[0]], [goals[0], goals[1]]]
    assert batch["next_obs"]["goal"].tolist() == [[goals[0], goals[1]], [goals[1], goals[2]]]
    assert batch["obs"]["image"].shape == batch["next_obs"]["image"].shape == (2, 32, 36)
    assert list(batch["next_obs"]) == list(batch["obs"]) == ["image", "goal"]
    assert "next_state" not in batch


def test_the_axis_of_a_stack_stays_for_one_frame():
    buffer = buffer_of(tr.Transitions(stack={"obs": 1}))
    with buffer.writer() as writer:
        play(writer, 2)
    assert everything(buffer)["obs"].shape == (2, 1, 2)


# Elsewhere in the buffer


def test_a_draw_from_a_trajectory_without_a_complete_item_says_so(monkeypatch):
    monkeypatch.setattr("threading.active_count", lambda: 1)
    buffer = buffer_of(tr.Transitions(n_step=3))
    with buffer.writer() as writer:
        play(writer, 2, "none")
        with pytest.raises(tr.WouldBlockForever, match="0 items were inserted, 1 are needed and 0 can be drawn"):
            buffer.sample(1)
        play(writer, 2)
        assert buffer.sample(8)["key"].unique().tolist() == [3, 4]


def test_the_limiter_counts_items_of_trajectories_and_not_rows(monkeypatch):
    monkeypatch.setattr("threading.active_count", lambda: 1)
    buffer = buffer_of(tr.Transitions(), limiter=tr.MinSize(4))
    with buffer.writer() as writer:
        play(writer, 3)
        writer.reset(**observation(9))
        with pytest.raises(tr.WouldBlockForever, match="3 items were inserted, 4 are needed"):
            buffer.sample(1)
        play(writer, 1)
    assert len(buffer.sample(1)["key"]) == 1


def test_the_same_seed_and_the_same_trajectories_give_the_same_batches():
    batches = []
    for _ in range(2):
        buffer = buffer_of(tr.Transitions(n_step=2), sampler=tr.Prioritized())
        with buffer.writer() as writer:
            play(writer, 30)
        batches.append([buffer.sample(16) for _ in range(3)])
    for first, second in zip(*batches, strict=True):
        assert all(np.array_equal(first[name], second[name]) for name in first)


VIEWS = [
    tr.Transitions(n_step=2, gamma=0.5, stack={"obs": 3}),
    tr.Sequences(3, stride=2, burn_in=1, initial=("action",)),
    tr.Sequences(2, across_episodes=True),
]


@pytest.mark.parametrize("view", VIEWS, ids=repr)
def test_the_view_of_trajectories_travels_with_the_buffer(view):
    buffer = buffer_of(view)
    with buffer.writer() as writer:
        play(writer, 6)
    attached = pickle.loads(pickle.dumps(buffer))
    assert attached.view == buffer.view == view
    ours, theirs = flat(everything(buffer)), flat(everything(attached))
    assert len(ours["key"]) > 0
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours | theirs)


@pytest.mark.parametrize("view", VIEWS, ids=repr)
def test_batches_of_trajectories_come_through_the_dataset(view):
    buffer = buffer_of(view)
    with buffer.writer() as writer:
        play(writer, 9)
    batch = next(iter(tr.ReplayDataset(buffer, 4)))
    drawn = everything(buffer)
    places = [drawn["key"].tolist().index(key) for key in batch["key"].tolist()]
    for name in set(drawn) - {"weight", "probability"}:
        assert torch.equal(batch[name], drawn[name][places])

"""Feedback to items of trajectories: what is gathered by key, which TD errors are applied, how priorities begin."""

import pytest
import torch
from linked_rows import buffer_of, everything, observation, play

import torchreplay as tr


def assert_leaf(buffer, key, raw, alpha=1.0):
    expected = (abs(raw) + 1e-6) ** alpha
    assert buffer._segment.column(-1)[key % buffer.capacity].item() == pytest.approx(expected, rel=1e-6)


def test_gathered_items_of_a_trajectory_come_in_the_order_asked_for_without_those_that_cannot_be_drawn():
    buffer = buffer_of(tr.Transitions(), capacity=6)
    with buffer.writer() as writer:
        play(writer, 3)
        play(writer, 3, start=50)  # its last two rows take the slots of keys 0 and 1
    batch = buffer.gather(torch.tensor([6, 3, 2, 0, 7, 2, 4, 5]))
    assert batch["key"].tolist() == [6, 2, 2, 4, 5]
    assert batch["obs"][:, 0].tolist() == [52, 2, 2, 50, 51]
    empty = buffer.gather(torch.tensor([3], dtype=torch.int64))
    assert empty["key"].shape == (0,)
    assert empty["obs"].shape == empty["next_obs"].shape == (0, 2)
    assert len(buffer.gather(torch.tensor([], dtype=torch.int64))["key"]) == 0


def test_td_errors_of_rows_that_anchor_no_item_of_a_trajectory_are_dropped_and_counted():
    buffer = buffer_of(tr.Transitions(n_step=2), capacity=10, sampler=tr.Prioritized(alpha=1.0))
    with buffer.writer() as writer:
        play(writer, 4)
        play(writer, 6, "none", start=50)  # 12 rows: keys 0 and 1 are overwritten
    batch = buffer.gather(torch.arange(12))
    assert batch["key"].tolist() == [2, 3, 5, 6, 7, 8, 9]
    buffer.update_priorities(torch.tensor([0, 1, 2, 4, 9, 10, 11]), torch.full((7,), 50.0))
    stats = buffer.stats()
    assert (stats.updated, stats.stale_updates, stats.unready_updates) == (2, 2, 3)
    buffer.update_priorities(batch, torch.ones(7))
    assert buffer.stats().updated == 9


def test_a_td_error_does_not_bring_back_an_item_of_a_trajectory_whose_frames_are_gone():
    buffer = buffer_of(tr.Transitions(stack={"obs": 3}), capacity=6, sampler=tr.Prioritized(alpha=1.0))
    with buffer.writer() as writer:
        play(writer, 5)
        writer.reset(**observation(50))  # takes the slot of key 0, a frame of keys 1 and 2
    buffer.update_priorities(torch.tensor([1, 2, 3]), torch.full((3,), 9.0))
    assert everything(buffer)["key"].tolist() == [3, 4]
    stats = buffer.stats()
    assert (stats.updated, stats.unready_updates, stats.drawable) == (1, 2, 2)
    assert stats.priority_max == 9.0


def test_a_priority_belongs_to_the_items_of_the_trajectory_that_its_step_completes():
    buffer = buffer_of(tr.Transitions(n_step=3), sampler=tr.Prioritized(alpha=1.0))
    with buffer.writer() as writer:
        keys = play(writer, 5, priorities=[100.0, 200.0, 3.0, -4.0, 5.0])
    assert len(buffer) == 6
    for key, raw in zip(keys, [3.0, 4.0, 5.0, 5.0, 5.0], strict=False):
        assert_leaf(buffer, key, raw)
    assert buffer.stats().priority_max == 5.0, "the first two steps completed nothing"


def test_a_sequence_of_a_trajectory_starts_with_the_largest_priority_given_with_its_steps():
    buffer = buffer_of(tr.Sequences(2, stride=1, burn_in=1), sampler=tr.Prioritized(alpha=1.0))
    with buffer.writer() as writer:
        play(writer, 5, priorities=[2.0, None, -4.0, 3.0, None])
    assert len(buffer) == 6
    assert everything(buffer)["key"].tolist() == [0, 1, 2, 3]
    for key, raw in enumerate([4.0, 4.0, 4.0, 3.0]):
        assert_leaf(buffer, key, raw)


def test_a_sequence_of_a_trajectory_without_any_priority_gets_the_largest_seen_before():
    buffer = buffer_of(tr.Sequences(2), sampler=tr.Prioritized(alpha=1.0))
    with buffer.writer() as writer:
        play(writer, 2, priorities=[6.0, None])
        assert len(buffer) == 3
        play(writer, 4, priorities=[None, None, 2.0, 1.0])
    assert len(buffer) == 8
    for key, raw in {0: 6.0, 3: 6.0, 5: 2.0}.items():
        assert_leaf(buffer, key, raw)


def test_items_of_a_trajectory_without_a_priority_get_the_largest_seen_so_far():
    buffer = buffer_of(tr.Transitions(), sampler=tr.Prioritized(alpha=1.0))
    with buffer.writer() as writer:
        keys = play(writer, 4, priorities=[None, 8.0, None, 2.0])
        assert len(buffer) == 5  # looks at the rows, in their order
        for key, raw in zip(keys, [1.0, 8.0, 8.0, 2.0], strict=False):
            assert_leaf(buffer, key, raw)
        buffer.update_priorities(torch.tensor([0]), torch.tensor([20.0]))
        later = play(writer, 1)
    assert len(buffer) == 7
    assert_leaf(buffer, later[0], 20.0)

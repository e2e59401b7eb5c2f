"""Reverse experience replay, against the sequences of a peer and a plain list of items."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchreplay as tr

ROW = {"x": tr.Field((), torch.int64)}
STEP = {**ROW, "reward": tr.Field(), "terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}


def counting(rows, capacity=64, **arguments):
    """Rows that hold their own key."""
    buffer = tr.ReplayBuffer(ROW, capacity, **arguments)
    if rows:
        buffer.extend(x=np.arange(rows))
    return buffer


def write_episodes(buffer, lengths, first=0):
    """Episodes whose observations count on; returns the keys of the rows, a list an episode."""
    episodes = []
    with buffer.writer() as writer:
        for length in lengths:
            keys = [writer.reset(x=first)]
            for step in range(1, length + 1):
                end = step == length
                keys.append(writer.step(x=first + step, reward=0.0, terminated=end, truncated=False))
            first += length + 1
            episodes.append(keys)
    return episodes


class ListOfItems:
    """The same on a list, newest item last, as the paper and cpprb's documentation describe it."""

    def __init__(self, stride):
        self.stride = stride
        self.last = None

    def sample(self, items, batch_size):
        newest_first = items[::-1]
        older = [i for i, item in enumerate(newest_first) if self.last is None or item < self.last]
        start = older[0] if older and older[0] < 2 * self.stride else 0
        self.last = newest_first[start]
        return [newest_first[(start + k * self.stride) % len(items)] for k in range(batch_size)]


def test_batches_step_back_and_return_to_the_newest_as_cpprbs_do():
    # What cpprb 11.0.0's ReverseReplayBuffer(64, stride=5) draws of 40 rows, with another one written meanwhile.
    buffer = counting(40)
    reverse = tr.Reverse(buffer, stride=5)
    for newest in (39, 38, 37, 36, 35, 34, 33, 32):
        assert reverse.sample(4)["x"].tolist() == [newest, newest - 5, newest - 10, newest - 15]
    buffer.extend(x=np.array([40]))
    for newest in (31, 40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 40):
        assert reverse.sample(4)["x"].tolist() == [newest, newest - 5, newest - 10, newest - 15]


def test_a_batch_longer_than_the_buffer_goes_on_from_the_newest_as_cpprbs_do():
    # What cpprb 11.0.0's ReverseReplayBuffer(16, stride=5) draws of 8 rows.
    reverse = tr.Reverse(counting(8, 16), stride=5)
    expected = [
        [7, 2, 5, 0], [6, 1, 4, 7], [5, 0, 3, 6], [4, 7, 2, 5], [3, 6, 1, 4],
        [2, 5, 0, 3], [1, 4, 7, 2], [0, 3, 6, 1], [7, 2, 5, 0], [6, 1, 4, 7],
    ]  # fmt: skip
    assert [reverse.sample(4)["x"].tolist() for _ in expected] == expected


@given(
    capacity=st.integers(1, 40),
    stride=st.integers(1, 9),
    batch_size=st.integers(1, 7),
    writes=st.lists(st.integers(0, 6), max_size=40),
)
def test_batches_are_those_of_a_list_of_items_at_any_pace_of_writing(capacity, stride, batch_size, writes):
    buffer = counting(1, capacity)
    reverse, model = tr.Reverse(buffer, stride), ListOfItems(stride)
    written = 1
    for n in writes:
        buffer.extend(x=np.arange(written, written + n))
        written += n
        items = list(range(max(0, written - capacity), written))
        assert reverse.sample(batch_size)["x"].tolist() == model.sample(items, batch_size)


@given(
    capacity=st.integers(6, 60),
    stride=st.integers(1, 9),
    lengths=st.lists(st.lists(st.integers(1, 8), max_size=3), min_size=1, max_size=12),
)
def test_rows_that_start_no_item_are_passed_over(capacity, stride, lengths):
    buffer = tr.ReplayBuffer(STEP, capacity, view=tr.Transitions(observation="x"))
    reverse, model = tr.Reverse(buffer, stride), ListOfItems(stride)
    keys = []
    for some in lengths:
        keys += write_episodes(buffer, some, first=sum(map(len, keys)))
        rows = sum(map(len, keys))
        items = [key for episode in keys for key in episode[:-1] if key >= rows - capacity]
        if not items:
            continue
        batch = reverse.sample(5)
        assert batch["key"].tolist() == batch["x"].tolist() == model.sample(items, 5)
        assert batch["next_x"].tolist() == (batch["x"] + 1).tolist()


def test_windows_of_sequences_are_items_like_others():
    buffer = tr.ReplayBuffer(STEP, 200, view=tr.Sequences(4, observation="x"))
    episodes = write_episodes(buffer, [12] * 10)
    anchors = [episode[t] for episode in episodes for t in (0, 4, 8)]
    reverse, model = tr.Reverse(buffer, 7), ListOfItems(7)
    for _ in range(40):
        assert reverse.sample(4)["key"].tolist() == model.sample(anchors, 4)


def test_a_batch_may_reach_far_back_and_over_the_rings_seam():
    buffer = counting(90_000, 50_000)
    reverse = tr.Reverse(buffer, 300)
    for newest in (89_999, 89_998):
        assert reverse.sample(100)["x"].tolist() == list(range(newest, newest - 30_000, -300))


def test_a_reward_meets_every_step_of_its_episode_backwards():
    buffer = tr.ReplayBuffer(STEP, 100, view=tr.Transitions(observation="x"))
    write_episodes(buffer, [20])
    reverse = tr.Reverse(buffer, stride=10)
    assert [int(reverse.sample(1)["x"][0]) for _ in range(20)] == list(range(19, -1, -1))


def test_several_of_them_have_places_of_their_own():
    buffer = counting(20)
    one, other = tr.Reverse(buffer, 5), tr.Reverse(buffer, 5)
    assert [int(one.sample(1)["x"][0]) for _ in range(3)] == [19, 18, 17]
    assert int(other.sample(1)["x"][0]) == 19


def test_rows_of_other_processes_count():
    buffer = counting(10)
    attached = tr.ReplayBuffer.attach(buffer.handle())
    reverse = tr.Reverse(attached, 2)
    buffer.extend(x=np.array([10]))
    assert reverse.sample(2)["x"].tolist() == [10, 8]


def test_draws_are_not_counted_and_their_feedback_is_applied():
    buffer = counting(20, sampler=tr.Prioritized())
    batch = tr.Reverse(buffer, 3).sample(5)
    assert type(batch) is tr.ReplayBatch
    buffer.update_priorities(batch, torch.ones(5))
    stats = buffer.stats()
    assert (stats.sampled, stats.draws, stats.updated) == (0, 0, 5)


def test_without_an_item_it_says_so_and_a_stopped_buffer_is_stopped():
    buffer = counting(0)
    reverse = tr.Reverse(buffer)
    with pytest.raises(RuntimeError, match="no item can be drawn yet"):
        reverse.sample(2)
    buffer.extend(x=np.arange(3))
    assert reverse.sample(2)["x"].tolist() == [2, 2], "300 items before the newest of three is itself"
    buffer.stop()
    with pytest.raises(tr.Stopped):
        reverse.sample(2)


def test_a_row_that_is_no_item_yet_is_no_item():
    buffer = tr.ReplayBuffer(STEP, 10, view=tr.Transitions(observation="x"))
    writer = buffer.writer()
    writer.reset(x=0)
    with pytest.raises(RuntimeError, match="no item can be drawn yet"):
        tr.Reverse(buffer).sample(1)


@pytest.mark.parametrize("stride", [0, -1, 1.5, None, True], ids=repr)
def test_a_stride_below_one_is_refused(stride):
    with pytest.raises(ValueError, match="stride is"):
        tr.Reverse(counting(1), stride)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5], ids=repr)
def test_a_batch_size_below_one_is_refused(batch_size):
    with pytest.raises(ValueError, match="batch_size is"):
        tr.Reverse(counting(1)).sample(batch_size)


def test_repr_tells_the_buffer_and_the_stride():
    assert repr(tr.Reverse(counting(2), 7)).endswith("stride=7)")

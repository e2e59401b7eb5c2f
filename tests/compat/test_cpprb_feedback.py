"""The adapter feeds priorities back as the installed cpprb does, and to the rows that were drawn."""

import copy
import pickle

import cpprb
import numpy as np
import pytest
from cpprb_transitions import ENV, one, transitions

from torchreplay.compat import cpprb as adapter


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float64"])
@pytest.mark.parametrize("form", [np.array, list, tuple])
def test_plain_indexes_of_any_kind_name_the_rows_that_are_there(dtype, form):
    buffers = [library.PrioritizedReplayBuffer(8, ENV, eps=1e-30) for library in (adapter, cpprb)]
    for buffer in buffers:
        buffer.add(**transitions(13))  # the ring has turned
        buffer.update_priorities(form(np.array([1, 6], dtype)), form([0.0, 100.0]))
        buffer.update_priorities(np.array([0, 2, 3, 4, 5, 7], dtype), np.zeros(6))
        assert (buffer.sample(16)["indexes"] == 6).all()
        assert buffer.sample(1)["rew"][0, 0] == 6


def test_read_only_arrays_are_taken():
    buffer = adapter.PrioritizedReplayBuffer(8, ENV)
    values = transitions(8)
    for array in values.values():
        array.flags.writeable = False
    buffer.add(**values)
    priorities = np.ones(8)
    priorities.flags.writeable = False
    batch = buffer.sample(8)
    batch["indexes"].flags.writeable = False
    buffer.update_priorities(batch["indexes"], priorities)


def test_priorities_may_come_in_a_column():
    buffer = adapter.PrioritizedReplayBuffer(8, ENV)
    buffer.add(**transitions(8), priorities=np.ones((8, 1)))
    buffer.update_priorities(buffer.sample(4)["indexes"], np.full((4, 1), 3.0))
    assert buffer.get_max_priority() == 3.0


def hot_after(feed):
    """Returns the number of rows with the priority 1000 after `feed` gave it to a batch whose rows are overwritten."""
    buffer = adapter.PrioritizedReplayBuffer(8, ENV)
    buffer.add(**transitions(8))
    batch = buffer.sample(8)
    buffer.add(**transitions(8, 8))
    buffer.sample(8)  # as with a batch drawn ahead
    feed(buffer, batch["indexes"])
    return int((buffer.replay.priorities(buffer.replay.keys()) > 999).sum()), buffer


@pytest.mark.parametrize(
    "form",
    [
        lambda i: i,
        lambda i: i[:5],
        lambda i: i[[4, 1, 2]],
        lambda i: i[np.arange(len(i)) % 2 == 0],
        lambda i: i.copy(),
        lambda i: i.astype(np.uint64),
        lambda i: i.reshape(-1, 2),
        lambda i: i.reshape(-1, 2).ravel(),
        copy.deepcopy,
        lambda i: pickle.loads(pickle.dumps(i)),
    ],
)
def test_feedback_for_rows_that_are_overwritten_is_dropped(form):
    hot, buffer = hot_after(lambda buffer, i: buffer.update_priorities(form(i), np.full(form(i).size, 1000.0)))
    assert hot == 0
    assert buffer.get_max_priority() == 1.0
    assert buffer.replay.stats().stale_updates > 0


def test_feedback_for_rows_of_before_a_clear_is_dropped():
    buffer = adapter.PrioritizedReplayBuffer(8, ENV)
    buffer.add(**transitions(8))
    batch = buffer.sample(8)
    buffer.clear()
    buffer.add(**transitions(8))
    buffer.update_priorities(batch["indexes"], np.full(8, 1000.0))
    assert buffer.get_max_priority() == 1.0


def test_feedback_reaches_the_rows_that_were_drawn():
    buffer = adapter.PrioritizedReplayBuffer(64, ENV)
    buffer.add(**transitions(64))
    for i in range(20):
        batch = buffer.sample(16)
        buffer.add(**one(64 + i), priorities=1.0)
        buffer.update_priorities(batch["indexes"][3:9], 0.1 + batch["rew"][3:9] / 1000)
    rows = buffer.replay.gather(buffer.replay.keys())
    raw = buffer.replay.priorities(rows["key"]).numpy()
    fed = raw < 0.9
    assert fed.sum() > 20
    np.testing.assert_allclose(raw[fed], 0.1 + rows["rew"].numpy()[fed] / 1000, rtol=1e-3)


def test_indexes_that_were_changed_in_place_are_plain_numbers():
    buffer = adapter.PrioritizedReplayBuffer(8, ENV, eps=1e-30)
    buffer.add(**transitions(8), priorities=np.ones(8))
    indexes = buffer.sample(1)["indexes"]
    indexes[:] = 5
    buffer.update_priorities(indexes, [1000.0])
    assert buffer.replay.priorities([5])[0] == pytest.approx(1000, rel=1e-3)


def test_check_for_update_leaves_alone_what_was_added_since_the_last_sample():
    ours, theirs = [library.PrioritizedReplayBuffer(8, ENV, check_for_update=True) for library in (adapter, cpprb)]
    for buffer in (ours, theirs):
        buffer.add(**transitions(8))
        buffer.sample(4)
        buffer.add(**transitions(3, 8))
        buffer.update_priorities([0, 1, 2], [50.0, 60.0, 70.0])
        assert buffer.get_max_priority() == 1.0
        buffer.update_priorities([2, 3], [50.0, 60.0])
        assert buffer.get_max_priority() == 60.0

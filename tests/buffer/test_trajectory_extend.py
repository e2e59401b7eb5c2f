"""Whole trajectories at once: episodes recorded elsewhere, and time-major blocks of several streams."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked
from linked_rows import NESTED, PLAIN, STEPS, buffer_of, everything, flat, nested, pairs, parted, row_values, stacked
from reference_model import Lanes, Ring, Transitions

import torchreplay as tr


def episode(fields, length, end=(True, False), start=0):
    """(observations [T + 1], everything else [T]) as flat lists of rows."""
    flags = [(False, False)] * length + [end]
    rows = [parted(row_values(fields, start + t, *flags[t]), ["obs"]) for t in range(length + 1)]
    return [observed for observed, _ in rows], [others for _, others in rows[1:]]


def arranged(observed, others):
    return nested(stacked(observed)) | nested(stacked(others))


def assert_holds(buffer, ring):
    """Every drawable item is the model's."""
    ring.look()
    items = ring.items()
    batch = flat(everything(buffer))
    assert batch["key"].tolist() == list(items)
    for name, value in stacked(list(items.values())).items():
        assert np.array_equal(batch[name], value)


@pytest.mark.parametrize("fields", [PLAIN, NESTED], ids=["plain", "nested"])
@pytest.mark.parametrize("end", [(True, False), (False, True), (False, False)])
def test_an_episode_in_minaris_layout_becomes_the_trajectory_that_was_recorded(fields, end):
    buffer = buffer_of(tr.Transitions(n_step=2, gamma=0.5), fields)
    ring = Ring(fields, 100, Transitions(n_step=2, gamma=0.5))
    for length, start in ((5, 0), (1, 20), (9, 40)):
        observed, others = episode(fields, length, end, start)
        before = len(ring.rows)
        keys = buffer.extend(**arranged(observed, others))
        assert (keys.dtype, keys.tolist()) == (torch.int64, list(range(before, before + length + 1)))
        writer = Lanes(ring)
        writer.reset(observed[:1])
        for t in range(length):
            writer.step(others[t : t + 1], observed[t + 1 : t + 2])
    assert_holds(buffer, ring)


def test_an_episode_of_a_data_set_is_taken_with_its_dtypes_and_as_tensors():
    buffer = buffer_of(tr.Transitions())
    buffer.extend(
        obs=torch.arange(6, dtype=torch.float64).reshape(3, 2),
        action=np.array([4, 5], np.int32),
        reward=np.array([0.5, 1.5]),
        terminated=np.array([False, False]),
        truncated=torch.tensor([False, True]),
    )
    batch = everything(buffer)
    assert batch["next_obs"].tolist() == [[2, 3], [4, 5]]
    assert (batch["action"].tolist(), batch["reward"].tolist()) == ([4, 5], [0.5, 1.5])
    assert batch["truncated"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("priority", "leaves"), [(None, [1.0, 1.0, 1.0]), (-3.0, [3.0] * 3), ([7.0, 2.0, 5.0], [2.0, 5.0, 5.0])]
)
def test_a_priority_of_an_episode_is_one_for_all_steps_or_one_for_each(priority, leaves):
    buffer = buffer_of(tr.Transitions(n_step=2), sampler=tr.Prioritized(alpha=1.0))
    given = np.array(priority) if isinstance(priority, list) else priority
    buffer.extend(**arranged(*episode(PLAIN, 3)), priority=given)
    assert len(buffer) == 4
    assert buffer._segment.column(-1)[:3].tolist() == pytest.approx(leaves, rel=1e-5)


def test_an_episode_longer_than_the_ring_leaves_its_end():
    buffer = buffer_of(tr.Transitions(), capacity=10)
    observed, others = episode(PLAIN, 200)
    keys = buffer.extend(**arranged(observed, others))
    assert keys.tolist() == list(range(201))
    batch = everything(buffer)
    assert batch["key"].tolist() == list(range(191, 200))
    assert np.array_equal(batch["next_obs"], stacked(observed[192:])["obs"])
    assert batch["terminated"].tolist() == [False] * 8 + [True]


M_MMAP_THRESHOLD = -3  # malloc.h


def private_bytes():
    """Memory of this process that is not the buffer's, nor what malloc has been given back and keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.parametrize(("view", "most"), [(tr.Rows(), 10), (tr.Transitions(), 20)], ids=["rows", "an episode"])
def test_a_long_call_leaves_little_more_memory_behind_than_that_of_its_keys(view, most):
    # Those take 8 bytes each, and stay for the next tensor of that size. A priority takes 4, a planned row 56.
    rows = 1 << 22
    fields = {"obs": ((), np.uint8), **STEPS, "action": ((), np.uint8), "reward": ((), np.float16)}

    def write():
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)  # fixed: what is freed goes back to the system at once
        buffer = buffer_of(view, fields)
        columns = {name: np.ones(rows, dtype) for name, (_, dtype) in fields.items() if name != "obs"}
        columns |= dict.fromkeys(("terminated", "truncated"), np.zeros(rows, bool))
        observed, priority = np.ones(rows + (view != tr.Rows()), np.uint8), np.ones(rows, np.float32)
        before = private_bytes()
        buffer.extend(obs=observed, **columns, priority=priority)
        grown = private_bytes() - before
        assert grown < most * rows, f"{grown / rows:.1f} bytes a row stay"

    with Forked(write) as process:
        assert process.wait() == 0


def test_a_writer_extends_by_episodes_as_the_buffer_does():
    buffer = buffer_of(tr.Transitions())
    with buffer.writer() as writer:
        assert writer.extend(**arranged(*episode(PLAIN, 2))).tolist() == [0, 1, 2]
        assert writer.extend(**arranged(*episode(PLAIN, 1))).tolist() == [3, 4]
        assert writer.rows == 5
    assert everything(buffer)["key"].tolist() == [0, 1, 3]


def test_a_time_major_block_is_a_stream_for_each_of_its_lanes():
    chance = np.random.default_rng(0)
    buffer = buffer_of(tr.Transitions(n_step=2, gamma=0.5), NESTED, capacity=60)
    ring = Ring(NESTED, 60, Transitions(n_step=2, gamma=0.5))
    rows = []
    for number in range(18 * 3):
        begins = number >= 6 and rows[number - 3][1]["terminated"] | rows[number - 3][1]["truncated"]
        ends = (chance.random(2) < 0.15) & ~begins
        rows.append(parted(row_values(NESTED, number, *ends), ["obs"]))
        rows[number][1]["reward"] *= not begins
    blocks = [rows[i : i + 3] for i in range(0, len(rows), 3)]
    observed = [[o for o, _ in lanes] for lanes in blocks]
    others = [[v for _, v in lanes] for lanes in blocks[1:]]
    fields = stacked([stacked(lanes) for lanes in observed]) | stacked([stacked(lanes) for lanes in others])
    keys = buffer.extend(**nested(fields))
    lanes = Lanes(ring, 3, "next_step")
    expected = [lanes.reset(observed[0])]
    expected += [lanes.step(others[t], observed[t + 1]) for t in range(17)]
    assert (keys.dtype, keys.tolist()) == (torch.int64, expected)
    assert any(row.step == 0 for row in ring.rows[3:]), "some environment began another episode"
    assert_holds(buffer, ring)


def test_priorities_of_a_block_are_given_for_each_step_and_lane():
    buffer = buffer_of(tr.Transitions(), sampler=tr.Prioritized(alpha=1.0))
    buffer.extend(
        obs=np.zeros((3, 2, 2)),
        action=np.zeros((2, 2), int),
        reward=np.zeros((2, 2)),
        terminated=np.zeros((2, 2), bool),
        truncated=np.zeros((2, 2), bool),
        priority=np.array([[2.0, 3.0], [4.0, 5.0]]),
    )
    assert len(buffer) == 6
    assert buffer._segment.column(-1)[:6].tolist() == pytest.approx([2, 3, 4, 5, 0, 0], rel=1e-5)


def test_episodes_written_at_once_join_neither_each_other_nor_those_of_writers():
    buffer = buffer_of(tr.Transitions(n_step=3))
    with buffer.writer() as writer:
        writer.reset(obs=np.full(2, 90))
        buffer.extend(**arranged(*episode(PLAIN, 2, (False, False))))
        buffer.extend(**arranged(*episode(PLAIN, 3, (False, False))))
        flags = {"terminated": True, "truncated": False}
        writer.step(obs=np.full(2, 91), action=0, reward=0.0, **flags)
    first, last = (row_values(PLAIN, number)["obs"][0] for number in (0, 3))
    assert pairs(buffer) == [(90, 91), (first, last)]

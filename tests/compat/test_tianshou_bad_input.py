"""`compat.tianshou`: what is refused, and with which words."""

import numpy as np
import pytest
import tianshou.data as theirs
from tianshou.data import Batch
from tianshou_steps import filled, step

from torchreplay.compat.tianshou import (
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    SharedReplayBuffer,
    SharedVectorReplayBuffer,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("rew"), "no 'rew'"),
        (lambda b: b.update(obs=np.zeros(5, np.float32)), "'obs'"),
        (lambda b: b.update(act="left"), "act"),
    ],
)
def test_bad_steps_are_refused_and_leave_nothing_behind(change, message):
    ours = SharedReplayBuffer(10)
    filled(3, ours)
    bad = step(np.random.default_rng(1))
    change(bad)
    with pytest.raises(ValueError, match=message):
        ours.add(bad)
    assert len(ours) == 3
    filled(1, ours)
    assert len(ours) == 4


def test_environments_that_are_not_there_are_refused():
    ours = SharedVectorReplayBuffer(10, 2)
    given = step(np.random.default_rng(0), 2)
    for ids in ([0, 2], [-1, 0], []):
        with pytest.raises(ValueError, match="expected numbers from 0 to 1"):
            ours.add(given, buffer_ids=ids)


def test_rows_without_an_environment_are_refused():
    ours = SharedVectorReplayBuffer(10, 2)
    with pytest.raises(ValueError, match=r"shape \(3,\) for 2 environments"):
        ours.add(step(np.random.default_rng(0), 3))
    assert len(ours) == 0
    filled(1, ours, n=2)
    assert len(ours) == 2


def test_rows_of_another_writer_are_noticed():
    ours = SharedReplayBuffer(10)
    filled(3, ours)
    row = ours.replay.gather(ours.replay.keys()[:1])
    ours.replay.extend(**{name: row[name] for name in ours.replay.spec})
    with pytest.raises(RuntimeError, match="another process has written"):
        filled(1, ours)


@pytest.mark.parametrize("td", [np.array([np.nan, 1.0]), np.array([np.inf, 1.0]), np.ones(3)])
def test_bad_td_errors_are_refused(td):
    ours = PrioritizedReplayBuffer(10, alpha=0.6, beta=0.4)
    filled(5, ours)
    with pytest.raises(ValueError, match=r"td|TD"):
        ours.update_weight(np.array([0, 1]), td)
    with pytest.raises(IndexError, match="index 5 is out of range"):
        ours.update_weight(np.array([0, 5]), np.ones(2))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: SharedReplayBuffer(0), "size"),
        (lambda: SharedReplayBuffer(5, stack_num=0), "stack_num"),
        (lambda: SharedVectorReplayBuffer(5, 0), "buffer_num"),
        (lambda: PrioritizedReplayBuffer(5, alpha=-1, beta=0.4), "alpha"),
        (lambda: PrioritizedReplayBuffer(5, alpha=1, beta=float("nan")), "beta"),
        (lambda: SharedReplayBuffer(5).sample(3), "is empty"),
    ],
)
def test_bad_numbers_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        made()


def test_what_cannot_be_done_with_shared_memory_says_so():
    ours = PrioritizedVectorReplayBuffer(10, 2, alpha=0.6, beta=0.4)
    filled(2, ours, n=2)
    refusals = [
        lambda: ours.set_batch(Batch()),
        ours.dropnull,
        lambda: ours.init_weight(0),
        lambda: ours.update(theirs.ReplayBuffer(5)),
    ]
    for refused in refusals:
        with pytest.raises(NotImplementedError, match=r"\w"):
            refused()

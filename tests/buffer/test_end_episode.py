"""`Writer.end_episode`: the running episode ends by truncation, without another step."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scalar_steps import STEPS

import torchreplay as tr

VIEWS = [
    tr.Transitions(n_step=1),
    tr.Transitions(n_step=3),
    tr.Transitions(n_step=2, stack={"obs": 3}),
    tr.Sequences(4),
    tr.Sequences(3, stride=1, burn_in=2),
]


def step(writer, i, truncated=False):
    writer.step(obs=i, action=10 * i, reward=float(i), terminated=False, truncated=truncated)


def assert_same_items(found, expected):
    items, others = found.gather(found.keys()), expected.gather(expected.keys())
    assert items.keys() == others.keys()
    for name in items:
        assert torch.equal(items[name], others[name]), name


@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize("look", [False, True], ids=["unseen", "seen"])
def test_an_episode_that_is_ended_gives_the_items_of_one_whose_last_step_was_truncated(view, look):
    with tr.ReplayBuffer(STEPS, 100, view=view) as ended, tr.ReplayBuffer(STEPS, 100, view=view) as truncated:
        for buffer in (ended, truncated):
            with buffer.writer() as writer:
                for steps in (7, 1, 2):
                    writer.reset(obs=0)
                    for i in range(1, steps + 1):
                        step(writer, i, truncated=buffer is truncated and i == steps)
                    if look:
                        len(buffer)  # absorbs the rows before the end
                    if buffer is ended:
                        writer.end_episode()
                        writer.end_episode()  # and nothing more happens
        assert len(truncated.keys()) > 0
        assert_same_items(ended, truncated)
        assert ended.stats().inserted == truncated.stats().inserted


def test_an_item_that_was_complete_before_the_end_keeps_its_priority():
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions(), sampler=tr.Prioritized(alpha=1.0)) as buffer:
        with buffer.writer() as writer:
            writer.reset(obs=0)
            for i in (1, 2, 3):
                step(writer, i)
            buffer.update_priorities(buffer.keys(), torch.tensor([2.0, 3.0, 4.0]))
            writer.end_episode()
        assert buffer.priorities(buffer.keys()) == pytest.approx([2, 3, 4], abs=1e-4)


def test_a_step_needs_a_reset_after_the_end():
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions()) as buffer, buffer.writer() as writer:
        writer.end_episode()  # nothing runs yet
        writer.reset(obs=0)
        writer.end_episode()  # no step yet: the episode goes on
        step(writer, 1)
        writer.end_episode()
        with pytest.raises(ValueError, match="after the end of the episode"):
            step(writer, 2)
        writer.reset(obs=0)
        step(writer, 1)
        assert buffer.num_items == 2


def test_a_mask_says_in_which_environments_the_episode_ends():
    no, chosen = np.zeros(3, bool), np.array([True, False, True])

    def step_all(writer, i):
        writer.step(obs=np.full(3, i), action=np.arange(3), reward=np.ones(3), terminated=no, truncated=no)

    buffer = tr.ReplayBuffer(STEPS, 100, view=tr.Transitions(n_step=3))
    with buffer, buffer.writer(num_envs=3, autoreset="disabled") as writer:
        writer.reset(obs=np.zeros(3, np.int64))
        for i in (1, 2):
            step_all(writer, i)
        assert buffer.num_items == 0
        writer.end_episode(mask=chosen)
        assert sorted(buffer.gather(buffer.keys())["action"].tolist()) == [0, 0, 2, 2]
        with pytest.raises(ValueError, match="environment 0"):
            step_all(writer, 3)
        writer.reset(obs=np.zeros(3, np.int64), mask=chosen)
        step_all(writer, 1)
        writer.end_episode()
        assert len(buffer.keys()) == 4 + 3 + 2


def test_an_end_whose_row_the_ring_has_overwritten_does_nothing():
    buffer = tr.ReplayBuffer(STEPS, 8, view=tr.Transitions())
    with buffer, buffer.writer() as slow, buffer.writer() as fast:
        slow.reset(obs=0)
        step(slow, 1)
        fast.reset(obs=100)
        for i in range(101, 120):
            step(fast, i)
        before = buffer.gather(buffer.keys())
        slow.end_episode()
        after = buffer.gather(buffer.keys())
        assert torch.equal(before["truncated"], after["truncated"])
        assert not after["truncated"].any()


def test_a_learner_that_waits_is_woken_by_the_end():
    with tr.ReplayBuffer(STEPS, 100, view=tr.Sequences(50)) as buffer, buffer.writer() as writer:
        writer.reset(obs=0)
        step(writer, 1)
        with ThreadPoolExecutor(1) as threads:
            batch = threads.submit(buffer.sample, 2, timeout=30)
            writer.end_episode()
            assert batch.result().batch_size == 2


def test_rows_by_themselves_belong_to_no_episode():
    buffer = tr.ReplayBuffer(STEPS, 100)
    with buffer, buffer.writer() as writer, pytest.raises(ValueError, match=r"end_episode\(\) links rows"):
        writer.end_episode()

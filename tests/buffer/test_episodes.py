"""`episodes`: what was written by episode comes back so, and `extend` takes it."""

import threading

import numpy as np
import pytest
import torch
from scalar_steps import STEPS

import torchreplay as tr


def episode(first, steps, terminated=True):
    ends = np.arange(1, steps + 1) == steps
    return {
        "obs": torch.arange(first, first + steps + 1),
        "action": torch.arange(first, first + steps) * 10,
        "reward": torch.ones(steps),
        "terminated": torch.from_numpy(ends & terminated),
        "truncated": torch.from_numpy(ends & (not terminated)),
    }


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name].to(one[name].dtype)), name


@pytest.mark.parametrize("view", [tr.Transitions(3), tr.Sequences(4, across_episodes=True)], ids=str)
def test_episodes_come_back_as_they_were_extended(view):
    written = [episode(100 * i, steps, i % 2 == 0) for i, steps in enumerate((5, 1, 12, 3))]
    with tr.ReplayBuffer(STEPS, 100, view=view) as buffer, tr.ReplayBuffer(STEPS, 100, view=view) as copy:
        for one in written:
            buffer.extend(**one)
        assert_same(list(buffer.episodes()), written)
        for one in buffer.episodes():
            copy.extend(**one)
        assert torch.equal(copy.keys(), buffer.keys())
        assert_same(list(copy.episodes()), written)


def test_episodes_of_vector_environments_are_told_apart():
    no = np.zeros(2, bool)
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions()) as buffer, buffer.writer(num_envs=2) as writer:
        writer.reset(obs=np.array([0, 100]))
        for i in (1, 2, 3):
            ends = np.array([i == 3, False])
            writer.step(obs=np.array([i, 100 + i]), action=[i, i], reward=[1.0, 1.0], terminated=ends, truncated=no)
        assert [e["obs"].tolist() for e in buffer.episodes()] == [[0, 1, 2, 3]]
        assert [e["obs"].tolist() for e in buffer.episodes(unfinished=True)] == [[0, 1, 2, 3], [100, 101, 102, 103]]


def test_of_an_episode_whose_start_is_overwritten_the_rest_is_unfinished():
    with tr.ReplayBuffer(STEPS, 8, view=tr.Transitions()) as buffer:
        buffer.extend(**episode(0, 5))
        buffer.extend(**episode(50, 3))
        assert [e["obs"].tolist() for e in buffer.episodes()] == [[50, 51, 52, 53]]
        rest, whole = buffer.episodes(unfinished=True)
        assert rest["obs"].tolist() == [2, 3, 4, 5]
        assert rest["action"].tolist() == [20, 30, 40]
        assert whole["obs"].tolist() == [50, 51, 52, 53]


def test_a_reset_in_the_midst_of_an_episode_leaves_it_unfinished():
    with tr.ReplayBuffer(STEPS, 20, view=tr.Transitions()) as buffer, buffer.writer() as writer:
        for first in (0, 10):
            writer.reset(obs=first)
            writer.step(obs=first + 1, action=1, reward=1.0, terminated=first == 10, truncated=False)
        assert [e["obs"].tolist() for e in buffer.episodes()] == [[10, 11]]
        assert [e["obs"].tolist() for e in buffer.episodes(unfinished=True)] == [[0, 1], [10, 11]]


def test_beside_a_writer_no_episode_is_torn():
    with tr.ReplayBuffer(STEPS, 200, view=tr.Transitions()) as buffer:
        stop = threading.Event()

        def explore():
            with buffer.writer() as writer:
                first = 0
                while not stop.is_set():
                    writer.extend(**episode(first, 10))
                    first += 100

        writer = threading.Thread(target=explore)
        writer.start()
        seen = 0
        while seen < 200:
            for one in buffer.episodes():
                first = int(one["obs"][0])
                assert one["obs"].tolist() == list(range(first, first + 11))
                assert one["action"].tolist() == [10 * k for k in range(first, first + 10)]
                seen += 1
        stop.set()
        writer.join()


def test_rows_by_themselves_belong_to_no_episode():
    with tr.ReplayBuffer(STEPS, 20) as buffer, pytest.raises(ValueError, match="belong to no episode"):
        list(buffer.episodes())

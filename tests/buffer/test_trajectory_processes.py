"""Trajectories written in several threads and processes: streams belong to one writer each, and never join."""

import multiprocessing
import pickle
import threading

import numpy as np
import pytest
import torch
from forked import Forked
from linked_rows import buffer_of, everything, observation, pairs, play

import torchreplay as tr

STEP = {"action": 0, "reward": 1.0, "terminated": False, "truncated": False}


def explore(buffer, start):
    with buffer.writer() as writer:
        play(writer, 5, start=start)


def explore_lanes(buffer, start):
    with buffer.writer(num_envs=2) as writer:
        writer.reset(obs=np.array([[start, start], [start + 10, start + 10]]))
        flags = {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}
        obs = np.array([[start + 1, start + 1], [start + 11, start + 11]])
        writer.step(obs=obs, action=np.zeros(2, int), reward=np.zeros(2), **flags)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_trajectories_of_other_processes_are_drawn_here(method):
    buffer = buffer_of(tr.Transitions(n_step=2))
    context = multiprocessing.get_context(method)
    children = [
        context.Process(target=explore, args=(buffer, 100)),
        context.Process(target=explore_lanes, args=(buffer, 200)),
    ]
    for child in children:
        child.start()
    explore(buffer, 300)
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    found = sorted(pairs(buffer))
    assert found == [(s + t, min(s + t + 2, s + 5)) for s in (100, 300) for t in range(5)]


def test_a_forked_child_starts_its_own_stream_with_a_reset_and_the_parents_goes_on():
    buffer = buffer_of(tr.Transitions())
    writer = buffer.writer()
    writer.reset(**observation(0))

    def child():
        with pytest.raises(ValueError, match="reset"):
            writer.step(**observation(77), **STEP)
        play(writer, 2, start=50)

    with Forked(child) as forked:
        assert forked.wait() == 0
    writer.step(**observation(1), **STEP)
    assert sorted(pairs(buffer)) == [(0, 1), (50, 51), (51, 52)]


def test_lanes_of_a_forked_child_start_with_a_reset_too():
    buffer = buffer_of(tr.Transitions())
    writer = buffer.writer(num_envs=2, autoreset="disabled")
    obs = np.zeros((2, 2))
    fields = {"action": np.zeros(2, int), "reward": np.zeros(2)}
    fields |= {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}
    writer.reset(obs=obs)

    def child():
        with pytest.raises(ValueError, match="reset"):
            writer.step(obs=obs, **fields)
        writer.reset(obs=obs + 5, mask=np.array([True, False]))
        with pytest.raises(ValueError, match="environment 1"):
            writer.step(obs=obs, **fields)

    with Forked(child) as forked:
        assert forked.wait() == 0
    writer.step(obs=obs + 1, **fields)
    assert pairs(buffer) == [(0, 1), (0, 1)]


def test_a_forked_childs_extended_episodes_do_not_run_on_from_its_parents():
    buffer = buffer_of(tr.Sequences(2, across_episodes=True))
    columns = {name: np.full(1, value) for name, value in STEP.items()}
    buffer.extend(obs=np.array([[0, 0], [1, 1]]), **columns)
    with Forked(lambda: buffer.extend(obs=np.array([[50, 50], [51, 51]]), **columns)) as forked:
        assert forked.wait() == 0
    buffer.extend(obs=np.array([[2, 2], [3, 3]]), **columns)
    assert everything(buffer)["obs"][..., 0].tolist() == [[0, 1, 2], [1, 2, 3]]


def test_threads_with_a_writer_each_write_trajectories_that_do_not_join():
    buffer = buffer_of(tr.Transitions(n_step=3), capacity=4000)

    def write(thread):
        for episode in range(40):
            with buffer.writer() as writer:
                play(writer, 5, start=1000 * thread + 10 * episode)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = [1000 * thread + 10 * episode for thread in range(4) for episode in range(40)]
    assert sorted(pairs(buffer)) == [(s + t, min(s + t + 3, s + 5)) for s in starts for t in range(5)]


def test_a_writer_of_trajectories_is_not_passed_to_another_process():
    with pytest.raises(TypeError, match=r"pass the buffer, and call buffer.writer\(\) there"):
        pickle.dumps(buffer_of(tr.Transitions()).writer(num_envs=2))


def test_an_attached_buffer_feeds_back_to_items_of_trajectories_gathered_elsewhere():
    buffer = buffer_of(tr.Transitions(n_step=2), sampler=tr.Prioritized(alpha=1.0))
    explore(buffer, 0)
    batch = buffer.gather(torch.tensor([0, 3]))
    attached = pickle.loads(pickle.dumps(buffer))
    attached.update_priorities(batch, torch.tensor([2.0, 4.0]))
    assert buffer.stats().updated == 2
    assert buffer._segment.column(-1)[[0, 3]].tolist() == pytest.approx([2, 4], rel=1e-5)

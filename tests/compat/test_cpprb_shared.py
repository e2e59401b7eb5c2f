"""cpprb's buffers of several processes: shared by fork, spawn and Ray, also where processes are killed."""

import multiprocessing as mp
import os
import pickle
import signal
from multiprocessing.context import ProcessError
from multiprocessing.managers import SyncManager

import cpprb
import numpy as np
import pytest
from example_programs import succeed

from torchreplay.compat import cpprb as adapter

ENV = {"obs": {"shape": 3}, "rew": {"dtype": np.float64}, "done": {"dtype": bool}}
KINDS = ["MPReplayBuffer", "MPPrioritizedReplayBuffer"]


def transitions(n, start=0):
    numbers = np.arange(start, start + n)
    return {"obs": np.repeat(numbers[:, None], 3, axis=1), "rew": numbers, "done": numbers % 2 == 0}


def add(buffer, n, start):
    for i in range(start, start + n):
        buffer.add(obs=np.full(3, i), rew=i, done=i % 2 == 0)


def add_for_ever(buffer, begun):
    while True:
        add(buffer, 50, 0)
        begun.set()


@pytest.fixture(params=KINDS)
def kind(request):
    return getattr(adapter, request.param)


@pytest.mark.parametrize(
    ("method", "backend"), [("fork", "sharedctypes"), pytest.param("spawn", "SharedMemory", marks=pytest.mark.slow)]
)
def test_processes_add_to_the_same_buffer(kind, method, backend):
    context = mp.get_context(method)
    buffer = kind(256, ENV, ctx=context, backend=backend)
    processes = [context.Process(target=add, args=(buffer, 50, start)) for start in (0, 100)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert buffer.get_stored_size() == buffer.get_next_index() == 100
    held = buffer.get_all_transitions()
    assert sorted(held["rew"].ravel()) == [*range(50), *range(100, 150)]
    np.testing.assert_array_equal(held["obs"][:, 1:2], held["rew"])
    assert buffer.sample(8)["obs"].shape == (8, 3)


def test_a_killed_explorer_stops_nobody(kind):
    context = mp.get_context("fork")
    buffer = kind(64, ENV, ctx=context)
    for _ in range(5):
        begun = context.Event()
        explorer = context.Process(target=add_for_ever, args=(buffer, begun))
        explorer.start()
        assert begun.wait(60)
        os.kill(explorer.pid, signal.SIGKILL)
        explorer.join()
        batch = buffer.sample(32)
        np.testing.assert_array_equal(batch["obs"][:, :1], batch["rew"])
        buffer.add(**transitions(3))


def clear(buffer):
    buffer.clear()


def test_clear_is_seen_by_every_process(kind):
    context = mp.get_context("fork")
    buffer = kind(16, ENV, ctx=context)
    buffer.add(**transitions(21))
    other = context.Process(target=clear, args=(buffer,))
    other.start()
    other.join()
    assert (buffer.get_stored_size(), buffer.get_next_index()) == (0, 0)
    assert buffer.add(**transitions(2)) == 0
    assert buffer.get_all_transitions()["rew"].tolist() == [[0], [1]]


def test_a_pickle_is_the_same_memory(kind):
    buffer = kind(16, ENV)
    other = pickle.loads(pickle.dumps(buffer))
    other.add(**transitions(5))
    assert buffer.get_stored_size() == 5
    assert type(other) is kind


def test_feedback_from_another_process_reaches_the_rows_that_were_drawn():
    buffer = adapter.MPPrioritizedReplayBuffer(16, ENV)
    buffer.add(**transitions(16))
    batch = buffer.sample(4)
    other, indexes = pickle.loads(pickle.dumps((buffer, batch["indexes"])))
    other.update_priorities(indexes, np.full(4, 8.0))
    assert buffer.get_max_priority() == 8.0
    assert (buffer.replay.priorities(batch["indexes"].keys) > 7.9).all()


def test_plain_indexes_leave_alone_what_was_added_since_the_last_sample():
    for library in (adapter, cpprb):
        buffer = library.MPPrioritizedReplayBuffer(8, ENV)
        buffer.add(**transitions(8))
        buffer.sample(4)
        buffer.add(**transitions(8, 8))
        buffer.update_priorities(np.arange(8), np.full(8, 50.0))
        assert buffer.get_max_priority() == 1.0


def test_what_others_add_while_the_buffer_is_cleared_counts(kind, monkeypatch):
    buffer = kind(8, ENV)
    buffer.add(**transitions(5))
    other, clear = pickle.loads(pickle.dumps(buffer)), buffer.replay.clear

    def clear_beside_another():
        clear()
        other.add(**transitions(2, 70))

    monkeypatch.setattr(buffer.replay, "clear", clear_beside_another)
    buffer.clear()
    for one in (buffer, other):
        assert one.get_stored_size() == one.get_next_index() == 2
        assert one.get_all_transitions()["rew"].ravel().tolist() == [70, 71]
        assert one._encode_sample([0, 1])["rew"].ravel().tolist() == [70, 71]


def test_a_manager_is_started_and_one_that_has_shut_down_is_refused(kind):
    manager = SyncManager(ctx=mp.get_context("fork"))
    try:
        buffer = kind(8, ENV, ctx=manager)
        kind(8, ENV, ctx=manager)
        buffer.add(**transitions(3))
        assert manager.list([1])[0] == 1
    finally:
        manager.shutdown()
    assert buffer.get_stored_size() == 3
    with pytest.raises(ProcessError, match="shut down"):
        kind(8, ENV, ctx=manager)


def test_an_unknown_backend_is_refused(kind):
    with pytest.raises(ValueError, match="backend"):
        kind(8, ENV, backend="files")


def test_nothing_to_draw_is_said_at_once_and_blocks_nobody(kind):
    buffer = kind(8, ENV)
    pickle.dumps(buffer)  # others may add from now on
    with pytest.raises(ValueError, match="holds no transition"):
        buffer.sample(4)
    assert buffer.get_all_transitions()["rew"].shape == (0, 1)
    assert buffer.is_Nstep() is False


def nstep(buffer, start):
    for i in range(start, start + 10):
        buffer.add(obs=i, rew=1.0, next_obs=i + 1, done=0)
    buffer.on_episode_end()


def test_n_step_transitions_of_several_processes_stay_apart():
    context = mp.get_context("fork")
    env = {name: {} for name in ("obs", "rew", "next_obs", "done")}
    buffer = adapter.MPReplayBuffer(64, env, Nstep={"size": 3, "rew": "rew", "gamma": 0.5, "next": "next_obs"})
    processes = [context.Process(target=nstep, args=(buffer, start)) for start in (0, 100)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    held = buffer.get_all_transitions()
    steps = held["next_obs"] - held["obs"]
    assert sorted(held["obs"].ravel()) == [*range(10), *range(100, 110)]
    np.testing.assert_array_equal(steps, np.minimum(3, 10 - held["obs"] % 100))
    np.testing.assert_array_equal(held["rew"], 2 - 0.5 ** (steps - 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["apex", "ray", "serialization"])
def test_programs_written_for_cpprb_run(name, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    said = succeed(f"from_cpprb_{name}", tmp_path, timeout=170).stdout
    assert {"apex": "00\n", "ray": "Finish Training", "serialization": "'done': array([[1.]"}[name] in said

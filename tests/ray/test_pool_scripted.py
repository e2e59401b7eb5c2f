"""A pool in its program, without processes: forks, signals, failures, wrong arguments."""

import signal
import threading

import numpy as np
import pytest
import torch
from forked import Forked, eventually
from numbered_rows import make_buffer
from scripted_workers import DIED, RAISED, ScriptedActors

import torchreplay as tr
from torchreplay.ray import ExplorerContext, ExplorerPool
from torchreplay.ray.workers.resources import WorkerResources
from torchreplay.workers.explorer_stats import explorer_stats
from torchreplay.workers.worker_table import WorkerTable


@pytest.fixture
def pool(monkeypatch):
    """A pool of one explorer without a process, which never ends by itself; `pool.actors` runs it."""
    monkeypatch.setattr(WorkerResources, "open", lambda *_: pool.actors)
    pool = ExplorerPool(print, 1, make_buffer())
    pool.actors = ScriptedActors(lambda launch: None)
    yield pool
    pool.stop(0)


def test_a_forked_child_that_ends_leaves_its_parents_explorers_alone(pool):
    with pool:
        ctx = ExplorerContext(pool.buffer, table=pool._supervisor.table)
        with Forked(pool.__exit__, None, None, None) as child:
            assert child.wait() == 0
        assert not ctx.stopped
    assert ctx.stopped


def test_a_signals_handler_may_stop_a_pool_that_is_being_stopped(pool, monkeypatch):
    closed = []
    monkeypatch.setattr(pool.actors, "close", lambda: closed.append(pool.actors))
    in_time = threading.Event()

    def kill(run):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)  # which waits in `stop`
        in_time.wait(30)
        pool.actors.end(run, DIED)

    pool.actors.kill = kill

    def stop(*_):
        in_time.set()
        pool.stop()

    before = signal.signal(signal.SIGUSR2, stop)
    try:
        pool.start()
        eventually(lambda: pool.actors.runs)
        pool.stop(0)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert in_time.is_set()
    assert len(closed) == 1
    assert pool.stats()[0].state == "stopped"


def test_a_pool_whose_stop_was_interrupted_starts_anew(pool, monkeypatch):
    closed = []
    monkeypatch.setattr(pool.actors, "close", lambda: closed.append(len(pool.actors.runs)))
    interrupted = threading.Event()

    def kill(run):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)  # which waits in `stop`
        interrupted.wait(30)
        pool.actors.end(run, DIED)

    def interrupt(*_):
        interrupted.set()
        raise KeyboardInterrupt

    pool.actors.kill = kill
    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        pool.start()
        eventually(lambda: pool.actors.runs)
        with pytest.raises(KeyboardInterrupt):
            pool.stop(0)
    finally:
        signal.signal(signal.SIGUSR2, before)
    pool.actors.kill = lambda run: pool.actors.end(run, DIED)
    pool.start()
    eventually(lambda: len(pool.actors.runs) == 2)
    assert closed == [1]
    assert pool.stats()[0].state == "starting"


def test_a_learner_is_told_what_explorers_have_failed_with_since_the_last_start(pool):
    pool.actors.script = lambda launch: RAISED if launch.restarts == 0 else None
    pool.start()
    eventually(lambda: pool.errors)
    with pytest.raises(tr.ReplayTimeout) as caught, pool:
        pool.buffer.sample(1, timeout=0)
    assert caught.value.__notes__ == ["explorer 0 of 1 failed last with:\nTraceback: in explore, boom"]
    pool.actors.script = lambda launch: None
    with pytest.raises(tr.ReplayTimeout) as caught, pool:
        pool.buffer.sample(1, timeout=0)
    assert not hasattr(caught.value, "__notes__")
    assert len(pool.errors) == 1


@pytest.mark.parametrize("backend", ["ray", "process"])
def test_a_pool_of_a_closed_buffer_says_so(backend):
    buffer = make_buffer()
    pool = ExplorerPool(print, 1, buffer, backend=backend)
    buffer.close()
    with pytest.raises(RuntimeError, match="the replay buffer is closed"):
        pool.start()


@pytest.mark.parametrize("placement", [3, "nowhere", ["SPREAD"], object()])
def test_a_placement_that_is_none_is_named_at_once(placement):
    with pytest.raises(ValueError, match=r"placement=.*expected 'LOCAL_FIRST', 'SPREAD', 'DEFAULT', a scheduling"):
        ExplorerPool(print, 1, make_buffer(), placement=placement)


@pytest.mark.slow
def test_a_pool_that_cannot_announce_writers_to_all_its_buffers_announces_them_to_none(monkeypatch):
    def refuse():
        raise RuntimeError("there is no room for another process")

    buffers = {"red": make_buffer(), "blue": make_buffer()}
    monkeypatch.setattr(WorkerResources, "open", lambda *_: ScriptedActors(lambda launch: None))
    monkeypatch.setattr(buffers["blue"], "expect_writers", refuse)
    with pytest.raises(RuntimeError, match="no room"):
        ExplorerPool(print, 1, buffers).start()
    with pytest.raises(tr.WouldBlockForever):
        buffers["red"].sample(1)


# The pool's arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"explore": 3}, "explore"),
        ({"num_explorers": 0}, "num_explorers is 0"),
        ({"buffer": {}}, "buffer is {}"),
        ({"num_explorers": "two"}, "num_explorers is 'two'"),
        ({"max_restarts": None}, "max_restarts .* is None"),
        ({"max_weight_sync_delay": 1.5}, "max_weight_sync_delay is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"max_restarts": -2}, "max_restarts .* is -2"),
        ({"restart_delay": -1.0}, "restart_delay is -1"),
        ({"num_cpus": -1}, "num_cpus is -1"),
        ({"num_gpus": float("nan")}, "num_gpus is nan"),
        ({"max_weight_sync_delay": -1}, "max_weight_sync_delay is -1"),
        ({"backend": "threads"}, "backend='threads'.*'ray' or 'process'"),
        ({"backend": "process", "num_cpus": 1}, "num_cpus: only Ray"),
        ({"backend": "process", "placement": "SPREAD"}, "placement: only Ray"),
        ({"placement": "NEARBY"}, "placement='NEARBY': expected 'LOCAL_FIRST', 'SPREAD'"),
    ],
)
def test_arguments_out_of_range_are_refused_with_their_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExplorerPool(**{"explore": print, "num_explorers": 1, "buffer": make_buffer(), **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"buffer": given}, "buffer is .*: expected a torchreplay.ReplayBuffer") for given in (None, 3, make_buffer)),
        ({"buffer": {"red": 3}}, r"buffer\['red'\] is 3: expected a torchreplay.ReplayBuffer"),
        *(
            ({"weights": given}, "weights is .*: expected torchreplay.SharedWeights")
            for given in (3, "w", tr.SharedWeights)
        ),
        ({"weights": {"red": None}}, r"weights\['red'\] is None: expected torchreplay.SharedWeights"),
        *(({name: "two"}, f"{name} is 'two': expected a number") for name in ("restart_delay", "num_cpus", "num_gpus")),
        *(({name: None}, f"{name} is None: expected a number") for name in ("restart_delay", "num_cpus", "num_gpus")),
    ],
)
def test_arguments_of_another_kind_are_refused_with_their_name(arguments, message):
    given = {"explore": print, "num_explorers": 1, "buffer": make_buffer(), **arguments}
    with pytest.raises((TypeError, ValueError), match=message):
        ExplorerPool(**given)
    if not {"buffer", "weights"}.isdisjoint(arguments):
        with pytest.raises(TypeError, match=message):
            ExplorerContext(given["buffer"], given.get("weights"))


@pytest.mark.parametrize("timeout", [-1, "soon", float("nan"), [1]], ids=repr)
def test_a_bad_timeout_of_a_pool_is_refused(timeout):
    pool = ExplorerPool(print, 1, make_buffer())
    for call in (pool.stop, pool.drain, pool.wait):
        with pytest.raises((TypeError, ValueError), match="timeout is"):
            call(timeout)


@pytest.mark.parametrize("numbers", [("high", 3), (1.0, None), (1.0, float("nan")), (None, 3)], ids=repr)
def test_an_episode_whose_return_or_length_is_no_number_is_refused_with_both(numbers):
    episode_return, episode_length = numbers
    with pytest.raises(ValueError, match=f"return {episode_return!r} and length {episode_length!r}: expected numbers"):
        ExplorerContext(make_buffer()).record(episode_return=episode_return, episode_length=episode_length)


@pytest.mark.parametrize("length", [-1, 10**30, 2**63, 1e30], ids=repr)
def test_an_episode_of_a_length_that_no_episode_has_is_refused_and_not_counted(length):
    table = WorkerTable(1)
    ctx = ExplorerContext(make_buffer(), table=table)
    with pytest.raises(ValueError, match=r"episode_length is .*: expected an int from 0 to"):
        ctx.record(episode_return=1.0, episode_length=length)
    ctx.record(episode_return=2.0, episode_length=3)
    stats = explorer_stats(0, table.entries[0])
    assert (stats.episodes, stats.steps, stats.mean_return) == (1, 3, 2.0)


@pytest.mark.parametrize(
    ("returns", "lengths", "message"),
    [
        (np.zeros(2), np.ones(3), r"episode_return has shape \(2,\) and episode_length \(3,\)"),
        (np.zeros(3), [1, 2], r"shape \(3,\) and episode_length \(2,\)"),
        (torch.zeros(2), 3, r"shape \(2,\) and episode_length \(\)"),
        (0.0, np.ones(1), r"shape \(\) and episode_length \(1,\)"),
        (np.zeros((2, 1)), np.ones((2, 1)), r"shape \(2, 1\) and episode_length \(2, 1\)"),
        (np.zeros(2), np.array([1, -1]), "episode_length is -1"),
        (np.zeros(2), np.array([1, np.nan]), "expected numbers"),
    ],
    ids=repr,
)
def test_of_episodes_of_which_one_cannot_be_recorded_none_is(returns, lengths, message):
    table = WorkerTable(1)
    ctx = ExplorerContext(make_buffer(), table=table)
    with pytest.raises(ValueError, match=message):
        ctx.record(episode_return=returns, episode_length=lengths)
    assert explorer_stats(0, table.entries[0]).episodes == 0


def test_episodes_of_vector_environments_come_as_arrays_or_lists():
    table = WorkerTable(1)
    ctx = ExplorerContext(make_buffer(), table=table)
    ctx.record(episode_return=np.array([1.0, 2.0]), episode_length=np.array([3, 4]))
    ctx.record(episode_return=[6.0], episode_length=[5])
    ctx.record(episode_return=(7.0, 9.0), episode_length=(2, 1))
    ctx.record(episode_return=[], episode_length=[])
    stats = explorer_stats(0, table.entries[0])
    assert (stats.episodes, stats.steps, stats.mean_return) == (5, 15, 5.0)

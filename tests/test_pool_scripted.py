"""A pool in its program, without processes: forks, signals, Ray's session, wrong arguments."""

import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forked import Forked, eventually
from numbered_rows import make_buffer
from scripted_workers import DIED, RAISED, ScriptedActors

import torchreplay as tr
from torchreplay.ray import ExplorerContext, ExplorerPool
from torchreplay.ray.board import Board
from torchreplay.ray.hosting import Hosting
from torchreplay.ray.session import RaySession
from torchreplay.ray.stats import explorer_stats


@pytest.fixture
def pool(monkeypatch):
    """A pool of one explorer without a process, which never ends by itself; `pool.actors` runs it."""
    pool = ExplorerPool(print, 1, make_buffer())
    pool.actors = ScriptedActors(lambda launch: None)
    monkeypatch.setattr(Hosting, "open", lambda *_: pool.actors)
    yield pool
    pool.stop(0)


def test_a_forked_child_that_ends_leaves_its_parents_explorers_alone(pool):
    with pool:
        ctx = ExplorerContext(pool.buffer, board=pool._supervisor.board)
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


def test_a_pool_that_cannot_announce_writers_to_all_its_buffers_announces_them_to_none(monkeypatch):
    def refuse():
        raise RuntimeError("there is no room for another process")

    buffers = {"red": make_buffer(), "blue": make_buffer()}
    monkeypatch.setattr(Hosting, "open", lambda *_: ScriptedActors(lambda launch: None))
    monkeypatch.setattr(buffers["blue"], "expect_writers", refuse)
    with pytest.raises(RuntimeError, match="no room"):
        ExplorerPool(print, 1, buffers).start()
    with pytest.raises(tr.WouldBlockForever):
        buffers["red"].sample(1)


# The session, and the pool's arguments


class SpareRay:
    """Stands for Ray where only its life matters."""

    def __init__(self, running):
        self.running, self.options, self.starts = running, None, 0

    def cluster_resources(self):
        return {"CPU": 8.0, "GPU": 2.0}

    def is_initialized(self):
        return self.running

    def nodes(self):
        return [{"NodeID": node, "Alive": True, "Resources": {"CPU": 4, "GPU": 1}} for node in ("here", "elsewhere")]

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "here", get_job_id=lambda: str(self.starts))

    def init(self, **options):
        self.running, self.options, self.starts = True, options, self.starts + 1

    def shutdown(self):
        self.running = False


def test_a_pool_leaves_a_running_ray_as_it_is(monkeypatch):
    spare = SpareRay(running=True)
    monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda: spare)
    RaySession(cpus=4).close()
    assert spare.running
    assert spare.options is None


def test_a_pool_without_a_ray_starts_one_and_shuts_it_down(monkeypatch):
    spare = SpareRay(running=False)
    monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda: spare)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    session = RaySession(cpus=999.5)
    assert spare.running
    assert spare.options["address"] == "local"
    assert spare.options["num_cpus"] == 1000
    session.close()
    assert not spare.running


@pytest.mark.parametrize("first", [0, 1])
def test_a_ray_that_a_pool_started_is_shut_down_with_the_last_pool_that_uses_it(monkeypatch, first):
    spare = SpareRay(running=False)
    monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda: spare)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sessions = [RaySession(cpus=0), RaySession(cpus=0)]
    with pytest.raises(ValueError, match="lower num_cpus"):
        RaySession(cpus=5)
    for _ in range(2):
        sessions[first].close()
        assert spare.running
    sessions[1 - first].close()
    assert not spare.running


def test_a_pool_that_starts_a_ray_leaves_the_programs_handler_of_sigterm_in_place(monkeypatch):
    class Exiting(SpareRay):
        def init(self, **options):
            super().init(**options)
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own ends the program, too

    def save(*_):
        """As a program does that a queue's system is about to end."""

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    try:
        for handler, left in (
            (save, save),
            (signal.SIG_IGN, signal.SIG_IGN),
            (signal.SIG_DFL, signal.default_int_handler),
        ):
            spare = Exiting(running=False)
            monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda spare=spare: spare)
            signal.signal(signal.SIGTERM, handler)
            RaySession(cpus=0).close()
            assert signal.getsignal(signal.SIGTERM) is left
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_ray_that_the_program_has_started_after_a_pools_own_is_left_as_it_is(monkeypatch):
    spare = SpareRay(running=False)
    monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda: spare)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    session = RaySession(cpus=0)
    assert session.connected
    spare.shutdown()
    assert not session.connected
    spare.init()
    assert not session.connected
    session.close()
    assert spare.running


def test_explorers_that_ray_could_never_start_are_refused(monkeypatch):
    monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda: SpareRay(running=True))
    with pytest.raises(ValueError, match=r"5 CPUs .* has 4"):
        RaySession(cpus=5)
    with pytest.raises(ValueError, match=r"2 GPUs .* has 1"):
        RaySession(cpus=0, gpus=2)
    with pytest.raises(ValueError, match=r"9 CPUs .* it has 8"):
        RaySession(cpus=9, here=False)


def test_what_others_of_the_program_reserve_may_not_be_there(monkeypatch, caplog):
    def told(cpus, gpus=0, here=True):
        caplog.clear()
        RaySession(cpus, gpus, here).close()
        return caplog.text

    monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda: SpareRay(running=True))
    explorers = RaySession(cpus=7 * 0.4 + 0.4, gpus=1)
    anywhere = RaySession(cpus=4, here=False)
    assert "2 CPUs, this node has 4, and other pools and evaluators of this program ask for 3.2" in told(2)
    assert "1 GPUs" in told(0, gpus=1)
    assert "2 CPUs, it has 8, and other pools and evaluators of this program ask for 7.2" in told(2, here=False)
    assert told(0.8) == told(0.8, here=False) == ""  # whatever the sum of such fractions is
    explorers.close()
    assert told(4, gpus=1) == told(4, here=False) == ""
    anywhere.close()


def test_a_pool_joins_the_cluster_that_the_environment_names(monkeypatch):
    spare = SpareRay(running=False)
    monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda: spare)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    RaySession(cpus=4).close()
    assert spare.options == {}  # a cluster refuses num_cpus and the like


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
    board = Board(1)
    ctx = ExplorerContext(make_buffer(), board=board)
    with pytest.raises(ValueError, match=r"episode_length is .*: expected an int from 0 to"):
        ctx.record(episode_return=1.0, episode_length=length)
    ctx.record(episode_return=2.0, episode_length=3)
    stats = explorer_stats(0, board.entries[0])
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
    board = Board(1)
    ctx = ExplorerContext(make_buffer(), board=board)
    with pytest.raises(ValueError, match=message):
        ctx.record(episode_return=returns, episode_length=lengths)
    assert explorer_stats(0, board.entries[0]).episodes == 0

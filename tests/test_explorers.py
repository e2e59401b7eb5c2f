"""What surrounds an explorer's function, tested without Ray: context, board, supervisor, session."""

import errno
import math
import pickle
import signal
import threading
from collections import deque

import numpy as np
import pytest
import torch
from forked import Forked, eventually
from numbered_rows import make_buffer, row
from scripted_workers import DIED, ENDED, RAISED, Marks, ScriptedActors

import torchreplay as tr
from torchreplay.ray import ExplorerContext, ExplorerPool
from torchreplay.ray.board import Board
from torchreplay.ray.hosting import Hosting
from torchreplay.ray.session import RaySession
from torchreplay.ray.stats import explorer_stats
from torchreplay.ray.supervisor import Policy, Supervisor

# --- the context ---


def test_an_explorers_function_can_be_tried_without_ray():
    buffer = make_buffer()

    def explore(ctx):
        writer = ctx.writer()
        for count in range(10):
            writer.append(**row(ctx.index, ctx.seed, count))
        ctx.record(episode_return=3.0, episode_length=10)

    ctx = ExplorerContext(buffer, seed=5)
    explore(ctx)
    ctx.close()
    assert len(buffer) == 10
    assert int(ctx._board.entries[0]["rows"]) == 10
    assert "explorer 0 of 1" in repr(ctx)
    assert "episodes=1" in repr(ctx)


def test_closing_a_context_closes_its_writers():
    ctx = ExplorerContext(make_buffer())
    writer = ctx.writer()
    ctx.close()
    with pytest.raises(ValueError, match="closed"):
        writer.append(**row(0, 0, 0))


def test_rows_of_writers_that_the_function_closes_itself_are_counted_once():
    ctx = ExplorerContext(make_buffer())
    for _ in range(3):
        with ctx.writer() as writer:
            for count in range(5):
                writer.append(**row(0, 0, count))
            assert not ctx.stopped
    ctx.close()
    assert int(ctx._board.entries[0]["rows"]) == 15


def test_rows_and_episodes_of_a_vectorised_explorer_are_counted():
    spec = {"obs": tr.Field(), "action": tr.Field(), "reward": tr.Field()}
    ends = {"terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}
    buffer = tr.ReplayBuffer({**spec, **ends}, 100, view=tr.Transitions())
    board, lanes, rng = Board(1), 3, np.random.default_rng(0)
    ctx = ExplorerContext(buffer, board=board)
    writer = ctx.writer(lanes=lanes)
    writer.reset(obs=np.zeros(lanes))
    episodes = []
    returns = np.zeros(lanes)
    lengths = np.zeros(lanes, int)
    for _ in range(20):
        reward, ended = rng.normal(size=lanes), rng.random(lanes) < 0.3
        zeros = np.zeros(lanes)
        writer.step(obs=zeros, action=zeros, reward=reward, terminated=ended, truncated=np.zeros(lanes, bool))
        returns, lengths = returns + reward, lengths + 1
        episodes += zip(returns[ended], lengths[ended], strict=True)
        ctx.record(episode_return=returns[ended], episode_length=lengths[ended])
        returns[ended], lengths[ended] = 0.0, 0
    stats = explorer_stats(0, board.entries[0])
    assert stats.rows == ctx.rows == len(buffer) == lanes * 21
    assert (stats.episodes, stats.steps) == (len(episodes), sum(n for _, n in episodes))
    assert math.isclose(stats.mean_return, sum(r for r, _ in episodes) / len(episodes), rel_tol=1e-9)
    with pytest.raises(ValueError, match="longer"):
        ctx.record(episode_return=np.zeros(2), episode_length=np.zeros(3))


def test_weights_are_pulled_when_newer_and_not_before_the_delay_is_over():
    policy, explorers_policy = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    weights, buffer = tr.SharedWeights(policy), make_buffer()
    board, published = Board(1), 0
    ctx = ExplorerContext(buffer, weights, max_weight_sync_delay=10, board=board)
    writer = ctx.writer()
    pulled = []
    for count in range(35):
        if count in (1, 2, 12, 34):
            published = weights.publish(policy)
        if ctx.pull_weights(explorers_policy):
            pulled.append((count, published))
        writer.append(**row(0, 0, count))
    # The first at once; version 2 ten rows later; version 3 as soon as ten more are over; then there is nothing newer.
    assert pulled == [(0, 0), (10, 2), (20, 3), (34, 4)]
    stats = explorer_stats(0, board.entries[0])
    assert (stats.weight_version, stats.weight_syncs) == (4, 4)
    assert ctx.pull_weights(torch.nn.Linear(1, 1))  # into another module: at once


def test_without_a_delay_weights_are_pulled_whenever_they_are_newer():
    policy, explorers_policy = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    weights = tr.SharedWeights(policy)
    ctx = ExplorerContext(make_buffer(), weights)
    assert ctx.pull_weights(explorers_policy)
    assert not ctx.pull_weights(explorers_policy)
    weights.publish(policy)
    assert ctx.pull_weights(explorers_policy)


def test_an_explorer_of_several_policies_has_a_writer_and_weights_for_each():
    buffers = {"red": make_buffer(), "blue": make_buffer()}
    policies = {name: torch.nn.Linear(1, 1) for name in buffers}
    weights = {name: tr.SharedWeights(policy) for name, policy in policies.items()}
    board = Board(1)
    ctx = ExplorerContext(buffers, weights, max_weight_sync_delay=3, board=board)
    weights["blue"].publish(policies["blue"])
    for count, name in enumerate(["red", "blue", "blue"]):
        with ctx.writer(name=name) as writer:
            writer.append(**row(0, 0, count))
        assert ctx.pull_weights(policies[name], name=name) == (count < 2)
    assert [len(buffer) for buffer in buffers.values()] == [1, 2]
    assert not ctx.stopped
    buffers["blue"].stop()
    assert ctx.stopped
    stats = explorer_stats(0, board.entries[0])
    assert (stats.rows, stats.weight_version, stats.weight_syncs) == (3, 0, 2)


@pytest.mark.parametrize("name", [None, "green"])
def test_a_name_that_there_is_not_is_refused(name):
    buffers = {"red": make_buffer(), "blue": make_buffer()}
    with pytest.raises(ValueError, match="expected one of 'red', 'blue'"):
        ExplorerContext(buffers).writer(name=name)
    with pytest.raises(ValueError, match="there is only one"):
        ExplorerContext(make_buffer()).writer(name="red")


def test_pulling_weights_that_nobody_gave_says_where_to_give_them():
    with pytest.raises(RuntimeError, match="weights="):
        ExplorerContext(make_buffer()).pull_weights(torch.nn.Linear(1, 1))


def test_a_context_is_stopped_by_its_pool_and_by_its_buffer():
    board, buffer = Board(1), make_buffer()
    ctx = ExplorerContext(buffer, board=board)
    assert not ctx.stopped
    board.stopped = True
    assert ctx.stopped
    board.stopped = False
    buffer.stop()
    assert ctx.stopped


def test_recorded_statistics_agree_with_a_plain_list_of_episodes():
    supervisor = supervise(ScriptedActors(lambda launch: None), num_explorers=2)
    ctx = ExplorerContext(make_buffer(), index=1, num_explorers=2, board=supervisor.board)
    rng = np.random.default_rng(0)
    episodes = [(float(rng.normal()), int(rng.integers(1, 500))) for _ in range(250)]
    for seen, (episode_return, length) in enumerate(episodes, start=1):
        ctx.record(episode_return=episode_return, episode_length=length)
        if seen in (1, 99, 100, 101, 250):
            stats = supervisor.stats()[1]
            window = episodes[:seen][-100:]
            assert (stats.episodes, stats.steps) == (seen, sum(n for _, n in episodes[:seen]))
            assert (stats.last_return, stats.last_length) == (episode_return, length)
            assert math.isclose(stats.mean_return, sum(r for r, _ in window) / len(window), rel_tol=1e-9)
            assert math.isclose(stats.mean_length, sum(n for _, n in window) / len(window), rel_tol=1e-9)
    untouched = supervisor.stats()[0]
    assert untouched.episodes == 0
    assert math.isnan(untouched.mean_return)
    supervisor.stop(0, 0)


def test_a_board_that_was_pickled_is_the_same_memory():
    board = Board(3)
    other = pickle.loads(pickle.dumps(board))
    board.stopped = True
    other.entries[2]["episodes"] = 7
    assert other.stopped
    assert board.entries[2]["episodes"] == 7
    del board
    with pytest.raises(tr.AttachError, match="gone"):
        pickle.loads(pickle.dumps(other))


# --- the supervisor ---


def supervise(actors, num_explorers=1, max_restarts=-1, restart_delay=0.0, marks=None):
    policy = Policy(seed=1, generation=0, max_restarts=max_restarts, restart_delay=restart_delay)
    names = [f"explorer {index}" for index in range(num_explorers)]
    return Supervisor(actors, Board(num_explorers), names, policy, marks or Marks(), deque())


def test_an_explorer_that_raises_is_reported_and_restarted_and_one_that_returns_is_not(caplog):
    actors = ScriptedActors(lambda launch: RAISED if launch.index == 0 and launch.restarts < 2 else ENDED)
    supervisor = supervise(actors, num_explorers=2)
    assert supervisor.over.wait(30)
    assert [s.state for s in supervisor.stats()] == ["finished", "finished"]
    assert [s.restarts for s in supervisor.stats()] == [2, 0]
    assert supervisor.stats()[0].last_error == "KeyError: 'boom'"
    assert [(f.index, f.restarts, f.died) for f in supervisor.failures] == [(0, 0, False), (0, 1, False)]
    reports = [r.getMessage() for r in caplog.records if r.name == "torchreplay.ray"]
    assert len(reports) == 2
    assert all("Traceback: in explore, boom" in report for report in reports)
    supervisor.stop(0, 0)


@pytest.mark.parametrize("outcome", [RAISED, DIED], ids=["raised", "died"])
@pytest.mark.parametrize("max_restarts", [0, 3])
def test_an_explorer_fails_for_good_after_max_restarts(outcome, max_restarts):
    marks = Marks()
    actors = ScriptedActors(lambda launch: outcome)
    supervisor = supervise(actors, max_restarts=max_restarts, marks=marks)
    assert supervisor.over.wait(30)
    assert supervisor.stats()[0].state == "failed"
    assert supervisor.stats()[0].restarts == max_restarts
    assert len(actors.runs) == max_restarts + 1
    assert marks.open == 0
    supervisor.stop(0, 0)


def test_learners_are_told_to_wait_until_the_last_explorer_has_finished():
    marks = Marks()
    actors = ScriptedActors(lambda launch: None)
    supervisor = supervise(actors, num_explorers=2, marks=marks)
    eventually(lambda: len(actors.runs) == 2)
    actors.end(actors.runs[0], ENDED)
    eventually(lambda: supervisor.stats()[0].state == "finished")
    assert marks.open == 1
    actors.end(actors.runs[1], ENDED)
    assert supervisor.over.wait(30)
    assert marks.open == 0
    supervisor.stop(0, 0)


def test_an_explorer_that_only_fails_is_not_waited_for_until_it_makes_progress():
    marks = Marks()
    actors = ScriptedActors(lambda launch: RAISED if launch.restarts < 5 else None)
    supervisor = supervise(actors, marks=marks)
    eventually(lambda: len(actors.runs) == 6)
    eventually(lambda: marks.open == 0)
    supervisor.board.entries[0]["episodes"] += 1
    eventually(lambda: marks.open == 1)
    supervisor.stop(0, 0)
    assert marks.open == 0


def test_an_explorer_runs_from_the_moment_at_which_its_process_says_so():
    actors = ScriptedActors(lambda launch: None)
    supervisor = supervise(actors)
    eventually(lambda: len(actors.runs) == 1)
    assert supervisor.stats()[0].state == "starting"
    supervisor.board.entries["pid"] = 2**22
    assert supervisor.stats()[0].alive
    actors.end(actors.runs[0], RAISED)
    eventually(lambda: len(actors.runs) == 2)
    eventually(lambda: supervisor.stats()[0].state == "starting")
    supervisor.stop(0, 0)


def test_explorers_that_do_not_return_in_time_are_killed():
    actors = ScriptedActors(lambda launch: None)
    supervisor = supervise(actors, num_explorers=2)
    eventually(lambda: len(actors.runs) == 2)
    supervisor.board.entries["pid"] = 2**22  # both are in their function
    supervisor.stop(0, 0)
    assert all(run.interrupted and run.killed for run in actors.runs)
    assert [s.state for s in supervisor.stats()] == ["stopped", "stopped"]
    assert not supervisor.failures


def test_every_run_of_every_explorer_has_its_own_reproducible_seed():
    def seeds(pool_seed):
        actors = ScriptedActors(lambda launch: RAISED)
        supervisor = supervise(actors, num_explorers=8, max_restarts=4)
        supervisor.over.wait(30)
        supervisor.stop(0, 0)
        return {(run.launch.index, run.launch.restarts): run.launch.seed for run in actors.runs}

    first = seeds(1)
    assert len(first) == len(set(first.values())) == 40
    assert all(0 <= seed < 2**32 for seed in first.values())
    assert first == seeds(1)


def test_restart_delays_double_up_to_half_a_minute():
    policy = Policy(seed=0, generation=0, max_restarts=-1, restart_delay=1.0)
    assert [policy.delay(streak) for streak in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert policy.delay(100_000) == 30


def test_a_longer_restart_delay_is_kept():
    policy = Policy(seed=0, generation=0, max_restarts=-1, restart_delay=60.0)
    assert [policy.delay(streak) for streak in (1, 2, 100)] == [60, 60, 60]


def test_one_worker_that_cannot_be_launched_is_restarted_while_the_others_go_on():
    def script(launch):
        if (launch.index, launch.restarts) == (0, 0):
            raise OSError(errno.EMFILE, "Too many open files")
        return ENDED if launch.index == 0 else None

    actors = ScriptedActors(script)
    supervisor = supervise(actors, num_explorers=2)
    eventually(lambda: supervisor.stats()[0].state == "finished")
    assert "Too many open files" in supervisor.stats()[0].last_error
    assert [(f.index, f.restarts, f.died) for f in supervisor.failures] == [(0, 0, True)]
    assert [(run.launch.index, run.killed) for run in actors.runs] == [(1, False), (0, False)]
    supervisor.stop(0, 0)


def test_one_worker_of_whose_end_nothing_can_be_learnt_is_restarted_while_the_others_go_on(caplog):
    class Reluctant(ScriptedActors):
        def outcome(self, run):
            if run.launch.restarts == 0:
                raise ValueError("no such process")
            return super().outcome(run)

        def release(self, run):
            raise ValueError("cannot close a running process")

    actors = Reluctant(lambda launch: ENDED if launch.index == 0 else None)
    supervisor = supervise(actors, num_explorers=2)
    eventually(lambda: supervisor.stats()[0].state == "finished")
    assert [(f.index, f.restarts, f.died) for f in supervisor.failures] == [(0, 0, True)]
    assert "cannot close a running process" in caplog.text
    assert not any(run.killed for run in actors.runs)
    supervisor.stop(0, 0)
    assert supervisor.stats()[1].state == "stopped"


def test_workers_that_cannot_be_supervised_any_more_are_killed():
    class Lost(ScriptedActors):
        def wait(self, runs, timeout):
            if len(self.runs) == 2:
                raise ConnectionError("Ray was shut down")

    actors = Lost(lambda launch: None)
    supervisor = supervise(actors, num_explorers=2)
    assert supervisor.over.wait(30)
    assert [s.state for s in supervisor.stats()] == ["failed", "failed"]
    assert all(run.killed for run in actors.runs)
    assert "Ray was shut down" in supervisor.stats()[0].last_error
    supervisor.stop(0, 0)


# --- the pool ---


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


# --- the session and the pool's arguments ---


class SpareRay:
    """Stands for Ray where only its life matters."""

    def __init__(self, running):
        self.running, self.options = running, None

    def cluster_resources(self):
        return {"CPU": 4.0, "GPU": 1.0}

    def is_initialized(self):
        return self.running

    def init(self, **options):
        self.running, self.options = True, options

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


def test_explorers_that_ray_could_never_start_are_refused(monkeypatch):
    monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda: SpareRay(running=True))
    with pytest.raises(ValueError, match=r"5 CPUs .* has 4"):
        RaySession(cpus=5)
    with pytest.raises(ValueError, match=r"2 GPUs .* has 1"):
        RaySession(cpus=0, gpus=2)


def test_a_pool_joins_the_cluster_that_the_environment_names(monkeypatch):
    spare = SpareRay(running=False)
    monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda: spare)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    RaySession(cpus=4)
    assert spare.options == {}  # a cluster refuses num_cpus and the like


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"explore": 3}, "explore"),
        ({"num_explorers": 0}, "num_explorers=0"),
        ({"buffer": {}}, "buffer is {}"),
        ({"max_restarts": -2}, "max_restarts=-2"),
        ({"restart_delay": -1.0}, "restart_delay=-1"),
        ({"num_cpus": -1}, "num_cpus=-1"),
        ({"num_gpus": float("nan")}, "num_gpus=nan"),
        ({"max_weight_sync_delay": -1}, "max_weight_sync_delay=-1"),
        ({"backend": "threads"}, "backend='threads'.*'ray' or 'process'"),
        ({"backend": "process", "num_cpus": 1}, "num_cpus: only Ray"),
        ({"backend": "process", "placement": "SPREAD"}, "placement: only Ray"),
    ],
)
def test_arguments_out_of_range_are_refused_with_their_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExplorerPool(**{"explore": print, "num_explorers": 1, "buffer": make_buffer(), **arguments})

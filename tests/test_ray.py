"""Explorers as Ray actors: the pool on a real Ray, and its supervisor and context without one."""

import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

import torchreplay as tr
from torchreplay.ray import ExplorerContext, ExplorerPool, ExplorersFailed
from torchreplay.ray.board import Board
from torchreplay.ray.explorer import Outcome
from torchreplay.ray.session import RaySession
from torchreplay.ray.supervisor import Policy, Supervisor

PAYLOAD = 16
SPEC = {
    "explorer": tr.Field((), torch.int64),
    "seed": tr.Field((), torch.int64),
    "count": tr.Field((), torch.int64),
    "payload": tr.Field((PAYLOAD,), torch.int64),
}


def make_buffer(capacity=4096, limiter=None):
    return tr.ReplayBuffer(SPEC, capacity, sampler=tr.Prioritized(), limiter=limiter or tr.MinSize(1), seed=0)


def row(explorer, seed, count):
    """A row whose payload can be recomputed from its other fields."""
    return {
        "explorer": explorer,
        "seed": seed,
        "count": count,
        "payload": np.arange(PAYLOAD) + explorer * 2**40 + count * PAYLOAD,
    }


def assert_intact(batch):
    start = batch["explorer"] * 2**40 + batch["count"] * PAYLOAD
    assert torch.equal(batch["payload"], start[:, None] + torch.arange(PAYLOAD))


def eventually(predicate, timeout=60.0):
    """Waits for a condition of another process; fails when it does not come about."""
    deadline = time.monotonic() + timeout
    while not predicate():
        assert time.monotonic() < deadline, "the awaited condition did not come about"
        time.sleep(0.005)


def is_running(pid):
    return Path(f"/proc/{pid}").exists()


# --- without Ray: the context ---


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
    supervisor.stop(timeout=0)


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


# --- without Ray: the supervisor ---


class ScriptedActors:
    """Runs that end as a script says: at once with an outcome, or never if it returns None."""

    class Run:
        def __init__(self, launch, outcome):
            self.launch, self.result = launch, outcome
            self.interrupted = self.killed = False

    def __init__(self, script):
        self.script, self.runs = script, []
        self.changed = threading.Condition()

    def launch(self, launch):
        run = self.Run(launch, self.script(launch))
        self.runs.append(run)
        return run

    def wait(self, runs, timeout):
        with self.changed:
            self.changed.wait_for(lambda: any(run.result for run in runs), max(timeout, 0.0))
            return [run for run in runs if run.result]

    def end(self, run, outcome):
        with self.changed:
            run.result = outcome
            self.changed.notify_all()

    def outcome(self, run):
        return run.result

    def release(self, run):
        pass

    def interrupt(self, run, pid):
        run.interrupted = True

    def kill(self, run):
        run.killed = True
        self.end(run, Outcome("died", "killed"))

    def await_exit(self, pids):
        pass


class Marks:
    """Counts the marks that keep learners waiting."""

    def __init__(self):
        self.open = 0

    def __call__(self):
        self.open += 1
        return self

    def close(self):
        self.open -= 1


def supervise(actors, num_explorers=1, max_restarts=-1, restart_delay=0.0, marks=None):
    policy = Policy(seed=1, generation=0, max_restarts=max_restarts, restart_delay=restart_delay)
    return Supervisor(actors, Board(num_explorers), num_explorers, policy, marks or Marks(), deque())


RAISED = Outcome("raised", "KeyError: 'boom'", "Traceback: in explore, boom")
DIED = Outcome("died", "its process died", "what Ray knows")
ENDED = Outcome("ended")


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
    supervisor.stop(timeout=0)


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
    supervisor.stop(timeout=0)


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
    supervisor.stop(timeout=0)


def test_an_explorer_that_only_fails_is_not_waited_for_until_it_makes_progress():
    marks = Marks()
    actors = ScriptedActors(lambda launch: RAISED if launch.restarts < 5 else None)
    supervisor = supervise(actors, marks=marks)
    eventually(lambda: len(actors.runs) == 6)
    eventually(lambda: marks.open == 0)
    supervisor.board.entries[0]["episodes"] += 1
    eventually(lambda: marks.open == 1)
    supervisor.stop(timeout=0)
    assert marks.open == 0


def test_explorers_that_do_not_return_in_time_are_killed():
    actors = ScriptedActors(lambda launch: None)
    supervisor = supervise(actors, num_explorers=2)
    eventually(lambda: len(actors.runs) == 2)
    supervisor.board.entries["pid"] = 2**22  # both are in their function
    supervisor.stop(timeout=0.0)
    assert all(run.interrupted and run.killed for run in actors.runs)
    assert [s.state for s in supervisor.stats()] == ["stopped", "stopped"]
    assert not supervisor.failures


def test_every_run_of_every_explorer_has_its_own_reproducible_seed():
    def seeds(pool_seed):
        actors = ScriptedActors(lambda launch: RAISED)
        supervisor = supervise(actors, num_explorers=8, max_restarts=4)
        supervisor.over.wait(30)
        supervisor.stop(timeout=0)
        return {(run.launch.index, run.launch.restarts): run.launch.seed for run in actors.runs}

    first = seeds(1)
    assert len(first) == len(set(first.values())) == 40
    assert all(0 <= seed < 2**32 for seed in first.values())
    assert first == seeds(1)


def test_restart_delays_double_up_to_half_a_minute():
    policy = Policy(seed=0, generation=0, max_restarts=-1, restart_delay=1.0)
    assert [policy.delay(streak) for streak in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert policy.delay(100_000) == 30


class SpareRay:
    """Stands for Ray where only its life matters."""

    def __init__(self, running):
        self.running, self.options = running, None

    def is_initialized(self):
        return self.running

    def init(self, **options):
        self.running, self.options = True, options

    def shutdown(self):
        self.running = False


def test_a_pool_leaves_a_running_ray_as_it_is(monkeypatch):
    spare = SpareRay(running=True)
    monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda: spare)
    RaySession(num_explorers=4).close()
    assert spare.running
    assert spare.options is None


def test_a_pool_without_a_ray_starts_one_and_shuts_it_down(monkeypatch):
    spare = SpareRay(running=False)
    monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda: spare)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    session = RaySession(num_explorers=1000)
    assert spare.running
    assert spare.options["address"] == "local"
    assert spare.options["num_cpus"] == 1000
    session.close()
    assert not spare.running


def test_a_pool_joins_the_cluster_that_the_environment_names(monkeypatch):
    spare = SpareRay(running=False)
    monkeypatch.setattr("torchreplay.ray.session.import_ray", lambda: spare)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    RaySession(num_explorers=4)
    assert spare.options == {}  # a cluster refuses num_cpus and the like


# --- on Ray ---


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=80 * 2**20,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


def explore(ctx):
    """Writes rows and episodes until it is stopped."""
    writer, count = ctx.writer(), 0
    while not ctx.stopped:
        writer.append(**row(ctx.index, ctx.seed, count))
        count += 1
        if count % 100 == 0:
            ctx.record(episode_return=float(ctx.index), episode_length=100)


def test_rows_of_ray_explorers_arrive_intact_and_stop_leaves_no_process(ray):
    buffer = make_buffer()
    with ExplorerPool(explore, 3, buffer, seed=3) as pool:
        assert pool.start() is pool  # again: does nothing
        eventually(lambda: all(s.alive and s.episodes for s in pool.stats()))
        for _ in range(20):
            assert_intact(buffer.sample(256, timeout=60.0))
        eventually(lambda: set(buffer.sample(1024)["explorer"].tolist()) == {0, 1, 2})
        batch = buffer.sample(1024)
        by_explorer = {(int(e), int(s)) for e, s in zip(batch["explorer"], batch["seed"], strict=True)}
        assert len({seed for _, seed in by_explorer}) == len({e for e, _ in by_explorer})
        pids = [s.pid for s in pool.stats()]
        assert len({os.getpid(), *pids}) == 4
    assert not any(is_running(pid) for pid in pids)
    assert [s.state for s in pool.stats()] == ["stopped"] * 3
    assert [s.mean_return for s in pool.stats()] == [0.0, 1.0, 2.0]
    assert buffer.stats().writers == 0
    assert not buffer.stopped
    pool.stop()


def test_a_sigkilled_explorer_is_restarted_while_the_others_go_on(ray):
    buffer = make_buffer()
    with ExplorerPool(explore, 2, buffer, restart_delay=0.01) as pool:
        eventually(lambda: all(s.alive and s.episodes for s in pool.stats()))
        victim, other = pool.stats()
        os.kill(victim.pid, signal.SIGKILL)
        eventually(lambda: pool.stats()[0].restarts == 1)
        before = buffer.stats().rows_written
        buffer.sample(64, timeout=60.0)
        eventually(lambda: buffer.stats().rows_written > before)
        eventually(lambda: pool.stats()[0].alive and pool.stats()[0].episodes > victim.episodes)
        again = pool.stats()
        assert again[0].pid != victim.pid
        assert (again[1].pid, again[1].restarts) == (other.pid, 0)
        assert [(f.index, f.died) for f in pool.errors] == [(0, True)]
        assert_intact(buffer.sample(512))


def test_a_raising_explorer_shows_its_own_traceback_and_comes_back(ray, caplog):
    def raise_once(ctx):
        writer = ctx.writer()
        writer.append(**row(ctx.index, ctx.seed, ctx.restarts))
        if ctx.restarts == 0:
            raise ValueError("the simulator is on fire")

    buffer = make_buffer()
    with ExplorerPool(raise_once, 1, buffer, restart_delay=0.01) as pool:
        assert pool.wait(60)
        (stats,) = pool.stats()
        (failure,) = pool.errors
    assert (stats.state, stats.restarts) == ("finished", 1)
    assert failure.error == stats.last_error == "ValueError: the simulator is on fire"
    assert "in raise_once" in failure.traceback
    assert "test_ray.py" in failure.traceback
    assert failure.traceback in caplog.text
    assert buffer.storage["count"][:2].tolist() == [0, 1]
    first, second = buffer.storage["seed"][:2].tolist()
    assert first != second


def test_when_all_explorers_have_failed_the_waiting_learner_learns_why(ray):
    def broken(ctx):
        raise ValueError("no such environment")

    buffer = make_buffer(limiter=tr.MinSize(100))
    pool = ExplorerPool(broken, 1, buffer, max_restarts=0)
    with pytest.raises(tr.WouldBlockForever) as caught, pool:
        buffer.sample(32)
    assert "no such environment" in "".join(caught.value.__notes__)
    assert pool.stats()[0].state == "failed"
    with pytest.raises(ExplorersFailed, match="no such environment"):
        pool.check()


def test_an_error_in_the_with_body_ends_explorers_that_wait_for_room(ray):
    def flood(ctx):
        writer = ctx.writer()
        for count in range(10**9):
            writer.append(**row(ctx.index, ctx.seed, count))

    buffer = make_buffer(limiter=tr.SamplesPerInsert(1.0, min_size=10))
    pool = ExplorerPool(flood, 1, buffer)
    pids = []

    def learn():
        with pool:
            buffer.sample(8, timeout=60.0)
            pids.extend(s.pid for s in pool.stats())
            raise RuntimeError("the learner fails")

    with pytest.raises(RuntimeError, match="the learner fails"):
        learn()
    assert not any(is_running(pid) for pid in pids)
    assert pool.stats()[0].state == "stopped"
    assert not pool.errors
    assert len(buffer.sample(8)["key"]) == 8


def test_a_function_that_never_looks_up_is_interrupted_and_cleans_up(ray, tmp_path):
    def sleep(ctx):
        try:
            ctx.record(episode_return=0.0, episode_length=1)
            time.sleep(3600)
        finally:
            (tmp_path / "cleaned up").touch()

    pool = ExplorerPool(sleep, 1, make_buffer()).start()
    eventually(lambda: pool.stats()[0].episodes)
    pool.stop(timeout=30.0)
    assert (tmp_path / "cleaned up").exists()
    assert not pool.errors


def test_explorers_pull_published_weights_and_a_stopped_pool_starts_again(ray):
    def explore_with_weights(ctx):
        policy = torch.nn.Linear(1, 1, bias=False)
        assert torch.get_num_threads() == 1
        with ctx.writer() as writer:
            while not ctx.stopped:
                if ctx.weights.pull(policy):
                    writer.append(**row(ctx.index, ctx.seed, int(policy.weight.detach())))

    policy = torch.nn.Linear(1, 1, bias=False)
    weights, buffer = tr.SharedWeights(policy), make_buffer()
    pool = ExplorerPool(explore_with_weights, 1, buffer, weights)
    for version in (11.0, 12.0):
        with pool:
            with torch.no_grad():
                policy.weight.fill_(version)
            weights.publish(policy)
            eventually(lambda version=version: version in buffer.storage["count"].tolist())
    seeds = buffer.storage["seed"][buffer.storage["count"] == 11].tolist()
    assert not set(seeds) & set(buffer.storage["seed"][buffer.storage["count"] == 12].tolist())


def test_a_buffer_passes_as_an_argument_to_any_remote_function_or_actor(ray):
    @ray.remote(num_cpus=0)
    def collect(buffer, rows):
        return buffer.extend(**rows).tolist()

    @ray.remote(num_cpus=0)
    class Collector:
        def __init__(self, buffer):
            self.writer = buffer.writer()

        def collect(self, row):
            return self.writer.append(**row)

    rows = [row(explorer=1, seed=0, count=count) for count in range(20)]
    together = {name: np.stack([np.asarray(r[name]) for r in rows]) for name in SPEC}
    buffer = make_buffer()
    collector = Collector.remote(buffer)
    assert ray.get(collect.remote(buffer, together)) == list(range(20))
    assert ray.get(collector.collect.remote(row(explorer=2, seed=0, count=0))) == 20
    assert len(buffer) == 21
    assert_intact(buffer.sample(64))
    ray.kill(collector)


# --- programs of their own ---

DRIVER = """
import sys, torch, torchreplay as tr
from torchreplay.ray import ExplorerPool

def explore(ctx):
    while True:
        ctx.buffer.extend(x=torch.zeros(1))

if __name__ == "__main__":
    buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=100)
    with ExplorerPool(explore, 1, buffer) as pool:
        buffer.sample(1)
        print(pool.stats()[0].pid, flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def driver(tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    with subprocess.Popen(
        [sys.executable, "driver.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(tr.__file__).parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def test_no_explorer_survives_a_sigkilled_program_that_brought_its_own_ray(driver):
    pid = int(driver.stdout.readline())
    assert is_running(pid)
    driver.kill()
    eventually(lambda: not is_running(pid))


def test_importing_needs_no_ray_and_starting_a_pool_without_it_says_what_to_install():
    program = """
import sys
sys.modules["ray"] = None
import torch, torchreplay as tr
from torchreplay.ray import ExplorerPool
buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=10)
try:
    ExplorerPool(print, 1, buffer).start()
except ImportError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "torchreplay[ray]" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"explore": 3}, "explore"),
        ({"num_explorers": 0}, "num_explorers=0"),
        ({"max_restarts": -2}, "max_restarts=-2"),
        ({"restart_delay": -1.0}, "restart_delay=-1"),
        ({"num_cpus": -1}, "num_cpus=-1"),
    ],
)
def test_arguments_out_of_range_are_refused_with_their_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExplorerPool(**{"explore": explore, "num_explorers": 1, "buffer": make_buffer(), **arguments})


def test_a_function_that_cannot_be_pickled_is_refused_at_the_start(ray):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent"):
        ExplorerPool(lambda ctx: lock, 1, make_buffer()).start()

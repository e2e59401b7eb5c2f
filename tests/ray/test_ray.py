"""What is particular to explorers as Ray actors, on a real Ray."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from forked import eventually
from numbered_rows import SPEC, assert_intact, is_running, make_buffer, row

import torchreplay as tr
from torchreplay.ray import ExplorerPool, ExplorersFailed
from torchreplay.ray.workers.ray_backend import RayBackend

pytestmark = pytest.mark.slow

NOT_IMPORTED = """  File "serialization.py", line 461, in deserialize_objects
RuntimeError: The actor with name WorkerProcess failed to import on the worker.

  File "function_manager.py", line 687, in _load_actor_class_from_gcs
ModuleNotFoundError: No module named 'torchreplay'
"""


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


def test_what_is_asked_of_ray_reaches_it(ray):
    def explore(ctx):
        with ctx.writer() as writer:
            writer.append(**row(ctx.index, ctx.seed, int(os.environ["ROUNDS"])))
        while not ctx.stopped:
            pass

    buffer = make_buffer()
    options = {"num_cpus": 0.5, "runtime_env": {"env_vars": {"ROUNDS": "7"}}, "placement": "SPREAD"}
    with ExplorerPool(explore, 2, buffer, **options):
        eventually(lambda: len(buffer) == 2, timeout=150)
        eventually(lambda: ray.available_resources().get("CPU", 0) == 1.0)
    assert buffer.storage["count"][:2].tolist() == [7, 7]


@pytest.mark.parametrize(("argument", "kind"), [("num_cpus", "CPU"), ("num_gpus", "GPU")])
def test_more_than_ray_has_is_refused_at_the_start(ray, argument, kind):
    with pytest.raises(ValueError, match=f"198 {kind}s .* lower {argument}"):
        ExplorerPool(print, 2, make_buffer(), **{argument: 99}).start()


@pytest.mark.parametrize(
    ("error", "died", "text"),
    [
        (lambda e: e.RuntimeEnvSetupError("pip install failed"), False, "RuntimeEnvSetupError: .*pip install failed"),
        (lambda e: e.ActorUnschedulableError("no node has it"), False, "ActorUnschedulableError: .*no node has it"),
        (lambda e: e.ActorDiedError(), True, "its process died"),
        (
            lambda e: e.ActorDiedError(e.RayTaskError("__init__", NOT_IMPORTED, None)),
            False,
            "cannot import .* 'torchreplay'",
        ),
        (lambda e: e.NodeDiedError("gone"), True, "its process died"),
    ],
)
def test_a_process_that_never_began_is_told_from_one_that_died(error, died, text):
    ray = pytest.importorskip("ray")

    actors, result = RayBackend.__new__(RayBackend), Future()
    actors._ray = ray
    result.set_exception(error(ray.exceptions))
    outcome = actors.outcome(SimpleNamespace(result=result))
    assert (outcome.kind == "died") is died
    assert re.search(text, outcome.error)


def test_a_node_without_torchreplay_is_told_by_what_it_cannot_import(ray, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['torchreplay'] = None")
    hidden = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    pool = ExplorerPool(print, 1, make_buffer(), max_restarts=0, runtime_env=hidden)
    with pytest.raises(ExplorersFailed, match=r"No module named .torchreplay"), pool:
        pool.wait(150)
    assert [failure.died for failure in pool.errors] == [False]
    assert re.search(
        r"its node cannot import .*: ModuleNotFoundError: No module named .torchreplay", pool.stats()[0].last_error
    )


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


POOL_STOPS_FIRST = """
import ray, torch, torchreplay as tr
from torchreplay.ray import Evaluator, ExplorerPool

def explore(ctx):
    while True:
        ctx.buffer.extend(x=torch.zeros(1))

if __name__ == "__main__":
    policy = torch.nn.Linear(1, 1)
    buffer, weights = tr.ReplayBuffer({"x": tr.Field()}, capacity=100), tr.SharedWeights(policy)
    pool = ExplorerPool(explore, 1, buffer).start()
    evaluator = Evaluator(lambda module, seed: 1.0, weights, policy, every=1).start()
    buffer.sample(1)
    pool.stop()
    weights.publish(policy)
    print(evaluator.wait().version, evaluator.stats().restarts)
    evaluator.stop()
    print(ray.is_initialized())
"""


RAY_IS_SHUT_DOWN = """
import time, ray, torch, torchreplay as tr
from torchreplay.ray import ExplorerPool, ExplorersFailed

def explore(ctx):
    while True:
        ctx.buffer.extend(x=torch.zeros(1))

def fail(ctx):
    raise ValueError("to be restarted in a while")

def own_ray():
    ray.init(address="local", num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False)

if __name__ == "__main__":
    buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=100)
    brought = ExplorerPool(explore, 1, buffer).start()
    joined = ExplorerPool(fail, 1, buffer, restart_delay=1.5).start()
    buffer.sample(1)
    while joined.stats()[0].state != "restarting":
        time.sleep(0.01)
    ray.shutdown()
    for pool in (brought, joined):
        try:
            print(pool.wait(60))
        except ExplorersFailed:
            print("failed", "Ray was shut down" in pool.stats()[0].last_error, ray.is_initialized())
    own_ray()
    for pool in (brought, joined):
        pool.stop()
    print(ray.is_initialized())
    rows = buffer.stats().rows_written
    with brought:
        while buffer.stats().rows_written == rows:
            time.sleep(0.01)
        print(brought.stats()[0].state)
    print(ray.is_initialized())
"""

RAYLET_IS_KILLED = """
import os, signal, sys, time
import numpy as np, ray
import torchreplay as tr
from torchreplay.ray import ExplorerPool

fast = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 300}
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20, _system_config=fast, log_to_driver=False)
large = np.zeros(1 << 20, np.uint8)  # Ray stores what is larger than 100 KB, and passes no more than 10 MB in a call

def explore(ctx):
    with ctx.writer() as writer:
        while not ctx.stopped:
            writer.append(x=float(large[0]))
            time.sleep(0.01)

buffer = tr.ReplayBuffer({"x": tr.Field()}, 1000)
pool = ExplorerPool(explore, 1, buffer).start()
buffer.sample(4)
(raylet,) = ray._private.worker._global_node.all_processes["raylet"]
os.kill(raylet.process.pid, signal.SIGKILL)
try:
    while not pool.errors:  # until Ray knows of it
        buffer.sample(4)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        buffer.sample(4)
finally:
    buffer.save(sys.argv[1])
    print(len(buffer) > 0)
pool.stop()
print(pool.stats()[0].state)
"""


@pytest.fixture
def program():
    return DRIVER


@pytest.fixture
def driver(tmp_path, program):
    (tmp_path / "driver.py").write_text(program)
    with subprocess.Popen(
        [sys.executable, "driver.py", "saved"],
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


@pytest.mark.parametrize("program", [POOL_STOPS_FIRST], ids=[""])
def test_an_evaluator_outlives_the_pool_that_brought_its_ray(driver):
    assert driver.stdout.read().split() == ["1", "0", "False"]


@pytest.mark.parametrize("program", [RAY_IS_SHUT_DOWN], ids=[""])
def test_pools_under_which_ray_is_shut_down_say_so_and_leave_the_next_ray_alone(driver):
    told = driver.stdout.read().splitlines()
    assert told == ["failed True False", "failed True False", "True", "running", "True"]


@pytest.mark.parametrize("program", [RAYLET_IS_KILLED], ids=[""])
def test_a_learner_outlives_the_raylet_of_its_pool_and_saves_what_it_has(driver, tmp_path):
    assert {"True", "stopped"} <= {*driver.stdout.read().splitlines()}  # Ray has a lot to say there
    assert driver.wait() == 0
    assert len(tr.ReplayBuffer.load(tmp_path / "saved"))


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
    assert "pip install ray" in out


def test_a_function_that_cannot_be_pickled_is_refused_at_the_start(ray):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent"):
        ExplorerPool(lambda ctx: lock, 1, make_buffer()).start()

"""Pools of plain processes, as `torchreplay.explorers` has them: no Ray, and no argument that only Ray serves."""

import os
import subprocess
import sys

import pytest
from numbered_rows import make_buffer
from paths import import_path

import torchreplay.ray
from torchreplay.explorers import ExplorerContext, ExplorerPool, ExplorersFailed
from torchreplay.workers.process_backend import ProcessBackend

PROGRAM = """
import sys, torch, torchreplay as tr
sys.modules["ray"] = None  # importing it fails
from torchreplay.explorers import ExplorerPool

def explore(ctx):
    writer = ctx.writer()
    while not ctx.stopped:
        writer.append(x=1.0)

if __name__ == "__main__":
    buffer = tr.ReplayBuffer({"x": tr.Field()}, capacity=100)
    with ExplorerPool(explore, 2, buffer) as pool:
        buffer.sample(1)
        print(len(pool.stats()), [name for name in sys.modules if name.startswith("torchreplay.ray")])
"""


@pytest.mark.slow
def test_a_pool_of_plain_processes_needs_no_ray_and_loads_nothing_of_it(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": import_path()}
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2 []\n", "")


FAILING = """
import torchreplay as tr
from torchreplay.explorers import ExplorerPool, ExplorersFailed

def explore(ctx):
    with ctx.writer() as writer:
        for _ in range(3):
            writer.append(x=1.0)
        raise ValueError("no such level")

if __name__ == "__main__":
    with tr.ReplayBuffer({"x": tr.Field()}, 100, sampler=tr.Fifo()) as queue:
        with ExplorerPool(explore, 2, queue, max_restarts=0) as pool:
            items = sum(len(batch["x"]) for batch in tr.ReplayDataset(queue, 4))
            try:
                pool.check()
            except ExplorersFailed:
                print("failed", items, queue.stats().inserted, len(pool.errors))
            print(*(stats.state for stats in pool.stats()))
"""


@pytest.mark.slow
def test_an_iteration_over_a_queue_ends_when_all_explorers_have_failed_and_the_pool_says_so(tmp_path):
    (tmp_path / "program.py").write_text(FAILING)
    env = {**os.environ, "PYTHONPATH": import_path()}
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout == "failed 6 6 2\nfailed failed\n", done.stderr
    assert done.stderr.count("ValueError: no such level") >= 2


def test_rays_pool_is_one_of_these_with_actors_as_the_default():
    assert issubclass(torchreplay.ray.ExplorerPool, ExplorerPool)
    assert torchreplay.ray.ExplorersFailed is ExplorersFailed
    assert torchreplay.ray.ExplorerContext is ExplorerContext
    pool = ExplorerPool(print, 1, make_buffer())
    backend = pool._open((pool._make_work(), None), 1)
    assert isinstance(backend, ProcessBackend)
    backend.close()


def test_what_only_ray_reaches_is_refused_with_the_class_that_does():
    class Elsewhere(torchreplay.ray.ShardedReplay):  # no cluster is needed to be refused
        def __init__(self):
            pass

        def __repr__(self):
            return "ShardedReplay(...)"

    with pytest.raises(TypeError, match=r"torchreplay\.ray\.ExplorerPool"):
        ExplorerPool(print, 1, Elsewhere())
    with pytest.raises(TypeError, match="placement"):
        ExplorerPool(print, 1, make_buffer(), placement="SPREAD")


def test_a_closed_buffer_is_refused_at_the_start():
    buffer = make_buffer()
    pool = ExplorerPool(print, 1, buffer)
    buffer.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.start()

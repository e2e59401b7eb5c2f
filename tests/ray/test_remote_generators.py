"""Generators on another node of a Ray cluster that have to be admitted: real nodes, real kills."""

import os
import signal
import time
from collections import Counter

import pytest
import torch
from forked import eventually
from remote_generators import SPEC, Holder, generate

import torchreplay as tr
from torchreplay.ray import ExplorerPool

pytestmark = pytest.mark.slow


def queue_of(batch_size, max_age, **options):
    limiter = tr.Admission(batch_size=batch_size, max_age=max_age)
    return tr.ReplayBuffer(SPEC, 64, sampler=tr.Fifo(commit="manual"), limiter=limiter, **options)


def test_no_item_is_older_than_it_may_be_whoever_fails_or_is_killed(cluster):
    """With `max_age=0` a batch takes all that is begun, so that even a straggler is of its version."""
    policy = torch.nn.Linear(1, 1)
    weights, batch_size, seen, deadline = tr.SharedWeights(policy), 6, Counter(), time.monotonic() + 120
    with queue_of(batch_size, 0) as queue:
        options = {"restart_delay": 0.01, "placement": lambda i: cluster.on(int(i > 0))["scheduling_strategy"]}
        with ExplorerPool(generate, 3, queue, weights, **options) as pool:

            def learn_until(enough):
                while not enough():
                    batch = queue.sample(batch_size, timeout=60)
                    assert batch["age"].tolist() == [0] * batch_size
                    seen.update(batch["who"].tolist())
                    queue.commit()
                    version = weights.publish(policy, buffer=queue)
                    assert queue.stats().admitted_items <= (version + 1) * batch_size
                    assert time.monotonic() < deadline, seen

            learn_until(lambda: min(seen[who] for who in range(3)) >= 10)
            os.kill(pool.stats()[1].pid, signal.SIGKILL)
            before = seen[2]
            learn_until(lambda: seen[2] > before + 10)
        eventually(lambda: queue.stats().open_admissions == 0)


def test_a_generator_that_is_killed_in_its_block_gives_back_what_it_has_not_written(cluster):
    with queue_of(4, 0) as queue:
        holders = [cluster.ray.remote(Holder).options(**cluster.on(1)).remote() for _ in range(2)]
        victim, other = holders
        cluster.ray.get(victim.begin.remote(queue, 3))
        cluster.ray.get(victim.write.remote(1))
        cluster.ray.get(other.begin.remote(queue, 1))
        told = cluster.ray.get(other.try_to_begin.remote(0.2))
        assert "admit() of" in told or "admit() found no room within 0.2 s: 0 items may be admitted" in told
        assert cluster.ray.get(other.version.remote(queue)) == 0
        victim.die.remote()
        start = time.monotonic()
        with queue.writer() as here, here.admit(2, timeout=30):
            assert queue.stats().admitted_items == 4
            assert time.monotonic() - start < 12, "its connection has ended, and that is known at once"
        cluster.ray.get(other.write.remote(1))
        assert queue.sample(2)["who"].tolist() == [7, 7]
        cluster.ray.kill(other)

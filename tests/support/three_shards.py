"""Shards on three nodes of a cluster in this process, written to, counted and killed."""

import numpy as np

from torchreplay.ray.sharded.writing import buffer_to_write_to

NODES = ["a", "b", "c"]


def write(shards, count):
    buffer_to_write_to(shards).extend(home=np.zeros(count, int), index=np.arange(count))


def hand_out(limiter, n):
    """Counts a batch of `n` items."""
    limiter.tally.begin(n, None).hand_out()


def die(coordinator, number):
    """Kills a shard's actor; its memory goes with it, except where it is attached."""
    actor = coordinator.table().entries[number].actor
    actor.dead = True
    actor.it._buffer.close()

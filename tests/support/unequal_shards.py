"""Two shards of very unequal sizes, whose rows say which they are, and what TD errors make of them."""

from contextlib import contextmanager

import numpy as np
import torch
from sharded_rows import SPEC, write

import torchreplay as tr
from torchreplay.ray import ShardedReplay

ALPHA, EPS, BETA = 0.6, 1e-6, 0.4
ROWS = ((0, 0, 300), (0, 1, 20), (1, 0, 5), (1, 1, 40))  # node, explorer, rows


@contextmanager
def filled_shards(cluster):
    """A buffer of two shards, with rows of two explorers on each node, and their keys by (node, explorer)."""
    sampler = tr.Prioritized(alpha=ALPHA, beta=BETA, eps=EPS)
    with ShardedReplay(SPEC, 4001, sampler=sampler, seed=5, nodes=cluster.node_ids) as replay:
        task = cluster.ray.remote(write)
        calls = {(node, e): task.options(**cluster.on(node)).remote(replay, node, e, n) for node, e, n in ROWS}
        keys = {who: np.array(cluster.ray.get(call)) for who, call in calls.items()}
        replay.sample(1, timeout=120)  # which attaches the shard that is on this node
        yield replay, keys


def identity(batch):
    """Which row each item is, as one number."""
    return (batch["node"] * 2 + batch["explorer"]) * 1000 + batch["count"]


def all_keys(keys):
    """Every row's key, and which row it is."""
    ids = [(node * 2 + explorer) * 1000 + np.arange(len(k)) for (node, explorer), k in keys.items()]
    return np.concatenate(list(keys.values())), np.concatenate(ids)


def prioritize(filled, seed):
    """Gives each row a TD error that follows from which row it is; returns the leaf of each by identity."""
    replay, keys = filled
    flat, ids = all_keys(keys)
    td = 10.0 ** np.random.default_rng(seed).uniform(-2, 2, 4000)
    order = np.random.default_rng(seed + 1).permutation(len(flat))
    replay.update_priorities(flat[order], torch.from_numpy(td[ids[order]]))
    leaves = np.zeros(4000)
    leaves[ids] = (td[ids] + EPS) ** ALPHA
    return leaves

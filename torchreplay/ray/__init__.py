"""Explorers as Ray actors: a function of the user's, run in parallel, filling a replay buffer.

Importing this needs no Ray; starting an `ExplorerPool` does.
"""

from torchreplay.ray.context import ExplorerContext
from torchreplay.ray.home import ShardLost, ShardWriter
from torchreplay.ray.pool import ExplorerPool, ExplorersFailed
from torchreplay.ray.sharded import ShardedReplay
from torchreplay.ray.sharded_stats import ShardedStats, ShardStats
from torchreplay.ray.stats import ExplorerFailure, ExplorerStats

__all__ = [
    "ExplorerContext",
    "ExplorerFailure",
    "ExplorerPool",
    "ExplorerStats",
    "ExplorersFailed",
    "ShardLost",
    "ShardStats",
    "ShardWriter",
    "ShardedReplay",
    "ShardedStats",
]

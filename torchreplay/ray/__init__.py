"""Workers beside the learner: explorers that fill a replay buffer, an evaluator that watches over the weights.

They are functions of the user's, run by Ray actors or by plain processes. Importing this needs no Ray, and plain
processes need none.
"""

from torchreplay.errors import ReplayLost
from torchreplay.ray.async_replay import AsyncReplay, AsyncReplayStats
from torchreplay.ray.context import ExplorerContext
from torchreplay.ray.evaluator import Evaluator, EvaluatorFailed, EvaluatorStats
from torchreplay.ray.meter import Timing
from torchreplay.ray.pool import ExplorerPool, ExplorersFailed
from torchreplay.ray.remote import RemoteBuffer, RemoteWriter
from torchreplay.ray.scores import Evaluation
from torchreplay.ray.shard_writer import ShardLost, ShardWriter
from torchreplay.ray.sharded import ShardedReplay
from torchreplay.ray.sharded_stats import ShardedStats, ShardStats
from torchreplay.ray.stats import ExplorerFailure, ExplorerStats

__all__ = [
    "AsyncReplay",
    "AsyncReplayStats",
    "Evaluation",
    "Evaluator",
    "EvaluatorFailed",
    "EvaluatorStats",
    "ExplorerContext",
    "ExplorerFailure",
    "ExplorerPool",
    "ExplorerStats",
    "ExplorersFailed",
    "RemoteBuffer",
    "RemoteWriter",
    "ReplayLost",
    "ShardLost",
    "ShardStats",
    "ShardWriter",
    "ShardedReplay",
    "ShardedStats",
    "Timing",
]

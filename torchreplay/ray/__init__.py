"""Workers beside the learner: explorers that fill a replay buffer, an evaluator that watches over the weights.

They are functions of the user's, run by Ray actors or by plain processes. Importing this needs no Ray, and plain
processes need none.
"""

from torchreplay.errors import ReplayLost
from torchreplay.evaluation.evaluation_log import Evaluation
from torchreplay.explorers import ExplorerContext, ExplorersFailed
from torchreplay.ray.evaluation.evaluator import Evaluator, EvaluatorFailed, EvaluatorStats
from torchreplay.ray.explorers.explorer_pool import ExplorerPool
from torchreplay.ray.remote.remote_buffer import RemoteBuffer, RemoteWriter
from torchreplay.ray.sharded.local_shard import ShardLost, ShardWriter
from torchreplay.ray.sharded.sharded_replay import ShardedReplay
from torchreplay.ray.sharded.stats import ShardedStats, ShardStats
from torchreplay.ray.training.async_replay import AsyncReplay, AsyncReplayStats
from torchreplay.ray.training.throughput import Timing
from torchreplay.workers.explorer_stats import ExplorerFailure, ExplorerStats

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

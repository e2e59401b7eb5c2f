"""Explorers beside the learner: a user's function that fills a replay buffer, in processes of their own.

`ExplorerPool` runs them as plain processes of this machine. `torchreplay.ray.ExplorerPool` is the same over Ray actors.
"""

from torchreplay.explorers.explorer_context import ExplorerContext
from torchreplay.explorers.explorer_pool import ExplorerPool, ExplorersFailed
from torchreplay.workers.explorer_stats import ExplorerFailure, ExplorerStats

__all__ = ["ExplorerContext", "ExplorerFailure", "ExplorerPool", "ExplorerStats", "ExplorersFailed"]

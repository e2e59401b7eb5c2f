"""Replay buffers in shared memory for Tianshou's collectors and off-policy trainers.

Tested with tianshou 2.0.1. `docs/coming_from_tianshou.md` says what to change in a program, and what differs.
"""

from torchreplay.compat.tianshou.buffers import SharedReplayBuffer, SharedVectorReplayBuffer
from torchreplay.compat.tianshou.prioritized import PrioritizedReplayBuffer, PrioritizedVectorReplayBuffer

__all__ = [
    "PrioritizedReplayBuffer",
    "PrioritizedVectorReplayBuffer",
    "SharedReplayBuffer",
    "SharedVectorReplayBuffer",
]

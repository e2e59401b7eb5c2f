"""Replay buffers in shared memory for Stable-Baselines3, and its learners with prioritized replay.

Tested with stable-baselines3 2.9.2. `docs/coming_from_sb3.md` says what to change in a program, and what differs.
"""

from torchreplay.compat.sb3.buffers import (
    PrioritizedReplayBuffer,
    SharedDictReplayBuffer,
    SharedNStepReplayBuffer,
    SharedReplayBuffer,
)
from torchreplay.compat.sb3.hindsight import SharedHerReplayBuffer
from torchreplay.compat.sb3.learners import PrioritizedDQN, PrioritizedSAC, PrioritizedTD3
from torchreplay.compat.sb3.samples import PrioritizedSamples

__all__ = [
    "PrioritizedDQN",
    "PrioritizedReplayBuffer",
    "PrioritizedSAC",
    "PrioritizedSamples",
    "PrioritizedTD3",
    "SharedDictReplayBuffer",
    "SharedHerReplayBuffer",
    "SharedNStepReplayBuffer",
    "SharedReplayBuffer",
]

"""Episode replay buffers in shared memory for RLlib's current API stack: DQN, SAC and what samples as they do.

Tested with ray 2.60.0. `docs/coming_from_rllib.md` says what to change in a program, and what differs.
"""

from torchreplay.compat.rllib.multi_agent import MultiAgentEpisodeReplayBuffer, MultiAgentPrioritizedEpisodeReplayBuffer
from torchreplay.compat.rllib.single_agent import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer

__all__ = [
    "EpisodeReplayBuffer",
    "MultiAgentEpisodeReplayBuffer",
    "MultiAgentPrioritizedEpisodeReplayBuffer",
    "PrioritizedEpisodeReplayBuffer",
]

"""cpprb's replay buffers, by cpprb's names and arguments: replace `cpprb` in the import by `torchreplay.compat.cpprb`.

Tested beside cpprb 11.0.0. `docs/coming_from_cpprb.md` lists what differs, and why.
"""

from torchreplay.compat.cpprb.buffers import PrioritizedReplayBuffer, ReplayBuffer, ReverseReplayBuffer, create_buffer
from torchreplay.compat.cpprb.environments import create_before_add_func, create_env_dict
from torchreplay.compat.cpprb.episodes import SelectiveReplayBuffer
from torchreplay.compat.cpprb.hindsight import HindsightReplayBuffer
from torchreplay.compat.cpprb.laber import LaBERlazy, LaBERmax, LaBERmean
from torchreplay.compat.cpprb.shared import MPPrioritizedReplayBuffer, MPReplayBuffer
from torchreplay.compat.cpprb.training import train

__all__ = [
    "HindsightReplayBuffer",
    "LaBERlazy",
    "LaBERmax",
    "LaBERmean",
    "MPPrioritizedReplayBuffer",
    "MPReplayBuffer",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReverseReplayBuffer",
    "SelectiveReplayBuffer",
    "create_before_add_func",
    "create_buffer",
    "create_env_dict",
    "train",
]

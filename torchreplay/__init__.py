"""torchreplay: a prioritized replay buffer in shared memory, for PyTorch."""

from .batch import ReplayBatch
from .buffer import ReplayBuffer
from .dataset import ReplayDataset
from .errors import AttachError, ReplayTimeout, Stopped, WouldBlockForever
from .limiters import MinSize, SamplesPerInsert
from .samplers import Linear, Prioritized, Uniform
from .segment import Handle
from .spec import Field
from .stats import Stats
from .tree import PriorityTree
from .views import Rows
from .weights import SharedWeights
from .writer import Writer

__version__ = "0.1.0"

__all__ = [
    "AttachError",
    "Field",
    "Handle",
    "Linear",
    "MinSize",
    "Prioritized",
    "PriorityTree",
    "ReplayBatch",
    "ReplayBuffer",
    "ReplayDataset",
    "ReplayTimeout",
    "Rows",
    "SamplesPerInsert",
    "SharedWeights",
    "Stats",
    "Stopped",
    "Uniform",
    "WouldBlockForever",
    "Writer",
]

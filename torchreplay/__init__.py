"""torchreplay: a prioritized replay buffer in shared memory, for PyTorch."""

from .batch import ReplayBatch
from .buffer import ReplayBuffer
from .checking import CheckReport, check
from .dataset import ReplayDataset
from .errors import (
    AttachError,
    CheckpointError,
    LearnerLost,
    MissingItems,
    ReplayTimeout,
    Stopped,
    WouldBlockForever,
)
from .hindsight import Hindsight
from .laber import LaBER
from .learners import Learners
from .limiters import MinSize, SamplesPerInsert
from .mixing import MixedDataset
from .priorities import sequence_priority
from .reverse import Reverse
from .samplers import Linear, Prioritized, Uniform
from .segment import Handle
from .spaces import spec_from_env, spec_from_space
from .spec import Field, Spec
from .stats import Stats
from .tree import PriorityTree
from .views import Rows, Sequences, Transitions
from .weights import SharedWeights
from .writer import Writer

__version__ = "0.1.0"

__all__ = [
    "AttachError",
    "CheckReport",
    "CheckpointError",
    "Field",
    "Handle",
    "Hindsight",
    "LaBER",
    "LearnerLost",
    "Learners",
    "Linear",
    "MinSize",
    "MissingItems",
    "MixedDataset",
    "Prioritized",
    "PriorityTree",
    "ReplayBatch",
    "ReplayBuffer",
    "ReplayDataset",
    "ReplayTimeout",
    "Reverse",
    "Rows",
    "SamplesPerInsert",
    "Sequences",
    "SharedWeights",
    "Spec",
    "Stats",
    "Stopped",
    "Transitions",
    "Uniform",
    "WouldBlockForever",
    "Writer",
    "check",
    "sequence_priority",
    "spec_from_env",
    "spec_from_space",
]

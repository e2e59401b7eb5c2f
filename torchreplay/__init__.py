"""torchreplay: a prioritized replay buffer in shared memory, for PyTorch."""

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

try:
    import_module("torchreplay._C")
except ModuleNotFoundError as _error:
    if _error.name != "torchreplay._C":
        raise
    raise ImportError(
        f"{__path__[0]} is torchreplay's source, without its compiled part. Compile it there: pip install . "
        "(or `make build`, for .venv/bin/python), or start Python in another folder"
    ) from None

from torchreplay.buffer.replay_buffer import REMOTE_BUFFER, ReplayBuffer
from torchreplay.buffer.stats import Stats
from torchreplay.buffer.writer import Writer
from torchreplay.errors import (
    AttachError,
    CheckpointError,
    LearnerLost,
    MissingItems,
    ReplayTimeout,
    Stopped,
    WouldBlockForever,
)
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.hindsight import Hindsight
from torchreplay.schema.limiters import Admission, MinSize, SamplesPerInsert
from torchreplay.schema.samplers import Fifo, LinearSchedule, Prioritized, Uniform
from torchreplay.schema.sequence_priority import sequence_priority
from torchreplay.schema.spaces import spec_from_env, spec_from_space
from torchreplay.schema.spec import Field, Ragged, Spec
from torchreplay.schema.tensor_info import TensorInfo
from torchreplay.schema.views import Rows, Sequences, Transitions, View
from torchreplay.segment.handle import Handle
from torchreplay.weights.shared_weights import REMOTE_WEIGHTS, SharedWeights

if TYPE_CHECKING:
    from torchreplay.buffer.flat_episodes import FlatEpisodes, episodes_from_flat
    from torchreplay.buffer.footprint import Footprint, footprint
    from torchreplay.checking import CheckReport, check
    from torchreplay.distributed.learners import Learners
    from torchreplay.loading.dataset import ReplayDataset
    from torchreplay.loading.group_dataset import GroupDataset
    from torchreplay.loading.laber import LaBER
    from torchreplay.loading.mixed_dataset import MixedDataset
    from torchreplay.loading.queue_loader import QueueLoader
    from torchreplay.loading.reverse import Reverse
    from torchreplay.monitoring.batch_report import BatchReport, explain
    from torchreplay.monitoring.monitor import Monitor
    from torchreplay.priority_tree import PriorityTree
    from torchreplay.ray.remote import RemoteBuffer

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "AttachError",
    "BatchReport",
    "CheckReport",
    "CheckpointError",
    "Field",
    "Fifo",
    "FlatEpisodes",
    "Footprint",
    "GroupDataset",
    "Handle",
    "Hindsight",
    "LaBER",
    "LearnerLost",
    "Learners",
    "LinearSchedule",
    "MinSize",
    "MissingItems",
    "MixedDataset",
    "Monitor",
    "Prioritized",
    "PriorityTree",
    "QueueLoader",
    "Ragged",
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
    "episodes_from_flat",
    "explain",
    "footprint",
    "sequence_priority",
    "spec_from_env",
    "spec_from_space",
]

_IMPORTED_AT_FIRST_USE = {  # to make `import torchreplay` quick: no program needs all of them
    "BatchReport": "torchreplay.monitoring.batch_report",
    "CheckReport": "torchreplay.checking",
    "FlatEpisodes": "torchreplay.buffer.flat_episodes",
    "Footprint": "torchreplay.buffer.footprint",
    "GroupDataset": "torchreplay.loading.group_dataset",
    "LaBER": "torchreplay.loading.laber",
    "Learners": "torchreplay.distributed.learners",
    "MixedDataset": "torchreplay.loading.mixed_dataset",
    "Monitor": "torchreplay.monitoring.monitor",
    "PriorityTree": "torchreplay.priority_tree",
    "QueueLoader": "torchreplay.loading.queue_loader",
    "ReplayDataset": "torchreplay.loading.dataset",
    "Reverse": "torchreplay.loading.reverse",
    "check": "torchreplay.checking",
    "episodes_from_flat": "torchreplay.buffer.flat_episodes",
    "explain": "torchreplay.monitoring.batch_report",
    "footprint": "torchreplay.buffer.footprint",
}


class _OperatorsAtFirstUse(ModuleType):
    """Stands for `torch.ops.torchreplay` until an operator is asked for, which loads them."""

    def __getattr__(self, name: str) -> Any:
        import_module("torchreplay.ops")
        return getattr(torch.ops.torchreplay, name)


# What is on another node is attached by a room above those that ask for it. It is imported where there is such a node.
def _remote_buffer(handle: Handle, view: View | None) -> "RemoteBuffer":
    from torchreplay.ray.remote import RemoteBuffer

    return RemoteBuffer(handle, view)


def _remote_weights(handle: Handle, infos: dict[str, TensorInfo], nbytes: int) -> SharedWeights:
    from torchreplay.ray.remote import RemoteWeights

    return RemoteWeights(handle, infos, nbytes)


REMOTE_BUFFER.attach = _remote_buffer
REMOTE_WEIGHTS.attach = _remote_weights

if "torchreplay.ops" not in sys.modules:  # what is there otherwise is a namespace without operators
    vars(torch.ops)["torchreplay"] = _OperatorsAtFirstUse("torch.ops.torchreplay")


def __getattr__(name: str) -> Any:
    if name == "Linear":  # its name before 0.1
        warnings.warn("tr.Linear is called tr.LinearSchedule; the old name goes away", DeprecationWarning, stacklevel=2)
        return LinearSchedule
    if name not in _IMPORTED_AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_IMPORTED_AT_FIRST_USE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

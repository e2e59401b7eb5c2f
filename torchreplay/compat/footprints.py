"""The bytes that other libraries' buffers take for the same experience, by what their sources allocate.

No library is imported. The formulae are those of the versions named; tests compare them with the installed libraries.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment's step gives, in bytes.

    Attributes:
        obs: Of one observation, or of one frame where frames are stacked.
        action: Of the action.
        stack: Frames of an observation; 1: they are not stacked.
    """

    obs: int
    action: int
    stack: int = 1

    @property
    def stacked(self) -> int:
        """Bytes of an observation as the agent sees it."""
        return self.obs * self.stack


@dataclass(frozen=True, slots=True)
class PeerFootprint:
    """What another library's buffer takes.

    Attributes:
        name: Library and class.
        nbytes: Of all rows.
        stores: What of each step, in words.
        source: Where that stands.
    """

    name: str
    nbytes: int
    stores: str
    source: str


def peer_footprints(step: Step, capacity: int, num_envs: int = 1) -> list[PeerFootprint]:
    """Returns what other libraries take for `capacity` steps.

    Args:
        step: Of the environment.
        capacity: Steps that fit.
        num_envs: Environments that step together.
    """
    return [
        _sb3(step, capacity, num_envs),
        _cpprb(step, capacity),
        _torchrl(step, capacity),
        _rllib(step, capacity),
    ]


def _sb3(step: Step, capacity: int, num_envs: int) -> PeerFootprint:
    """Rewards, dones and timeouts are float32 each; the size is cut to whole steps of all environments."""
    rows = max(capacity // num_envs, 1) * num_envs
    return PeerFootprint(
        "Stable-Baselines3 ReplayBuffer",
        rows * (2 * step.stacked + step.action + 3 * FLOAT32),
        "obs and next_obs, each with its frames; no priorities",
        "stable_baselines3/common/buffers.py, ReplayBuffer.__init__ (2.9)",
    )


def _cpprb(step: Step, capacity: int) -> PeerFootprint:
    """Two segment trees of float32, with as many leaves as the next power of two."""
    trees = 2 * 2 * _power_of_two(capacity) * FLOAT32
    return PeerFootprint(
        "cpprb PrioritizedReplayBuffer",
        capacity * (2 * step.stacked + step.action + 2 * FLOAT32) + trees,
        "obs and next_obs, each with its frames, unless next_of and stack_compress are given; two trees",
        "cpprb/PyReplayBuffer.pyx, dict2buffer; SegmentTree.hh (11.0)",
    )


def _torchrl(step: Step, capacity: int) -> PeerFootprint:
    """Three flags, twice: at the root and under "next"; two segment trees of float32."""
    trees = 2 * 2 * _power_of_two(capacity) * FLOAT32
    return PeerFootprint(
        "TorchRL TensorDictPrioritizedReplayBuffer",
        capacity * (2 * step.stacked + step.action + FLOAT32 + 6) + trees,
        "observation and next.observation, each with its frames; flags twice; two trees",
        "torchrl/data/replay_buffers/storages, LazyTensorStorage; csrc/segment_tree.h (0.14)",
    )


ARRAY_OBJECT = 112
"""Bytes of a NumPy array beside its values, in CPython 3.11."""
POINTER, FLOAT_OBJECT = 8, 24


def _rllib(step: Step, capacity: int) -> PeerFootprint:
    """A SampleBatch a step: seven arrays of one row. Two trees are lists of floats."""
    arrays = 7
    trees = 2 * (2 * _power_of_two(capacity) * POINTER + capacity * FLOAT_OBJECT)
    return PeerFootprint(
        "RLlib PrioritizedReplayBuffer, at least",
        capacity * (2 * step.stacked + step.action + FLOAT32 + 2 + 8 + arrays * ARRAY_OBJECT) + trees,
        "obs and new_obs, each with its frames, as Python objects; two trees of Python floats",
        "rllib/utils/replay_buffers/prioritized_replay_buffer.py; rllib/execution/segment_tree.py (2.60)",
    )


def _power_of_two(capacity: int) -> int:
    return 1 << max(capacity - 1, 0).bit_length()

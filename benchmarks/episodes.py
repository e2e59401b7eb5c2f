"""Episodes as explorers live through them, and buffers full of them, for views that link rows."""

from math import prod

import numpy as np
import torch

import torchreplay as tr
from benchmarks.workload import Rows, Workload, td_errors

EPISODE = 1000
"""Steps of an episode."""
STREAMS = 8
"""Explorers whose rows are interleaved in a full buffer, as those of several processes would be."""
FRAMES = Workload("frames", (84, 84), np.uint8, 30_000)
"""Atari frames, which views stack."""
STACK = 4
STACKED = tr.Transitions(n_step=3, stack={"obs": STACK})


def block(workload: Workload, steps: int, envs: tuple[int, ...] = (), seed: int = 0) -> Rows:
    """Returns one random episode for each environment, which terminates with its last step.

    Args:
        workload: What observations look like.
        steps: Length of the episodes.
        envs: Leading dimension of environments, ``(n,)``; ``()`` for one episode without that dimension.
        seed: Of the values.

    Returns:
        ``obs`` ``[steps + 1, *envs, ...]``, the other fields ``[steps, *envs]``.
    """
    lead = (steps + 1, *envs)
    rows = {name: values.reshape(*lead, *values.shape[1:]) for name, values in workload.rows(prod(lead), seed).items()}
    ends = np.zeros((steps, *envs), bool)
    ends[-1] = True
    return {
        "obs": rows["obs"],
        "action": rows["action"][1:],
        "reward": rows["reward"][1:],
        "terminated": ends,
        "truncated": np.zeros_like(ends),
    }


def linked_buffer(workload: Workload, capacity: int, view: tr.Transitions | tr.Sequences) -> tr.ReplayBuffer:
    """Returns a full buffer of eight interleaved streams of episodes with random priorities."""
    dtype = torch.from_numpy(workload.rows(1)["obs"]).dtype
    spec = {
        "obs": tr.Field(workload.shape, dtype),
        "action": tr.Field((), torch.int64),
        "reward": tr.Field(),
        "terminated": tr.Field((), torch.bool),
        "truncated": tr.Field((), torch.bool),
    }
    sampler = tr.Prioritized(alpha=0.6, beta=0.4)
    buffer = tr.ReplayBuffer(spec, capacity=capacity, view=view, sampler=sampler, seed=0)
    steps = min(EPISODE, capacity // (4 * STREAMS))
    episodes = block(workload, steps, (STREAMS,), seed=1)
    for start in range(0, capacity, STREAMS * (steps + 1)):
        buffer.extend(**episodes, priority=td_errors(STREAMS * steps, start).reshape(steps, STREAMS))
    len(buffer)  # takes the rows in
    return buffer

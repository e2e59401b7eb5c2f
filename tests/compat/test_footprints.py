"""What other libraries are said to take is what their buffers allocate."""

import numpy as np
import pytest
import torch

from torchreplay.compat.footprints import Step, peer_footprints

STEP = Step(obs=8 * 8, action=8, stack=4)


def test_stable_baselines3_allocates_what_is_said():
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    from gymnasium import spaces

    made = buffers.ReplayBuffer(1000, spaces.Box(0, 255, (4, 8, 8), np.uint8), spaces.Discrete(4), n_envs=3)
    allocated = sum(value.nbytes for value in vars(made).values() if isinstance(value, np.ndarray))
    assert peer_footprints(STEP, 1000, 3)[0].nbytes == allocated


@pytest.mark.slow
def test_torchrl_allocates_what_is_said_without_its_trees():
    data = pytest.importorskip("torchrl.data")
    from tensordict import TensorDict

    def flags():
        return {name: torch.zeros(5, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}

    obs = torch.zeros(5, 4, 8, 8, dtype=torch.uint8)
    steps = {"observation": obs, "action": torch.zeros(5, dtype=torch.int64), **flags()}
    steps["next"] = {"observation": obs, "reward": torch.zeros(5, 1), **flags()}
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(1024))
    buffer.extend(TensorDict(steps, [5]))
    stored = buffer._storage._storage
    allocated = sum(value.nbytes for value in stored.values(True, True))
    trees = 2 * 2 * 1024 * 4
    assert peer_footprints(STEP, 1024)[2].nbytes == allocated + trees


def test_cpprb_allocates_what_is_said_without_its_trees():
    cpprb = pytest.importorskip("cpprb")
    image = {"shape": (4, 8, 8), "dtype": np.uint8}
    fields = {"obs": image, "act": {"dtype": np.int64}, "rew": {}, "next_obs": image, "done": {}}
    buffer = cpprb.ReplayBuffer(1024, fields)
    zeros = np.zeros((1024, 4, 8, 8), np.uint8)
    buffer.add(obs=zeros, act=np.zeros(1024), rew=np.zeros(1024), next_obs=zeros, done=np.zeros(1024))
    allocated = sum(value.nbytes for value in buffer.get_all_transitions().values())
    trees = 2 * 2 * 1024 * 4
    assert peer_footprints(STEP, 1024)[1].nbytes == allocated + trees

"""`compat.sb3`: pickles and copies hold the experience, and other processes share it."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from forked import Forked
from paths import import_path
from played_steps import BOX, DICT, DISCRETE, TORQUE
from sb3_buffers import filled, flat
from stable_baselines3.common.buffers import DictReplayBuffer

import torchreplay as tr
from torchreplay.compat.sb3 import (
    PrioritizedReplayBuffer,
    SharedNStepReplayBuffer,
    SharedReplayBuffer,
)

LOADING = """
import pickle, sys
buffer = pickle.load(open(sys.argv[1], "rb"))
print(sorted(set(buffer.sample(2000).rewards.ravel().tolist())))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SharedReplayBuffer, PrioritizedReplayBuffer])
def test_a_pickle_is_the_experience_and_outlives_the_process(kind, tmp_path):
    buffer = filled(kind(30, BOX, DISCRETE, n_envs=2, device="cpu"), count=12)
    _ = buffer.shared
    path = tmp_path / "buffer.pkl"
    path.write_bytes(pickle.dumps(buffer))
    buffer.reset()
    command = [sys.executable, "-c", LOADING, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env={"PYTHONPATH": import_path()})
    assert done.stdout.strip() == str([float(r) for r in range(1, 25)]), done.stderr


@pytest.mark.parametrize("how", [{}, {"n_steps": 2}])
def test_a_deep_copy_goes_its_own_way(how):
    buffer = filled(SharedReplayBuffer(30, BOX, DISCRETE, device="cpu", **how), count=6, ends=0)
    copied = copy.deepcopy(buffer)
    filled(copied, count=6, seed=5, ends=0)
    assert buffer.size() * 2 == copied.size()


def test_priorities_and_their_schedule_travel_with_a_pickle():
    beta = tr.LinearSchedule(0.4, 1.0, 100)
    buffer = filled(PrioritizedReplayBuffer(30, BOX, DISCRETE, device="cpu", beta=beta), count=6)
    batch = buffer.sample(16)
    buffer.update_priorities(batch, batch.rewards)
    loaded = pickle.loads(pickle.dumps(buffer))
    keys = loaded.shared.keys()
    assert torch.equal(loaded.shared.priorities(keys), buffer.shared.priorities(keys))
    assert loaded.shared.sampler.beta == beta


# Sharing


def explore(buffer):
    rows = {"obs": np.full((4, 3), 9, np.float32), "next_obs": np.full((4, 3), 9, np.float32), "action": [0] * 4}
    buffer.extend(**rows, reward=[100.0] * 4, terminated=[False] * 4, truncated=[False] * 4)


def test_another_process_writes_into_the_buffer():
    buffer = filled(SharedReplayBuffer(30, BOX, DISCRETE, device="cpu"), count=6)
    with Forked(explore, buffer.shared) as explorer:
        assert explorer.wait() == 0
    assert buffer.size() == 10
    assert set(buffer.sample(500).rewards.ravel().tolist()) == {*range(1, 7), 100.0}


def test_arrays_are_the_memory_itself_until_the_buffer_is_shared():
    theirs, ours = (kind(20, DICT, TORQUE, n_envs=2, device="cpu") for kind in (DictReplayBuffer, SharedReplayBuffer))
    filled(theirs, ours, count=13)
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        for value, peer in zip(*(flat(getattr(b, name)).values() for b in (ours, theirs)), strict=True):
            assert (value.shape, value.dtype) == (peer.shape, peer.dtype)
            assert (value == peer).all()
    ours.rewards[:] = 5.0
    assert set(ours.sample(50).rewards.ravel().tolist()) == {5.0}
    _ = ours.shared
    for name in ("observations", "actions", "rewards", "dones"):
        with pytest.raises(RuntimeError, match=r"other processes .*gather"):
            getattr(ours, name)


def test_linked_rows_have_no_arrays():
    buffer = filled(SharedNStepReplayBuffer(30, BOX, DISCRETE, device="cpu"), count=6)
    for name in ("observations", "rewards", "timeouts"):
        with pytest.raises(RuntimeError, match="linked"):
            getattr(buffer, name)
    for use in (np.asarray, lambda dones: dones[0], lambda dones: dones.sum()):
        with pytest.raises(RuntimeError, match="linked"):
            use(buffer.dones)


def test_reset_takes_all_rows_away():
    buffer = filled(SharedReplayBuffer(30, BOX, DISCRETE, device="cpu"), count=6)
    buffer.reset()
    assert buffer.size() == 0
    filled(buffer, count=2)
    assert set(buffer.sample(50).rewards.ravel().tolist()) == {1.0, 2.0}

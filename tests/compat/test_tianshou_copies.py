"""`compat.tianshou`: pickles, copies and files carry the experience, never a handle."""

import copy
import os
import pickle
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from paths import import_path
from tianshou_steps import equal, filled

from torchreplay.compat.tianshou import (
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
    SharedReplayBuffer,
)

READS_IT = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    buffer = pickle.load(file)
batch, indices = buffer.sample(8)
buffer.update_weight(indices, batch.rew)
print(len(buffer), float(buffer.rew.sum()), buffer.next(5), float(buffer[:].weight.sum()))
"""


def prioritized():
    buffer = PrioritizedVectorReplayBuffer(40, 2, alpha=0.7, beta=0.4)
    filled(30, buffer, n=2)
    buffer.update_weight(np.arange(40), np.linspace(0.1, 3, 40))
    return buffer


@pytest.mark.slow
def test_a_pickle_is_read_where_the_memory_is_gone(tmp_path):
    buffer = prioritized()
    expected = [len(buffer), float(buffer.rew.sum()), int(buffer.next(5)), float(buffer[:].weight.sum())]
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(buffer))
    buffer.replay.close()
    del buffer
    command = [sys.executable, "-c", READS_IT, str(tmp_path / "buffer.pkl")]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": import_path()}
    ).stdout
    *found, weights = map(float, printed.split())
    assert found == expected[:-1]
    assert weights > 0


def copies(buffer, tmp_path):
    buffer.save_hdf5(str(tmp_path / "buffer.hdf5"))
    loaded = type(buffer).load_hdf5(str(tmp_path / "buffer.hdf5"))
    return [pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer), loaded]


def test_copies_go_on_like_the_original_and_apart_from_it(tmp_path):
    buffer = prioritized()
    more = prioritized()
    for made in (more, *copies(buffer, tmp_path)):
        assert equal(made[:], buffer[:])
        filled(7, made, n=2, seed=9)
        made.set_beta(0.0)
        assert np.array_equal(made.next(np.arange(40)), more.next(np.arange(40)))
        assert np.array_equal(made.rew, more.rew)
        assert not np.array_equal(made.rew, buffer.rew)
        assert (made.sample(5)[0].weight == 1).all()
    assert len(set(buffer.sample(20)[0].weight.tolist())) > 1


def test_an_empty_buffer_is_copied_too(tmp_path):
    for made in copies(SharedReplayBuffer(20), tmp_path):
        filled(3, made)
        assert len(made) == 3


@pytest.mark.parametrize("kind", [SharedReplayBuffer, partial(PrioritizedReplayBuffer, alpha=0.6, beta=0.4)])
def test_entries_that_a_hook_adds_stay_with_the_rows(kind, tmp_path):
    buffer = kind(10)
    filled(10, buffer)
    buffer.set_array_at_key(np.arange(10.0), "returns")
    for made in (buffer, *copies(buffer, tmp_path)):
        assert made[[3, 7]].returns.tolist() == [3, 7]
        batch, indices = made.sample(5)
        assert batch.returns.tolist() == indices.tolist()

"""What torchreplay makes lies on the CPU, whatever torch's default device is."""

import numpy as np
import pytest
import torch

import torchreplay as tr
from torchreplay.ops import Ring

SPEC = {"x": tr.Field((), torch.int64)}


@pytest.fixture
def default_device():
    """A device that has no memory: what is made there by mistake cannot be read."""
    with torch.device("meta"):
        yield


@pytest.fixture
def buffer():
    with torch.device("cpu"):
        buffer = tr.ReplayBuffer(SPEC, 8, sampler=tr.Prioritized(), seed=0)
        buffer.extend(x=np.arange(5))
    return buffer


def on_the_cpu(batch):
    return all(value.device.type == "cpu" for value in batch.values())


def test_a_tree(default_device):
    tree = tr.PriorityTree(4, seed=0)
    tree.set([1, 3], [0.5, 1.5])
    assert tree.total == pytest.approx(2.0)
    assert set(tree.sample(100)[0].tolist()) == {1, 3}
    copied = tr.PriorityTree(4)
    copied.load_state_dict(tree.state_dict())
    assert copied.leaves.tolist() == [0, 0.5, 0, 1.5]


def test_batches(default_device, buffer):
    batch = buffer.sample(4)
    assert on_the_cpu(batch)
    buffer.update_priorities(batch, [1.0, 2.0, 3.0, 4.0])
    assert on_the_cpu(tr.LaBER(2)(batch, [1.0] * 4))
    batch.pop("weight")
    assert on_the_cpu(tr.LaBER(2)(batch, [1.0] * 4))
    assert on_the_cpu(next(iter(tr.ReplayDataset(buffer, 4))))
    assert buffer.extend(x=[1.0, 2.0], casting="unsafe").tolist() == [5, 6]


def test_mixed_batches(default_device, buffer):
    dataset = tr.MixedDataset({buffer: 0.5, buffer.copy(): 0.5}, 4)
    batch = next(iter(dataset))
    assert on_the_cpu(batch)
    assert batch["buffer"].tolist() == [0, 0, 1, 1]
    dataset.update_priorities(batch, [1.0] * 4)


def test_operators(default_device, buffer):
    ring = Ring(buffer)
    batch = ring.sample(4)
    assert on_the_cpu(batch)
    ring.update_priorities(batch["key"], batch["weight"])
    ring.close()

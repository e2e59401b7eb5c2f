"""`ReplayBatch.to_tensordict`: a batch as TorchRL's losses take it."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import torchreplay as tr

SPEC = {
    "obs": {"vector": tr.Field((2,)), "index": tr.Field((), torch.int64)},
    "action": tr.Field((), torch.int64),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}


@pytest.fixture
def batch():
    view = tr.Transitions(observation="obs")
    with tr.ReplayBuffer(SPEC, 20, view=view, sampler=tr.Prioritized(), seed=0) as buffer:
        buffer.extend(
            obs={"vector": np.arange(12).reshape(6, 2).astype(float), "index": np.arange(6)},
            action=np.arange(5), reward=np.arange(5.0), terminated=[False] * 5, truncated=[False] * 4 + [True],
        )  # fmt: skip
        yield buffer.sample(8)


def test_what_follows_a_step_lies_below_next(batch):
    td = batch.to_tensordict()
    assert isinstance(td, TensorDict)
    assert td.batch_size == torch.Size([8])
    assert set(td.keys()) == {"obs", "action", "discount", "next", "key", "weight", "probability"}
    assert set(td["next"].keys()) == {"obs", "reward", "terminated", "truncated", "done"}
    assert torch.equal(td["next", "obs", "vector"], batch["next_obs"]["vector"])
    assert torch.equal(td["next", "done"], batch["terminated"] | batch["truncated"])
    assert td["next", "reward"] is not None
    assert td["obs", "vector"].data_ptr() == batch["obs"]["vector"].data_ptr()


def test_columns_on_request(batch):
    td = batch.to_tensordict(column=True)
    for name in [("next", "reward"), ("next", "done"), "action", ("obs", "index"), "discount"]:
        assert td[name].shape == (8, 1), name
    assert td["obs", "vector"].shape == (8, 2)
    assert td["key"].shape == td["weight"].shape == (8,)


def test_flat_as_the_batch_is(batch):
    td = batch.to_tensordict(nest_next=False)
    assert set(td.keys()) == set(batch)


def test_a_batch_of_rows_keeps_its_names():
    with tr.ReplayBuffer({"x": tr.Field(), "reward": tr.Field()}, 4) as buffer:
        buffer.extend(x=[1.0, 2.0], reward=[1.0, 2.0])
        assert set(buffer.sample(3).to_tensordict().keys()) == {"x", "reward", "key", "weight", "probability"}

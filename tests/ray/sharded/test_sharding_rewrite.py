"""`rewrite` of a `ShardedReplay` under a view that links rows: keys of items name the rows before their steps'. On a
cluster in this process."""

import copy

import pytest
import torch

import torchreplay as tr
from torchreplay.ray import ShardedReplay

FLAG = tr.Field((), torch.bool)
SPEC = {"obs": tr.Field(2), "reward": tr.Field(), "terminated": FLAG, "truncated": FLAG}
STEPS = 6


@pytest.fixture(params=["a", "ab"], ids=["one shard", "two shards"])
def stepped(local_cluster, request):
    """A buffer with an episode of six steps in each shard, whose rewards are 0."""
    with ShardedReplay(SPEC, 100, view=tr.Transitions(), seed=1, nodes=list(request.param)) as replay:
        for node in request.param:
            local_cluster.here = node
            with copy.copy(replay) as there:
                flags = {"terminated": [False] * STEPS, "truncated": [False] * (STEPS - 1) + [True]}
                there.extend(obs=torch.zeros(STEPS + 1, 2), reward=torch.zeros(STEPS), **flags)
        local_cluster.here = "a"
        # Rows that begin an episode have no step, and are refused in any case.
        replay.discard([key for key in replay.keys().tolist() if key % (1 << 48) == 0])
        yield replay


def rewards(replay):
    return replay.gather(replay.keys())["reward"].tolist()


DRAWS = {
    "sample": lambda replay: replay.sample(4, timeout=60),
    "gather": lambda replay: replay.gather(replay.keys()[:4]),
    "prefetch=0": lambda replay: next(iter(tr.ReplayDataset(replay, 4, prefetch=0))),
    "prefetch=2": lambda replay: next(iter(tr.ReplayDataset(replay, 4, prefetch=2))),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_values_of_steps_are_refused_for_the_keys_of_a_batch(stepped, draw):
    batch = DRAWS[draw](stepped)
    for given in (batch["key"], batch["key"][1:], batch["key"].numpy()):
        with pytest.raises(ValueError, match=r"keys of a batch's items.*rows_of\(batch\)\[:, 1\]"):
            stepped.rewrite(given, reward=[90.0] * len(given))
    assert set(rewards(stepped)) == {0.0}
    observed = len(set(batch["key"].tolist()))
    assert stepped.rewrite(batch["key"], obs=torch.ones(4, 2)) == observed, "an observation lies there"


def test_the_rows_of_their_steps_are_taken(stepped):
    batch = stepped.gather(stepped.keys())
    assert stepped.rewrite(stepped.rows_of(batch)[:, 1], reward=[90.0] * batch.batch_size) == batch.batch_size
    assert set(rewards(stepped)) == {90.0}


def test_keys_of_an_older_batch_are_not_looked_for(stepped):
    """As in a `ReplayBuffer`: only those of the batch that was handed out last are told from other keys."""
    steps = stepped.rows_of(stepped.gather(stepped.keys()[:2]))[:, 1]
    following = stepped.gather(steps)
    assert stepped.rewrite(steps, reward=following["reward"] + 1) == 2

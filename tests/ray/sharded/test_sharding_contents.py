"""What a `ShardedReplay` on two nodes holds: its keys, items and priorities, and taking them away."""

import numpy as np
import pytest
import torch
from sharded_rows import SPEC, rows_of, write
from unequal_shards import all_keys, prioritize

import torchreplay as tr
from torchreplay.ray import ShardedReplay

pytestmark = pytest.mark.slow


def test_keys_items_and_priorities_are_those_of_all_shards(filled):
    replay, keys = filled
    everything, ids = all_keys(keys)
    assert sorted(replay.keys().tolist()) == sorted(everything.tolist())
    assert replay.keys(rows=True).tolist() == replay.keys().tolist()
    assert replay.num_items == len(replay) == 365
    assert sorted(replay.gather(replay.keys())["key"].tolist()) == sorted(everything.tolist())
    leaves = prioritize(filled, 1)
    raw = replay.priorities(everything)
    assert raw.dtype == torch.float32
    order = np.argsort(leaves[ids], kind="stable")
    assert (np.diff(raw.numpy()[order]) >= -1e-6).all()
    for number in {key >> 48 for key in everything.tolist()}:
        mine = replay.keys()[replay.keys() >> 48 == number]
        assert (mine.diff() > 0).all()


def test_sample_puts_a_batch_on_a_device(filled):
    replay, _ = filled
    batch = replay.sample(8, timeout=120, device="meta")
    assert {name: values.device.type for name, values in batch.items() if name != "key"} == dict.fromkeys(
        [*SPEC, "weight", "probability"], "meta"
    )
    assert batch["key"].device.type == "cpu"


def test_priorities_are_the_td_errors_that_were_fed_back(cluster):
    with ShardedReplay(SPEC, 100, sampler=tr.Prioritized(), seed=1) as replay:
        here = replay.extend(**rows_of(0, 5))
        there = cluster.ray.get(cluster.ray.remote(write).options(**cluster.on(1)).remote(replay, 1, 0, 4))
        keys = torch.cat([here, torch.tensor(there)])
        td = torch.tensor([0.5, -2.0, 3.0, 0.25, 1.5, 4.0, -0.125, 2.5, 8.0])
        replay.update_priorities(keys, td)
        assert replay.priorities(keys).numpy() == pytest.approx(td.abs().numpy(), rel=1e-4)
        assert replay.priorities(keys[[8, 1]]).numpy() == pytest.approx([8.0, 2.0], rel=1e-4)
        assert len(replay.priorities([])) == 0
        with pytest.raises(ValueError, match="never issued"):
            replay.priorities(keys + 1000)


def test_rows_are_rewritten_and_discarded_each_in_its_own_shard(cluster):
    with ShardedReplay(SPEC, 100, seed=1) as replay:
        here = replay.extend(**rows_of(0, 5))
        there = cluster.ray.get(cluster.ray.remote(write).options(**cluster.on(1)).remote(replay, 1, 0, 4))
        keys = torch.cat([here, torch.tensor(there)])
        name = next(iter(SPEC))
        new = torch.full((4,), 7)
        before = replay.gather(keys)
        chosen = keys[[8, 1, 6, 1]]
        assert replay.rewrite(chosen, **{name: new}) == 3
        after = replay.gather(keys)
        expected = before[name].clone()
        for key in chosen.tolist():
            expected[before["key"] == key] = 7
        assert torch.equal(after[name], expected)
        assert replay.rows_of(chosen).tolist() == chosen[:, None].tolist()
        for given, fields, error in (
            (keys + 1000, {name: new}, "never issued"),
            (chosen, {name: new[:3]}, "got 3 values, expected one for each of the 4 keys"),
            (chosen, {"other": new}, "unknown field 'other'"),
        ):
            with pytest.raises(ValueError, match=error):
                replay.rewrite(given, **fields)
        assert replay.discard(chosen) == 3
        assert sorted(replay.keys().tolist()) == sorted(set(keys.tolist()) - set(chosen.tolist()))
        with pytest.raises(ValueError, match="its rows belong to no episode"):
            replay.discard_episode(keys[0])


LIMITERS = {
    tr.MinSize(6): 6,
    tr.SamplesPerInsert(1.0, min_size=6, tolerance=0.5): 7,  # inserted - 4 drawn is at least 6 - 50 %
}
"""Of a new buffer, and how many items it asks for before a batch of 4."""


@pytest.mark.parametrize("limiter", LIMITERS)
def test_a_cleared_union_is_as_a_new_one_and_its_keys_go_on(cluster, limiter):
    with (
        ShardedReplay(SPEC, 100, sampler=tr.Prioritized(), limiter=limiter, seed=1) as replay,
        replay.expect_writers(),
    ):
        there = cluster.ray.remote(write).options(**cluster.on(1))
        old = torch.cat([replay.extend(**rows_of(0, 4)), torch.tensor(cluster.ray.get(there.remote(replay, 1, 0, 4)))])
        replay.sample(4, timeout=60)
        replay.update_priorities(old, torch.full((8,), 9.0))
        replay.clear()
        assert (len(replay), replay.num_items, len(replay.keys())) == (0, 0, 0)
        assert replay.priorities(old).isnan().all()
        assert len(replay.gather(old)["key"]) == 0
        replay.update_priorities(old, torch.ones(8))
        replay.flush()
        assert replay.stats().stale_updates == 8
        new = torch.cat([replay.extend(**rows_of(0, 3)), torch.tensor(cluster.ray.get(there.remote(replay, 1, 0, 2)))])
        assert not set(new.tolist()) & set(old.tolist())
        assert replay.priorities(new).numpy() == pytest.approx(1.0, rel=1e-4)
        needed = 8 + LIMITERS[limiter]
        with pytest.raises(tr.ReplayTimeout, match=f"13 items were inserted, {needed} are needed"):
            replay.sample(4, timeout=1.0)
        replay.extend(**rows_of(0, needed - 13))
        assert replay.sample(4, timeout=60).batch_size == 4
        assert replay.stats().sampled == 8


def test_a_checkpoint_of_a_cleared_union_asks_for_as_many_new_items(cluster, tmp_path):
    with ShardedReplay(SPEC, 100, limiter=tr.MinSize(6), seed=1) as replay:
        replay.extend(**rows_of(0, 8))
        replay.clear()
        replay.extend(**rows_of(0, 5))
        replay.save(tmp_path)
    with ShardedReplay.load(tmp_path) as replay, replay.expect_writers():
        with pytest.raises(tr.ReplayTimeout, match="13 items were inserted, 14 are needed"):
            replay.sample(4, timeout=1.0)
        replay.extend(**rows_of(0, 1))
        assert replay.sample(4, timeout=60).batch_size == 4

"""`ShardedReplay` on a real Ray cluster of two nodes: writing at home, drawing across, and who takes it as a buffer."""

import numpy as np
import pytest
import torch
from forked import Forked, eventually
from lightning_learner import fit, make_learner
from rollouts import ROLLOUTS, assert_rollouts, write_rollouts_of_its_own
from sharded_rows import SPEC, assert_follows, assert_intact, rows_of
from torch.utils.data import DataLoader
from unequal_shards import ALPHA, BETA, EPS, all_keys, identity, prioritize
from worker_errors import raised_by_worker

import torchreplay as tr
from torchreplay.ray import ShardedReplay
from torchreplay.ray.sharded.shard_keys import KEY_BITS

STEPS = {"obs": tr.Field((3,)), "action": tr.Field(), "reward": tr.Field()}
STEPS |= {"terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}


def test_explorers_of_each_node_write_to_its_shard_and_keys_say_which(filled, cluster):
    replay, keys = filled
    assert (len(replay), replay.capacity) == (365, 4001)
    by_node = {shard.node: shard for shard in replay.stats().shards}
    assert [by_node[node].stats.size for node in cluster.node_ids] == [320, 45]
    assert sum(shard.stats.capacity for shard in by_node.values()) == 4001
    for (node, _), found in keys.items():
        assert set(found >> KEY_BITS) == {by_node[cluster.node_ids[node]].number}
    assert len(np.unique(all_keys(keys)[0])) == 365
    batch = replay.sample(256, timeout=120)
    assert_intact(batch)
    known = dict(zip(all_keys(keys)[0].tolist(), all_keys(keys)[1].tolist(), strict=True))
    assert [known[key] for key in batch["key"].tolist()] == identity(batch).tolist()


def test_a_batch_is_drawn_in_proportion_over_both_shards_and_feedback_goes_home(filled):
    replay, _ = filled
    for seed in (1, 2):
        leaves = prioritize(filled, seed)
        p, observed = leaves / leaves.sum(), np.zeros(4000)
        for batch in tr.ReplayDataset(replay, 256, steps=60, prefetch=3):
            at = identity(batch).numpy()
            observed += np.bincount(at, minlength=4000)
            # Feedback that went to any other row would show here; leaves are float32.
            np.testing.assert_allclose(batch["probability"].numpy(), p[at], rtol=2e-6)
            weight = (p[p > 0].min() / p[at]) ** BETA
            np.testing.assert_allclose(batch["weight"].numpy(), weight, rtol=5e-6)
        assert_follows(observed, p)
    assert replay.stats().priority_total == pytest.approx(leaves.sum(), rel=1e-6)


def expect_items(batch, leaves, ids):
    """Checks items by which rows they are."""
    assert identity(batch).tolist() == ids.tolist()
    assert_intact(batch)
    p = leaves / leaves.sum()
    np.testing.assert_allclose(batch["probability"].numpy(), p[ids], rtol=2e-6)
    np.testing.assert_allclose(batch["weight"].numpy(), (p[p > 0].min() / p[ids]) ** BETA, rtol=5e-6)


def test_items_of_all_shards_are_gathered_in_the_order_of_their_keys(filled, cluster):
    replay, keys = filled
    leaves = prioritize(filled, 3)
    flat, ids = all_keys(keys)
    chance = np.random.default_rng(3)
    which = chance.integers(0, len(flat), 500)  # some several times
    missing = [-1, 10_000, (1 << KEY_BITS) + 10_000, 9 << KEY_BITS]  # as those of rows that are gone
    at = np.sort(chance.integers(0, 500, len(missing)))
    asked, before = np.insert(flat[which], at, missing), replay.stats()

    def gather(replay, keys):
        return replay.gather(keys)

    there = cluster.ray.remote(gather).options(**cluster.on(1)).remote(replay, torch.from_numpy(asked))
    for batch in (replay.gather(asked), cluster.ray.get(there)):
        assert batch["key"].tolist() == flat[which].tolist()
        expect_items(batch, leaves, ids[which])
    expect_items(replay.gather(keys[1, 1].tolist()), leaves, ids[np.isin(flat, keys[1, 1])])
    for nothing in (torch.empty(0, dtype=torch.int64), missing):
        none = replay.gather(nothing)
        assert [none[name].shape for name in ("key", "weight", "image")] == [(0,), (0,), (0, 16, 16)]
    for wrong in ([0.5], [[1]], "keys"):
        with pytest.raises(ValueError, match=r"expected int64 \[n\]"):
            replay.gather(wrong)
    after = replay.stats()
    assert (after.sampled, after.draws, after.updated) == (before.sampled, before.draws, before.updated)
    some = replay.gather(flat[:2])
    replay.update_priorities(some, torch.tensor([1e6, 1e6]))  # they are of this buffer, and what is fed back is known
    assert (replay.gather(flat[:2])["probability"] > some["probability"]).all()


def test_bad_arguments_are_refused_before_anything_is_made(cluster):
    for arguments, error, message in [
        ({"capacity": 0}, ValueError, "capacity"),
        ({"spec": {}}, ValueError, "spec"),
        ({"sampler": "uniform"}, TypeError, "sampler"),
        ({"limiter": 3}, TypeError, "limiter"),
        ({"seed": -1}, ValueError, "seed"),
        ({"nodes": []}, ValueError, "nodes"),
        ({"nodes": ["elsewhere"]}, ValueError, "nodes"),
        ({"nodes": cluster.node_ids[:1] * 2}, ValueError, "nodes"),
        ({"ragged_bytes": 1 << 20}, ValueError, "ragged_bytes"),
        ({"spec": ROLLOUTS}, ValueError, "ragged_bytes is missing"),
        ({"spec": ROLLOUTS, "ragged_bytes": 2000}, ValueError, "ragged_bytes"),  # 1,000 for each node
    ]:
        with pytest.raises(error, match=message):
            ShardedReplay(**{"spec": SPEC, "capacity": 100, **arguments})
    assert len(cluster.actors("Coordinator")) <= 1  # that of the fixture


def test_datasets_take_it_like_any_buffer(filled):
    replay, keys = filled
    known = set(all_keys(keys)[0].tolist())
    loader = DataLoader(tr.ReplayDataset(replay, 32, steps=4), batch_size=None)
    for _ in range(2):
        before = replay.stats().sampled
        batches = list(loader)
        assert len(batches) == len(loader) == 4
        for batch in batches:
            assert_intact(batch)
            assert set(batch["key"].tolist()) <= known
            replay.update_priorities(batch, torch.rand(32) + 0.1)
        assert replay.stats().sampled == before + 4 * 32  # candidates and batches that nobody took do not count
    endless = iter(tr.ReplayDataset(replay, 16, prefetch=4))
    next(endless)
    drawn = replay.draws
    endless.close()
    assert replay.draws == drawn
    with tr.ReplayBuffer(SPEC, 64, sampler=tr.Prioritized()) as local:
        local.extend(**rows_of(7, 9))
        mixed = tr.MixedDataset({"online": replay, "kept": local}, 8, steps=1)
        (batches,) = mixed
        assert batches["kept"]["node"].tolist() == [7] * 8
        td, kept = {"kept": torch.ones(8), "online": torch.ones(8)}, batches["online"]["key"].clone()
        batches["online"]["key"][3] += 10_000
        with pytest.raises(ValueError, match="at index 3 was never issued by buffer 'online'"):
            mixed.update_priorities(batches, td)
        assert local.stats().updated == 0
        batches["online"]["key"].copy_(kept)
        mixed.update_priorities(batches, td)
        assert local.stats().updated == 8


def test_in_a_mixture_weights_are_on_one_scale_and_no_batch_asks_what_a_draw_has_told(filled, monkeypatch):
    replay, _ = filled
    leaves = prioritize(filled, 3)
    p = leaves / leaves.sum()
    with tr.ReplayBuffer(SPEC, 64, sampler=tr.Prioritized(1.0, BETA, EPS)) as local:
        local.extend(**rows_of(7, 9), priority=torch.arange(1.0, 10.0))
        mine = (torch.arange(1.0, 10.0) + EPS).numpy() / (45 + 9 * EPS)
        largest = max((365 * p[p > 0].min()) ** -BETA, (9 * mine.min()) ** -BETA)
        mixed = tr.MixedDataset({replay: 1, local: 1}, 64, steps=5, prefetch=0)
        with monkeypatch.context() as patch:
            patch.setattr(replay._shards, "exchange", None)
            patch.setattr(replay._shards, "look", None)
            for batch in mixed:
                theirs = batch["buffer"] == 0
                expected = np.empty(64)
                expected[theirs] = (365 * p[identity(batch)[theirs].numpy()]) ** -BETA
                expected[~theirs] = (9 * mine[batch["count"][~theirs].numpy()]) ** -BETA
                np.testing.assert_allclose(batch["weight"].numpy(), expected / largest, rtol=1e-4)


def test_every_process_that_has_it_draws_from_it_and_counts(filled, cluster):
    replay, _ = filled
    before = replay.stats()

    def learn(replay):
        batch = replay.sample(64)
        replay.update_priorities(batch, batch["weight"])
        return replay.stream, batch["weight"].numpy()

    stream, _ = cluster.ray.get(cluster.ray.remote(learn).options(**cluster.on(1)).remote(replay))
    eventually(lambda: replay.stats().sampled == before.sampled + 64)  # it has told so, though it looked at nothing
    eventually(lambda: replay.stats().updated == before.updated + 64)
    after = replay.stats()
    assert stream != replay.stream
    assert after.sampled == before.sampled + 64
    assert after.draws == before.draws + 1
    assert after.learners == before.learners + 1
    counts = replay.histograms(8)
    assert int(counts["priority"].sum()) == int(counts["age"].sum()) == 365


def test_what_a_learner_that_ends_has_drawn_is_counted_to_the_last_batch(filled, cluster):
    replay, _ = filled
    before = replay.stats()

    def learn(replay, closes):
        for _ in tr.ReplayDataset(replay, 32, steps=None if closes else 7):
            if closes and replay.draws - first == 5:
                break
        if closes:
            replay.close()

    first = 0
    task = cluster.ray.remote(learn)
    cluster.ray.get([task.options(**cluster.on(1)).remote(replay, closes) for closes in (False, True)])
    eventually(lambda: replay.stats().draws == before.draws + 12)
    assert replay.stats().sampled == before.sampled + 12 * 32


def test_a_forked_child_is_told_to_draw_elsewhere(filled):
    replay, _ = filled
    told = []

    def draw():
        for call in (lambda: replay.sample(8), lambda: next(iter(tr.ReplayDataset(replay, 8))), replay.stats):
            with pytest.raises(RuntimeError, match="forked off one of Ray's") as caught:
                call()
            told.append(caught)
        assert len(told) == 3

    with Forked(draw) as child:
        assert child.wait(60) == 0
    with raised_by_worker("num_workers=0"):
        next(iter(DataLoader(tr.ReplayDataset(replay, 8), None, num_workers=1, multiprocessing_context="fork")))


def test_lightning_trains_from_it(filled):
    lightning = pytest.importorskip("pytorch_lightning")
    replay, keys = filled

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["key"])
        return {"loss": (self.q.weight**2).sum(), "td_error": 2.0 + batch["explorer"]}

    before = replay.stats().updated
    learner = make_learner(lightning, training_step=training_step)
    fit(lightning, replay, learner, batch_size=8, max_steps=5)
    seen = torch.cat(learner.seen)
    assert len(seen) == 40
    assert set(seen.tolist()) <= set(all_keys(keys)[0].tolist())
    found = replay.stats()
    assert found.updated == before + 40
    batch = replay.sample(512)
    for key, explorer, p in zip(*(batch[name].tolist() for name in ("key", "explorer", "probability")), strict=True):
        if key in seen:
            assert p * found.priority_total == pytest.approx((2.0 + explorer + EPS) ** ALPHA, rel=1e-5)


def play(replay):
    """Writes an episode of five steps; returns what its calls did."""
    with replay.writer() as writer:
        told = [writer.reset(obs=np.zeros(3))]
        for t in range(1, 6):
            ends = {"terminated": t == 5, "truncated": False}
            told.append(writer.step(obs=np.full(3, float(t)), action=t, reward=t, fade=2.0**-t, **ends))
    return told


@pytest.mark.slow
def test_rows_of_any_length_of_both_nodes_are_drawn_gathered_and_fed_back_as_those_of_one_buffer(cluster):
    with ShardedReplay(ROLLOUTS, 600, sampler=tr.Prioritized(alpha=1.0), ragged_bytes=1 << 21, seed=3) as replay:
        write = cluster.ray.remote(write_rollouts_of_its_own)
        for node in range(2):
            keys = cluster.ray.get(write.options(**cluster.on(node)).remote(replay, 200 * node, 200))
            assert len(set(keys)) == 100
        assert [shard.stats.ragged_bytes for shard in replay.stats().shards] == [1 << 20] * 2
        seen = set()
        for batch in tr.ReplayDataset(replay, 128, steps=4, timeout=120):
            seen.update(assert_rollouts(batch))
        assert min(seen) < 200 <= max(seen)
        every = replay.keys().numpy()
        asked = np.random.default_rng(0).permutation(every)
        batch = replay.gather(asked)
        assert batch["key"].tolist() == asked.tolist()
        assert sorted(assert_rollouts(batch)) == list(range(400))
        assert replay.gather([])["tokens"].shape == (0,)
        replay.update_priorities(batch, 1.0 + batch.lengths("tokens"))
        lengths = dict(zip(asked.tolist(), batch.lengths("tokens").tolist(), strict=True))
        batch = replay.sample(64, timeout=120)
        of_union = [(1 + lengths[key]) / (400 + sum(lengths.values())) for key in batch["key"].tolist()]
        np.testing.assert_allclose(batch["probability"].numpy(), of_union, rtol=1e-4)
        before = replay.stats().sampled
        some = [replay.sample(64, timeout=120, budget={"tokens": 500})]
        some += tr.ReplayDataset(replay, 64, steps=3, timeout=120, budget={"tokens": 500})
        for batch in some:
            assert_rollouts(batch)
            assert batch.lengths("tokens").sum() <= 500
            assert 5 <= batch.batch_size < 64
        assert replay.stats().sampled == before + sum(batch.batch_size for batch in some)
        with pytest.raises(ValueError, match="budget names 'number', which is no ragged field"):
            replay.sample(1, budget={"number": 3})
        for name, message in (("text", "'text' is Ragged"), ("other", "other")):
            with pytest.raises(ValueError, match=message):
                replay.rewrite(asked[:2], **{name: [1, 2]})
        assert replay.rewrite(asked[:2], number=[-1, -2]) == 2
        assert replay.gather(asked[:2])["number"].tolist() == [-1, -2]


@pytest.mark.slow
def test_a_node_without_a_shard_is_written_from_as_its_own_node_is(cluster):
    view = tr.Transitions(n_step=2, gamma=0.5, discount="fade")
    with ShardedReplay(STEPS | {"fade": tr.Field()}, 200, view=view, nodes=cluster.node_ids[:1], seed=1) as replay:
        task = cluster.ray.remote(play)
        assert cluster.ray.get(task.options(**cluster.on(0)).remote(replay)) == list(range(6))
        assert cluster.ray.get(task.options(**cluster.on(1)).remote(replay)) == [None] * 6
        batch = replay.sample(100, timeout=120)
        start = batch["obs"][:, 0]
        # Returns of two steps, r_{t+1} + 0.5 d_{t+1} r_{t+2}, of the one step left at the end.
        expected = torch.where(start < 4, (start + 1) + 0.5 * 2.0 ** -(start + 1) * (start + 2), start + 1)
        assert torch.equal(batch["reward"], expected)
        assert torch.equal(batch["discount"], torch.where(start < 3, 0.25 * 2.0 ** -(2 * start + 3), 0.0))
        assert torch.equal(batch["next_obs"][:, 0], (start + 2).clamp(max=5.0))
        assert set(start.tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}
        # Both have written the same. No item starts at the end.
        assert replay.gather(range(12))["obs"][:, 0].tolist() == 2 * [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("nodes", [5, "all", [], [[1]], ["nowhere"], None], ids=str)
def test_shards_go_to_nodes_that_there_are(cluster, nodes):
    twice = [cluster.node_ids[0]] * 2 if nodes is None else nodes
    with pytest.raises(ValueError, match=r"nodes is .*: expected different ones of the nodes that are alive"):
        ShardedReplay(SPEC, 100, nodes=twice)

"""A single shard, on the learner's node: drawn from as a local buffer is. On a cluster in this process."""

from itertools import islice

import numpy as np
import pytest
import torch
from local_cluster import LocalCluster
from local_shards import SPEC

import torchreplay as tr
from torchreplay.ray import ShardedReplay
from torchreplay.ray.sharded import coordinator_view
from torchreplay.ray.sharded.sample_request import SampleRequest
from torchreplay.ray.sharded.shard_keys import KEY_BITS

ALPHA, EPS, ROWS = 0.6, 1e-6, 40


@pytest.fixture
def cluster(monkeypatch):
    made = LocalCluster(monkeypatch, a=2)
    yield made
    made.close()


@pytest.fixture
def rounds(monkeypatch):
    """The batches for which shards were asked for candidates, one entry for each."""
    asked, init = [], SampleRequest.__init__

    def watched(self, *args):
        asked.append(None)
        init(self, *args)

    monkeypatch.setattr(SampleRequest, "__init__", watched)
    return asked


def filled(weights="buffer", **options):
    sampler = tr.Prioritized(alpha=ALPHA, beta=0.4, eps=EPS, weights=weights)
    replay = ShardedReplay(SPEC, 100, sampler=sampler, seed=1, **options)
    write(replay)
    return replay


def write(replay):
    """Writes 40 rows; returns their keys, and what their leaves will be when their TD errors are fed back."""
    keys = replay.extend(home=np.zeros(ROWS, int), index=np.arange(ROWS))
    td = 10.0 ** np.random.default_rng(1).uniform(-2, 2, ROWS)
    replay.sample(8)
    replay.update_priorities(keys, td)
    return keys, (td + EPS) ** ALPHA


def leaves():
    return (10.0 ** np.random.default_rng(1).uniform(-2, 2, ROWS) + EPS) ** ALPHA


@pytest.mark.parametrize("weights", ["buffer", "batch", "none"])
@pytest.mark.parametrize("prefetch", [None, 0, 2])
def test_its_batches_have_the_weights_and_shares_of_the_formulas_without_a_round_of_calls(
    cluster, rounds, weights, prefetch
):
    with filled(weights) as replay:
        p = leaves() / leaves().sum()
        del rounds[:]
        before, observed = replay.stats(), np.zeros(ROWS)
        stream = None if prefetch is None else iter(tr.ReplayDataset(replay, 32, prefetch=prefetch))
        for _ in range(150):
            batch = replay.sample(32) if stream is None else next(stream)
            at = batch["index"].numpy()
            observed += np.bincount(at, minlength=ROWS)
            least = {"buffer": p.min(), "batch": p[at].min(), "none": 1 / ROWS}[weights]
            np.testing.assert_allclose(batch["probability"].numpy(), p[at], rtol=2e-6)
            np.testing.assert_allclose(batch["weight"].numpy(), (least / p[at]) ** 0.4, rtol=5e-6)
            assert (batch["key"].numpy() == at).all()
        after = replay.stats()
        assert (after.draws - before.draws, after.sampled - before.sampled) == (150, 150 * 32)
        assert replay.draws == 151
        assert rounds == []
        # 32 strata of a batch keep the counts closer to n p than independent draws would.
        assert (np.abs(observed - 4800 * p) < 5 * np.sqrt(4800 * p) + 1).all()
        if stream is not None:
            stream.close()


def test_what_is_drawn_ahead_does_not_know_later_feedback_and_flush_waits_for_it(cluster):
    with filled() as replay:
        stream = iter(tr.ReplayDataset(replay, 32, prefetch=2))
        next(stream)  # two more are drawn
        every = replay.keys()
        replay.update_priorities(every, torch.ones(ROWS))
        replay.flush()
        assert torch.equal(replay.priorities(every), torch.ones(ROWS))
        shares = [next(stream)["probability"] for _ in range(3)]
        assert all(part.unique().numel() > 1 for part in shares[:2])
        assert torch.allclose(shares[2], torch.tensor(1 / ROWS))
        stream.close()


def test_bad_feedback_is_refused_as_from_several_shards(cluster):
    with filled() as replay:
        keys = replay.keys()
        for bad, td, text in (
            (keys[:2], [1.0, float("nan")], "TD errors"),
            (keys[:2], [1.0], "TD errors"),
            (torch.tensor([0, 1 << KEY_BITS]), [1.0, 1.0], "never issued"),
            (torch.tensor([0, ROWS]), [1.0, 1.0], r"never issued.*shard 0, row 40"),
        ):
            with pytest.raises(ValueError, match=text):
                replay.update_priorities(bad, td)
        assert replay.stats().updated == ROWS
        with filled() as other, pytest.raises(ValueError, match="another buffer"):
            replay.update_priorities(other.sample(2), torch.ones(2))


def test_one_that_dies_is_lost_and_the_next_ones_keys_are_its_own(cluster, monkeypatch, rounds):
    monkeypatch.setattr(coordinator_view, "NEWS_SECONDS", 0.0)  # it is looked at with each draw
    with filled() as replay:
        old = replay.sample(8)
        actor = replay._shards.table.entries[0].actor
        actor.dead = True
        actor.it._buffer.close()
        assert len(replay) == 0
        assert replay.stats().rows_lost == ROWS
        replay._shards.look()
        keys, after = write(replay)
        assert set((keys >> KEY_BITS).tolist()) == {1}
        del rounds[:]
        batch = replay.sample(32)
        assert rounds == []
        assert (batch["key"] - (1 << KEY_BITS)).equal(batch["index"])
        np.testing.assert_allclose(batch["probability"].numpy(), (after / after.sum())[batch["index"]], rtol=2e-6)
        replay.update_priorities(batch, torch.full((32,), 3.0))
        np.testing.assert_allclose(replay.priorities(batch["key"]).numpy(), 3.0, rtol=1e-5)
        replay.update_priorities(old, torch.ones(8))
        assert replay.stats().lost_updates == 8


def test_explorers_that_wait_for_draws_and_another_limiter_are_heeded(cluster, rounds):
    with filled() as replay:
        replay.sample(8)
        del rounds[:]
        replay.limiter = tr.SamplesPerInsert(4.0, min_size=1, tolerance=0.5)
        replay.sample(4)
        assert rounds == []
        replay.limiter = tr.MinSize(50)
        with pytest.raises(tr.ReplayTimeout, match="50"):
            replay.sample(4, timeout=0.05)
        replay.extend(home=np.zeros(10, int), index=np.arange(10))
        assert len(replay.sample(4)["key"]) == 4
        replay.stop()
        with pytest.raises(tr.Stopped):
            replay.sample(4)


def test_a_schedule_of_beta_counts_the_batches_of_all_learners(cluster):
    seen = []

    def beta(step):
        seen.append(step)
        return 0.5

    with ShardedReplay(SPEC, 100, sampler=tr.Prioritized(beta=beta), seed=1) as replay:
        replay.extend(home=np.zeros(ROWS, int), index=np.arange(ROWS))
        for _ in range(5):
            replay.sample(4)
        assert seen[-5:] == [0, 1, 2, 3, 4]


def batches_of(replay, n, prefetch):
    """Endless batches, by `sample` where `prefetch` is None; each is waited for a second at most."""
    if prefetch is None:
        return iter(lambda: replay.sample(n, timeout=1.0), None)
    return iter(tr.ReplayDataset(replay, n, prefetch=prefetch, timeout=1.0))


@pytest.mark.parametrize("prefetch", [None, 0, 2])
def test_a_learner_finds_out_that_nothing_is_left_to_be_drawn(cluster, prefetch):
    with filled() as replay:
        batches = batches_of(replay, 4, prefetch)
        for _ in range(3):
            next(batches)
        replay.discard(replay.keys())
        with pytest.raises(tr.ReplayTimeout, match="0 can be drawn"):
            list(islice(batches, 4))  # some are drawn ahead


@pytest.mark.parametrize("prefetch", [None, 0, 2])
def test_under_a_ratio_it_is_drawn_from_without_a_round_of_calls_up_to_the_bound(cluster, rounds, prefetch):
    with filled(limiter=tr.SamplesPerInsert(4.0, min_size=20, tolerance=0.5)) as replay:
        del rounds[:]
        before, drawn = replay.stats().sampled, []
        with pytest.raises(tr.ReplayTimeout, match="40 items were inserted, 42 are needed"):
            drawn.extend(len(batch["key"]) for batch in batches_of(replay, 8, prefetch))
        assert rounds == []
        assert before + sum(drawn) == replay.stats().sampled == 120  # 4 x 40 - 120 = 4 x 20 x (1 - 0.5)

"""A saved `ShardedReplay`: what comes back on which node, and what a save that is killed leaves."""

import os
import shutil
import signal
import threading
from contextlib import suppress

import numpy as np
import pytest
import torch
from forked import eventually
from lightning_learner import QUIET, make_learner
from sharded_rows import SPEC, assert_intact, image, write
from synced import watch_syncs

import torchreplay as tr
from torchreplay.lightning import PriorityFeedback, ReplayCheckpoint, ReplayDataModule
from torchreplay.ray import ShardedReplay
from torchreplay.ray.sharded.manifest import Counts, Manifest, Part
from torchreplay.ray.sharded.shard_actor import Shard
from torchreplay.ray.sharded.shard_keys import KEY_BITS
from torchreplay.schema.config import Config

pytestmark = pytest.mark.slow


SAMPLER = tr.Prioritized(alpha=0.7, beta=0.5)
LIMITER = tr.SamplesPerInsert(8.0, min_size=50)
COUNTED = ("size", "drawable", "inserted", "sampled", "draws", "updated", "rows_written", "stale_updates", "rows_lost")
COUNTED += ("lost_updates", "evicted_unsampled", "shards_missing")


@pytest.fixture(scope="module")
def saved(cluster, tmp_path_factory):
    """A checkpoint, and of what was saved: the items of all keys, a batch drawn before, statistics, and more."""
    directory = tmp_path_factory.mktemp("saved")
    with ShardedReplay(SPEC, 400, sampler=SAMPLER, seed=2**64 - 1, nodes=cluster.node_ids, name="union") as replay:
        keys = write_on_both(cluster, replay, (250, 45))
        replay.limiter = LIMITER  # 50 of them count
        for batch in tr.ReplayDataset(replay, 32, steps=9, timeout=120):
            replay.update_priorities(batch, batch["count"] % 7 + 1.0)
        stats = replay.stats()
        assert 1 <= stats.round_trips <= 3
        assert stats.wire_bytes > batch["image"][0].nbytes  # some items of each batch are the other node's
        replay.save(directory)
        items, found = replay.gather(keys), replay.stats()
        assert len(items["key"]) == 200 + 45  # the ring of the first node has turned
        assert balance_of(replay) == 50 * 8 - 9 * 32
    return directory, items, batch, found


def write_on_both(cluster, replay, rows, first=0):
    """Writes rows on both nodes; returns all their keys, node by node."""
    task = cluster.ray.remote(write)
    calls = [task.options(**cluster.on(node)).remote(replay, node, 0, n, first) for node, n in enumerate(rows)]
    return np.concatenate([cluster.ray.get(call) for call in calls])


def balance_of(replay):
    """What the limiter keeps within its bounds."""
    counted = replay._shards.limiter
    return (counted.inserted - counted.rule.inserted_before) * counted.rule.limiter.ratio - counted.sampled


def node_of_numbers(replay):
    return {shard.number: shard.node for shard in replay.stats().shards}


def assert_same(batch, items):
    assert batch["key"].tolist() == items["key"].tolist()
    for name in SPEC:
        assert torch.equal(batch[name], items[name])
    for name in ("probability", "weight"):
        np.testing.assert_allclose(batch[name].numpy(), items[name].numpy(), rtol=1e-6)


@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.soak), -1], ids=["as it was", "reversed"])
def test_rows_keys_priorities_counters_and_the_limiters_balance_come_back(cluster, saved, order):
    directory, items, batch, before = saved
    with ShardedReplay.load(directory, nodes=cluster.node_ids[::order]) as replay:
        assert node_of_numbers(replay) == dict(enumerate(cluster.node_ids))  # each is where it was
        assert_same(replay.gather(items["key"]), items)
        after = replay.stats()
        assert {name: getattr(after, name) for name in COUNTED} == {name: getattr(before, name) for name in COUNTED}
        assert after.priority_total == pytest.approx(before.priority_total, rel=1e-6)
        assert (replay.name, replay.capacity, replay.draws, replay.limiter) == ("union", 400, 9, LIMITER)
        assert balance_of(replay) == 50 * 8 - 9 * 32
        replay.update_priorities(batch["key"], torch.full((32,), 5.0))  # they are still good
        held = len(replay.gather(batch["key"])["key"])
        assert replay.stats().updated - before.updated == held > 0
        again = write_on_both(cluster, replay, (2, 2), first=1000)
        assert again.tolist() == [250, 251, (1 << KEY_BITS) + 45, (1 << KEY_BITS) + 46]
        drawn = replay.sample(256, timeout=120)
        assert_intact(drawn)
        assert set(drawn["node"].tolist()) == {0, 1}
        assert replay.stats().sampled == before.sampled + 256


def test_the_rows_of_shards_are_loaded_with_another_view_and_sampler(cluster, tmp_path):
    spec = {"obs": tr.Field(), "reward": tr.Field()}
    spec |= dict.fromkeys(("terminated", "truncated"), tr.Field((), torch.bool))
    sampler, nodes = tr.Prioritized(alpha=1.0, eps=1e-30), cluster.node_ids[:1]
    with ShardedReplay(spec, 100, view=tr.Transitions(), sampler=sampler, nodes=nodes) as replay:
        with replay.writer() as writer:
            writer.reset(obs=0.0)
            for t in range(1, 6):
                writer.step(obs=float(t), reward=float(t), terminated=t == 5, truncated=False)
        replay.update_priorities(torch.arange(5), torch.tensor([4.0, 9.0, 16.0, 25.0, 36.0]))
        replay.save(tmp_path)
    with pytest.raises(ValueError, match="expected a view of episodes"):
        ShardedReplay.load(tmp_path, nodes=nodes, view=tr.Rows())
    view, sampler = tr.Transitions(n_step=2, gamma=0.5), tr.Prioritized(alpha=0.5, eps=1e-30)
    with ShardedReplay.load(tmp_path, nodes=nodes, view=view, sampler=sampler) as replay:
        assert (replay.view, replay.sampler) == (view, sampler)
        batch = replay.gather(range(6))
        assert batch["reward"].tolist() == [1 + 1.0, 2 + 1.5, 3 + 2.0, 4 + 2.5, 5.0]
        assert batch["probability"].tolist() == pytest.approx([2 / 20, 3 / 20, 4 / 20, 5 / 20, 6 / 20])
        assert set(replay.sample(64, timeout=120)["key"].tolist()) == set(range(5))


def test_all_rows_that_fit_are_loaded_and_nodes_beyond_the_shards_get_new_ones(cluster, saved, tmp_path):
    directory, items, *_ = saved
    with ShardedReplay.load(directory, nodes=cluster.node_ids[:1]) as replay:  # one of the nodes is gone
        batch = replay.gather(replay.keys())
        assert_intact(batch)
        assert len(replay) == len(batch["key"]) == len(items["key"])
        assert sorted(batch["image"].flatten(1).tolist()) == sorted(items["image"].flatten(1).tolist())
        assert node_of_numbers(replay) == {0: cluster.node_ids[0]}
    with ShardedReplay(SPEC, 100, nodes=cluster.node_ids[:1]) as replay:
        write(replay, 0, 0, 30)
        replay.save(tmp_path)
    with ShardedReplay.load(tmp_path, 40, nodes=cluster.node_ids[::-1]) as replay:
        assert replay.gather(range(30))["key"].tolist() == list(range(30))
        assert node_of_numbers(replay) == dict(enumerate(cluster.node_ids))
        assert write_on_both(cluster, replay, (1, 1)).tolist() == [30, 1 << KEY_BITS]
    # Another limiter than the one saved counts from here: 10 of the items and no draw, so that the balance is 20.
    limiter = tr.SamplesPerInsert(2.0, min_size=10, tolerance=0.1)
    with ShardedReplay(SPEC, 100, limiter=limiter, nodes=cluster.node_ids[:1]) as replay, replay.expect_writers():
        replay.restore(tmp_path)
        replay.sample(2, timeout=120)
        with pytest.raises(tr.ReplayTimeout, match="30 items were inserted, 31 are needed"):
            replay.sample(2, timeout=5.0)


def load_parts(directory, least=200):
    """Checks the rows of a checkpoint, at least so many a shard, without a cluster; returns how many shards it has."""
    manifest = Manifest.read(directory)
    for part in manifest.parts:
        with tr.ReplayBuffer.load(manifest.path_of(directory, part)) as buffer:
            batch = buffer.gather(torch.arange(buffer.stats().rows_written))
            assert_intact(batch)
            assert torch.equal(batch["count"], batch["key"])
            assert set(batch["node"].tolist()) == {part.number}
            assert len(batch["key"]) >= least
    return len(manifest.parts)


def test_a_save_beside_writers_holds_whole_rows_only(cluster, tmp_path):
    def explore(replay, node):
        count = 0
        with suppress(tr.Stopped), replay.writer() as writer:
            while not replay.stopped:
                writer.append(node=node, explorer=0, count=count, image=image(node, 0, count))
                count += 1

    with ShardedReplay(SPEC, 6000, sampler=SAMPLER, nodes=cluster.node_ids) as replay:
        runs = [cluster.ray.remote(explore).options(**cluster.on(node)).remote(replay, node) for node in (0, 1)]
        eventually(lambda: min(shard.stats.inserted for shard in replay.stats().shards) > 300, timeout=120)
        for _ in range(3):
            replay.save(tmp_path)
            assert len(replay.sample(64)["key"]) == 64
        replay.stop()
        cluster.ray.get(runs)
    assert load_parts(tmp_path, least=300) == 2


def kill_saves(cluster, directory, kills):
    class Saver:
        def __init__(self, replay):
            self.replay = replay

        def pid(self):
            return os.getpid()

        def save_for_ever(self):
            while True:
                self.replay.save(directory)

    chance = np.random.default_rng(5)
    with ShardedReplay(SPEC, 400, nodes=cluster.node_ids) as replay:
        write_on_both(cluster, replay, (200, 200))
        replay.save(directory)
        for _ in range(kills):
            saver = cluster.ray.remote(Saver).options(**cluster.on(0)).remote(replay)
            pid, first = cluster.ray.get(saver.pid.remote()), Manifest.read(directory).shards
            saver.save_for_ever.remote()
            eventually(lambda first=first: Manifest.read(directory).shards != first, timeout=120)
            threading.Event().wait(chance.uniform(0, 0.1))  # the instant of the kill
            os.kill(pid, signal.SIGKILL)
            assert load_parts(directory) == 2
        replay.save(directory)
        assert len(list(directory.iterdir())) == 2  # what killed saves had left is gone


def test_a_save_killed_at_any_moment_leaves_a_checkpoint_that_loads(cluster, tmp_path):
    kill_saves(cluster, tmp_path, 2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_save_killed_at_40_random_moments_leaves_a_checkpoint_that_loads(cluster, tmp_path):
    kill_saves(cluster, tmp_path, 40)


def pids_of_shards(cluster, count):
    """The processes of the shards, by node."""
    eventually(lambda: len(cluster.actors("Shard")) == count)  # those of tests before may not be gone yet
    return {a["Address"]["NodeID"]: a["Pid"] for a in cluster.actors("Shard")}


def test_a_save_that_fails_at_its_end_leaves_the_new_checkpoint_and_what_is_not_its_own(cluster, tmp_path, monkeypatch):
    theirs = tmp_path / "shards-train" / "data"
    theirs.parent.mkdir()
    theirs.touch()
    with ShardedReplay(SPEC, 100, nodes=cluster.node_ids[:1]) as replay:
        write(replay, 0, 0, 30)
        replay.save(tmp_path)
        write(replay, 0, 0, 10, first=30)
        with monkeypatch.context() as patch:
            synced = watch_syncs(patch, tmp_path, 3, KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                replay.save(tmp_path)
        assert load_parts(tmp_path, least=40) == 1
        manifest = Manifest.read(tmp_path)
        assert synced[:2] == [manifest.shards, "."]  # the names of the shards' directories, and that one's own
        assert synced[3:] == ["replaced", "."]
        replay.save(tmp_path)
        assert len(list(tmp_path.iterdir())) == 3
        assert theirs.exists()
        # One that finds no shard leaves the one before.
        (pid,) = pids_of_shards(cluster, 1).values()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="all are lost"):
            replay.save(tmp_path)
    assert load_parts(tmp_path, least=40) == 1


def test_a_save_that_finds_a_shard_lost_has_those_that_are_left(cluster, tmp_path):
    with ShardedReplay(SPEC, 400, nodes=cluster.node_ids) as replay:
        write_on_both(cluster, replay, (30, 20))
        assert len(replay) == 50
        os.kill(pids_of_shards(cluster, 2)[cluster.node_ids[1]], signal.SIGKILL)
        replay.save(tmp_path)
    manifest = Manifest.read(tmp_path)
    assert load_parts(tmp_path, least=30) == 1
    assert [part.number for part in manifest.parts] == [0]
    assert [(lost.number, lost.node, lost.rows) for lost in manifest.lost] == [(1, cluster.node_ids[1], 20)]
    assert [path.name for path in (tmp_path / manifest.shards).iterdir()] == ["0"]


def test_a_restore_that_fails_midway_stops_the_buffer_and_one_that_is_refused_does_not(cluster, saved, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(saved[0], damaged)
    manifest = Manifest.read(damaged)
    part, away = manifest.path_of(damaged, manifest.parts[1]), tmp_path / "away"
    with ShardedReplay(SPEC, 400, sampler=SAMPLER, nodes=cluster.node_ids) as replay:
        part.rename(away)
        with pytest.raises(tr.CheckpointError, match="is missing"):
            replay.restore(damaged)
        assert not replay.stopped
        away.rename(part)
        (file,) = part.glob("rows-*/*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(tr.CheckpointError, match=file.name) as failure:
            replay.restore(damaged)
        assert "was stopped: close it" in failure.value.__notes__[0]
        assert replay.stopped
        with pytest.raises(tr.Stopped):
            replay.sample(8)


def test_a_description_with_numbers_that_no_buffer_has_is_refused():
    config = Config.of(SPEC, 8, None, None, None)
    parts = (Part(0, "a", 8), Part(1, "b", 8))
    told = Manifest(config, 1, 0, 0, "shards-" + "0" * 16, parts, Counts(2, 1, 0, 0, 0, 0, 0, 0), ()).as_data()
    assert Manifest.from_data(told).parts == parts
    damages = [
        *({"counts": told["counts"] | {name: value}} for name in told["counts"] for value in (-1, 2**63, 0.5)),
        *({name: value} for name in ("seed", "stream", "step") for value in (-1, 2**64, None)),
        {"parts": [told["parts"][0]] * 2},
    ]
    for damage in damages:
        with pytest.raises(ValueError, match=r"expected an int|there twice"):
            Manifest.from_data(told | damage)


@pytest.mark.soak
def test_a_save_that_loses_a_shard_has_those_that_are_left(cluster, tmp_path):
    with ShardedReplay(SPEC, 400, nodes=cluster.node_ids) as replay:
        keys = write_on_both(cluster, replay, (200, 200))
        replay.save(tmp_path)
        there = pids_of_shards(cluster, 2)[cluster.node_ids[1]]
        os.kill(there, signal.SIGSTOP)
        saving = threading.Thread(target=replay.save, args=[tmp_path])
        saving.start()
        eventually(lambda: len(list(tmp_path.glob("shards-*/0/checkpoint.json"))) == 2)
        os.kill(there, signal.SIGKILL)
        saving.join()
        assert load_parts(tmp_path) == 1
        assert [lost.number for lost in Manifest.read(tmp_path).lost] == [1]
        eventually(lambda: replay.stats().shards_missing == 0, timeout=120)
        assert write_on_both(cluster, replay, (0, 3)).tolist() == (np.arange(3) + (2 << KEY_BITS)).tolist()
        replay.save(tmp_path)
    with ShardedReplay.load(tmp_path, nodes=cluster.node_ids) as loaded:
        assert node_of_numbers(loaded) == {0: cluster.node_ids[0], 2: cluster.node_ids[1]}
        assert len(loaded.gather(keys)["key"]) == 200
        found = loaded.stats()
        assert (found.size, found.rows_lost, found.inserted) == (203, 200, 403)
        loaded.update_priorities(keys[-2:], torch.ones(2))  # of the one that was lost: dropped, as before
        assert loaded.stats().lost_updates == found.lost_updates + 2


def test_what_cannot_be_loaded_says_why(cluster, saved, tmp_path):
    directory, *_ = saved
    for wrong, error, message in (
        (tmp_path, tr.CheckpointError, "checkpoint.json is missing"),
        (3, TypeError, "directory"),
    ):
        with pytest.raises(error, match=message):
            ShardedReplay.load(wrong)
    with pytest.raises(tr.CheckpointError, match=r"of a ShardedReplay: ShardedReplay.load\(directory\)"):
        tr.ReplayBuffer.load(directory)
    with tr.ReplayBuffer(SPEC, 10) as local:
        local.save(tmp_path / "local")
    with pytest.raises(tr.CheckpointError, match=r"of a ReplayBuffer: ReplayBuffer.load\(directory\)"):
        ShardedReplay.load(tmp_path / "local")
    with ShardedReplay(SPEC, 100, nodes=cluster.node_ids[:1]) as replay:
        write(replay, 0, 0, 1)
        with pytest.raises(tr.CheckpointError, match="holds rows already"):
            replay.restore(directory)
    with (
        ShardedReplay({"x": tr.Field()}, 100, nodes=cluster.node_ids[:1]) as replay,
        pytest.raises(tr.CheckpointError, match="of another spec"),
    ):
        replay.restore(directory)
    shard = Shard(0, Config.of(SPEC, 10, None, None, None), 1, None)
    shard.open()

    def ended(call):
        try:
            return call()
        except (OSError, ValueError) as error:
            return str(error)

    unseen = tmp_path / "unseen" / "0"
    for call in (lambda: shard.save(str(unseen)), lambda: shard.restore(4, str(unseen))):
        eventually(lambda call=call: "directory that all its nodes share" in str(ended(call)))


def test_a_part_that_is_missing_or_a_damaged_description_is_an_error(cluster, saved, tmp_path):
    directory, *_ = saved
    path = directory / "checkpoint.json"
    manifest, content = Manifest.read(directory), path.read_bytes()
    part = manifest.path_of(directory, manifest.parts[1])
    try:
        for position in range(0, len(content), 7):
            path.write_bytes(content[:position] + bytes([content[position] ^ 0x41]) + content[position + 1 :])
            with pytest.raises(tr.CheckpointError, match=str(path)):
                Manifest.read(directory)
        path.write_bytes(content)
        part.rename(tmp_path / "away")
        with pytest.raises(tr.CheckpointError, match=f"{part} is missing"):
            ShardedReplay.load(directory, nodes=cluster.node_ids)
    finally:
        path.write_bytes(content)
        (tmp_path / "away").rename(part)
    eventually(lambda: not cluster.actors("Coordinator"))  # of one that could not be loaded


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")  # Lightning remarks on a run that is resumed
def test_lightning_saves_it_beside_its_checkpoints_and_brings_it_back(cluster, tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["key"])
        return {"loss": (self.q.weight**2).sum(), "td_error": 2.0 + batch["count"]}

    def fit(replay, steps, **resumed):
        saving = lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
        options = QUIET | {"enable_checkpointing": True, "callbacks": [PriorityFeedback(), saving, ReplayCheckpoint()]}
        learner = make_learner(lightning, training_step=training_step)
        data = ReplayDataModule(replay, 8, steps_per_epoch=20)
        lightning.Trainer(max_steps=steps, **options).fit(learner, datamodule=data, **resumed)

    with ShardedReplay(SPEC, 100, sampler=SAMPLER, nodes=cluster.node_ids[:1]) as replay:
        keys = torch.tensor(write(replay, 0, 0, 30))
        fit(replay, 3)
        items = replay.gather(keys)
    (path,) = tmp_path.glob("*.ckpt")
    with ShardedReplay(SPEC, 100, sampler=SAMPLER, nodes=cluster.node_ids[:1]) as replay:
        fit(replay, 4, ckpt_path=path)
        assert torch.equal(replay.gather(keys)["image"], items["image"])
        assert replay.stats().updated == 4 * 8

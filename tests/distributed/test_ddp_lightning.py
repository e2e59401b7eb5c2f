"""Several learners under Lightning's and Fabric's strategies: real ranks, real gloo, one buffer."""

import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from paths import import_path

import torchreplay as tr
from torchreplay.distributed import rank_monitor

pytest.importorskip("pytorch_lightning")

import pytorch_lightning
from forked import eventually
from gloo_ranks import await_end_of, run_ranks
from lightning_fabric import Fabric
from lightning_learner import QUIET, filled_buffer, make_learner
from pytorch_lightning.strategies import ModelParallelStrategy
from spawned_learner import SpawnedLearner, noted_buffer
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from torchreplay.lightning import PriorityFeedback, ReplayCheckpoint, ReplayDataModule, WeightPublisher, datamodule

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def what_ranks_import():
    """What DDP imports late, here once instead of in every forked rank."""
    importlib.import_module("torch._dynamo")


class RecordingExplorers:
    """Explorers that write down what is done to them."""

    def __init__(self, path):
        self.path = path

    def start(self):
        self._note("start")

    def stop(self):
        self._note("stop")

    def _note(self, word):
        with open(self.path, "a") as file:
            file.write(f"{word}\n")


def fit(learner, data, strategy="ddp", max_steps=20):
    options = {**QUIET, "devices": 2, "max_steps": max_steps, "strategy": strategy}
    pytorch_lightning.Trainer(callbacks=[PriorityFeedback()], **options).fit(learner, datamodule=data)


# Fabric and FSDP.


def test_fabric_takes_the_stream_as_it_is_and_each_rank_draws_its_own_batches(tmp_path):
    def body(rank):
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        fabric.seed_everything(1)
        with tr.Learners(filled_buffer) as buffer:
            loader = fabric.setup_dataloaders(DataLoader(tr.ReplayDataset(buffer, 8, steps=5), batch_size=None))
            model = torch.nn.Linear(4, 1)
            model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
            drawn = []
            for batch in loader:
                td = model(batch["obs"])[:, 0]
                fabric.backward((batch["weight"] * td**2).mean())
                optimizer.step()
                optimizer.zero_grad()
                buffer.update_priorities(batch, torch.ones(8))
                drawn.append(batch["key"].tolist())
            fabric.barrier()
            return [drawn, buffer.stats().updated, model.weight.tolist()]

    (first, updated, weight), (second, _, same) = (outcome["value"] for outcome in run_ranks(tmp_path, body))
    assert len({tuple(keys) for keys in first + second}) == 10
    assert updated == 10 * 8
    assert weight == same


def test_a_module_sharded_over_the_ranks_trains_from_one_buffer(tmp_path):
    def configure_model(self):
        fully_shard(self.q, mesh=self.device_mesh["data_parallel"])

    def body(rank):
        learner = make_learner(pytorch_lightning, configure_model=configure_model)
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        fit(learner, ReplayDataModule(filled_buffer, 8), strategy, max_steps=5)
        return [isinstance(learner.q.weight, DTensor), learner.seen]

    ranks = [outcome["value"] for outcome in run_ranks(tmp_path, body)]
    assert [sharded for sharded, _ in ranks] == [True, True]
    assert len({tuple(keys) for _, seen in ranks for keys in seen}) >= 10


@pytest.mark.filterwarnings(r"ignore:.fit\(ckpt_path=.last.\) is set, but there is no last checkpoint")
def test_both_ranks_go_on_from_last_in_a_second_fit_of_their_processes(tmp_path):
    def empty_buffer():
        buffer = filled_buffer()
        return tr.ReplayBuffer(buffer.spec, buffer.capacity, sampler=buffer.sampler)

    def body(rank):
        steps = []
        for last in (3, 6):
            learner = make_learner(pytorch_lightning)
            saving = pytorch_lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_last=True)
            options = {**QUIET, "devices": 2, "max_steps": last, "strategy": "ddp", "enable_checkpointing": True}
            trainer = pytorch_lightning.Trainer(callbacks=[PriorityFeedback(), ReplayCheckpoint(), saving], **options)
            data = ReplayDataModule(filled_buffer if last == 3 else empty_buffer, 8)
            trainer.fit(learner, datamodule=data, ckpt_path="last")
            steps.append([trainer.global_step, len(learner.seen)])
        return steps

    assert [outcome["value"] for outcome in run_ranks(tmp_path, body)] == [[[3, 3], [6, 3]]] * 2


# Deaths and failures.


@pytest.mark.parametrize("lives_on", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_fit_ends_on_the_other_rank_with_the_name_of_the_one_that_ended(tmp_path, victim, lives_on, capfd, monkeypatch):
    monkeypatch.setattr(rank_monitor, "GRACE", 0.2 if lives_on else rank_monitor.GRACE)

    def end(loss, td, step):
        if step == 5 and dist.get_rank() == victim:
            if lives_on:
                raise ValueError("a bad batch")
            os.kill(os.getpid(), signal.SIGKILL)
        return {"loss": loss, "td_error": td}

    def body(rank):
        data = ReplayDataModule(
            filled_buffer, 8, explorers=lambda buffer: RecordingExplorers(tmp_path / f"calls{rank}")
        )
        try:
            fit(make_learner(pytorch_lightning, end), data)
        finally:
            if rank == victim:
                await_end_of(tmp_path, 1 - rank)  # with its connections open

    ranks = run_ranks(tmp_path, body)
    reason = "ended with ValueError: a bad batch" if lives_on else "is gone: it died"
    other = ranks[1 - victim]  # beside a rank that lives on it is ended in its collective, with the reason in its log
    told = [other.get("text", ""), *other.get("notes", ()), capfd.readouterr().err if other["status"] else ""]
    assert any(f"rank {victim} (process {ranks[victim]['pid']}) {reason}" in text for text in told)
    assert ranks[victim].get("error") == ("ValueError" if lives_on else None)
    if lives_on == (victim == 0):  # the process of rank 0 has ended in order
        assert (tmp_path / "calls0").read_text().split() == ["start", "stop"]
    assert not (tmp_path / "calls1").exists()


def test_a_buffer_stopped_under_several_ranks_is_an_error_on_all_of_them(tmp_path):
    def body(rank):
        data = ReplayDataModule(filled_buffer, 8)

        def stop(loss, td, step):
            if step == 3 and rank == 0:
                data.buffer.stop()
            return {"loss": loss, "td_error": td}

        fit(make_learner(pytorch_lightning, stop), data)

    ranks = run_ranks(tmp_path, body)
    assert all("error" in rank for rank in ranks)
    assert any("several ranks" in " ".join([rank["text"], *rank["notes"]]) for rank in ranks)


class WithWorkers(ReplayDataModule):
    """Has a worker process draw its batches."""

    context = "fork"

    def train_dataloader(self):
        stream = super().train_dataloader()
        return DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context=self.context)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_several_ranks_draw_and_leave_what_is_heard_to_the_ranks(tmp_path, context, monkeypatch):
    heard_by = tmp_path / "heard"
    hear = rank_monitor.RankMonitor.hear

    def noted_hear(self, patience=0.0):
        with heard_by.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return hear(self, patience)

    def body(rank):
        data = WithWorkers(filled_buffer, 8)
        data.context = context

        def stop(loss, td, step):
            if step == 3 and rank == 0:
                data.buffer.stop()
            return {"loss": loss, "td_error": td}

        fit(make_learner(pytorch_lightning, stop), data, max_steps=1000)

    monkeypatch.setattr(rank_monitor.RankMonitor, "hear", noted_hear)
    ranks = run_ranks(tmp_path, body)
    assert any("several ranks" in " ".join([rank["text"], *rank["notes"]]) for rank in ranks)
    assert set(heard_by.read_text().split()) == {str(rank["pid"]) for rank in ranks}


def test_weights_that_would_differ_between_ranks_are_refused_at_setup(tmp_path):
    def body(rank):
        data = ReplayDataModule(lambda: filled_buffer(sampler=tr.Prioritized(weights="batch")), 8)
        fit(make_learner(pytorch_lightning), data)

    first, second = run_ranks(tmp_path, body)
    assert first["error"] == "ValueError"
    assert 'use weights="buffer"' in first["text"]
    assert second["error"] == "LearnerLost"


# Lightning's own launchers.

RANKS = """
import json, os, signal, sys
from pathlib import Path
import pytorch_lightning as lightning
from lightning_learner import QUIET, filled_buffer, make_learner
from torchreplay.lightning import PriorityFeedback, ReplayCheckpoint, ReplayDataModule, WeightPublisher, datamodule
import torchreplay as tr

made = []

class RecordingExplorers:
    def __init__(self, buffer): made.append("explorers")
    def start(self): made.append("start")
    def stop(self): made.append("stop")

def make_buffer():
    made.append("buffer")
    return filled_buffer()

lightning.seed_everything(1)
# Equal TD errors: the draws stay spread out, so that equal batches would mean equal streams.
learner = make_learner(lightning, lambda loss, td, step: {"loss": loss, "td_error": td / td})
weights = tr.SharedWeights(learner.q)
data = ReplayDataModule(make_buffer, 8, steps_per_epoch=5, explorers=RecordingExplorers)
stats = {}

class Last(lightning.Callback):
    def on_train_end(self, trainer, learner):
        trainer.strategy.barrier()
        stats.update(sampled=data.buffer.stats().sampled, updated=data.buffer.stats().updated)
        trainer.strategy.barrier()

trainer = lightning.Trainer(**{**QUIET, "devices": 2}, strategy="ddp", max_epochs=2,
                            callbacks=[PriorityFeedback(), WeightPublisher(weights, 5, "q"), Last()])
trainer.fit(learner, datamodule=data)
weight = learner.q.weight.tolist()
report = {"made": made, "seen": learner.seen, "published": weights.version, "weight": weight, **stats}
Path(sys.argv[1], f"{trainer.global_rank}.json").write_text(json.dumps(report))

def die_on_rank_one(loss, td, step):
    if step == 3 and os.environ["LOCAL_RANK"] == "1":
        Path(sys.argv[1], "victim").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return {"loss": loss, "td_error": td}

trainer = lightning.Trainer(**{**QUIET, "devices": 2}, strategy="ddp", max_steps=1000, callbacks=[PriorityFeedback()])
trainer.fit(make_learner(lightning, die_on_rank_one), datamodule=ReplayDataModule(filled_buffer, 8))
"""


@pytest.mark.slow
def test_ddp_trains_two_ranks_from_one_buffer_and_ends_with_the_name_of_one_that_is_killed(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    path = import_path()
    command = [sys.executable, script, tmp_path]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=150, check=False
    )
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["made"] == ["buffer", "explorers", "start", "stop"]
    assert second["made"] == []
    drawn = [tuple(keys) for rank in (first, second) for keys in rank["seen"]]
    assert len(drawn) == len(set(drawn)) == 20
    assert first["sampled"] == first["updated"] == second["updated"] == 20 * 8
    assert (first["published"], second["published"]) == (3, 0)
    assert first["weight"] == second["weight"]

    # Lightning's launcher looks at its children every 5 s and, if it comes first, kills rank 0 without a word.
    assert done.returncode in (1, -signal.SIGKILL), done.stderr
    assert f"rank 1 (process {(tmp_path / 'victim').read_text()}) is gone" in done.stderr
    eventually(lambda: not is_running(script))


@pytest.mark.slow
def test_ddp_spawn_makes_one_buffer_and_its_ranks_draw_different_batches(tmp_path):
    learner = SpawnedLearner(tmp_path)
    weights = tr.SharedWeights(learner.q)
    trainer = pytorch_lightning.Trainer(
        **{**QUIET, "devices": 2},
        strategy="ddp_spawn",
        max_steps=6,
        callbacks=[PriorityFeedback(), WeightPublisher(weights, 2, "q")],
    )
    trainer.fit(learner, datamodule=ReplayDataModule(partial(noted_buffer, tmp_path), 8))
    assert len(list(tmp_path.glob("made*"))) == 1
    drawn = [tuple(keys) for rank in (0, 1) for keys in json.loads((tmp_path / f"{rank}.json").read_text())]
    assert len(drawn) == len(set(drawn)) == 12
    assert weights.version == 4  # after the steps 2, 4 and 6, and at the end


def is_running(script):
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(script) in (process / "cmdline").read_text():
                return True
        except OSError:
            continue
    return False


def test_a_data_module_goes_to_spawned_ranks_by_pickle():
    buffer = filled_buffer()
    data = pickle.loads(pickle.dumps(ReplayDataModule(buffer, 8, explorers=RecordingExplorers)))
    assert data.buffer.stats().size == len(buffer)
    data.buffer.close()
    data = pickle.loads(pickle.dumps(ReplayDataModule(filled_buffer, 8)))
    data.setup("fit")
    assert next(iter(data.train_dataloader()))["key"].shape == (8,)
    data.teardown("fit")


class Joined:
    """What a stream knows of the ranks beside its own."""

    several = True

    def __init__(self, leads):
        self.leads = leads


@pytest.mark.parametrize("leads", [True, False])
def test_batches_that_rank_0_had_drawn_ahead_come_back_on_rank_0_alone(leads):
    buffer = filled_buffer()
    saved = tr.ReplayDataset(buffer, 8)
    next(iterator := iter(saved))
    state = saved.state_dict()
    iterator.close()
    buffer.update_priorities(torch.arange(4), [1e6] * 4)  # a draw of now gives others than one of then
    stream = datamodule._Stream(buffer, 8)
    stream.learners = Joined(leads)
    stream.load_state_dict(state)
    first = next(resumed := iter(stream))["key"]
    assert torch.equal(first, state["drawn"][0]["key"]) == leads
    resumed.close()

"""`buffer.stop()` during `fit`: it ends, under the Trainer of `pytorch_lightning` and of `lightning.pytorch` alike."""

import pytest
from torch.utils.data import DataLoader

import torchreplay as tr

pytest.importorskip("pytorch_lightning")

import pytorch_lightning
from gloo_ranks import run_ranks
from lightning_learner import BARE, QUIET, filled_buffer, make_learner

from torchreplay.lightning import PriorityFeedback, ReplayDataModule
from torchreplay.ray import AsyncReplay, ExplorerPool

# Lightning's own: under a torch newer than it knows, and of loaders that share steps between workers.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*`__len__` defined")

LONG = {"max_steps": 1000, "max_epochs": 50}  # of which nearly all would be empty


@pytest.fixture
def buffer():
    buffer = filled_buffer()
    yield buffer
    buffer.close()


def stopping_learner(lightning, buffer, at_step=3, **methods):
    def stop(loss, td, step):
        if step == at_step:
            buffer.stop()
        return {"loss": loss, "td_error": td}

    return make_learner(lightning, stop, **methods)


def assert_ended(trainer, learner, at_step=3):
    assert trainer.state.finished
    assert at_step <= len(learner.seen) <= at_step + 3
    assert trainer.current_epoch <= 3


@pytest.mark.parametrize(
    ("steps_per_epoch", "limits"), [(None, {}), (5, {}), (3, {}), (None, {"limit_train_batches": 5})]
)
@pytest.mark.parametrize("feedback", [False, True])
def test_the_stream_of_a_data_module_ends_fit(lightning, buffer, steps_per_epoch, limits, feedback):
    learner = stopping_learner(lightning, buffer)
    trainer = lightning.Trainer(callbacks=[PriorityFeedback()] * feedback, **LONG, **limits, **BARE)
    trainer.fit(learner, datamodule=ReplayDataModule(buffer, 8, steps_per_epoch=steps_per_epoch, prefetch=0))
    assert_ended(trainer, learner)


def test_a_buffer_stopped_before_fit_gives_no_step(lightning, buffer):
    buffer.stop()
    learner = make_learner(lightning)
    trainer = lightning.Trainer(**LONG, **BARE)
    trainer.fit(learner, datamodule=ReplayDataModule(buffer, 8))
    assert_ended(trainer, learner, at_step=0)


@pytest.mark.parametrize("loading", ["dataset", "steps", "workers", "mixed"])
def test_a_bare_dataset_ends_fit_through_the_feedback(lightning, buffer, loading):
    learner = stopping_learner(lightning, buffer)
    with filled_buffer() as second:
        if loading == "mixed":
            loader = dataset = tr.MixedDataset({second: 1, buffer: 1}, 8)
        else:
            dataset, steps = buffer, 4 if loading == "steps" else None
            loader = tr.ReplayDataset(buffer, 8, steps)
        if loading == "workers":
            loader = DataLoader(loader, batch_size=None, num_workers=1, prefetch_factor=1)
        trainer = lightning.Trainer(callbacks=[PriorityFeedback(dataset)], **LONG, **BARE)
        trainer.fit(learner, loader)
    assert_ended(trainer, learner)


def test_a_trainer_of_a_whole_arrangement_ends(lightning, buffer):
    learner = stopping_learner(lightning, buffer)
    trainer = lightning.Trainer(**LONG, **BARE)
    pool = ExplorerPool(lambda ctx: None, 1, buffer, backend="process")
    assert AsyncReplay(pool, learner, batch_size=8).fit(trainer).steps == len(learner.seen)
    assert_ended(trainer, learner)


@pytest.mark.parametrize("bound", [{"min_steps": 500}, {"min_epochs": 10}])
@pytest.mark.parametrize("feedback", [False, True])
def test_a_trainer_that_is_to_make_more_steps_ends_with_an_error_that_says_so(lightning, buffer, bound, feedback):
    learner = stopping_learner(lightning, buffer)
    trainer = lightning.Trainer(callbacks=[PriorityFeedback()] * feedback, **LONG, **bound, **BARE)
    (name, number), *_ = bound.items()
    with pytest.raises(tr.Stopped, match=rf"no batch will come after step \d.* {name}={number}"):
        trainer.fit(learner, datamodule=ReplayDataModule(buffer, 8, steps_per_epoch=5))
    assert trainer.current_epoch <= 3


def test_several_ranks_with_a_bare_dataset_all_end(tmp_path):
    def body(rank):
        with tr.Learners(filled_buffer) as buffer:
            learner = stopping_learner(pytorch_lightning, buffer, at_step=3 if rank == 0 else -1)
            options = {**QUIET, **LONG, "devices": 2, "strategy": "ddp"}
            trainer = pytorch_lightning.Trainer(callbacks=[PriorityFeedback(buffer)], **options)
            trainer.fit(learner, tr.ReplayDataset(buffer, 8))

    ranks = run_ranks(tmp_path, body)
    assert all("error" in rank for rank in ranks)
    assert any("several ranks" in " ".join([rank["text"], *rank["notes"]]) for rank in ranks)

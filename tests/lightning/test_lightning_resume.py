"""A run that goes on from a checkpoint learns from the batches of one that was never interrupted."""

import json
import os
import subprocess
import sys

import pytest
import torch
from delayed_draws import Delayed, filled_buffer, td_of
from lightning_learner import BARE, QUIET
from paths import import_path

import torchreplay as tr

pytest.importorskip("pytorch_lightning")

import pytorch_lightning
import resumed_fits
from resumed_fits import BATCH, ROWS, buffer_of, learner_of, train

from torchreplay.lightning import PriorityFeedback, ReplayCheckpoint, ReplayDataModule

# Lightning's own: of runs that are resumed, and of a torch newer than it knows.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The dirpath has changed",
    "ignore:Checkpoint directory .* exists",
    "ignore:Be aware that when using `ckpt_path`",
    "ignore:.*LeafSpec:FutureWarning",
)


def assert_goes_on(resumed, whole, batches):
    """Checks that `resumed` has seen what `whole` had after so many batches, and has learnt the same."""
    assert resumed.seen == whole.seen[batches:] != []
    assert torch.equal(resumed.q.weight, whole.q.weight)


def checkpoint_of(directory, step):
    (path,) = directory.glob(f"*step={step}.ckpt")
    return path


EVERY_20, EVERY_EPOCH = {"every_n_train_steps": 20}, {"every_n_epochs": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 40, "saving": EVERY_20},
        {"max_steps": 40, "saving": EVERY_20, "prefetch": 0},
        {"max_steps": 40, "saving": EVERY_20, "steps_per_epoch": 30},
        {"max_steps": 40, "saving": EVERY_20, "steps_per_epoch": 20},
        {"max_steps": 40, "saving": EVERY_20, "limit_train_batches": 30},
        {"max_steps": 40, "saving": EVERY_20, "limit_train_batches": 20},
        {"max_steps": 40, "saving": EVERY_20, "limit_train_batches": 20, "steps_per_epoch": 30},
        {"max_epochs": 2, "saving": EVERY_EPOCH, "steps_per_epoch": 20},
        {"max_epochs": 2, "saving": EVERY_EPOCH, "limit_train_batches": 20},
        {"max_steps": 40, "saving": EVERY_20, "max_epochs": 9, "schedule": True},
        {"max_steps": 40, "saving": EVERY_20, "max_epochs": 9, "schedule": True, "steps_per_epoch": 30},
    ],
    ids=str,
)
def test_a_resumed_run_learns_from_the_batches_of_an_uninterrupted_one(lightning, tmp_path, options):
    whole = train(lightning, tmp_path / "whole", **options)
    resumed = train(lightning, tmp_path / "resumed", ckpt_path=checkpoint_of(tmp_path / "whole", 20), **options)
    assert_goes_on(resumed, whole, 20)


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization and every_n_train_steps")
@pytest.mark.parametrize(
    ("saving", "step", "batches"),
    [({"every_n_train_steps": 15}, 15, 10), (EVERY_EPOCH, 30, 20)],  # 3 steps of optimisers to 2 batches
    ids=["steps", "epochs"],
)
def test_a_run_of_several_optimisers_resumes_with_the_batches_there_would_have_been(
    lightning, tmp_path, saving, step, batches
):
    options = {"max_epochs": 2, "steps_per_epoch": 20, "optimisers": 2, "saving": saving}
    whole = train(lightning, tmp_path / "whole", **options)
    resumed = train(lightning, tmp_path / "resumed", ckpt_path=checkpoint_of(tmp_path / "whole", step), **options)
    assert_goes_on(resumed, whole, batches)
    assert len(whole.seen) == 40


def test_a_run_resumes_between_the_steps_of_accumulated_gradients(lightning, tmp_path):
    options = {"max_steps": 10, "accumulate_grad_batches": 4, "saving": {"every_n_train_steps": 5}}
    whole = train(lightning, tmp_path / "whole", **options)
    resumed = train(lightning, tmp_path / "resumed", ckpt_path=checkpoint_of(tmp_path / "whole", 5), **options)
    assert_goes_on(resumed, whole, 20)


@pytest.mark.parametrize("saving", [EVERY_20, EVERY_EPOCH], ids=str)
def test_a_run_that_came_to_its_max_steps_goes_on_with_more(lightning, tmp_path, saving):
    whole = train(lightning, tmp_path / "whole", max_steps=40)
    train(lightning, tmp_path / "first", max_steps=20, saving=saving)
    path = checkpoint_of(tmp_path / "first", 20)
    assert_goes_on(train(lightning, tmp_path / "resumed", max_steps=40, ckpt_path=path), whole, 20)


def resumed_after_sigterm(lightning, directory, killed_at, **options):
    """Returns the learner of a run that goes on from the `last.ckpt` of a process that SIGTERM ended."""
    first = directory / "first"
    first.mkdir()
    path = import_path()
    given = json.dumps(options | {"killed_at": killed_at})
    command = [sys.executable, resumed_fits.__file__, lightning.__name__, str(first), given]
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "Received SIGTERM" in ended.stderr
    assert "was not interrupted" not in ended.stderr
    return train(lightning, directory / "resumed", ckpt_path=first / "last.ckpt", **options)


@pytest.mark.slow
@pytest.mark.parametrize(("on_exception", "batches"), [(True, 24), (False, 20)])
def test_a_run_that_sigterm_ended_goes_on_from_its_last_checkpoint(lightning, tmp_path, on_exception, batches):
    saving = {"every_n_train_steps": 20, "save_last": True, "save_on_exception": on_exception}
    whole = train(lightning, tmp_path / "whole", max_steps=40)
    assert_goes_on(resumed_after_sigterm(lightning, tmp_path, 23, max_steps=40, saving=saving), whole, batches)


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [False, True])
def test_after_sigterm_amid_accumulated_gradients_the_rest_of_their_batches_comes(tmp_path, uniform):
    # Lightning saves no gradients, so that weights differ from there on, and priorities with them.
    options = {"max_steps": 10, "accumulate_grad_batches": 4, "uniform": uniform}
    saving = {"every_n_train_steps": 50, "save_last": True, "save_on_exception": True}
    whole = train(pytorch_lightning, tmp_path / "whole", **options)
    seen = resumed_after_sigterm(pytorch_lightning, tmp_path, 21, saving=saving, **options).seen
    assert seen[:2] == whole.seen[22:24]
    assert (seen == whole.seen[22:]) == uniform


# Loaders that are no data module's.


class Both(pytorch_lightning.Callback):
    """Saves two buffers beside what the Trainer saves."""

    def __init__(self, buffers, directory):
        self.buffers, self.directory = buffers, directory

    def on_save_checkpoint(self, trainer, learner, checkpoint):
        for number, buffer in enumerate(self.buffers):
            buffer.save(self.directory / f"{trainer.global_step}-{number}")


@pytest.mark.parametrize("steps", [None, 30])
def test_a_mixture_resumes_with_the_batches_there_would_have_been(tmp_path, steps):
    def run(buffers, ckpt_path=None):
        dataset = tr.MixedDataset({buffers[0]: 0.75, buffers[1]: 0.25}, BATCH, steps=steps)
        saving = pytorch_lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=20, save_top_k=-1)
        callbacks = [PriorityFeedback(dataset), saving, Both(buffers, tmp_path)]
        trainer = pytorch_lightning.Trainer(
            max_steps=40, callbacks=callbacks, **(QUIET | {"enable_checkpointing": True})
        )
        trainer.fit(learner := learner_of(pytorch_lightning), dataset, ckpt_path=ckpt_path)
        return learner

    whole = run([buffer_of(seed=3), buffer_of(seed=4)])
    restored = [tr.ReplayBuffer.load(tmp_path / f"20-{number}") for number in range(2)]
    assert_goes_on(run(restored, checkpoint_of(tmp_path, 20)), whole, 20)


@pytest.mark.parametrize("feeds_back", [True, False])
def test_a_bare_dataset_resumes_under_any_callback_that_is_given_its_buffer(lightning, tmp_path, feeds_back):
    def run(directory, buffer, ckpt_path=None):
        saving = lightning.callbacks.ModelCheckpoint(directory, every_n_train_steps=20, save_top_k=-1)
        callbacks = [*[PriorityFeedback(buffer)] * feeds_back, saving, ReplayCheckpoint(buffer)]
        trainer = lightning.Trainer(max_steps=40, callbacks=callbacks, **(QUIET | {"enable_checkpointing": True}))
        trainer.fit(learner := learner_of(lightning), tr.ReplayDataset(buffer, BATCH), ckpt_path=ckpt_path)
        return learner

    whole = run(tmp_path / "whole", buffer_of())
    resumed = run(tmp_path / "resumed", buffer_of(0, seed=99), checkpoint_of(tmp_path / "whole", 20))
    assert_goes_on(resumed, whole, 20)


# What a Trainer draws is what any loop draws.


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("bare", [False, True])
def test_a_trainer_takes_each_batch_when_its_step_begins(lightning, prefetch, bare):
    expected, twin = [], filled_buffer()
    for k, batch in zip(range(30), Delayed(twin, prefetch), strict=False):
        expected.append(batch["key"].tolist())
        twin.update_priorities(batch, td_of(k))

    class Learner(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.q, self.seen = torch.nn.Linear(4, 1), []

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch, batch_idx):
            self.seen.append(batch["key"].tolist())
            return {"loss": self.q(batch["obs"]).mean(), "td_error": torch.from_numpy(td_of(batch_idx))}

    buffer = filled_buffer()
    dataset = tr.ReplayDataset(buffer, 8, prefetch=prefetch)
    loading = {"train_dataloaders": dataset} if bare else {"datamodule": ReplayDataModule(buffer, 8, prefetch=prefetch)}
    trainer = lightning.Trainer(max_steps=30, callbacks=[PriorityFeedback(buffer)], **BARE)
    trainer.fit(learner := Learner(), **loading)
    assert learner.seen == expected


def test_a_dataset_is_as_before_when_its_trainer_is_gone():
    buffer = buffer_of()
    dataset = tr.ReplayDataset(buffer, BATCH, steps=5)
    trainer = pytorch_lightning.Trainer(max_epochs=1, callbacks=[PriorityFeedback(buffer)], **BARE)
    trainer.fit(learner_of(pytorch_lightning), dataset)
    iterator = iter(dataset)
    next(iterator)
    assert [len(batch["key"]) for batch in dataset.state_dict()["drawn"]] == [BATCH] * 2
    iterator.close()
    assert buffer.stats().size == ROWS

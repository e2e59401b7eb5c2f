"""The buffer beside Lightning's checkpoints: saved, removed and brought back with them."""

import pytest
import torch

import torchreplay as tr

pytest.importorskip("pytorch_lightning")

import pytorch_lightning
from lightning_learner import QUIET, ROWS, filled_buffer, make_learner

from torchreplay.lightning import PriorityFeedback, ReplayCheckpoint, ReplayDataModule

# Lightning remarks on runs that are resumed, in another directory or in the same.
pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory .* exists")


def empty_buffer(ragged=False):
    spec = {"number": tr.Field((), torch.int64), "obs": tr.Field((4,))}
    spec |= {"words": tr.Ragged(torch.int32)} if ragged else {}
    sampler, sizes = tr.Prioritized(alpha=1.0), {"ragged_bytes": 1 << 20} if ragged else {}
    return tr.ReplayBuffer(spec, capacity=ROWS, sampler=sampler, seed=99, **sizes)


def trainer_of(library, directory, steps, *callbacks, **arguments):
    saving = library.callbacks.ModelCheckpoint(directory, every_n_train_steps=5, save_top_k=-1, **arguments)
    options = QUIET | {"enable_checkpointing": True, "callbacks": [PriorityFeedback(), saving, *callbacks]}
    return library.Trainer(max_steps=steps, **options)


def saved(directory, suffix):
    return sorted(path.name.removesuffix(".replay") for path in directory.glob(f"*{suffix}"))


def test_every_checkpoint_has_its_buffer_beside_it_and_training_goes_on_from_both(lightning, tmp_path):
    whole = make_learner(lightning)
    data = ReplayDataModule(filled_buffer(), 8, steps_per_epoch=20)
    trainer_of(lightning, tmp_path / "whole", 10, ReplayCheckpoint()).fit(whole, datamodule=data)
    assert saved(tmp_path / "whole", ".ckpt") == saved(tmp_path / "whole", ".replay") != []

    first = tmp_path / "whole" / "epoch=0-step=5.ckpt"
    resumed = make_learner(lightning)
    data = ReplayDataModule(empty_buffer, 8, steps_per_epoch=20)  # the explorers of this run have written nothing yet
    trainer_of(lightning, tmp_path / "resumed", 10, ReplayCheckpoint()).fit(resumed, datamodule=data, ckpt_path=first)
    assert resumed.seen == whole.seen[5:10]
    assert torch.equal(resumed.q.weight, whole.q.weight)


@pytest.mark.parametrize("ragged", [False, True], ids=["of one shape", "of any length"])
def test_a_buffer_made_before_is_filled_in_place_and_its_handles_see_the_rows(ragged, tmp_path):
    data = ReplayDataModule(filled_buffer(ragged=ragged), 8, steps_per_epoch=20)
    trainer_of(pytorch_lightning, tmp_path, 5, ReplayCheckpoint()).fit(make_learner(pytorch_lightning), datamodule=data)
    buffer = empty_buffer(ragged)
    attached = tr.ReplayBuffer.attach(buffer.handle())
    (path,) = tmp_path.glob("*.ckpt")
    resuming = trainer_of(pytorch_lightning, tmp_path, 6, ReplayCheckpoint())
    resuming.fit(make_learner(pytorch_lightning), datamodule=ReplayDataModule(buffer, batch_size=8), ckpt_path=path)
    assert len(attached) == ROWS
    if ragged:
        batch = attached.gather(attached.keys())
        assert batch["words"].tolist() == [k for k in range(ROWS) for _ in range(k)]


def resumed_from(path, directory):
    """A buffer that was empty, after a fit of one step from `path`."""
    buffer = empty_buffer()
    data = ReplayDataModule(buffer, 8, steps_per_epoch=20, explorers=FillIfEmpty)
    resuming = trainer_of(pytorch_lightning, directory, 6, ReplayCheckpoint(), save_last="link")
    resuming.fit(make_learner(pytorch_lightning), datamodule=data, ckpt_path=path)
    return buffer


class FillIfEmpty:
    """Explorers that a buffer without rows gets: a learner would wait for ever."""

    def __init__(self, buffer):
        self.buffer = buffer

    def start(self):
        if len(self.buffer) == 0:
            self.buffer.extend(number=torch.arange(3), obs=torch.ones(3, 4))

    def stop(self, *_):
        pass


@pytest.mark.parametrize("named", ["last", "file:///", "link"])
def test_the_buffer_of_a_checkpoint_is_found_by_a_link_and_by_a_url(named, tmp_path, caplog):
    data = ReplayDataModule(filled_buffer(), 8, steps_per_epoch=20)
    saving = trainer_of(pytorch_lightning, tmp_path, 5, ReplayCheckpoint(), save_last="link")
    saving.fit(make_learner(pytorch_lightning), datamodule=data)
    (path,) = tmp_path.glob("epoch*.ckpt")
    assert (tmp_path / "last.ckpt").is_symlink()
    tr.ReplayBuffer({"of an earlier run": tr.Field()}, 1).save(tmp_path / "last.ckpt.replay")
    (tmp_path / "elsewhere").symlink_to(path)
    paths = {"last": "last", "file:///": f"file://{path}", "link": tmp_path / "elsewhere"}
    assert len(resumed_from(paths[named], tmp_path)) == ROWS
    assert "the buffer stays as it is" not in caplog.text


def test_a_checkpoint_without_a_buffer_beside_it_is_resumed_with_a_warning(tmp_path, caplog):
    data = ReplayDataModule(filled_buffer(), 8, steps_per_epoch=20)
    trainer_of(pytorch_lightning, tmp_path, 5).fit(make_learner(pytorch_lightning), datamodule=data)
    (path,) = tmp_path.glob("*.ckpt")
    assert len(resumed_from(path, tmp_path)) == 3
    assert f"there is no {path}.replay: the buffer stays as it is" in caplog.text


def test_a_checkpoint_that_is_removed_takes_its_buffer_with_it(tmp_path):
    data = ReplayDataModule(filled_buffer(), 8, steps_per_epoch=20)
    callbacks = pytorch_lightning.callbacks
    saving = callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1)
    options = QUIET | {"enable_checkpointing": True, "callbacks": [PriorityFeedback(), saving, ReplayCheckpoint()]}
    pytorch_lightning.Trainer(max_steps=10, **options).fit(make_learner(pytorch_lightning), datamodule=data)
    assert saved(tmp_path, ".ckpt") == saved(tmp_path, ".replay")
    assert len(saved(tmp_path, ".ckpt")) == 1


def test_a_checkpoint_saved_after_the_fit_has_its_buffer_beside_it(tmp_path):
    buffer = filled_buffer()
    trainer = trainer_of(pytorch_lightning, tmp_path, 2, ReplayCheckpoint())
    trainer.fit(make_learner(pytorch_lightning), datamodule=ReplayDataModule(buffer, 8, steps_per_epoch=20))
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    assert len(resumed_from(tmp_path / "final.ckpt", tmp_path)) == ROWS
    other = filled_buffer(2 * ROWS)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(make_learner(pytorch_lightning), datamodule=ReplayDataModule(other, 8, steps_per_epoch=20))
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    assert tr.ReplayBuffer.load(tmp_path / "second.ckpt.replay").capacity == 2 * ROWS


def test_a_checkpoint_saved_after_the_buffer_was_closed_says_that_it_has_none(tmp_path, caplog):
    trainer = trainer_of(pytorch_lightning, tmp_path, 2, ReplayCheckpoint())
    data = ReplayDataModule(filled_buffer, 8, steps_per_epoch=20)
    trainer.fit(make_learner(pytorch_lightning), datamodule=data)
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    assert saved(tmp_path, ".ckpt") == ["final.ckpt"]
    assert saved(tmp_path, ".replay") == []
    assert "final.ckpt is saved without a replay buffer beside it: the replay buffer was stopped" in caplog.text


def test_a_checkpoint_on_another_machine_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ReplayDataModule(filled_buffer(), 8, steps_per_epoch=20)
    for directory in ("memory://checkpoints", "s3://bucket/checkpoints"):
        trainer = pytorch_lightning.Trainer(max_steps=1, **QUIET, callbacks=[PriorityFeedback(), ReplayCheckpoint()])
        trainer.fit(make_learner(pytorch_lightning), datamodule=data)
        with pytest.raises(ValueError, match=f"{directory}/last.ckpt is not on a filesystem of this machine"):
            trainer.save_checkpoint(f"{directory}/last.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoint_itself_holds_no_rows(tmp_path):
    data = ReplayDataModule(filled_buffer(), 8, steps_per_epoch=20)
    trainer_of(pytorch_lightning, tmp_path, 5, ReplayCheckpoint()).fit(make_learner(pytorch_lightning), datamodule=data)
    (path,) = tmp_path.glob("*.ckpt")
    assert path.is_file()
    assert path.stat().st_size < 8000


def resume(data, directory, path="last", steps=6, library=pytorch_lightning, **options):
    """Trains with `data` from a checkpoint to so many steps; returns the learner."""
    resuming = trainer_of(library, directory, steps, ReplayCheckpoint(), **options)
    resuming.fit(learner := make_learner(library), datamodule=data, ckpt_path=path)
    return learner


def test_a_buffer_with_rows_of_another_run_is_not_overwritten(tmp_path):
    resume(ReplayDataModule(filled_buffer(), 8, steps_per_epoch=20), tmp_path, None, 5)
    (path,) = tmp_path.glob("*.ckpt")
    other = filled_buffer()
    with pytest.raises(tr.CheckpointError, match="holds rows already") as raised:
        resume(ReplayDataModule(other, 8, steps_per_epoch=20), tmp_path, path)
    assert "write rows of your own only where a run begins" in "".join(raised.value.__notes__)
    assert len(other) == ROWS


@pytest.mark.filterwarnings(r"ignore:.fit\(ckpt_path=.last.\) is set, but there is no last checkpoint")
def test_a_fit_from_last_goes_on_with_the_buffer_of_the_fit_before(lightning, tmp_path, caplog):
    torch.manual_seed(0)
    whole = make_learner(lightning)
    data = ReplayDataModule(filled_buffer(), 8, steps_per_epoch=20)
    trainer_of(lightning, tmp_path / "whole", 15).fit(whole, datamodule=data)

    torch.manual_seed(0)
    data = ReplayDataModule(filled_buffer(), 8, steps_per_epoch=20)
    saving = {"directory": tmp_path / "parts", "library": lightning, "save_last": True}
    parts = [resume(data, steps=steps, **saving) for steps in (5, 10, 15)]  # the first finds no "last"
    assert [step for part in parts for step in part.seen] == whole.seen
    assert torch.equal(parts[-1].q.weight, whole.q.weight)
    assert not [record for record in caplog.records if record.name.startswith("torchreplay")]


def test_what_the_buffer_got_since_the_checkpoint_stays_and_is_said(lightning, tmp_path, caplog):
    buffer = filled_buffer(2 * ROWS)
    data = ReplayDataModule(buffer, 8, steps_per_epoch=20)
    resume(data, tmp_path, None, 10, lightning)
    buffer.extend(number=torch.arange(3), obs=torch.ones(3, 4))
    priorities = buffer.priorities(buffer.keys())
    resume(data, tmp_path, tmp_path / "epoch=0-step=5.ckpt", 5, lightning)
    assert torch.equal(buffer.priorities(buffer.keys()), priorities)
    assert "the buffer keeps its 67 rows" in caplog.text
    assert "since then 3 rows were written and 40 TD errors applied" in caplog.text


def test_a_restored_buffer_goes_on_from_the_checkpoint_that_it_was_restored_from(tmp_path):
    resume(ReplayDataModule(filled_buffer(), 8, steps_per_epoch=20), tmp_path, None, 10)
    first, second = (tmp_path / f"epoch=0-step={step}.ckpt" for step in (5, 10))
    buffer = empty_buffer()
    for _ in range(2):
        resume(ReplayDataModule(buffer, 8, steps_per_epoch=20), tmp_path / "resumed", first, 6)
        assert len(buffer) == ROWS
    with pytest.raises(tr.CheckpointError, match="holds rows already"):  # it never had what came after the first
        resume(ReplayDataModule(buffer, 8, steps_per_epoch=20), tmp_path / "resumed", second, 12)


def test_a_checkpoint_of_a_restored_buffer_is_one_of_the_buffer_before_too(tmp_path):
    resume(ReplayDataModule(filled_buffer(), 8, steps_per_epoch=20), tmp_path, None, 5)
    (first,) = tmp_path.glob("*.ckpt")
    resume(ReplayDataModule(empty_buffer(), 8, steps_per_epoch=20), tmp_path, first, 10)
    buffer = empty_buffer()
    resume(ReplayDataModule(buffer, 8, steps_per_epoch=20), tmp_path, tmp_path / "epoch=0-step=10.ckpt", 11)
    resume(ReplayDataModule(buffer, 8, steps_per_epoch=20), tmp_path, first, 6)
    assert len(buffer) == ROWS


def test_a_buffer_in_a_file_goes_on_with_the_rows_that_it_has(tmp_path):
    spec = filled_buffer().spec
    with tr.ReplayBuffer(spec, ROWS, sampler=tr.Prioritized(alpha=1.0), path=tmp_path / "replay.bin") as buffer:
        buffer.extend(number=torch.arange(9), obs=torch.ones(9, 4))
        resume(ReplayDataModule(buffer, 8, steps_per_epoch=20), tmp_path, None, 5)
        buffer.extend(number=torch.arange(3), obs=torch.ones(3, 4))
    (path,) = tmp_path.glob("*.ckpt")
    with tr.ReplayBuffer.open(tmp_path / "replay.bin") as buffer:
        resume(ReplayDataModule(buffer, 8, steps_per_epoch=20), tmp_path, path, 6)
        assert len(buffer) == 12


def test_a_checkpoint_from_before_the_first_row_is_resumed_by_its_buffer(tmp_path):
    class SaveAndFail(pytorch_lightning.Callback):
        def on_fit_start(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "early.ckpt")
            raise KeyError

    buffer = empty_buffer()
    data = ReplayDataModule(buffer, 8, steps_per_epoch=20, explorers=FillIfEmpty)
    with pytest.raises(KeyError):
        trainer_of(pytorch_lightning, tmp_path, 1, ReplayCheckpoint(), SaveAndFail()).fit(
            make_learner(pytorch_lightning), datamodule=data
        )
    assert len(buffer) == 0
    resume(data, tmp_path, tmp_path / "early.ckpt")
    assert len(buffer) == 3


def test_a_buffer_that_was_cleared_is_refused_with_what_to_do(tmp_path):
    buffer = filled_buffer()
    data = ReplayDataModule(buffer, 8, steps_per_epoch=20)
    resume(data, tmp_path, None, 5)
    buffer.clear()
    (path,) = tmp_path.glob("*.ckpt")
    with pytest.raises(tr.CheckpointError, match=r"was cleared since .*: fit with a new one"):
        resume(data, tmp_path, path)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_validation_and_tuning_between_two_fits_change_nothing(lightning, tmp_path):
    step = lambda self, batch, batch_idx: torch.zeros(1)  # noqa: E731
    buffer = filled_buffer()
    data = ReplayDataModule(buffer, 8, steps_per_epoch=20)
    trainer = trainer_of(lightning, tmp_path, 5, ReplayCheckpoint(), save_last=True)
    learner = make_learner(lightning, validation_step=step)
    trainer.fit(learner, datamodule=data)
    trainer.validate(learner, tr.ReplayDataset(buffer, 8, steps=1), ckpt_path="last", weights_only=True)
    learner.lr = 1e-3
    tuning = trainer_of(lightning, tmp_path / "tuning", 9, ReplayCheckpoint())
    tuning_options = {"num_training": 3, "max_lr": 1e-2}
    lightning.tuner.Tuner(tuning).lr_find(learner, datamodule=data, **tuning_options)
    finder = lightning.callbacks.LearningRateFinder(num_training_steps=3, max_lr=1e-2)
    again = trainer_of(lightning, tmp_path, 7, ReplayCheckpoint(), finder, save_last=True)
    again.fit(learner, datamodule=data, ckpt_path=tmp_path / "last.ckpt")
    assert again.global_step == 7
    assert len(buffer) == ROWS


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_load_a_checkpoint_without_its_buffer(lightning, tmp_path, stage):
    steps = {
        f"{name}_step": lambda self, batch, batch_idx: torch.zeros(1) for name in ("validation", "test", "predict")
    }
    learner, data = make_learner(lightning, **steps), ReplayDataModule(filled_buffer, 8, steps_per_epoch=20)
    trainer = trainer_of(lightning, tmp_path, 5, ReplayCheckpoint())
    trainer.fit(learner, datamodule=data)
    (path,) = tmp_path.glob("*.ckpt")
    with filled_buffer() as buffer:
        for fresh in (trainer, trainer_of(lightning, tmp_path, 5, ReplayCheckpoint(buffer))):
            loader = tr.ReplayDataset(buffer, 8, steps=1)
            getattr(fresh, stage)(learner, loader, ckpt_path=path, weights_only=True)
        assert len(buffer) == ROWS


def test_a_checkpoint_of_another_spec_is_refused(tmp_path):
    filled_buffer().save(tmp_path)
    other = tr.ReplayBuffer({"other": tr.Field()}, 10)
    with pytest.raises(tr.CheckpointError, match="of another spec"):
        other.restore(tmp_path)


def test_without_a_buffer_the_callback_says_so_at_once():
    trainer = pytorch_lightning.Trainer(max_steps=1, **QUIET, callbacks=[ReplayCheckpoint()])
    with pytest.raises(ValueError, match=r"ReplayCheckpoint\(buffer\)"):
        trainer.fit(make_learner(pytorch_lightning), filled_buffer())

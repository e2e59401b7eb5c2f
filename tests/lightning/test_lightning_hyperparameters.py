"""Checkpoints of modules that take a buffer, or what else ends with its process, for a hyperparameter."""

import copy
import io
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from paths import import_path

import torchreplay as tr

pytest.importorskip("pytorch_lightning")

import modules_with_buffers
from lightning_learner import QUIET, filled_buffer
from modules_with_buffers import Data, module_of

from torchreplay.lightning import PriorityFeedback, ReplayDataModule
from torchreplay.ray import ExplorerPool

# Lightning's own: of a module with a loader of its own, and of a torch newer than it knows.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*removed from hparams")

LEFT_OUT = r'has a \w+ in it, which no file can keep.*save_hyperparameters\(ignore=\["buffer"\]\)'


@pytest.fixture
def buffer():
    buffer = filled_buffer()
    yield buffer
    buffer.close()


@pytest.mark.slow
def test_a_checkpoint_of_a_process_that_is_gone_loads_with_another_buffer(lightning, buffer, tmp_path):
    path = import_path()
    command = [sys.executable, modules_with_buffers.__file__, lightning.__name__, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert 'save_hyperparameters(ignore=["buffer"])' in done.stderr

    checkpoint = tmp_path / "last.ckpt"
    module = module_of(lightning).load_from_checkpoint(checkpoint, buffer=buffer)
    assert (module.buffer, module.hparams.width) == (buffer, 4)
    data = Data.load_from_checkpoint(checkpoint, buffer=buffer)
    assert (data.buffer, data.batch_size) == (buffer, 8)
    trainer = lightning.Trainer(max_steps=4, callbacks=[PriorityFeedback()], **QUIET)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    assert trainer.global_step == 4
    assert buffer.stats().updated == 2 * 8


def saved_and_loaded(value, **options):
    file = io.BytesIO()
    with pytest.warns(UserWarning, match=LEFT_OUT):
        torch.save({"values": [value]}, file)
    file.seek(0)
    return torch.load(file, **options)["values"][0]


def test_a_module_of_no_callback_of_ours_is_saved_without_its_buffer(lightning, buffer, tmp_path):
    trainer = lightning.Trainer(max_steps=2, **QUIET)
    kind = module_of(lightning)
    trainer.fit(kind(buffer, extra={"deep": [buffer]}))
    with pytest.warns(UserWarning, match=LEFT_OUT):
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    module = kind.load_from_checkpoint(tmp_path / "last.ckpt", buffer=buffer)
    assert module.buffer is buffer
    with pytest.raises(tr.AttachError, match=r"this is no ReplayBuffer: .*load_from_checkpoint\(path, buffer=buffer\)"):
        module.hparams.extra["deep"][0].sample(8)


@pytest.mark.filterwarnings("ignore:what torch.save writes")
def test_a_buffer_that_is_not_given_anew_is_missed_where_it_is_used(lightning, buffer, tmp_path):
    trainer = lightning.Trainer(max_steps=1, **QUIET)
    trainer.fit(module_of(lightning)(buffer))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    module = module_of(lightning).load_from_checkpoint(tmp_path / "last.ckpt")
    assert repr(module.buffer) == "NotSaved('ReplayBuffer')"
    with pytest.raises(tr.AttachError, match="this is no ReplayBuffer"):
        module.buffer.stats()
    with pytest.raises(tr.AttachError, match="this is no ReplayBuffer"):
        module.buffer.limiter = tr.MinSize(5)
    with pytest.raises(TypeError, match="buffer is NotSaved; it must be a ReplayBuffer"):
        ReplayDataModule(module.buffer)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    for same in (copy.deepcopy(module.buffer), pickle.loads(pickle.dumps(module.buffer))):
        assert repr(same) == "NotSaved('ReplayBuffer')"


KINDS = {
    "ReplayBuffer": lambda buffer: buffer,
    "SharedWeights": lambda buffer: tr.SharedWeights(torch.nn.Linear(2, 2)),
    "ReplayDataset": lambda buffer: tr.ReplayDataset(buffer),
    "MixedDataset": lambda buffer: tr.MixedDataset({buffer: 1}),
    "ExplorerPool": lambda buffer: ExplorerPool(print, 1, buffer, backend="process"),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_ends_with_its_process_is_left_out_of_files(buffer, kind, weights_only):
    assert repr(saved_and_loaded(KINDS[kind](buffer), weights_only=weights_only)) == f"NotSaved({kind!r})"


def test_another_module_that_pickles_for_torch_save_leaves_it_out_as_well(buffer):
    cloudpickle = pytest.importorskip("cloudpickle")
    file = io.BytesIO()
    with pytest.warns(UserWarning, match=LEFT_OUT):
        torch.save(buffer, file, pickle_module=cloudpickle)
    file.seek(0)
    assert repr(torch.load(file)) == "NotSaved('ReplayBuffer')"


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_what_is_passed_to_other_processes_is_attached_there_or_fails_at_once(buffer, protocol):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passed = pickle.dumps(buffer, protocol)
        attached = pickle.loads(passed)
    assert len(attached) == len(buffer)
    attached.close()
    buffer.close()
    with pytest.raises(tr.AttachError, match="is gone, or has closed it"):
        pickle.loads(passed)

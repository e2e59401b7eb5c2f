"""A `fit` whose batches follow from all that came before: what it learnt, fed back and drew.

As a program, `resumed_fits.py library directory '{"killed_at": ...}'`, it is to be interrupted, and says if it was not.
"""

import importlib
import json
import os
import signal
import sys

import torch
from lightning_learner import QUIET

import torchreplay as tr
from torchreplay.lightning import PriorityFeedback, ReplayCheckpoint, ReplayDataModule

ROWS, BATCH = 256, 8
SPEC = {"number": tr.Field((), torch.int64), "obs": tr.Field((4,))}


def buffer_of(rows=ROWS, seed=3, sampler=None):
    buffer = tr.ReplayBuffer(SPEC, ROWS, sampler=sampler or tr.Prioritized(alpha=1.0), seed=seed)
    if rows:
        obs = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
        buffer.extend(number=torch.arange(rows), obs=obs)
    return buffer


def learner_of(lightning, killed_at=None, schedule=False, optimisers=1):
    """Returns a LightningModule. Of several optimisers the second steps after every second batch, as in TD3."""

    class Learner(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = optimisers == 1
            self.q = torch.nn.Linear(4, 1)
            self.seen = []

        def configure_optimizers(self):
            if optimisers > 1:
                return [torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9) for _ in range(optimisers)]
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            if not schedule:
                return optimizer
            total = self.trainer.estimated_stepping_batches  # has Lightning set up the loader before it resumes
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=total + 1)]

        def training_step(self, batch, batch_idx):
            self.seen.append([batch_idx, batch["key"].tolist(), batch["weight"].tolist()])
            if batch_idx == killed_at:
                os.kill(os.getpid(), signal.SIGTERM)
            error = self.q(batch["obs"])[:, 0] - batch["obs"].sum(1)
            td = error.detach() ** 4 * (1 + batch["number"] % 7)
            if optimisers == 1:
                return {"loss": (batch["weight"] * error**2).mean(), "td_error": td}
            for delay, optimizer in enumerate(self.optimizers(), 1):
                if batch_idx % delay == 0:
                    optimizer.zero_grad()
                    self.manual_backward((self.q(batch["obs"])[:, 0] - batch["obs"].sum(1)).square().mean())
                    optimizer.step()
            return {"td_error": td}

    return Learner()


def train(
    lightning,
    directory,
    *,
    ckpt_path=None,
    prefetch=2,
    steps_per_epoch=None,
    saving=None,
    killed_at=None,
    schedule=False,
    uniform=False,
    optimisers=1,
    **options,
):
    """Trains on a filled buffer, or on what was saved beside `ckpt_path`; returns the learner."""
    sampler = tr.Uniform() if uniform else None
    buffer = buffer_of(sampler=sampler) if ckpt_path is None else buffer_of(0, seed=99, sampler=sampler)
    data = ReplayDataModule(buffer, BATCH, steps_per_epoch=steps_per_epoch, prefetch=prefetch)
    saving = lightning.callbacks.ModelCheckpoint(directory, **({"save_top_k": -1} | (saving or {})))
    callbacks = [PriorityFeedback(), saving, ReplayCheckpoint()]
    trainer = lightning.Trainer(callbacks=callbacks, **(QUIET | {"enable_checkpointing": True} | options))
    learner = learner_of(lightning, killed_at, schedule, optimisers)
    try:
        trainer.fit(learner, datamodule=data, ckpt_path=ckpt_path)
    finally:
        buffer.close()
    return learner


if __name__ == "__main__":
    train(importlib.import_module(sys.argv[1]), sys.argv[2], **json.loads(sys.argv[3]))
    sys.exit("was not interrupted")

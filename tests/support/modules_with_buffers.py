"""A LightningModule and a data module that call what they are given hyperparameters.

As a program, `modules_with_buffers.py library directory`, it trains both and leaves `last.ckpt` there.
"""

import importlib
import sys

import torch
from lightning_learner import QUIET, filled_buffer

import torchreplay as tr
from torchreplay.lightning import PriorityFeedback, ReplayDataModule


class Data(ReplayDataModule):
    def __init__(self, buffer, batch_size=8):
        super().__init__(buffer, batch_size)
        self.save_hyperparameters()


def module_of(lightning):
    class Module(lightning.LightningModule):
        def __init__(self, buffer, width=4, extra=None):
            super().__init__()
            self.save_hyperparameters()
            self.buffer, self.q = buffer, torch.nn.Linear(width, 1)

        def training_step(self, batch, batch_idx):
            error = self.q(batch["obs"])[:, 0]
            return {"loss": (error**2).mean(), "td_error": error}

        def train_dataloader(self):
            return tr.ReplayDataset(self.buffer, 8)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module


if __name__ == "__main__":
    lightning, buffer = importlib.import_module(sys.argv[1]), filled_buffer()
    trainer = lightning.Trainer(max_steps=2, callbacks=[PriorityFeedback()], **QUIET)
    trainer.fit(module_of(lightning)(buffer), datamodule=Data(buffer))
    trainer.save_checkpoint(f"{sys.argv[2]}/last.ckpt")

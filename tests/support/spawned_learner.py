"""A learner, and makers of its buffer and its weights' publisher, that travel to spawned ranks by pickle."""

import json
import os
from pathlib import Path

import pytorch_lightning
import torch
from lightning_learner import filled_buffer


class SpawnedLearner(pytorch_lightning.LightningModule):
    """Writes down, into `directory`, what each rank has drawn."""

    def __init__(self, directory):
        super().__init__()
        self.q = torch.nn.Linear(4, 1)
        self.directory = directory
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["key"].tolist())
        td = self.q(batch["obs"])[:, 0]
        return {"loss": (batch["weight"] * td**2).mean(), "td_error": td.detach()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_end(self):
        Path(self.directory, f"{self.global_rank}.json").write_text(json.dumps(self.seen))


def noted_buffer(directory):
    Path(directory, f"made{os.getpid()}").touch()
    return filled_buffer()

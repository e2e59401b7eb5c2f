"""PyTorch Lightning: train an ordinary LightningModule from a replay buffer.

The module receives a `ReplayBatch` and returns `{"loss": loss, "td_error": td}`; everything about replay stays here::

    data = ReplayDataModule(buffer, batch_size=256)
    trainer = Trainer(max_steps=10_000, callbacks=[PriorityFeedback(), WeightPublisher(weights, every=10)])
    trainer.fit(module, datamodule=data)

Both `pytorch_lightning` and `lightning.pytorch` trainers take these classes.
"""

from ..explorers import Explorers
from .checkpoint import ReplayCheckpoint
from .datamodule import ReplayDataModule
from .evaluation import EvaluationMonitor
from .feedback import PriorityFeedback
from .monitor import ReplayMonitor
from .publisher import WeightPublisher

__all__ = [
    "EvaluationMonitor",
    "Explorers",
    "PriorityFeedback",
    "ReplayCheckpoint",
    "ReplayDataModule",
    "ReplayMonitor",
    "WeightPublisher",
]

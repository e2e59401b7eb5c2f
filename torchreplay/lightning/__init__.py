"""PyTorch Lightning: train an ordinary LightningModule from a replay buffer.

The module receives a `ReplayBatch` and returns `{"loss": loss, "td_error": td}`; everything about replay stays here::

    data = ReplayDataModule(buffer, batch_size=256)
    trainer = Trainer(max_steps=10_000, callbacks=[PriorityFeedback(), WeightPublisher(weights, every=10)])
    trainer.fit(module, datamodule=data)

Both `pytorch_lightning` and `lightning.pytorch` trainers take these classes.
"""

from torchreplay.distributed.explorers import Explorers
from torchreplay.lightning.checkpoint import ReplayCheckpoint
from torchreplay.lightning.datamodule import ReplayDataModule
from torchreplay.lightning.evaluation import EvaluationMonitor
from torchreplay.lightning.feedback import PriorityFeedback
from torchreplay.lightning.monitor import ReplayMonitor
from torchreplay.lightning.publisher import WeightPublisher

__all__ = [
    "EvaluationMonitor",
    "Explorers",
    "PriorityFeedback",
    "ReplayCheckpoint",
    "ReplayDataModule",
    "ReplayMonitor",
    "WeightPublisher",
]

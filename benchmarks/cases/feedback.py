"""What ``PriorityFeedback`` adds to a step inside Lightning."""

import logging
import time
from typing import Any

import pytorch_lightning as pl
import torch

import torchreplay as tr
from benchmarks.line import OURS, Line
from benchmarks.peers.torchreplay import TorchreplayPeer
from benchmarks.plan import Plan
from torchreplay.lightning import PriorityFeedback, ReplayDataModule

BATCH_SIZE = 256
STEPS = 400
MICROSECONDS = 1e6
NO_OP = "no-op callback"


class _Learner(pl.LightningModule):
    """Learns next to nothing, and has TD errors."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Linear(4, 1)

    def training_step(self, batch: tr.ReplayBatch, batch_idx: int) -> dict[str, torch.Tensor]:
        td = batch["reward"] - self.value(batch["obs"]).squeeze(-1)
        return {"loss": td.square().mean(), "td_error": td}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Clock(pl.Callback):
    """Notes the time of its call at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())


def measure_feedback(peer: TorchreplayPeer, plan: Plan) -> Line:
    """Returns the time between the callbacks on either side of ``PriorityFeedback``, less that with a no-op one."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    samples: dict[str, list[float]] = {OURS: [], NO_OP: []}
    for _ in range(plan.contest_rounds):
        idle = _between(peer, pl.Callback())
        samples[OURS].append(_between(peer, PriorityFeedback()) - idle)
        samples[NO_OP].append(idle)
    return Line("loader", "PriorityFeedback inside Lightning", "us", samples, note="beyond what a callback costs")


def _between(peer: TorchreplayPeer, callback: pl.Callback) -> float:
    """Returns the median microseconds of a step between the turns of the callbacks on either side."""
    before, after = _Clock(), _Clock()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[before, callback, after],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Learner(), datamodule=ReplayDataModule(peer.buffer, BATCH_SIZE))
    spans = [end - start for start, end in zip(before.times, after.times, strict=True)]
    return MICROSECONDS * sorted(spans)[len(spans) // 2]

"""A learner that may be killed at any moment: started again, it goes on from its last checkpoint.

    python -m benchmarks.learning.resumable DIRECTORY --seed 0

Explorer and learner take turns, so a run depends on its seed alone. Each episode's end may be saved, once in so many
steps: there the explorer has no state but its generators.
"""

import argparse
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor

import torchreplay as tr
from benchmarks.learning.double_dqn import CARTPOLE, GAMMA, Explorer, Learner
from torchreplay.lightning import PriorityFeedback, ReplayCheckpoint, ReplayDataModule

STEPS = 10_000
LEARN_FROM = 1_000
BATCH_SIZE = 64
SAVE_EVERY = 250
EVALUATE_EVERY = 1_000
LOG, NEWEST = "log.jsonl", "newest"


class Agent(LightningModule):
    """Learns, and plays a step after each update.

    Args:
        directory: Where checkpoints and the log go.
        buffer: Learned from, and written into.
        seed: Of everything.
    """

    def __init__(self, directory: Path, buffer: tr.ReplayBuffer, seed: int) -> None:
        super().__init__()
        self._directory, self._seed = directory, seed
        self.learner, self.explorer = Learner(CARTPOLE, seed), Explorer(buffer, seed)
        self._saved_at = 0
        self._log = (directory / LOG).open("a")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the learner's optimizer."""
        return self.learner.optimizer

    def training_step(self, batch: tr.ReplayBatch, batch_idx: int) -> dict[str, Tensor]:
        """Returns the loss and the TD errors."""
        loss, errors = self.learner.loss(batch)
        self._tell({"step": self.global_step, "batch": _checksum(batch)})
        return {"loss": loss, "td_error": errors}

    def on_train_batch_end(self, outputs: Any, batch: tr.ReplayBatch, batch_idx: int) -> None:
        """Plays a step with the new weights. Saves, where an episode has ended."""
        self.learner.count()
        self.explorer.policy.load_state_dict(self.learner.q.state_dict())
        self.explorer.step()
        if self.global_step % EVALUATE_EVERY == 0:
            self._tell({"step": self.global_step, "mean_return": self.learner.evaluate(self._seed)})
        if not self.explorer.plays and self.global_step >= self._saved_at + SAVE_EVERY:
            self._save()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the explorer's state, and the number of updates."""
        checkpoint["explorer"] = self.explorer.state_dict()
        checkpoint["updates"] = self.learner.steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Goes on from there."""
        self.explorer.load_state_dict(checkpoint["explorer"])
        self.learner.steps = self._saved_at = checkpoint["updates"]

    def _save(self) -> None:
        before, path = newest(self._directory), self._directory / f"{self.global_step}.ckpt"
        self._saved_at = self.global_step
        self.trainer.save_checkpoint(path)
        part = self._directory / f"{NEWEST}.part"
        part.write_text(path.name)
        part.replace(self._directory / NEWEST)  # who is killed before this goes on from the one before
        if before is not None:
            self.trainer.strategy.remove_checkpoint(before)

    def _tell(self, facts: dict[str, Any]) -> None:
        print(json.dumps(facts), file=self._log, flush=True)


def newest(directory: Path) -> Path | None:
    """Returns the newest checkpoint that is whole; None: there is none."""
    named = directory / NEWEST
    return directory / named.read_text() if named.exists() else None


def told(directory: Path, what: str) -> dict[int, Any]:
    """Returns what a run has told, by its step: of steps that were taken twice the second time."""
    path = directory / LOG
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return {facts["step"]: facts[what] for facts in _whole(lines) if what in facts}


def newest_step(directory: Path) -> int:
    """Returns the last step that a run has told of; -1: none."""
    path = directory / LOG
    lines = path.read_bytes()[-1000:].decode().splitlines(keepends=True) if path.exists() else []
    return max((facts["step"] for facts in _whole(lines)), default=-1)


def _whole(lines: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("{") and line.endswith("}\n"):  # a kill may cut the last one off
            yield json.loads(line)


def _checksum(batch: tr.ReplayBatch) -> int:
    return zlib.crc32(batch["weight"].numpy().tobytes(), zlib.crc32(batch["key"].numpy().tobytes()))


def run(directory: Path, seed: int) -> None:
    """Learns to the end, from where an earlier run was killed."""
    torch.set_num_threads(1)
    with tr.ReplayBuffer(
        CARTPOLE.fields, STEPS, sampler=tr.Prioritized(), view=tr.Transitions(n_step=3, gamma=GAMMA), seed=seed
    ) as buffer:
        agent, checkpoint = Agent(directory, buffer, seed), newest(directory)
        if checkpoint is None:
            for _ in range(LEARN_FROM):
                agent.explorer.step()
        trainer = Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
            callbacks=[PriorityFeedback(), ReplayCheckpoint()],
        )
        trainer.fit(agent, ReplayDataModule(buffer, BATCH_SIZE, prefetch=0), ckpt_path=checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run(options.directory, options.seed)

"""A buffer in each of the forms that the command line looks into, and what must be in it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import torchreplay as tr

SPEC = {
    "obs": tr.Field((12, 10), torch.uint8),
    "state": {"hidden": tr.Field((3,), torch.bfloat16)},
    "action": tr.Field((), torch.int64),
    "reward": tr.Field(),
    "terminated": tr.Field((), bool),
    "truncated": tr.Field((), bool),
}
CAPACITY, EPISODES, STEPS = 50, 7, 9


@dataclass
class Stored:
    """The same buffer as a live file, a checkpoint's directory and an archive.

    Attributes:
        buffer: Open, and nobody writes to it.
        forms: The paths.
        keys: int64 `[n]` of the rows, oldest first.
    """

    buffer: tr.ReplayBuffer
    forms: dict[str, Path]
    keys: torch.Tensor

    def columns(self):
        """Every field, oldest row first, by its name: from the shared memory itself."""
        slots = self.keys % CAPACITY
        flat = {name: value for name, value in self.buffer.storage.items() if name != "state"}
        flat["state/hidden"] = self.buffer.storage["state"]["hidden"]
        return {name: value[slots].clone() for name, value in flat.items()}


def make(directory):
    """Seven episodes of nine steps in a ring that holds five of them."""
    buffer = tr.ReplayBuffer(
        SPEC, CAPACITY, view=tr.Transitions(n_step=2), sampler=tr.Prioritized(), path=directory / "live.bin", seed=1
    )
    rng = np.random.default_rng(0)
    for episode in range(EPISODES):
        last = np.arange(1, STEPS + 1) == STEPS
        buffer.extend(
            obs=rng.integers(0, 256, (STEPS + 1, 12, 10), dtype=np.uint8),
            state={"hidden": torch.from_numpy(rng.standard_normal((STEPS, 3))).bfloat16()},
            action=np.arange(STEPS) + 100 * episode,
            reward=rng.standard_normal(STEPS).astype(np.float32),
            terminated=last & (episode % 2 == 0),
            truncated=last & (episode % 2 == 1),
        )
    batch = buffer.sample(32)
    buffer.update_priorities(batch, torch.rand(32, generator=torch.Generator().manual_seed(0)))
    buffer.save(directory / "checkpoint")
    with (directory / "archive.tar").open("wb") as file:
        buffer.save(file)
    forms = {
        "file": directory / "live.bin",
        "directory": directory / "checkpoint",
        "archive": directory / "archive.tar",
    }
    return Stored(buffer, forms, buffer.keys(rows=True))

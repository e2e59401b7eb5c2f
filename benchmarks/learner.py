"""Learners of an ordinary size, whose steps replay must not hold up."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.workload import Workload

ACTIONS = 4
"""As many as the workloads' rows have."""
DISCOUNT = 0.99
Step = Callable[[Mapping[str, Any]], torch.Tensor]
"""Trains on a batch; returns its TD errors `[B]`, on the learner's device."""


def q_learning(workload: Workload, device: torch.device | str, hidden: int = 256) -> Step:
    """Returns the step of a Q-learner: two hidden layers for vectors, the layers of Mnih et al. (2015) for frames."""
    torch.manual_seed(0)
    network = (_of_frames() if len(workload.shape) == 3 else _of_vectors(workload.shape[0], hidden)).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, foreach=True)

    def step(batch: Mapping[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            following = network(batch["next_obs"].float()).amax(1) * ~batch["done"]
        chosen = network(batch["obs"].float()).gather(1, batch["action"][:, None]).squeeze(1)
        td: torch.Tensor = batch["reward"] + DISCOUNT * following - chosen
        optimizer.zero_grad()
        (batch["weight"] * td.square()).mean().backward()
        optimizer.step()
        return td.detach()

    return step


def _of_vectors(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, ACTIONS)
    )  # fmt: skip


def _of_frames() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, ACTIONS),
    )  # fmt: skip

"""Double DQN in the Deep Sea, with a demonstration mixed into every batch: experience alone does not find the treasure.

Deep Sea (Osband et al. 2020, bsuite, https://arxiv.org/abs/1908.03568) is a grid of 30 by 30 cells. A diver starts in
the upper left one, sinks a row with every step, and drifts to the left or to the right. The action that leads right
differs from cell to cell. Drifting right costs a little, and only 30 such steps lead to the treasure in the lower
right: one episode of random actions in 2^30. One dive of a guide, in a buffer of its own, is enough. A quarter of each
batch comes from there and the rest from the learner's own policy, as in R2D3 (Paine et al. 2019,
https://arxiv.org/abs/1909.01387). Each buffer has priorities of its own: `dataset.update_priorities` sorts TD errors.
`--share 0` draws from experience alone.

    python examples/demonstrations.py --seed 1
    python examples/demonstrations.py --seed 1 --share 0
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr


@dataclass
class Args:
    """Double DQN in the Deep Sea with a demonstration in every batch."""

    seed: int = 0
    """seed of the sea, the draws and the divers' random actions"""
    total_steps: int = 5_000
    """learner steps at most; the run ends earlier once the treasure is found"""
    eval_every: int = 100
    """learner steps between two evaluations"""
    size: int = 30
    """rows and columns of the sea, and steps of an episode"""
    tensorboard: bool = True
    """whether to write curves to runs/demonstrations-seed<seed>"""
    share: float = 0.25
    """share of each batch that is the demonstration; 0: none, 1: nothing else"""

    dive_every: int = 5
    """learner steps between two episodes of all divers"""
    divers: int = 4
    """divers that explore side by side"""
    epsilon: float = 0.1
    """share of their actions that are random"""
    capacity: int = 50_000
    """observations that the buffer of experience holds"""
    n_step: int = 3
    """steps that a transition spans"""
    gamma: float = 0.99
    """discount of one step"""
    alpha: float = 0.6
    """how strongly TD errors are preferred: 0 uniform, 1 proportional"""
    beta: float = 0.4
    """initial correction of that bias, annealed to 1 over total_steps"""
    batch_size: int = 64
    """transitions in a batch"""
    learning_rate: float = 1e-2
    """of Adam"""
    target_every: int = 20
    """learner steps between two copies into the target network"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


# What a row of the buffers holds: the number of a cell, and the step that led there.
SPEC = {
    "obs": tr.Field((), torch.int64),
    "action": tr.Field((), torch.int64),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}
COST = 0.01  # of drifting right all the way; the treasure is worth 1
Policy = Callable[[Tensor], Tensor]  # cells [n] to actions [n], 0 or 1


class DeepSea:
    """The sea: cell `row * size + column`, with a last row below that ends the episode.

    Args:
        size: Rows, columns and steps of an episode.
        seed: Of the action that leads right in each cell.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self.cells = (size + 1) * size
        self._right = torch.randint(2, (self.cells,), generator=torch.Generator().manual_seed(seed))

    def guide(self, obs: Tensor) -> Tensor:
        """Returns the actions that lead right."""
        return self._right[obs]

    def dive(self, policy: Policy, divers: int, epsilon: float = 0.0) -> dict[str, Tensor]:
        """Plays one episode with each of some divers, side by side.

        Returns:
            What `ReplayBuffer.extend` takes for a block of streams: `obs` `[size + 1, divers]`, the rest
            `[size, divers]`.
        """
        column = torch.zeros(divers, dtype=torch.int64)
        seen, acted, rewarded = [column], [], []
        for row in range(self.size):
            action = policy(seen[-1])
            action = torch.where(torch.rand(divers) < epsilon, torch.randint(2, (divers,)), action)
            right = action == self._right[seen[-1]]
            treasure = right & (column == self.size - 1)
            column = (column + torch.where(right, 1, -1)).clamp(0, self.size - 1)
            seen.append((row + 1) * self.size + column)
            acted.append(action)
            rewarded.append(treasure.float() - right * COST / self.size)
        terminated = torch.zeros(self.size, divers, dtype=torch.bool)
        terminated[-1] = True
        steps = {"action": torch.stack(acted), "reward": torch.stack(rewarded), "terminated": terminated}
        return {"obs": torch.stack(seen), **steps, "truncated": torch.zeros_like(terminated)}


class QTable(nn.Embedding):
    """Action values of cells, `[...]` to `[..., 2]`; 0 at first."""

    def __init__(self, cells: int) -> None:
        super().__init__(cells, 2)
        nn.init.zeros_(self.weight)

    @torch.no_grad()
    def act(self, obs: Tensor) -> Tensor:
        """Returns the greedy actions."""
        return self(obs).argmax(-1)


def td_errors(q: nn.Module, target: nn.Module, batch: tr.ReplayBatch) -> Tensor:
    """Returns the errors that double DQN (van Hasselt et al. 2016) makes small, `[B]`."""
    with torch.no_grad():
        best = q(batch["next_obs"]).argmax(-1, keepdim=True)
        value = target(batch["next_obs"]).gather(-1, best).squeeze(-1)
        goal = batch["reward"] + batch["discount"] * value
    return goal - q(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)


def main(args: Args) -> None:
    """Learns to find the treasure."""
    torch.set_num_threads(1)  # the table is small
    torch.manual_seed(args.seed)
    sea = DeepSea(args.size, args.seed)
    q = QTable(sea.cells)
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.learning_rate)

    sampler = tr.Prioritized(args.alpha, tr.LinearSchedule(args.beta, 1.0, args.total_steps))
    view = tr.Transitions(n_step=args.n_step, gamma=args.gamma)
    online = tr.ReplayBuffer(SPEC, args.capacity, sampler=sampler, view=view, seed=args.seed, name="online")
    options = {"sampler": sampler, "view": view, "seed": args.seed + 1, "name": "demonstration"}
    demonstration = tr.ReplayBuffer(SPEC, args.size + 1, **options)
    demonstration.extend(**sea.dive(sea.guide, divers=1))
    online.extend(**sea.dive(q.act, args.divers, epsilon=1.0))
    shares = {buffer: share for buffer, share in ((online, 1 - args.share), (demonstration, args.share)) if share}
    # Nothing is drawn ahead: with one process and one thread, runs with the same seed are the same.
    dataset = tr.MixedDataset(shares, args.batch_size, steps=args.total_steps, prefetch=0)

    curves = SummaryWriter(f"runs/demonstrations-seed{args.seed}", purge_step=0) if args.tensorboard else None
    monitor, began = tr.Monitor(online, curves), time.monotonic()
    for step, batch in enumerate(dataset, start=1):
        td_error = td_errors(q, target, batch)
        loss = (batch["weight"] * F.huber_loss(td_error, torch.zeros_like(td_error), reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dataset.update_priorities(batch, td_error)

        if step % args.dive_every == 0:
            online.extend(**sea.dive(q.act, args.divers, args.epsilon))
        if step % args.target_every == 0:
            target.load_state_dict(q.state_dict())
        monitor.step(step)
        if step % args.eval_every == 0:
            mean_return = sea.dive(q.act, divers=1)["reward"].sum().item()  # there is no chance in it
            solved, seconds = mean_return > 0, time.monotonic() - began
            line = {"share": args.share, "seed": args.seed, "step": step, "mean_return": round(mean_return, 4)}
            print(json.dumps(line | {"seconds": round(seconds, 2), "solved": solved}), flush=True)
            if curves:
                curves.add_scalar("charts/mean_return", mean_return, step)
                curves.flush()
            if solved:
                break


if __name__ == "__main__":
    main(tyro.cli(Args))

"""Offline learning on CartPole-v1: CQL from recorded episodes, without a step in the environment.

A clumsy player, half of whose actions are random, plays some hundred episodes. They are kept in an HDF5 file: as Minari
lays it out, or flat, as D4RL does, one step after the other. The file is then read into a buffer. Double DQN with the
penalty of conservative Q-learning (Kumar et al. 2020, https://arxiv.org/abs/2006.04779, equation 4) learns from it
alone. The environment only shows how good the policy has become. `--data` takes a file of your own, of CartPole-v1.

    python examples/offline.py --seed 1
    python examples/offline.py --form flat
    python examples/offline.py --data main_data.hdf5
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium
import h5py
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr
from torchreplay.compat import minari


@dataclass
class Args:
    """Conservative Q-learning from recorded episodes of CartPole-v1."""

    seed: int = 0
    """seed of the player, the draws and the network"""
    total_steps: int = 4_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 500
    """learner steps between two evaluations"""
    solved_at: float = 475.0
    """mean return of an evaluation that ends the run"""
    data: str = ""
    """HDF5 file with recorded episodes of CartPole-v1, of either form; made in a temporary directory if not given"""
    form: Literal["minari", "flat"] = "minari"
    """form of the file that is made"""
    tensorboard: bool = True
    """whether to write curves to runs/offline-seed<seed>"""

    episodes: int = 300
    """episodes to record"""
    noise: float = 0.5
    """share of the player's actions that are random"""

    penalty: float = 0.5
    """weight of the conservative term; 0: plain double DQN"""
    n_step: int = 3
    """steps that a transition spans"""
    gamma: float = 0.99
    """discount of one step"""
    batch_size: int = 256
    """transitions in a batch"""
    learning_rate: float = 1e-3
    """of Adam"""
    target_every: int = 100
    """learner steps between two copies into the target network"""
    eval_episodes: int = 20
    """episodes of an evaluation, played side by side"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


def record(path: Path, args: Args) -> float:
    """Lets the player play, writes the episodes into a file, and returns their mean return."""
    rng = np.random.default_rng(args.seed)
    env = gymnasium.make("CartPole-v1")
    returns = []
    with tr.ReplayBuffer(tr.spec_from_env(env), 501 * args.episodes, view=tr.Transitions(), name="recorded") as buffer:
        with buffer.writer() as writer:
            for episode in range(args.episodes):
                obs, _ = env.reset(seed=args.seed * args.episodes + episode)
                writer.reset(obs=obs)
                returns.append(0.0)
                ended = False
                while not ended:
                    lean = obs[2] + 0.5 * obs[3]
                    action = int(rng.integers(2)) if rng.random() < args.noise else int(lean > 0)
                    obs, reward, terminated, truncated, _ = env.step(action)
                    writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
                    returns[-1] += float(reward)
                    ended = terminated or truncated
        if args.form == "flat":
            write_flat(buffer, path)
        else:
            minari.write(buffer, path)
    env.close()
    return float(np.mean(returns))


def write_flat(buffer: tr.ReplayBuffer, path: Path) -> None:
    """Writes the episodes of a buffer into a file as D4RL lays it out: arrays with one step after the other."""
    episodes = list(buffer.episodes())
    observations = [(episode["obs"][:-1], episode["obs"][1:]) for episode in episodes]
    with h5py.File(path, "x") as file:
        file["observations"], file["next_observations"] = (torch.cat(obs) for obs in zip(*observations, strict=True))
        for name, field in (("actions", "action"), ("rewards", "reward"), ("terminals", "terminated")):
            file[name] = torch.cat([episode[field] for episode in episodes])
        file["timeouts"] = torch.cat([episode["truncated"] for episode in episodes])


def filled_buffer(path: Path, view: tr.Transitions, seed: int) -> tr.ReplayBuffer:
    """Returns a buffer with the episodes of a file, of either form."""
    with h5py.File(path) as file:
        if "observations" in file:
            flat = tr.episodes_from_flat(file)
            print(flat, file=sys.stderr)
            spec = tr.spec_from_env(gymnasium.make("CartPole-v1"))
            buffer = tr.ReplayBuffer(spec, flat.rows, view=view, seed=seed, name="recorded")
            for episode in flat:
                buffer.extend(**episode)
            return buffer
    rows = sum(len(episode["obs"]) for episode in minari.episodes(path))
    buffer = tr.ReplayBuffer(minari.spec_of(path), rows, view=view, seed=seed, name="recorded")
    minari.read(path, buffer)
    return buffer


def losses(q: nn.Module, target: nn.Module, batch: tr.ReplayBatch, penalty: float) -> Tensor:
    """Returns the loss of each item, `[B]`: the squared TD error, and how far other actions are overrated."""
    with torch.no_grad():
        best = q(batch["next_obs"]).argmax(-1, keepdim=True)
        value = target(batch["next_obs"]).gather(-1, best).squeeze(-1)
        goal = batch["reward"] + batch["discount"] * value
    values = q(batch["obs"])
    taken = values.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    overrated = values.logsumexp(-1) - taken
    return F.huber_loss(taken, goal, reduction="none") + penalty * overrated


@torch.no_grad()
def evaluate(q: nn.Module, args: Args) -> float:
    """Returns the mean return of the greedy policy."""
    envs = gymnasium.make_vec("CartPole-v1", args.eval_episodes)
    obs, _ = envs.reset(seed=10_000 + args.seed)
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, bool)
    while running.any():
        obs, reward, terminated, truncated, _ = envs.step(q(torch.as_tensor(obs)).argmax(-1).numpy())
        returns += reward * running
        running &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


def train(args: Args, path: Path, recorded: float | None) -> None:
    """Learns from the file."""
    torch.manual_seed(args.seed)
    q = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.learning_rate)

    view = tr.Transitions(n_step=args.n_step, gamma=args.gamma)
    curves = SummaryWriter(f"runs/offline-seed{args.seed}", purge_step=0) if args.tensorboard else None
    with filled_buffer(path, view, args.seed) as buffer:
        monitor, began = tr.Monitor(buffer, curves), time.monotonic()
        for step, batch in enumerate(tr.ReplayDataset(buffer, args.batch_size, steps=args.total_steps), start=1):
            loss = losses(q, target, batch, args.penalty).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % args.target_every == 0:
                target.load_state_dict(q.state_dict())
            monitor.step(step)
            if step % args.eval_every == 0:
                mean_return, seconds = evaluate(q, args), time.monotonic() - began
                solved = mean_return >= args.solved_at
                line = {"step": step, "mean_return": round(mean_return, 2), "recorded": recorded and round(recorded, 2)}
                print(json.dumps(line | {"seconds": round(seconds, 2), "solved": solved}), flush=True)
                if curves:
                    curves.add_scalar("charts/mean_return", mean_return, step)
                    curves.flush()
                if solved:
                    break


def main(args: Args) -> None:
    """Records episodes where none are given, and learns from them."""
    torch.set_num_threads(1)  # the network is small
    with tempfile.TemporaryDirectory() as directory:
        path = Path(args.data or Path(directory) / "episodes.hdf5")
        train(args, path, None if args.data else record(path, args))


if __name__ == "__main__":
    main(tyro.cli(Args))

"""TD3+BC: continuous control from recorded arrays alone, as D4RL lays them out; without a step in the environment.

A minimalist approach to offline reinforcement learning (Fujimoto and Gu 2021, https://arxiv.org/abs/2106.06860): TD3
whose actor is also pulled to the recorded actions. A clumsy player, some of whose actions are random, plays MuJoCo's
InvertedPendulum-v5 in short episodes. They are written into an HDF5 file with D4RL's names: `observations`, `actions`,
`rewards`, `terminals` and `timeouts`. `tr.episodes_from_flat` makes episodes of them, and the buffer transitions:

- `terminals` become `terminated`: the pole fell, and what follows has no value.
- `timeouts` become `truncated`: the episode was cut, and the value of what follows counts.
- `next_obs` is the observation of the step after. The last one of an episode comes from `next_observations`, if the
  file has them. If not, a fall keeps its step, since its `discount` is 0. The last step before a timeout is left out.

`--data` takes a file of your own, and `--env` the environment that it is of:

    python examples/offline_continuous.py --seed 1
    python examples/offline_continuous.py --env Hopper-v5 --data hopper_medium-v2.hdf5 --total-steps 1000000
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import h5py
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr


@dataclass
class Args:
    """TD3+BC from recorded arrays of a task with continuous actions."""

    seed: int = 0
    """seed of the player, the draws, the networks and the evaluations"""
    env: str = "InvertedPendulum-v5"
    """environment of the data, for evaluations; without --data only the default, which the player knows"""
    data: str = ""
    """HDF5 file with D4RL's arrays; made in a temporary directory if not given"""
    total_steps: int = 20_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 500
    """learner steps between two evaluations"""
    eval_episodes: int = 20
    """episodes of an evaluation, played side by side"""
    solved_at: float | None = None
    """mean return of an evaluation that ends the run; None: the environment's own threshold"""
    tensorboard: bool = True
    """whether to write curves to runs/offline_continuous-seed<seed>"""

    recorded_steps: int = 10_000
    """steps that the player plays, in episodes of 100 at most"""
    noise: float = 0.3
    """share of the player's actions that are random"""

    alpha: float = 2.5
    """weight of the critic's value beside the recorded actions; 0: behavioural cloning alone"""
    gamma: float = 0.99
    """discount of one step"""
    batch_size: int = 256
    """transitions in a batch"""
    learning_rate: float = 3e-4
    """of Adam"""
    policy_delay: int = 2
    """learner steps to one of the actor"""
    target_noise: float = 0.2
    """standard deviation of the noise in the target's action, at most 0.5, in half ranges of the action"""
    tau: float = 0.005
    """share of the networks that goes into their targets at each step of the actor"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")
        if not self.data and self.env != Args.env:
            raise ValueError(f"env={self.env!r} without data: give --data, a file that was recorded there")


def record(path: Path, args: Args) -> None:
    """Lets the player play, and writes its steps into a file as D4RL lays them out: one after the other."""
    rng, env = np.random.default_rng(args.seed), gymnasium.make(args.env, max_episode_steps=100)
    steps = {name: [] for name in ("observations", "actions", "rewards", "terminals", "timeouts")}
    obs, _ = env.reset(seed=args.seed)
    for _ in range(args.recorded_steps):
        action = np.clip(obs @ [0.5, 10.0, 1.0, 1.5], -3, 3)  # of the cart, the angle and their velocities
        if rng.random() < args.noise:
            action = rng.uniform(-3, 3)
        action = np.array([action], np.float32)
        after, reward, terminated, truncated, _ = env.step(action)
        for column, value in zip(steps.values(), (obs, action, reward, terminated, truncated), strict=True):
            column.append(value)
        obs = env.reset()[0] if terminated or truncated else after
    with h5py.File(path, "x") as file:
        for name, column in steps.items():
            file[name] = np.array(column, bool if name in ("terminals", "timeouts") else np.float32)


def filled_buffer(path: str | Path, args: Args) -> tr.ReplayBuffer:
    """Returns a buffer with the episodes of a file."""
    flag = tr.Field((), torch.bool)
    with h5py.File(path) as file:
        flat = tr.episodes_from_flat(file, unknown_final="repeat")  # it logs what is left out
        spec = {"obs": tr.Field(file["observations"].shape[1]), "action": tr.Field(file["actions"].shape[1])}
        spec |= {"reward": tr.Field(), "terminated": flag, "truncated": flag}
        view = tr.Transitions(gamma=args.gamma)
        buffer = tr.ReplayBuffer(spec, flat.rows, view=view, sampler=tr.Uniform(), seed=args.seed, name="recorded")
        for episode in flat:
            buffer.extend(**episode)
    return buffer


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Returns a network, `[B, inputs]` to `[B, outputs]`."""
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs))


class Networks(nn.Module):
    """An actor and two critics. They see observations of mean 0 and deviation 1, and actions from -1 to 1."""

    def __init__(self, obs: Tensor, space: gymnasium.spaces.Box) -> None:
        super().__init__()
        low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
        for name, value in {"mean": obs.mean(0), "deviation": obs.std(0) + 1e-3, "low": low, "high": high}.items():
            self.register_buffer(name, value)
        inputs, actions = obs.shape[1], len(low)
        self.actor, self.critics = mlp(inputs, actions), nn.ModuleList(mlp(inputs + actions, 1) for _ in range(2))

    def act(self, obs: Tensor) -> Tensor:
        """Returns actions from -1 to 1, `[B, A]`."""
        return self.actor((obs - self.mean) / self.deviation).tanh()

    def values(self, obs: Tensor, action: Tensor) -> Tensor:
        """Returns what both critics say of actions from -1 to 1, `[2, B]`."""
        inputs = torch.cat([(obs - self.mean) / self.deviation, action], -1)
        return torch.stack([critic(inputs).squeeze(-1) for critic in self.critics])

    def scaled(self, action: Tensor) -> Tensor:
        """Returns the environment's actions as those from -1 to 1."""
        return 2 * (action - self.low) / (self.high - self.low) - 1

    def play(self, obs: np.ndarray) -> np.ndarray:
        """Returns the environment's actions."""
        with torch.no_grad():
            action = self.act(torch.as_tensor(obs, dtype=torch.float32))
        return (self.low + (action + 1) / 2 * (self.high - self.low)).numpy()


def critics_loss(networks: Networks, target: Networks, batch: tr.ReplayBatch, args: Args) -> Tensor:
    """Returns the loss of both critics (Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477, algorithm 1)."""
    with torch.no_grad():
        action = target.act(batch["next_obs"])
        noise = (args.target_noise * torch.randn_like(action)).clamp(-0.5, 0.5)
        value = target.values(batch["next_obs"], (action + noise).clamp(-1, 1)).amin(0)
        goal = batch["reward"] + batch["discount"] * value  # a discount of 0 where it terminated, not where it was cut
    values = networks.values(batch["obs"], networks.scaled(batch["action"]))
    return F.mse_loss(values, goal.expand(2, -1))


def actor_loss(networks: Networks, batch: tr.ReplayBatch, alpha: float) -> Tensor:
    """Returns the loss of the actor (equation 5): minus its value, and its distance from the recorded actions."""
    action = networks.act(batch["obs"])
    value = networks.values(batch["obs"], action)[0]
    distance = F.mse_loss(action, networks.scaled(batch["action"]))
    return distance - alpha * value.mean() / value.abs().mean().detach()


def evaluate(networks: Networks, args: Args) -> float:
    """Returns the mean return of the actor without noise."""
    envs = gymnasium.make_vec(args.env, args.eval_episodes)
    obs, _ = envs.reset(seed=10_000 + args.seed)
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, bool)
    while running.any():
        obs, reward, terminated, truncated, _ = envs.step(networks.play(obs))
        returns += reward * running
        running &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


def train(buffer: tr.ReplayBuffer, args: Args) -> None:
    """Learns from the buffer."""
    torch.manual_seed(args.seed)
    env = gymnasium.make(args.env)
    solved_at = env.spec.reward_threshold if args.solved_at is None else args.solved_at
    episodes = list(buffer.episodes())
    recorded = float(np.mean([episode["reward"].sum() for episode in episodes]))
    networks = Networks(torch.cat([episode["obs"] for episode in episodes]), env.action_space)
    target = copy.deepcopy(networks).requires_grad_(False)
    of_actor, of_critics = (
        torch.optim.Adam(part.parameters(), lr=args.learning_rate) for part in (networks.actor, networks.critics)
    )
    curves = SummaryWriter(f"runs/offline_continuous-seed{args.seed}", purge_step=0) if args.tensorboard else None
    monitor, began = tr.Monitor(buffer, curves), time.monotonic()
    for step, batch in enumerate(tr.ReplayDataset(buffer, args.batch_size, steps=args.total_steps), start=1):
        of_critics.zero_grad()
        critics_loss(networks, target, batch, args).backward()
        of_critics.step()
        if step % args.policy_delay == 0:
            of_actor.zero_grad()
            actor_loss(networks, batch, args.alpha).backward()
            of_actor.step()
            for slow, fast in zip(target.parameters(), networks.parameters(), strict=True):
                slow.data.lerp_(fast.data, args.tau)
        monitor.step(step)
        if step % args.eval_every == 0:
            mean_return, seconds = evaluate(networks, args), time.monotonic() - began
            solved = solved_at is not None and mean_return >= solved_at
            line = {"step": step, "mean_return": round(mean_return, 2), "recorded": round(recorded, 2)}
            print(json.dumps(line | {"seconds": round(seconds, 1), "solved": solved}), flush=True)
            if curves:
                curves.add_scalar("charts/mean_return", mean_return, step)
                curves.flush()
            if solved:
                return


def main(args: Args) -> None:
    """Records steps where none are given, and learns from them."""
    torch.set_num_threads(1)  # the networks are small
    with tempfile.TemporaryDirectory() as directory:
        path = Path(args.data or Path(directory) / "steps.hdf5")
        if not args.data:
            record(path, args)
        with filled_buffer(path, args) as buffer:
            train(buffer, args)


if __name__ == "__main__":
    main(tyro.cli(Args))

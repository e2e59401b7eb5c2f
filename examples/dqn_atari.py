"""Dueling double DQN on an Atari game's screen, with explorers that play several games side by side.

After Ape-X (Horgan et al. 2018, https://arxiv.org/abs/1803.00933) and the dueling network (Wang et al. 2016,
https://arxiv.org/abs/1511.06581). Explorers write every frame once; stacks of four frames and 5-step returns are built
when a batch is drawn: 2 KB a transition. On frames of 42 pixels two cores learn Road Runner in minutes, as far as the
score of a human tester (Mnih et al. 2015, https://doi.org/10.1038/nature14236).
"""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from ale_py.roms import get_all_rom_ids
from ale_py.vector_env import AtariVectorEnv
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr
from torchreplay.explorers import ExplorerContext, ExplorerPool
from torchreplay.plots import ReplayHistory, replay_health


@dataclass
class Args:
    """Ape-X dueling double DQN on an Atari game: explorers in plain processes, a plain loop."""

    seed: int = 0
    """seed of the network, the draws, the explorers and the evaluations"""
    total_steps: int = 100_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 2_000
    """learner steps between two evaluations"""
    eval_episodes: int = 10
    """games in an evaluation, played side by side"""
    solved_at: float = 7_845.0
    """mean return of an evaluation that ends the run: a human tester's score in Road Runner"""
    tensorboard: bool = True
    """whether to write curves to runs/dqn_atari-seed<seed>"""
    plot: str = ""
    """file for a picture of the run; empty for none"""
    game: str = "road_runner"
    """name of the game's ROM in ale-py, such as ms_pacman"""
    actions: tuple[int, ...] = ()
    """the game's actions to choose from, such as 0 2 3 in Pong, where firing does nothing; none for all"""
    max_frames: int = 18_000
    """frames of the emulator after which a game is cut short; one step takes four"""
    num_explorers: int = 2
    """explorer processes"""
    num_envs: int = 4
    """games that each explorer plays side by side"""
    n_step: int = 5
    """steps that a transition spans"""
    gamma: float = 0.99
    """discount of one step"""
    capacity: int = 100_000
    """frames that the buffer holds"""
    learning_starts: int = 5_000
    """transitions to wait for before the first learner step"""
    samples_per_insert: float = 8.0
    """how often each transition is drawn on average; whoever is ahead of this waits"""
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    """where the learner works; explorers act on the CPU"""
    batch_size: int = 64
    """transitions in a batch"""
    learning_rate: float = 3e-4
    """of Adam"""
    channels: int = 16
    """of the first convolution; the second has twice as many, the layers after it eight times as many"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")
        if self.game not in get_all_rom_ids():
            raise ValueError(f"unknown game {self.game!r}: expected the name of a ROM in ale-py, such as ms_pacman")
        every = range(AtariVectorEnv(self.game, 1, num_threads=1).single_action_space.n)
        if unknown := [action for action in self.actions if action not in every]:  # ale-py would wait for ever
            raise ValueError(f"unknown actions {unknown}: {self.game} has 0 to {every[-1]}")
        self.actions = self.actions or tuple(every)


STACK, SIDE = 4, 42  # frames that the network sees at once, and their height and width
# What a row of the buffer holds: one frame, and the action, reward and flags that led to it.
SPEC = {"obs": tr.Field((SIDE, SIDE), torch.uint8), "action": tr.Field((), torch.int64), "reward": tr.Field()}
SPEC |= {name: tr.Field((), torch.bool) for name in ("terminated", "truncated")}


class DuelingNetwork(nn.Module):
    """Action values of stacked frames, uint8 `[B, STACK, SIDE, SIDE]` to float32 `[B, actions]`."""

    def __init__(self, actions: int, channels: int) -> None:
        super().__init__()
        first = nn.Conv2d(STACK, channels, 4, stride=4, padding=1)
        second = nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1)
        self.features = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten())
        size, hidden = 2 * channels * 5 * 5, 8 * channels  # of 42 pixels the convolutions leave 11, then 5
        self.value = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.advantage = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, actions))

    def forward(self, frames: Tensor) -> Tensor:
        """Adds the value of the state and the advantages of the actions, which have mean 0 (Wang et al., eq. 9)."""
        features = self.features(frames.to(self.advantage[-1].weight.device).float().mul_(1 / 255))  # acting: from CPU
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(-1, keepdim=True)


class Games:
    """Games played side by side, preprocessed by ale-py as in Mnih et al. (2015), sticky actions off.

    A lost life ends an episode for the learner; the game goes on, and so does its return. `stacks` is what to act on,
    uint8 `[num_envs, STACK, SIDE, SIDE]`; an episode's first frame is repeated before it.
    """

    def __init__(self, args: Args, num_envs: int, seed: int) -> None:
        options = {"num_threads": 1, "img_height": SIDE, "img_width": SIDE, "stack_num": 1, "reward_clipping": False}
        options |= {"max_num_frames_per_episode": args.max_frames, "autoreset_mode": "SameStep"}
        self.env = AtariVectorEnv(args.game, num_envs, **options)
        self.actions = np.array(args.actions)
        frames, info = self.env.reset(seed=seed % 2**30)  # ale-py's seeds have 31 bits
        self.stacks, self.lives = np.repeat(frames, STACK, axis=1), info["lives"]

    def step(self, choices: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Takes a step in each environment; returns its row without the action, and where a whole game ended."""
        frames, reward, terminated, truncated, info = self.env.step(self.actions[choices])
        over = terminated | truncated
        terminated = terminated | (~over & (info["lives"] < self.lives))
        self.lives, ended = info["lives"], (terminated | truncated)[:, None, None, None]
        final = np.where(over[:, None, None, None], info["final_obs"], frames) if over.any() else frames
        self.stacks = np.where(ended, frames, np.concatenate([self.stacks[:, 1:], final], axis=1))
        flags = {"terminated": terminated, "truncated": truncated}
        return {"obs": frames[:, 0], "final_obs": final[:, 0], "reward": reward, **flags}, over


@torch.no_grad()
def act(q: nn.Module, stacks: np.ndarray, epsilons: np.ndarray | float, rng: np.random.Generator) -> np.ndarray:
    """Returns the best action of each environment, or any with the environment's probability epsilon, `[num_envs]`."""
    values = q(torch.from_numpy(stacks)).numpy(force=True)
    any_action = rng.integers(values.shape[1], size=len(values))
    return np.where(rng.random(len(values)) < epsilons, any_action, values.argmax(-1))


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    torch.set_num_threads(1)
    games, rng = Games(args, args.num_envs, ctx.seed), np.random.default_rng(ctx.seed)
    epsilons = 0.4 ** np.linspace(1, 8, ctx.num_explorers * args.num_envs)[ctx.index * args.num_envs :][: args.num_envs]
    policy = DuelingNetwork(len(args.actions), args.channels)
    returns, lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, int)
    writer = ctx.writer(games.env)
    writer.reset(obs=games.stacks[:, -1])
    while not ctx.stopped:
        ctx.pull_weights(policy)  # one atomic read when there is nothing newer
        action = act(policy, games.stacks, epsilons, rng)
        row, over = games.step(action)
        writer.step(action=action, **row | {"reward": np.clip(row["reward"], -1, 1)})
        returns, lengths = returns + row["reward"], lengths + 1
        ctx.record(episode_return=returns[over], episode_length=lengths[over])
        returns[over] = lengths[over] = 0


def evaluate(q: nn.Module, args: Args, seed: int) -> np.ndarray:
    """Returns the returns of games. One action in 100 is random: some games wait until the player fires."""
    games, rng = Games(args, args.eval_episodes, seed), np.random.default_rng(seed)
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    while running.any():
        row, over = games.step(act(q, games.stacks, 0.01, rng))
        returns += row["reward"] * running
        running &= ~over
    return returns


def td_errors(q: nn.Module, target: nn.Module, batch: tr.ReplayBatch) -> Tensor:
    """Returns the errors that double DQN (van Hasselt et al. 2016) makes small, `[B]`."""
    with torch.no_grad():
        best = q(batch["next_obs"]).argmax(-1, keepdim=True)
        goal = batch["reward"] + batch["discount"] * target(batch["next_obs"]).gather(-1, best).squeeze(-1)
    return goal - q(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)


def learn(q: nn.Module, pool: ExplorerPool, buffer: tr.ReplayBuffer, weights: tr.SharedWeights, args: Args) -> None:
    """The learner's loop."""
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    curves = SummaryWriter(f"runs/dqn_atari-seed{args.seed}", purge_step=0) if args.tensorboard else None
    monitor, history, began = tr.Monitor(buffer, curves), ReplayHistory(buffer), time.monotonic()
    batches = tr.ReplayDataset(buffer, args.batch_size, steps=args.total_steps, device=args.device)
    for step, batch in enumerate(batches, start=1):
        td_error = td_errors(q, target, batch)
        loss = (batch["weight"] * F.huber_loss(td_error, torch.zeros_like(td_error), reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        optimizer.step()
        buffer.update_priorities(batch, td_error)
        if step % 250 == 0:
            target.load_state_dict(q.state_dict())
        if step % 25 == 0:
            weights.publish(q)
            history.observe(batch)
        monitor.step(step)
        if step % args.eval_every == 0:
            mean_return = evaluate(q, args, args.seed + step).mean()
            stats, seconds, solved = buffer.stats(), time.monotonic() - began, bool(mean_return >= args.solved_at)
            line = {"step": step, "mean_return": mean_return, "rows": stats.inserted, "solved": solved}
            line |= {"samples_per_insert": round(stats.samples_per_insert, 2), "seconds": round(seconds, 1)}
            line |= {"steps_per_second": round(step / seconds, 1), "rows_per_second": round(stats.inserted / seconds)}
            print(json.dumps(line | {"bytes_per_row": round(buffer.nbytes / args.capacity)}), flush=True)
            if curves:
                curves.add_scalar("charts/mean_return", mean_return, step)
                curves.flush()
            history.record(step, mean_return, [explorer.mean_return for explorer in pool.stats()])
            if solved:
                break
    if args.plot and history.moments:
        Path(args.plot).parent.mkdir(parents=True, exist_ok=True)
        replay_health(history, args.plot, f"Ape-X plays {args.game.replace('_', ' ').title()}", args.solved_at)


def main(args: Args) -> None:
    """Learns a game."""
    torch.set_num_threads(1)  # the other cores are the explorers'
    torch.manual_seed(args.seed)
    q = DuelingNetwork(len(args.actions), args.channels).to(args.device)
    weights = tr.SharedWeights(q)
    buffer = tr.ReplayBuffer(
        SPEC,
        args.capacity,
        view=tr.Transitions(args.n_step, args.gamma, stack={"obs": STACK}),
        sampler=tr.Prioritized(alpha=0.6, beta=tr.LinearSchedule(0.4, 1.0, args.total_steps)),
        limiter=tr.SamplesPerInsert(args.samples_per_insert, args.learning_starts),
        seed=args.seed,
        name=args.game,
    )
    work = partial(explore, args=args)
    with ExplorerPool(work, args.num_explorers, buffer, weights, seed=args.seed) as pool:
        learn(q, pool, buffer, weights, args)


if __name__ == "__main__":
    main(tyro.cli(Args))

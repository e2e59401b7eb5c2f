"""R2D2 on a T-maze: recurrent Q-learning with stored state and burn-in, beside a network that cannot remember.

Recurrent Experience Replay in Distributed Reinforcement Learning (Kapturowski et al. 2019,
https://openreview.net/forum?id=r1lyTjAqYX) on one machine. The explorers write each observation once, and with each
step the state of the LSTM that chose its action. The learner draws overlapping sequences by priority and starts its
LSTM from the stored state. It unrolls the first `burn_in` steps only to bring that state up to date with its weights.
The paper's n-step returns and rescaled values are left out: short ways and small rewards do not need them.

The task is a T-maze, after Bakker (Reinforcement Learning with Long Short-Term Memory, NIPS 2001): who cannot remember
the first observation gets a mean return of at most 0, and who can may get 1. Most sequences begin after it: what was
seen there reaches them as the stored state only.

    python examples/r2d2_memory.py --seed 1
    python examples/r2d2_memory.py --networks lstm,feedforward
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from command_line import parse
from progress import Progress
from torch import Tensor, nn

import torchreplay as tr
from torchreplay.plots import LIGHT, ReplayHistory, style
from torchreplay.ray import ExplorerContext, ExplorerPool


@dataclass
class Args:
    """R2D2 on a T-maze: LSTM with stored state and burn-in, Ray explorers, a plain loop."""

    seed: int = 0
    """seed of the network, the draws, the explorers and the evaluations"""
    total_steps: int = 2_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 100
    """learner steps between two evaluations"""
    eval_episodes: int = 50
    """greedy episodes in an evaluation, an even number: half of them with either cue"""
    solved_at: float = 0.95
    """mean return of an evaluation that ends the run"""
    networks: str = "lstm"
    """lstm; or feedforward, the control that cannot remember; or both, one after the other: lstm,feedforward"""
    plot: str = "r2d2_memory.png"
    """file for the picture of the learning curves; empty for none"""

    corridor: int = 20
    """steps from the cue to the junction at most; each episode draws its own number, at least half of that"""
    num_explorers: int = 2
    """explorer processes"""
    epsilon: float = 0.4
    """base of the explorers' epsilons: epsilon ** (1 + 7 i / (num_explorers - 1))"""
    gamma: float = 0.97
    """discount of one step"""

    length: int = 10
    """steps of a sequence that are learned from"""
    burn_in: int = field(default=5, metadata={"least": 0})
    """steps before those, which only bring the stored state up to date"""
    capacity: int = 10_000
    """observations that the buffer holds"""
    learning_starts: int = 500
    """sequences to wait for before the first learner step"""
    samples_per_insert: float = 8.0
    """how often each sequence is drawn on average; whoever is ahead of this waits"""
    alpha: float = 0.9
    """how strongly TD errors are preferred: 0 uniform, 1 proportional"""
    beta: float = 0.6
    """correction of that bias"""
    eta: float = 0.9
    """share of the largest TD error in a sequence's priority, beside the mean"""

    batch_size: int = 64
    """sequences in a batch"""
    learning_rate: float = 1e-3
    """of Adam"""
    target_every: int = 50
    """learner steps between two copies into the target network"""
    publish_every: int = 10
    """learner steps between two publications of the weights"""


FORWARD, UP, DOWN = range(3)
CUE_UP, CUE_DOWN, CORRIDOR, JUNCTION = range(4)  # what can be seen, as the place of the one in an observation


class TMaze(gym.Env[np.ndarray, int]):
    """A corridor that ends in a junction; which way to turn there is shown at its start only.

    A right turn gives 1 and a wrong one -1; a step against a wall gives -1/8 and leads nowhere. An episode is cut eight
    steps after the longest way, so that who never turns has met eight walls. Hence the bound: a policy of the present
    observation turns alike after both cues, and so pays -1 after one of them.

    Args:
        corridor: Steps to the junction at most.
    """

    observation_space = gym.spaces.Box(0.0, 1.0, (4,))
    action_space = gym.spaces.Discrete(3)

    def __init__(self, corridor: int) -> None:
        self.corridor = corridor

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode; `options={"turn": UP}` chooses the right turn, which is drawn otherwise."""
        super().reset(seed=seed)
        self.way = int(self.np_random.integers(self.corridor // 2, self.corridor + 1))
        self.turn = int((options or {}).get("turn", self.np_random.choice([UP, DOWN])))
        self.place, self.steps = 0, 0
        return self._look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Walks or turns."""
        self.steps += 1
        truncated = self.steps == self.corridor + 8
        if self.place == self.way and action != FORWARD:
            return self._look(), 1.0 if action == self.turn else -1.0, True, False, {}
        if self.place < self.way and action == FORWARD:
            self.place += 1
            return self._look(), 0.0, False, truncated, {}
        return self._look(), -0.125, False, truncated, {}

    def _look(self) -> np.ndarray:
        cue = CUE_UP if self.turn == UP else CUE_DOWN
        seen = JUNCTION if self.place == self.way else CORRIDOR if self.place > 0 else cue
        return np.eye(4, dtype=np.float32)[seen]


HIDDEN = 32


class QNetwork(nn.Module):
    """Action values `[B, T, 3]` of observations `[B, T, 4]`, and the state `[B, 2, HIDDEN]` of the LSTM after them.

    Args:
        kind: `lstm`, or `feedforward`, which hands the state on as it came.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(4, HIDDEN), nn.ReLU())
        self.memory = nn.LSTM(HIDDEN, HIDDEN, batch_first=True) if kind == "lstm" else None
        if self.memory is not None:
            # The forget gates start almost open: a memory lasts about 1 / (1 - sigmoid(3)) = 21 steps, as long as an
            # episode (Tallec and Ollivier 2018, https://arxiv.org/abs/1804.11188).
            self.memory.bias_ih_l0.data[HIDDEN : 2 * HIDDEN] = 3.0
        self.value = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3))

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Unrolls the network over the observations, from `state`."""
        x = self.encode(obs)
        if self.memory is not None:
            h, c = state.transpose(0, 1).contiguous().split(1)
            x, (h, c) = self.memory(x, (h, c))
            state = torch.cat([h, c]).transpose(0, 1)
        return self.value(x), state

    @torch.no_grad()
    def act(self, obs: np.ndarray, state: Tensor) -> tuple[int, Tensor]:
        """Returns the best action for one observation, and the next state."""
        q, state = self(torch.from_numpy(obs)[None, None], state)
        return int(q.argmax()), state


START = torch.zeros(1, 2, HIDDEN)  # the state before an episode's first observation

# What a row of the buffer holds: an observation, and the step that led to it with the state that the step began with.
SPEC = {
    "obs": tr.Field((4,)),
    "action": tr.Field((), torch.int64),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
    "state": tr.Field((2, HIDDEN)),
}


def explore(ctx: ExplorerContext, kind: str, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    env = TMaze(args.corridor)
    rng = np.random.default_rng(ctx.seed)
    epsilon = args.epsilon ** (1 + 7 * ctx.index / max(ctx.num_explorers - 1, 1))
    policy = QNetwork(kind).requires_grad_(False)
    writer = ctx.writer()

    env.reset(seed=ctx.seed)
    while not ctx.stopped:
        obs, _ = env.reset()
        state, done, episode_return, episode_length = START, False, 0.0, 0
        writer.reset(obs=obs)
        while not done and not ctx.stopped:
            ctx.pull_weights(policy)  # one atomic read when there is nothing newer
            action, next_state = policy.act(obs, state)
            if rng.random() < epsilon:
                action = int(rng.integers(3))
            obs, reward, terminated, truncated, _ = env.step(action)
            writer.step(
                obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated, state=state[0]
            )
            state, done = next_state, terminated or truncated
            episode_return, episode_length = episode_return + reward, episode_length + 1
        if done:
            ctx.record(episode_return=episode_return, episode_length=episode_length)


def unroll(q: QNetwork, batch: tr.ReplayBatch, burn_in: int) -> Tensor:
    """Returns the action values of all observations, `[B, T + 1, 3]`; no gradient passes through a burn-in.

    A sequence that begins with its episode has the right state already: its first steps are learned from as well.
    """
    if burn_in == 0:  # an LSTM takes no sequence of no steps
        return q(batch["obs"], batch["state"])[0]
    first_values, state = q(batch["obs"][:, :burn_in], batch["state"])
    begins = batch["is_first"][:, 0, None, None]
    last_values, _ = q(batch["obs"][:, burn_in:], torch.where(begins, state, state.detach()))
    return torch.cat([first_values, last_values], dim=1)


def td_errors(q: QNetwork, target: QNetwork, batch: tr.ReplayBatch, args: Args) -> tuple[Tensor, Tensor]:
    """Returns the errors that double DQN (van Hasselt et al. 2016) makes small, and the steps they are of.

    Both are `[B, T]`; the errors are 0 elsewhere: beyond an episode's end, and in a burn-in.
    """
    values = unroll(q, batch, args.burn_in)
    with torch.no_grad():
        best = values[:, 1:].argmax(-1, keepdim=True)
        value = unroll(target, batch, args.burn_in)[:, 1:].gather(-1, best).squeeze(-1)
        goal = batch["reward"] + args.gamma * ~batch["terminated"] * value
    error = goal - values[:, :-1].gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    past_burn_in = torch.arange(error.shape[1]) >= args.burn_in
    learned = batch["mask"] & (past_burn_in | batch["is_first"][:, :1])
    return torch.where(learned, error, 0.0), learned


def learn(q: QNetwork, buffer: tr.ReplayBuffer, weights: tr.SharedWeights, progress: Progress, args: Args) -> None:
    """The learner's loop."""
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.learning_rate)
    for step, batch in enumerate(tr.ReplayDataset(buffer, args.batch_size, steps=args.total_steps), start=1):
        error, learned = td_errors(q, target, batch, args)
        loss = (batch["weight"].unsqueeze(-1) * F.huber_loss(error, torch.zeros_like(error), reduction="none")).sum()
        optimizer.zero_grad()
        (loss / learned.sum()).backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        optimizer.step()
        buffer.update_priorities(batch, tr.sequence_priority(error.detach(), learned, args.eta))

        if step % args.target_every == 0:
            target.load_state_dict(q.state_dict())
        if step % args.publish_every == 0:
            weights.publish(q)
        progress.learned(step, batch)
        if step % args.eval_every == 0:
            returns = evaluate(q, args.corridor, args.eval_episodes, seed=args.seed + step)
            if progress.evaluated(step, returns.mean()):
                return


def evaluate(q: QNetwork, corridor: int, episodes: int, seed: int) -> np.ndarray:
    """Returns the returns of greedy episodes, with each cue in turn: without memory their mean is at most 0."""
    env = TMaze(corridor)
    env.reset(seed=seed)
    returns = np.zeros(episodes)
    for episode in range(episodes):
        obs, _ = env.reset(options={"turn": (UP, DOWN)[episode % 2]})
        state, done = START, False
        while not done:
            action, state = q.act(obs, state)
            obs, reward, terminated, truncated, _ = env.step(action)
            returns[episode] += reward
            done = terminated or truncated
    return returns


def train(kind: str, args: Args) -> ReplayHistory:
    """Learns the T-maze with one kind of network; returns how that went."""
    torch.manual_seed(args.seed)
    q = QNetwork(kind)
    weights = tr.SharedWeights(q)
    buffer = tr.ReplayBuffer(
        SPEC,
        args.capacity,
        view=tr.Sequences(args.length, stride=args.length // 2, burn_in=args.burn_in, initial=("state",)),
        sampler=tr.Prioritized(args.alpha, args.beta),
        limiter=tr.SamplesPerInsert(args.samples_per_insert, args.learning_starts),
        seed=args.seed,
    )
    pool = ExplorerPool(partial(explore, kind=kind, args=args), args.num_explorers, buffer, weights, seed=args.seed)
    progress = Progress(
        f"R2D2 on a T-maze: {kind}",
        buffer,
        args.total_steps,
        args.solved_at,
        explorer_returns=lambda: [explorer.mean_return for explorer in pool.stats()],
    )
    with progress, pool:
        learn(q, buffer, weights, progress, args)
    progress.summarize("")
    return progress.history


def draw(histories: dict[str, ReplayHistory], path: str) -> None:
    """Draws the learning curves into the file `path`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(style(LIGHT)):
        figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
        axes = figure.subplots()
        axes.set(title="R2D2 on a T-maze", xlabel="learner step", ylabel="mean return of a greedy episode")
        axes.axhline(0.0, color=LIGHT.ink, linestyle="--", linewidth=1.2, label="best without memory", zorder=3)
        for (kind, history), color in zip(histories.items(), (LIGHT.main, LIGHT.other), strict=False):
            steps = [moment.step for moment in history.moments]
            returns = [moment.mean_return for moment in history.moments]
            axes.plot(steps, returns, color=color, linewidth=2, marker="o", markersize=4, label=kind)
        axes.set_xlim(left=0)
        figure.legend(loc="outside lower center", ncols=4, fontsize=8.5)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def main(args: Args) -> None:
    """Learns the T-maze with each of the networks."""
    torch.set_num_threads(1)  # the network is small, and the explorers want the other cores
    kinds = args.networks.split(",")
    if unknown := set(kinds) - {"lstm", "feedforward"}:
        raise SystemExit(f"unknown networks: {', '.join(sorted(unknown))}; see --help")
    histories = {kind: train(kind, args) for kind in kinds}
    if args.plot:
        draw(histories, args.plot)


if __name__ == "__main__":
    main(parse(Args))

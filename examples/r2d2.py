"""R2D2 on a T-maze: recurrent Q-learning with stored state and burn-in, beside a network that cannot remember.

After Kapturowski et al. (2019, https://openreview.net/forum?id=r1lyTjAqYX). Explorers write with each step the state of
their LSTM. The learner draws sequences by priority, and brings the stored state up to date by `burn_in` steps.

    python examples/r2d2.py --seed 1
    python examples/r2d2.py --network feedforward
"""

import copy
import json
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr
from torchreplay.explorers import ExplorerContext, ExplorerPool


@dataclass
class Args:
    """R2D2 on a T-maze: LSTM with stored state and burn-in, explorers in plain processes, a plain loop."""

    seed: int = 0
    """seed of the network, the draws, the explorers and the evaluations"""
    network: Literal["lstm", "feedforward"] = "lstm"
    """feedforward is the control that cannot remember"""
    total_steps: int = 2_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 100
    """learner steps between two evaluations"""
    solved_at: float = 0.95
    """mean return of an evaluation that ends the run"""
    tensorboard: bool = True
    """whether to write curves to runs/r2d2-<network>-seed<seed>"""
    corridor: int = 20
    """steps from the cue to the junction at most; each episode draws its own number, at least half of that"""
    num_explorers: int = 2
    """explorer processes"""
    gamma: float = 0.97
    """discount of one step"""
    length: int = 10
    """steps of a sequence that are learned from"""
    burn_in: int = 5
    """steps before those, which only bring the stored state up to date"""
    stored_state: bool = True
    """--no-stored-state: each sequence starts from the state of an episode's start"""
    eta: float = 0.9
    """share of the largest error in a sequence's priority; the rest is the mean"""
    learning_starts: int = 500
    """sequences to wait for before the first learner step"""
    samples_per_insert: float = 8.0
    """how often each sequence is drawn on average; whoever is ahead of this waits"""
    batch_size: int = 64
    """sequences in a batch"""
    learning_rate: float = 1e-3
    """of Adam"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name in ("seed", "burn_in") else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


FORWARD, UP, DOWN = range(3)
CUE_UP, CUE_DOWN, CORRIDOR, JUNCTION = range(4)  # what can be seen, as the place of the one in an observation


class TMaze(gym.Env[np.ndarray, int]):
    """A corridor to a junction, where the start's cue says which way to turn (after Bakker 2001).

    A right turn gives 1, a wrong one -1, a step against a wall -1/8; an episode is cut eight steps after the longest
    way. So a policy of the present observation gets at most 0 on average: it turns alike after both cues, or never.
    """

    observation_space = gym.spaces.Box(0.0, 1.0, (4,))
    action_space = gym.spaces.Discrete(3)

    def __init__(self, corridor: int) -> None:
        self.corridor = corridor

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Starts an episode; `options={"turn": UP}` chooses the right turn, which is drawn otherwise."""
        super().reset(seed=seed)
        self.way = int(self.np_random.integers(self.corridor // 2, self.corridor + 1))
        self.turn = int((options or {}).get("turn", self.np_random.choice([UP, DOWN])))
        self.place, self.steps = 0, 0
        return self._look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Walks or turns."""
        self.steps += 1
        if self.place == self.way and action != FORWARD:
            return self._look(), 1.0 if action == self.turn else -1.0, True, False, {}
        walks = self.place < self.way and action == FORWARD
        self.place += walks
        return self._look(), 0.0 if walks else -0.125, False, self.steps == self.corridor + 8, {}

    def _look(self) -> np.ndarray:
        cue = CUE_UP if self.turn == UP else CUE_DOWN
        return np.eye(4, dtype=np.float32)[JUNCTION if self.place == self.way else CORRIDOR if self.place else cue]


HIDDEN = 32
START = torch.zeros(1, 2, HIDDEN)  # the LSTM's state before an episode's first observation
# What a row of the buffer holds: an observation, and the step that led to it with the state that the step began with.
SPEC = tr.spec_from_env(TMaze(1)) | {"state": tr.Field((2, HIDDEN))}


class QNetwork(nn.Module):
    """Action values `[B, T, 3]` of observations `[B, T, 4]`, and the state `[B, 2, HIDDEN]` of the LSTM after them."""

    def __init__(self, network: str) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(4, HIDDEN), nn.ReLU())
        self.memory = nn.LSTM(HIDDEN, HIDDEN, batch_first=True) if network == "lstm" else None
        if self.memory is not None:
            # Forget gates start almost open: a memory lasts 1 / (1 - sigmoid(3)) = 21 steps (Tallec and Ollivier 2018).
            self.memory.bias_ih_l0.data[HIDDEN : 2 * HIDDEN] = 3.0
        self.value = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3))

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Unrolls the network over the observations, from `state`."""
        x = self.encode(obs)
        if self.memory is not None and obs.shape[1]:  # an LSTM takes no sequence of no steps
            x, after = self.memory(x, tuple(state.transpose(0, 1).contiguous().split(1)))
            state = torch.cat(after).transpose(0, 1)
        return self.value(x), state

    @torch.no_grad()
    def act(self, obs: np.ndarray, state: Tensor) -> tuple[int, Tensor]:
        """Returns the best action for one observation, and the next state."""
        q, state = self(torch.from_numpy(obs)[None, None], state)
        return int(q.argmax()), state


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    env, rng = TMaze(args.corridor), np.random.default_rng(ctx.seed)
    epsilon = 0.4 ** (1 + 7 * ctx.index / max(ctx.num_explorers - 1, 1))
    policy, writer = QNetwork(args.network).requires_grad_(False), ctx.writer()
    obs, state = env.reset(seed=ctx.seed)[0], START
    writer.reset(obs=obs)
    while not ctx.stopped:
        ctx.pull_weights(policy)  # one atomic read when there is nothing newer
        action, next_state = policy.act(obs, state)
        action = int(rng.integers(3)) if rng.random() < epsilon else action
        obs, reward, terminated, truncated, _ = env.step(action)
        writer.step(obs=obs, action=action, reward=reward, state=state[0], terminated=terminated, truncated=truncated)
        state = next_state
        if terminated or truncated:
            obs, state = env.reset()[0], START
            writer.reset(obs=obs)


def unroll(q: QNetwork, batch: tr.ReplayBatch, args: Args) -> Tensor:
    """Returns the action values of all observations, `[B, T + 1, 3]`; no gradient passes through a burn-in."""
    start, burn_in = batch["state"] if args.stored_state else torch.zeros_like(batch["state"]), args.burn_in
    first_values, state = q(batch["obs"][:, :burn_in], start)
    # A sequence that begins with its episode has the right state already: its first steps are learned from as well.
    state = torch.where(batch["is_first"][:, 0, None, None], state, state.detach())
    last_values, _ = q(batch["obs"][:, burn_in:], state)
    return torch.cat([first_values, last_values], dim=1)


def td_errors(q: QNetwork, target: QNetwork, batch: tr.ReplayBatch, args: Args) -> tuple[Tensor, Tensor]:
    """Returns double DQN's errors and the steps they are of, `[B, T]`; 0 beyond an episode's end and in a burn-in."""
    values = unroll(q, batch, args)
    with torch.no_grad():
        best = values[:, 1:].argmax(-1, keepdim=True)
        value = unroll(target, batch, args)[:, 1:].gather(-1, best)
        goal = batch["reward"] + args.gamma * ~batch["terminated"] * value.squeeze(-1)
    error = goal - values[:, :-1].gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    learned = batch["mask"] & ((torch.arange(error.shape[1]) >= args.burn_in) | batch["is_first"][:, :1])
    return torch.where(learned, error, 0.0), learned


def evaluate(q: QNetwork, corridor: int, seed: int) -> np.ndarray:
    """Returns the returns of 50 greedy episodes, with each cue in turn: without memory their mean is at most 0."""
    env, returns = TMaze(corridor), np.zeros(50)
    for episode in range(50):
        obs, _ = env.reset(seed=seed + episode, options={"turn": (UP, DOWN)[episode % 2]})
        state, ended = START, [False]
        while not any(ended):
            action, state = q.act(obs, state)
            obs, reward, *ended, _ = env.step(action)
            returns[episode] += reward
    return returns


def learn(q: QNetwork, buffer: tr.ReplayBuffer, weights: tr.SharedWeights, args: Args) -> None:
    """The learner's loop."""
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.learning_rate)
    curves = SummaryWriter(f"runs/r2d2-{args.network}-seed{args.seed}", purge_step=0) if args.tensorboard else None
    monitor, began = tr.Monitor(buffer, curves), time.monotonic()
    for step, batch in enumerate(tr.ReplayDataset(buffer, args.batch_size, steps=args.total_steps), start=1):
        error, learned = td_errors(q, target, batch, args)
        loss = (batch["weight"].unsqueeze(-1) * F.huber_loss(error, torch.zeros_like(error), reduction="none")).sum()
        optimizer.zero_grad()
        (loss / learned.sum()).backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        optimizer.step()
        buffer.update_priorities(batch, tr.sequence_priority(error.detach(), learned, args.eta))
        if step % 50 == 0:
            target.load_state_dict(q.state_dict())
        weights.publish(q)
        monitor.step(step)
        if step % args.eval_every == 0:
            mean_return = evaluate(q, args.corridor, seed=args.seed + 1_000 * step).mean()
            solved = bool(mean_return >= args.solved_at)
            line = {"step": step, "mean_return": mean_return, "rows": buffer.stats().inserted, "solved": solved}
            print(json.dumps(line | {"seconds": round(time.monotonic() - began, 1)}), flush=True)
            if curves:
                curves.add_scalar("charts/mean_return", mean_return, step)
                curves.flush()
            if solved:
                return


def main(args: Args) -> None:
    """Learns the T-maze."""
    torch.set_num_threads(1)  # the network is small, and the explorers want the other cores
    torch.manual_seed(args.seed)
    weights = tr.SharedWeights(q := QNetwork(args.network))
    buffer = tr.ReplayBuffer(
        SPEC,
        capacity=10_000,
        view=tr.Sequences(args.length, stride=max(args.length // 2, 1), burn_in=args.burn_in, initial=("state",)),
        sampler=tr.Prioritized(alpha=0.9, beta=0.6),  # the paper's
        limiter=tr.SamplesPerInsert(args.samples_per_insert, args.learning_starts),
        seed=args.seed,
        name="T-maze",
    )
    work = partial(explore, args=args)
    with ExplorerPool(work, args.num_explorers, buffer, weights, seed=args.seed):
        learn(q, buffer, weights, args)


if __name__ == "__main__":
    main(tyro.cli(Args))

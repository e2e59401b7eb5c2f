"""Ape-X dueling double DQN on an Atari game's screen, with Ray explorers and a Lightning learner.

Distributed Prioritized Experience Replay (Horgan et al. 2018, https://arxiv.org/abs/1803.00933) on one machine, as in
apex_cartpole.py, with the dueling network (Wang et al. 2016, https://arxiv.org/abs/1511.06581). Each explorer plays
several games side by side and writes every frame once. The stacks of four frames and the 3-step returns are built when
a batch is drawn. A few thousand steps show the throughput and the memory of a transition; Pong takes more patience:

    python examples/apex_atari.py --total-steps 1000 --eval-every 500
    python examples/apex_atari.py --actions 0,2,3
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from ale_py.vector_env import AtariVectorEnv
from command_line import parse
from progress import Progress
from torch import Tensor, nn

import torchreplay as tr
from torchreplay.lightning import PriorityFeedback, ReplayDataModule, WeightPublisher
from torchreplay.ray import ExplorerContext, ExplorerPool


@dataclass
class Args:
    """Ape-X dueling double DQN on an Atari game: Ray explorers, Lightning learner."""

    seed: int = 0
    """seed of the network, the draws, the explorers and the evaluations"""
    total_steps: int = 60_000
    """learner steps at most; the run ends earlier once it is solved"""
    minutes: float = 600.0
    """minutes of learning at most"""
    eval_every: int = 1_500
    """learner steps between two evaluations"""
    eval_episodes: int = 4
    """games in an evaluation, played side by side"""
    solved_at: float = 18.0
    """mean return of an evaluation that ends the run"""
    plot: str = "apex_atari.png"
    """file for the picture of the run; empty for none"""

    game: str = "pong"
    """name of the game's ROM in ale-py, such as ms_pacman"""
    actions: str = ""
    """the game's actions to choose from, such as 0,2,3 in Pong, where firing does nothing; empty for all"""
    max_frames: int = 108_000
    """frames of the emulator after which a game is cut short; one step takes four"""

    num_explorers: int = 2
    """explorer processes"""
    num_envs: int = 4
    """games that each explorer plays side by side"""
    epsilon: float = 0.4
    """base of the games' epsilons: epsilon ** (1 + 7 i / (num_explorers * num_envs - 1))"""
    n_step: int = 3
    """steps that a transition spans"""
    gamma: float = 0.99
    """discount of one step"""

    capacity: int = 100_000
    """frames that the buffer holds"""
    learning_starts: int = 5_000
    """transitions to wait for before the first learner step"""
    samples_per_insert: float = 4.0
    """how often each transition is drawn on average; whoever is ahead of this waits"""
    alpha: float = 0.6
    """how strongly TD errors are preferred: 0 uniform, 1 proportional"""
    beta: float = 0.4
    """initial correction of that bias, annealed to 1 over total_steps"""

    batch_size: int = 32
    """transitions in a batch"""
    learning_rate: float = 5e-4
    """of Adam"""
    target_every: int = 250
    """learner steps between two copies into the target network"""
    publish_every: int = 25
    """learner steps between two publications of the weights"""
    channels: int = 16
    """of the first convolution; the second has twice as many"""
    hidden: int = 128
    """units of the value's hidden layer, and of the advantages'"""


STACK, SIDE = 4, 84  # frames that the network sees at once, and their height and width

# What a row of the buffer holds: one frame, and the action, reward and flags that led to it.
SPEC = {
    "obs": tr.Field((SIDE, SIDE), torch.uint8),
    "action": tr.Field((), torch.int64),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}


class DuelingNetwork(nn.Module):
    """Action values of stacked frames, uint8 `[B, STACK, SIDE, SIDE]` to float32 `[B, actions]`."""

    def __init__(self, actions: int, channels: int, hidden: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(STACK, channels, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 4, stride=2),
            nn.ReLU(),
            nn.Flatten(),
        )
        size = 2 * channels * 9 * 9  # of 84 pixels the convolutions leave 20, then 9
        self.value = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.advantage = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, actions))

    def forward(self, frames: Tensor) -> Tensor:
        """Adds the value of the state and the advantages of the actions, which have mean 0 (Wang et al., eq. 9)."""
        features = self.features(frames.float() / 255)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(-1, keepdim=True)


class Step(NamedTuple):
    """What a step of `Games` led to, by environments; the last frame of a stack is the new one."""

    obs: Tensor  # uint8 [num_envs, STACK, SIDE, SIDE]: what to act on next, in a new episode where the last one ended
    final_obs: Tensor  # what the step itself led to
    reward: np.ndarray  # the game's own, not clipped
    terminated: np.ndarray
    truncated: np.ndarray
    over: np.ndarray  # where the whole game ended, and another has begun


class Games:
    """Games played side by side, preprocessed by ale-py as in Mnih et al. (2015), sticky actions off.

    A lost life ends an episode for the learner; the game goes on, and so does the return that is reported.
    """

    def __init__(self, args: Args, num_envs: int) -> None:
        self.env = AtariVectorEnv(
            args.game,
            num_envs,
            num_threads=1,
            stack_num=1,
            reward_clipping=False,
            max_num_frames_per_episode=args.max_frames,
            autoreset_mode="SameStep",
        )
        self.actions = actions_of(args)
        self.stacks = np.zeros((num_envs, STACK, SIDE, SIDE), np.uint8)

    def reset(self, seed: int) -> Tensor:
        """Begins a game in each environment; returns the stacks, in which its first frame is repeated."""
        frames, info = self.env.reset(seed=seed)
        self.stacks[:], self.lives = frames, info["lives"]
        return torch.from_numpy(self.stacks.copy())

    def step(self, choices: np.ndarray) -> Step:
        """Takes a step in each environment; `choices` are indices into `actions`."""
        frames, reward, terminated, truncated, info = self.env.step(self.actions[choices])
        over = terminated | truncated
        terminated = terminated | (~over & (info["lives"] < self.lives))
        ended, self.lives = terminated | truncated, info["lives"]

        self.stacks[:, :-1] = self.stacks[:, 1:]
        self.stacks[:, -1:] = np.where(over[:, None, None, None], info["final_obs"], frames) if over.any() else frames
        final_obs = torch.from_numpy(self.stacks.copy())
        self.stacks[ended] = frames[ended]
        obs = torch.from_numpy(self.stacks.copy()) if ended.any() else final_obs
        return Step(obs, final_obs, reward, terminated, truncated, over)


def actions_of(args: Args) -> np.ndarray:
    """Returns which of the game's actions the network chooses from."""
    every = [str(action) for action in range(AtariVectorEnv(args.game, 1, num_threads=1).single_action_space.n)]
    chosen = args.actions.split(",") if args.actions else every
    if unknown := [action for action in chosen if action not in every]:  # ale-py would wait for ever for its step
        raise SystemExit(f"unknown actions: {', '.join(map(repr, unknown))}; {args.game} has 0 to {every[-1]}")
    return np.array(chosen, int)


def epsilon_greedy(q: Tensor, epsilons: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the best action of each environment `[num_envs]`, or any with the environment's probability epsilon."""
    num_envs, actions = q.shape
    return np.where(rng.random(num_envs) < epsilons, rng.integers(actions, size=num_envs), q.argmax(-1).numpy())


class FirstPriorities:
    """The |TD errors| of the items that each step completes, one number for each environment.

    A step completes the item n steps back. A step that ends the episode completes all nearer ones too. The writer takes
    one number for all of them: the largest.
    """

    def __init__(self, args: Args) -> None:
        self.gamma = args.gamma
        self.windows = [deque[tuple[float, float]](maxlen=args.n_step) for _ in range(args.num_envs)]

    def __call__(
        self, q: np.ndarray, reward: np.ndarray, value: np.ndarray, terminated: np.ndarray, truncated: np.ndarray
    ) -> np.ndarray:
        """Takes the value `q` of the action taken, and the `value` of what it led to; everything is `[num_envs]`."""
        priorities = np.zeros(len(self.windows))
        for i, window in enumerate(self.windows):
            window.append((reward[i], q[i]))
            goal, errors = value[i] * (not terminated[i]), []
            for step_reward, step_q in reversed(window):
                goal = step_reward + self.gamma * goal
                errors.append(abs(goal - step_q))
            ended = terminated[i] or truncated[i]
            priorities[i] = max(errors) if ended else errors[-1]
            if ended:
                window.clear()
        return priorities


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    torch.set_num_threads(1)
    games, rng = Games(args, args.num_envs), np.random.default_rng(ctx.seed)
    i = np.arange(args.num_envs) + ctx.index * args.num_envs
    epsilons = args.epsilon ** (1 + 7 * i / max(ctx.num_explorers * args.num_envs - 1, 1))
    policy = DuelingNetwork(len(games.actions), args.channels, args.hidden).requires_grad_(False)
    ctx.pull_weights(policy)
    first_priorities = FirstPriorities(args)
    returns, lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, int)

    writer = ctx.writer(num_envs=args.num_envs, autoreset="same_step")
    obs = games.reset(ctx.seed % 2**30)  # ale-py's seeds have 31 bits, and each environment gets its own
    writer.reset(obs=obs[:, -1])
    q = policy(obs)
    while not ctx.stopped:
        action = epsilon_greedy(q, epsilons, rng)
        step = games.step(action)
        ctx.pull_weights(policy)  # one atomic read when there is nothing newer
        next_q = policy(step.final_obs)
        q_taken = q.numpy()[np.arange(args.num_envs), action]
        row = {"reward": np.clip(step.reward, -1, 1), "terminated": step.terminated, "truncated": step.truncated}
        priority = first_priorities(q=q_taken, value=next_q.amax(-1).numpy(), **row)
        last = {"obs": step.obs[:, -1], "final_obs": step.final_obs[:, -1]}
        writer.step(action=action, priority=priority, **row, **last)

        q = next_q if step.obs is step.final_obs else policy(step.obs)
        returns, lengths = returns + step.reward, lengths + 1
        for i in np.flatnonzero(step.over):
            ctx.record(episode_return=returns[i], episode_length=lengths[i])
            returns[i] = lengths[i] = 0


class DoubleDQN(pl.LightningModule):
    """An ordinary LightningModule: it gets a batch, and returns the loss and the TD errors."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.q = DuelingNetwork(len(actions_of(args)), args.channels, args.hidden)
        self.target = copy.deepcopy(self.q).requires_grad_(False)

    def training_step(self, batch: tr.ReplayBatch, batch_idx: int) -> dict[str, Tensor]:
        """The double DQN loss (van Hasselt et al. 2016), weighted against the bias of prioritized draws."""
        with torch.no_grad():
            best = self.q(batch["next_obs"]).argmax(-1, keepdim=True)
            value = self.target(batch["next_obs"]).gather(-1, best).squeeze(-1)
            goal = batch["reward"] + batch["discount"] * value
        q = self.q(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        loss = (batch["weight"] * F.huber_loss(q, goal, reduction="none")).mean()
        return {"loss": loss, "td_error": goal - q.detach()}

    def on_train_batch_end(self, *_: Any) -> None:
        """Copies the network into the target network now and then."""
        if self.global_step % self.args.target_every == 0:
            self.target.load_state_dict(self.q.state_dict())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.q.parameters(), lr=self.args.learning_rate, eps=1e-5, fused=True)


class Evaluation(pl.Callback):
    """Evaluates the policy every `eval_every` steps, and ends the run when it is good enough."""

    def __init__(self, q: DuelingNetwork, progress: Progress, args: Args) -> None:
        self.q, self.progress, self.args = q, progress, args

    def on_train_batch_end(
        self, trainer: pl.Trainer, learner: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Follows every step."""
        step = trainer.global_step
        self.progress.learned(step, batch)
        if step % self.args.eval_every == 0:
            returns = evaluate(self.q, self.args, self.args.seed + step)
            trainer.should_stop = self.progress.evaluated(step, returns.mean())


@torch.no_grad()
def evaluate(q: nn.Module, args: Args, seed: int) -> np.ndarray:
    """Returns the returns of games that are played side by side.

    One action in a hundred is random: a purely greedy policy may wait for ever, where a game waits for it to fire.
    """
    games, rng = Games(args, args.eval_episodes), np.random.default_rng(seed)
    obs, epsilons = games.reset(seed), np.full(args.eval_episodes, 0.01)
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, dtype=bool)
    while running.any():
        step = games.step(epsilon_greedy(q(obs), epsilons, rng))
        obs = step.obs
        returns += step.reward * running
        running &= ~step.over
    return returns


def main(args: Args) -> None:
    """Learns a game."""
    torch.set_num_threads(1)  # the other cores are the explorers'
    pl.seed_everything(args.seed, verbose=False)
    learner = DoubleDQN(args)
    weights = tr.SharedWeights(learner.q)
    buffer = tr.ReplayBuffer(
        SPEC,
        args.capacity,
        view=tr.Transitions(args.n_step, args.gamma, stack={"obs": STACK}),
        sampler=tr.Prioritized(args.alpha, tr.LinearSchedule(args.beta, 1.0, args.total_steps)),
        limiter=tr.SamplesPerInsert(args.samples_per_insert, args.learning_starts),
        seed=args.seed,
    )
    pool = ExplorerPool(partial(explore, args=args), args.num_explorers, buffer, weights, seed=args.seed)
    progress = Progress(
        f"Ape-X on {args.game}'s screen, {buffer.nbytes / args.capacity:,.0f} bytes a transition",
        buffer,
        args.total_steps,
        args.solved_at,
        explorer_returns=lambda: [explorer.mean_return for explorer in pool.stats()],
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=args.total_steps,
        max_time=timedelta(minutes=args.minutes),
        gradient_clip_val=10.0,
        callbacks=[
            PriorityFeedback(),
            WeightPublisher(weights, args.publish_every, module="q"),
            Evaluation(learner.q, progress, args),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with progress:
        trainer.fit(learner, ReplayDataModule(buffer, args.batch_size, explorers=pool))
    progress.summarize(args.plot)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # Lightning's remarks would fall into the live panel
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    main(parse(Args))

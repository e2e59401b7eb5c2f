"""Ape-X double DQN on CartPole-v1, with Ray explorers and a Lightning learner.

Distributed Prioritized Experience Replay (Horgan et al. 2018, https://arxiv.org/abs/1803.00933) on one machine. Four
explorers, each with its own epsilon and its own copy of the network, write n-step transitions into one shared buffer.
The first priorities are the |TD error| that the explorers computed themselves. The learner draws by priority, learns,
feeds the new TD errors back, and publishes its weights.

    python examples/apex_cartpole.py --seed 1
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from command_line import parse
from progress import Progress
from torch import Tensor, nn

import torchreplay as tr
from torchreplay.lightning import PriorityFeedback, ReplayDataModule, WeightPublisher
from torchreplay.ray import ExplorerContext, ExplorerPool


@dataclass
class Args:
    """Ape-X double DQN on CartPole-v1: Ray explorers, Lightning learner."""

    seed: int = 0
    """seed of the network, the draws, the explorers and the evaluations"""
    total_steps: int = 30_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 250
    """learner steps between two evaluations"""
    eval_episodes: int = 20
    """greedy episodes in an evaluation"""
    solved_at: float = 475.0
    """mean return of an evaluation that ends the run"""
    plot: str = "apex_cartpole.png"
    """file for the picture of the run; empty for none"""

    num_explorers: int = 4
    """explorer processes"""
    epsilon: float = 0.4
    """base of the explorers' epsilons: epsilon ** (1 + 7 i / (num_explorers - 1))"""
    n_step: int = 3
    """steps that a transition spans"""
    gamma: float = 0.99
    """discount of one step"""

    capacity: int = 50_000
    """transitions that the buffer holds"""
    learning_starts: int = 1_000
    """transitions to wait for before the first learner step"""
    samples_per_insert: float = 16.0
    """how often each transition is drawn on average; whoever is ahead of this waits"""
    alpha: float = 0.6
    """how strongly TD errors are preferred: 0 uniform, 1 proportional"""
    beta: float = 0.4
    """initial correction of that bias, annealed to 1 over total_steps"""

    batch_size: int = 256
    """transitions in a batch"""
    learning_rate: float = 1e-3
    """of Adam"""
    target_every: int = 50
    """learner steps between two copies into the target network"""
    publish_every: int = 10
    """learner steps between two publications of the weights"""


class QNetwork(nn.Sequential):
    """Action values of CartPole's states, `[..., 4]` to `[..., 2]`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


# What a row of the buffer holds: `discount` is gamma^m for the m steps really taken, 0 if the episode terminated.
SPEC = {
    "obs": tr.Field((4,)),
    "action": tr.Field((), torch.int64),
    "reward": tr.Field(),
    "next_obs": tr.Field((4,)),
    "discount": tr.Field(),
}


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    torch.set_num_threads(1)
    env = gym.make("CartPole-v1")
    rng = np.random.default_rng(ctx.seed)
    epsilon = args.epsilon ** (1 + 7 * ctx.index / max(ctx.num_explorers - 1, 1))
    policy = QNetwork().requires_grad_(False)
    ctx.pull_weights(policy)
    writer = ctx.writer()

    obs, _ = env.reset(seed=ctx.seed)
    q = policy(torch.from_numpy(obs)).numpy()
    window: deque[Any] = deque()  # the last n_step steps, whose transitions are not written yet
    episode_return, episode_length = 0.0, 0
    while not ctx.stopped:
        action = rng.integers(2) if rng.random() < epsilon else q.argmax()
        next_obs, reward, terminated, truncated, _ = env.step(int(action))
        window.append((obs, action, reward, q[action]))
        episode_return, episode_length = episode_return + float(reward), episode_length + 1

        ctx.pull_weights(policy)  # one atomic read when there is nothing newer
        next_q = policy(torch.from_numpy(next_obs)).numpy()
        done = terminated or truncated
        while len(window) == args.n_step or (done and window):
            writer.append(**transition(window, next_obs, next_q.max(), terminated, args.gamma))
            window.popleft()

        obs, q = next_obs, next_q
        if done:
            ctx.record(episode_return=episode_return, episode_length=episode_length)
            episode_return, episode_length = 0.0, 0
            obs, _ = env.reset()
            q = policy(torch.from_numpy(obs)).numpy()


def transition(
    window: deque[Any], next_obs: np.ndarray, value: float, terminated: bool, gamma: float
) -> dict[str, Any]:
    """Returns the row, with its priority, of the transition from the window's first step to `next_obs`.

    A time limit ends the window but not the task: only termination stops the bootstrapping. Rewards are scaled by
    1 - gamma: returns then lie in [0, 1], where the Huber loss is quadratic.
    """
    obs, action, _, q = window[0]
    reward = (1 - gamma) * sum(gamma**k * step[2] for k, step in enumerate(window))
    discount = 0.0 if terminated else gamma ** len(window)
    row = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "discount": discount}
    return row | {"priority": abs(reward + discount * value - q)}


class DoubleDQN(pl.LightningModule):
    """An ordinary LightningModule: it gets a batch, and returns the loss and the TD errors."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.q = QNetwork()
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
        return torch.optim.Adam(self.q.parameters(), lr=self.args.learning_rate)


class Evaluation(pl.Callback):
    """Evaluates the greedy policy every `eval_every` steps, and ends the run when it is good enough."""

    def __init__(self, q: QNetwork, progress: Progress, args: Args) -> None:
        self.q, self.progress, self.args = q, progress, args

    def on_train_batch_end(
        self, trainer: pl.Trainer, learner: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Follows every step."""
        step = trainer.global_step
        self.progress.learned(step, batch)
        if step % self.args.eval_every == 0:
            returns = evaluate(self.q, self.args.eval_episodes, seed=self.args.seed + step)
            trainer.should_stop = self.progress.evaluated(step, returns.mean())


@torch.no_grad()
def evaluate(q: nn.Module, episodes: int, seed: int) -> np.ndarray:
    """Returns the returns of greedy episodes, which are played side by side."""
    envs = gym.make_vec("CartPole-v1", num_envs=episodes)
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        obs, rewards, terminated, truncated, _ = envs.step(q(torch.from_numpy(obs)).argmax(-1).numpy())
        returns += rewards * running
        running &= ~(terminated | truncated)
    return returns


def local_explorers(args: Args, buffer: tr.ReplayBuffer, weights: tr.SharedWeights) -> ExplorerPool:
    """Returns explorers on this machine."""
    return ExplorerPool(partial(explore, args=args), args.num_explorers, buffer, weights, seed=args.seed)


def main(
    args: Args, make_explorers: Callable[..., Any] = local_explorers, make_buffer: Callable[..., Any] = tr.ReplayBuffer
) -> None:
    """Learns CartPole with the explorers that `make_explorers(args, buffer, weights)` returns."""
    torch.set_num_threads(1)  # the network is small, and the explorers want the other cores
    pl.seed_everything(args.seed, verbose=False)
    learner = DoubleDQN(args)
    weights = tr.SharedWeights(learner.q)
    buffer = make_buffer(
        SPEC,
        args.capacity,
        sampler=tr.Prioritized(args.alpha, tr.LinearSchedule(args.beta, 1.0, args.total_steps)),
        limiter=tr.SamplesPerInsert(args.samples_per_insert, args.learning_starts),
        seed=args.seed,
        name="CartPole",
    )
    explorers = make_explorers(args, buffer, weights)
    progress = Progress(
        "Ape-X on CartPole-v1: Ray explorers, Lightning learner",
        buffer,
        args.total_steps,
        args.solved_at,
        explorer_returns=lambda: [explorer.mean_return for explorer in explorers.stats()],
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=args.total_steps,
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
        trainer.fit(learner, ReplayDataModule(buffer, args.batch_size, explorers=explorers))
    progress.summarize(args.plot)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # Lightning's remarks would fall into the live panel
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    main(parse(Args))

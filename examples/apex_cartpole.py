"""Ape-X double DQN on CartPole-v1, with Ray explorers and a Lightning learner: what `make demo` runs.

Distributed Prioritized Experience Replay (Horgan et al. 2018, https://arxiv.org/abs/1803.00933) on one machine. Each of
four explorers has its own epsilon and its own copy of the network. They write each observation once into one shared
buffer. Its first priority is the |TD error| that they found themselves. The n-step returns are made when a batch is
drawn. The learner draws by priority, learns, feeds the new TD errors back, and publishes its weights.

apex.py is the same as a plain loop. progress.py is what a terminal shows meanwhile, and the picture at the end.

    python examples/apex_cartpole.py --seed 1
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import tyro
from progress import Progress
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn

import torchreplay as tr
from torchreplay.lightning import PriorityFeedback, ReplayDataModule, ReplayMonitor, WeightPublisher
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
    tensorboard: bool = True
    """whether to write curves to runs/apex_cartpole-seed<seed>"""

    num_explorers: int = 4
    """explorer processes"""
    epsilon: float = 0.4
    """base of the explorers' epsilons: epsilon ** (1 + 7 i / (num_explorers - 1))"""
    n_step: int = 3
    """steps that a transition spans"""
    gamma: float = 0.99
    """discount of one step"""

    capacity: int = 50_000
    """observations that the buffer holds"""
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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name == "seed" else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")
        for name in ("epsilon", "gamma"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ValueError(f"{name}={share}: expected 0 to 1")


class QNetwork(nn.Sequential):
    """Action values of CartPole's states, `[..., 4]` to `[..., 2]`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    torch.set_num_threads(1)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    rng = np.random.default_rng(ctx.seed)
    epsilon = args.epsilon ** (1 + 7 * ctx.index / max(ctx.num_explorers - 1, 1))
    policy = QNetwork().requires_grad_(False)
    ctx.pull_weights(policy)
    writer = ctx.writer()

    env.reset(seed=ctx.seed)
    while not ctx.stopped:
        obs, _ = env.reset()
        writer.reset(obs=obs)
        q = policy(torch.from_numpy(obs)).numpy()
        window: deque[tuple[float, float]] = deque(maxlen=args.n_step)
        ended = False
        while not ended and not ctx.stopped:
            action = int(rng.integers(2) if rng.random() < epsilon else q.argmax())
            obs, reward, terminated, truncated, info = env.step(action)
            reward = (1 - args.gamma) * float(reward)  # returns then lie in [0, 1], where the Huber loss is quadratic
            window.append((reward, q[action]))
            ended = terminated or truncated

            ctx.pull_weights(policy)  # one atomic read when there is nothing newer
            q = policy(torch.from_numpy(obs)).numpy()
            priority = first_priority(window, 0.0 if terminated else q.max(), ended, args.gamma)
            step = {"action": action, "reward": reward, "terminated": terminated, "truncated": truncated}
            writer.step(obs=obs, priority=priority, **step)
        if ended:
            ctx.record(episode_return=info["episode"]["r"], episode_length=info["episode"]["l"])


def first_priority(window: deque[tuple[float, float]], value: float, ended: bool, gamma: float) -> float:
    """Returns the |TD error| of the transition that a step completes: the one that began n steps ago.

    A step that ends its episode completes all later ones, too: they get the largest. The window has the rewards of the
    last n steps and the value of the action that was taken in each; `value` is that of where the last of them led.
    """
    errors = []
    for reward, q in reversed(window):
        value = reward + gamma * value
        errors.append(abs(value - q))
    return max(errors) if ended else errors[-1]


class DoubleDQN(pl.LightningModule):
    """An ordinary LightningModule: it gets a batch, and returns the loss and the TD errors."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.args = args
        self.q = QNetwork()
        self.target = copy.deepcopy(self.q).requires_grad_(False)

    def training_step(self, batch: tr.ReplayBatch, batch_idx: int) -> dict[str, Tensor]:
        """The double DQN loss (van Hasselt et al. 2016), weighted against the bias of prioritized draws."""
        if self.global_step % self.args.target_every == 0:  # here, so that every checkpoint has it
            self.target.load_state_dict(self.q.state_dict())
        with torch.no_grad():
            best = self.q(batch["next_obs"]).argmax(-1, keepdim=True)
            value = self.target(batch["next_obs"]).gather(-1, best).squeeze(-1)
            goal = batch["reward"] + batch["discount"] * value
        q = self.q(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
        loss = (batch["weight"] * F.huber_loss(q, goal, reduction="none")).mean()
        return {"loss": loss, "td_error": goal - q.detach()}

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
            for logger in trainer.loggers:
                logger.log_metrics({"charts/mean_return": returns.mean()}, step)


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


def main(args: Args) -> None:
    """Learns CartPole."""
    torch.set_num_threads(1)  # the network is small, and the explorers want the other cores
    pl.seed_everything(args.seed, verbose=False)
    learner = DoubleDQN(args)
    weights = tr.SharedWeights(learner.q)
    buffer = tr.ReplayBuffer(
        tr.spec_from_env(gym.make("CartPole-v1")),
        args.capacity,
        view=tr.Transitions(args.n_step, args.gamma),
        sampler=tr.Prioritized(args.alpha, tr.LinearSchedule(args.beta, 1.0, args.total_steps)),
        limiter=tr.SamplesPerInsert(args.samples_per_insert, args.learning_starts),
        seed=args.seed,
        name="CartPole",
    )
    explorers = ExplorerPool(partial(explore, args=args), args.num_explorers, buffer, weights, seed=args.seed)
    progress = Progress(
        "Ape-X on CartPole-v1: Ray explorers, Lightning learner",
        buffer,
        args.total_steps,
        args.solved_at,
        explorer_returns=lambda: [explorer.mean_return for explorer in explorers.stats()],
    )
    curves = TensorBoardLogger("runs", name=f"apex_cartpole-seed{args.seed}", version="", purge_step=0)
    publisher = WeightPublisher(weights, args.publish_every, module="q")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=args.total_steps,
        gradient_clip_val=10.0,
        callbacks=[PriorityFeedback(), publisher, ReplayMonitor(), Evaluation(learner.q, progress, args)],
        logger=curves if args.tensorboard else False,
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
    main(tyro.cli(Args))

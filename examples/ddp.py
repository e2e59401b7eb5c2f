"""Double DQN on CartPole-v1 with several learners: Lightning's DDP over CPUs or GPUs, one buffer for all ranks.

Every rank draws its own batches from the one buffer in shared memory and feeds its own TD errors back; DDP averages the
gradients. Rank 0 makes the buffer and starts the explorers, which are plain processes. They write each observation
once, and the n-step returns are made when a batch is drawn. `ReplayDataModule` sees to who does what.

Kill one of the two ranks while it runs: the other one says which it was, and ends.

    python examples/ddp.py --seed 1                                    # two CPU ranks, which talk through gloo
    python examples/ddp.py --accelerator gpu --devices 4               # four GPUs, through NCCL
"""

from __future__ import annotations

import copy
import json
import logging
import time
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import tyro
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn

import torchreplay as tr
from torchreplay.explorers import ExplorerContext, ExplorerPool
from torchreplay.lightning import PriorityFeedback, ReplayDataModule, ReplayMonitor, WeightPublisher


@dataclass
class Args:
    """Double DQN on CartPole-v1, trained by several ranks from one replay buffer."""

    seed: int = 0
    """seed of the network, the draws, the explorers and the evaluations"""
    total_steps: int = 20_000
    """learner steps at most; the run ends earlier once it is solved"""
    eval_every: int = 250
    """learner steps between two evaluations"""
    eval_episodes: int = 20
    """greedy episodes in an evaluation"""
    solved_at: float = 475.0
    """mean return of an evaluation that ends the run"""
    tensorboard: bool = True
    """whether to write curves to runs/ddp-seed<seed>"""

    devices: int = 2
    """ranks: CPU processes or GPUs"""
    accelerator: Literal["cpu", "gpu"] = "cpu"
    """what the ranks compute on"""

    num_explorers: int = 2
    """explorer processes, for all ranks together"""
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
    """how often each transition is drawn on average, by all ranks together; whoever is ahead of this waits"""
    alpha: float = 0.6
    """how strongly TD errors are preferred: 0 uniform, 1 proportional"""
    beta: float = 0.4
    """initial correction of that bias, annealed to 1 over total_steps"""

    batch_size: int = 128
    """transitions in each rank's batch"""
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


class QNetwork(nn.Sequential):
    """Action values of CartPole's states, `[..., 4]` to `[..., 2]`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def make_buffer(args: Args) -> tr.ReplayBuffer:
    """Makes the buffer; called on rank 0 only."""
    return tr.ReplayBuffer(
        tr.spec_from_env(gym.make("CartPole-v1")),
        args.capacity,
        # Weights are normalised by the buffer's largest one, which is the same for every rank.
        sampler=tr.Prioritized(args.alpha, tr.LinearSchedule(args.beta, 1.0, args.total_steps * args.devices)),
        view=tr.Transitions(args.n_step, args.gamma),
        limiter=tr.SamplesPerInsert(args.samples_per_insert, args.learning_starts),
        seed=args.seed,
        name="CartPole",
    )


def make_explorers(buffer: tr.ReplayBuffer, weights: tr.SharedWeights, args: Args) -> ExplorerPool:
    """Makes the explorers, which the data module starts and stops; called on rank 0 only."""
    work = partial(explore, args=args)
    return ExplorerPool(work, args.num_explorers, buffer, weights, seed=args.seed)


def explore(ctx: ExplorerContext, args: Args) -> None:
    """Plays until the learners have finished; runs in a process of its own."""
    torch.set_num_threads(1)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    rng = np.random.default_rng(ctx.seed)
    epsilon = args.epsilon ** (1 + 7 * ctx.index / max(ctx.num_explorers - 1, 1))
    policy = QNetwork().requires_grad_(False)
    writer = ctx.writer()

    obs, _ = env.reset(seed=ctx.seed)
    writer.reset(obs=obs)
    while not ctx.stopped:
        ctx.pull_weights(policy)  # one atomic read when there is nothing newer
        greedy = int(policy(torch.from_numpy(obs)).argmax())
        action = int(rng.integers(2)) if rng.random() < epsilon else greedy
        obs, reward, terminated, truncated, info = env.step(action)
        reward = (1 - args.gamma) * float(reward)  # returns then lie in [0, 1], where the Huber loss is quadratic
        writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
        if terminated or truncated:
            ctx.record(episode_return=info["episode"]["r"], episode_length=info["episode"]["l"])
            obs, _ = env.reset()
            writer.reset(obs=obs)


class DoubleDQN(pl.LightningModule):
    """An ordinary LightningModule: it gets its rank's batch, and returns the loss and the TD errors."""

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
    """Evaluates the greedy policy on rank 0 every `eval_every` steps, and ends the run when it is good enough."""

    def __init__(self, args: Args) -> None:
        self.args, self.began = args, time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, learner: DoubleDQN, outputs: Any, batch: tr.ReplayBatch, batch_idx: int
    ) -> None:
        """Follows every step."""
        step = trainer.global_step
        if step % self.args.eval_every:
            return
        buffer = trainer.datamodule.buffer
        buffer.flush()  # the drawing thread may not have applied the last TD errors yet
        trainer.strategy.barrier()
        solved = trainer.is_global_zero and self.evaluated(trainer, learner, buffer.stats(), step)
        # The others wait here, and all ranks end after the same step.
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(solved, all=False)

    def evaluated(self, trainer: pl.Trainer, learner: DoubleDQN, stats: tr.Stats, step: int) -> bool:
        """Plays the evaluation and prints its line; returns whether the policy is good enough."""
        mean_return = evaluate(learner.q, self.args.eval_episodes, seed=self.args.seed + step).mean()
        solved = bool(mean_return >= self.args.solved_at)
        line = {"step": step, "mean_return": mean_return, "rows": stats.inserted, "updated": stats.updated}
        line |= {"samples_per_insert": round(stats.samples_per_insert, 2)}
        line |= {"seconds": round(time.monotonic() - self.began, 1), "solved": solved}
        print(json.dumps(line), flush=True)
        for logger in trainer.loggers:
            logger.log_metrics({"charts/mean_return": mean_return}, step)
        return solved


@torch.no_grad()
def evaluate(q: nn.Module, episodes: int, seed: int) -> np.ndarray:
    """Returns the returns of greedy episodes, which are played side by side."""
    q = copy.deepcopy(q).cpu()
    envs = gym.make_vec("CartPole-v1", num_envs=episodes)
    obs, _ = envs.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while running.any():
        obs, rewards, terminated, truncated, _ = envs.step(q(torch.from_numpy(obs)).argmax(-1).numpy())
        returns += rewards * running
        running &= ~(terminated | truncated)
    return returns


def main(args: Args) -> None:
    """Learns CartPole. Lightning starts this script once for each further rank."""
    torch.set_num_threads(1)  # the network is small, and the explorers want the other cores
    pl.seed_everything(args.seed, verbose=False)
    learner = DoubleDQN(args)
    weights = tr.SharedWeights(learner.q)
    explorers = partial(make_explorers, weights=weights, args=args)
    data = ReplayDataModule(partial(make_buffer, args), args.batch_size, explorers=explorers)
    curves = TensorBoardLogger("runs", name=f"ddp-seed{args.seed}", version="", purge_step=0)
    publisher = WeightPublisher(weights, args.publish_every, module="q")
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        max_steps=args.total_steps,
        gradient_clip_val=10.0,
        callbacks=[PriorityFeedback(), publisher, ReplayMonitor(), Evaluation(args)],
        logger=curves if args.tensorboard else False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(learner, data)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # Lightning's remarks on the hardware
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    main(tyro.cli(Args))

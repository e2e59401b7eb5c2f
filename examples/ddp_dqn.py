"""Double DQN on CartPole-v1 with several learners: Lightning's DDP over CPUs or GPUs, one buffer for all ranks.

Every rank draws its own batches from the one buffer in shared memory and feeds its own TD errors back; DDP averages the
gradients. Rank 0 makes the buffer and starts the explorers. These are processes that write their episodes step by step.
The 3-step returns are made when a batch is drawn. `ReplayDataModule` sees to who does what.

    python examples/ddp_dqn.py --seed 1                                # two CPU ranks, which talk through gloo
    python examples/ddp_dqn.py --accelerator gpu --devices 4           # four GPUs, through NCCL
"""

from __future__ import annotations

import contextlib
import copy
import logging
import multiprocessing
import signal
import warnings
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
    plot: str = "ddp_dqn.png"
    """file for the picture of the run; empty for none"""

    devices: int = 2
    """ranks: CPU processes or GPUs"""
    accelerator: str = "cpu"
    """what the ranks compute on: cpu or gpu"""

    num_explorers: int = 2
    """explorer processes, for all ranks together"""
    epsilon: float = 0.4
    """base of the explorers' epsilons: epsilon ** (1 + 7 i / (num_explorers - 1))"""
    n_step: int = 3
    """steps that a transition spans"""
    gamma: float = 0.99
    """discount of one step"""

    capacity: int = 50_000
    """rows that the buffer holds"""
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
    )


class Explorers:
    """The explorer processes; made, started and stopped on rank 0 only."""

    def __init__(self, buffer: tr.ReplayBuffer, weights: tr.SharedWeights, args: Args) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes = [
            context.Process(target=explore, args=(index, buffer, weights, args), daemon=True)
            for index in range(args.num_explorers)
        ]

    def start(self) -> None:
        """Starts them."""
        for process in self.processes:
            process.start()

    def stop(self) -> None:
        """Waits for their end; the stopped buffer ends them."""
        for process in self.processes:
            if process.pid is not None:
                process.join()


def explore(index: int, buffer: tr.ReplayBuffer, weights: tr.SharedWeights, args: Args) -> None:
    """Plays until the learners have finished; runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the learners, which stop the buffer
    torch.set_num_threads(1)
    env = gym.make("CartPole-v1")
    rng = np.random.default_rng([args.seed, index])
    epsilon = args.epsilon ** (1 + 7 * index / max(args.num_explorers - 1, 1))
    policy = QNetwork().requires_grad_(False)

    obs, _ = env.reset(seed=int(rng.integers(2**31)))
    with contextlib.suppress(tr.Stopped), buffer.writer() as writer:
        writer.reset(obs=obs)
        while not buffer.stopped:
            weights.pull(policy)  # one atomic read when there is nothing newer
            greedy = policy(torch.from_numpy(obs)).argmax().item()
            action = int(rng.integers(2) if rng.random() < epsilon else greedy)
            obs, reward, terminated, truncated, _ = env.step(action)
            writer.step(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
            if terminated or truncated:
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
        """The double DQN loss (van Hasselt et al. 2016), weighted against the bias of prioritized draws.

        Rewards are scaled by 1 - gamma: returns then lie in [0, 1], where the Huber loss is quadratic.
        """
        with torch.no_grad():
            best = self.q(batch["next_obs"]).argmax(-1, keepdim=True)
            value = self.target(batch["next_obs"]).gather(-1, best).squeeze(-1)
            goal = (1 - self.args.gamma) * batch["reward"] + batch["discount"] * value
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
        self.args = args
        self.progress: Progress | None = None

    def setup(self, trainer: pl.Trainer, learner: pl.LightningModule, stage: str) -> None:
        """Begins to show the run, on rank 0."""
        if trainer.is_global_zero:
            args, buffer = self.args, trainer.datamodule.buffer
            title = f"Double DQN on CartPole-v1: {args.devices} {args.accelerator} ranks, one buffer"
            self.progress = Progress(title, buffer, args.total_steps, args.solved_at)
            self.progress.__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, learner: DoubleDQN, outputs: Any, batch: tr.ReplayBatch, batch_idx: int
    ) -> None:
        """Follows every step."""
        step, solved = trainer.global_step, False
        if self.progress is not None:
            self.progress.learned(step, batch)
        if step % self.args.eval_every == 0:
            trainer.datamodule.buffer.flush()  # the drawing thread may not have applied the last TD errors yet
            trainer.strategy.barrier()
            if self.progress is not None:
                returns = evaluate(learner.q, self.args.eval_episodes, seed=self.args.seed + step)
                solved = self.progress.evaluated(step, returns.mean())
            # The others wait here, and all ranks end after the same step.
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(solved, all=False)

    def on_train_end(self, trainer: pl.Trainer, learner: pl.LightningModule) -> None:
        """Sums the run up."""
        if self.progress is not None:
            self.progress.__exit__()
            self.progress.summarize(self.args.plot)

    def on_exception(self, trainer: pl.Trainer, learner: pl.LightningModule, exception: BaseException) -> None:
        """Leaves the terminal to the error."""
        if self.progress is not None:
            self.progress.__exit__()


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
    data = ReplayDataModule(
        partial(make_buffer, args), args.batch_size, explorers=partial(Explorers, weights=weights, args=args)
    )
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        max_steps=args.total_steps,
        gradient_clip_val=10.0,
        callbacks=[PriorityFeedback(), WeightPublisher(weights, args.publish_every, module="q"), Evaluation(args)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(learner, data)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # Lightning's remarks would fall into the live panel
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    main(parse(Args))

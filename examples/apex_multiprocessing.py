"""Ape-X double DQN on CartPole-v1 with nothing but PyTorch, Gymnasium and processes.

The same learner as in `apex_cartpole.py`, as a plain loop, and the same explorers, as `multiprocessing` processes. The
buffer and the weights are arguments like any other. A handle of a few bytes travels to a process, and its rows are at
once in the learner's memory.

    python examples/apex_multiprocessing.py --seed 1
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import signal
from collections import deque
from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from command_line import parse
from progress import Progress
from torch import Tensor, nn

import torchreplay as tr


@dataclass
class Args:
    """Ape-X double DQN on CartPole-v1: processes and a plain loop."""

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
    plot: str = "apex_multiprocessing.png"
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


def explore(
    index: int, buffer: tr.ReplayBuffer, weights: tr.SharedWeights, mean_returns: MutableSequence[float], args: Args
) -> None:
    """Plays until the learner has finished; runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the learner, which stops the buffer
    torch.set_num_threads(1)
    env = gym.make("CartPole-v1")
    rng = np.random.default_rng([args.seed, index])
    epsilon = args.epsilon ** (1 + 7 * index / max(args.num_explorers - 1, 1))
    policy = QNetwork().requires_grad_(False)
    weights.pull(policy)
    returns: deque[float] = deque(maxlen=100)

    obs, _ = env.reset(seed=int(rng.integers(2**31)))
    q = policy(torch.from_numpy(obs)).numpy()
    window: deque[Any] = deque()  # the last n_step steps, whose transitions are not written yet
    episode_return = 0.0
    with contextlib.suppress(tr.Stopped), buffer.writer() as writer:
        while not buffer.stopped:
            action = rng.integers(2) if rng.random() < epsilon else q.argmax()
            next_obs, reward, terminated, truncated, _ = env.step(int(action))
            window.append((obs, action, reward, q[action]))
            episode_return += float(reward)

            weights.pull(policy)  # one atomic read when there is nothing newer
            next_q = policy(torch.from_numpy(next_obs)).numpy()
            done = terminated or truncated
            while len(window) == args.n_step or (done and window):
                writer.append(**transition(window, next_obs, next_q.max(), terminated, args.gamma))
                window.popleft()

            obs, q = next_obs, next_q
            if done:
                returns.append(episode_return)
                mean_returns[index], episode_return = float(np.mean(returns)), 0.0
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


def td_errors(q: nn.Module, target: nn.Module, batch: tr.ReplayBatch) -> Tensor:
    """Returns the errors that double DQN (van Hasselt et al. 2016) makes small, `[B]`."""
    with torch.no_grad():
        best = q(batch["next_obs"]).argmax(-1, keepdim=True)
        value = target(batch["next_obs"]).gather(-1, best).squeeze(-1)
        goal = batch["reward"] + batch["discount"] * value
    return goal - q(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)


def learn(q: nn.Module, buffer: tr.ReplayBuffer, weights: tr.SharedWeights, progress: Progress, args: Args) -> None:
    """The learner's loop."""
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.learning_rate)
    for step, batch in enumerate(tr.ReplayDataset(buffer, args.batch_size, steps=args.total_steps), start=1):
        td_error = td_errors(q, target, batch)
        loss = (batch["weight"] * F.huber_loss(td_error, torch.zeros_like(td_error), reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        optimizer.step()
        buffer.update_priorities(batch, td_error)

        if step % args.target_every == 0:
            target.load_state_dict(q.state_dict())
        if step % args.publish_every == 0:
            weights.publish(q)
        progress.learned(step, batch)
        if step % args.eval_every == 0:
            returns = evaluate(q, args.eval_episodes, seed=args.seed + step)
            if progress.evaluated(step, returns.mean()):
                return


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
    torch.manual_seed(args.seed)
    q = QNetwork()
    weights = tr.SharedWeights(q)
    buffer = tr.ReplayBuffer(
        SPEC,
        args.capacity,
        sampler=tr.Prioritized(args.alpha, tr.LinearSchedule(args.beta, 1.0, args.total_steps)),
        limiter=tr.SamplesPerInsert(args.samples_per_insert, args.learning_starts),
        seed=args.seed,
        name="CartPole",
    )
    context = multiprocessing.get_context("spawn")
    mean_returns = context.Array("d", [float("nan")] * args.num_explorers, lock=False)
    explorers = [
        context.Process(target=explore, args=(index, buffer, weights, mean_returns, args), daemon=True)
        for index in range(args.num_explorers)
    ]
    title = "Ape-X on CartPole-v1: processes and a plain loop"
    with Progress(title, buffer, args.total_steps, args.solved_at, lambda: list(mean_returns)) as progress:
        for explorer in explorers:
            explorer.start()
        try:
            learn(q, buffer, weights, progress, args)
        finally:
            buffer.stop()
            for explorer in explorers:
                explorer.join()
    progress.summarize(args.plot)


if __name__ == "__main__":
    main(parse(Args))

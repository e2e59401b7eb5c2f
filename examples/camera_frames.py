"""Double DQN from a camera whose frames are stored raw, as PNG and as JPEG: bytes, speed and returns side by side.

A gripper has to be under a falling ball. A camera over the table sees both, with the noise of its sensor. Frames are
stored once, and decoded by a worker of a `DataLoader`. Each form learns by itself; the table comes at the end.

    python examples/camera_frames.py --seed 1
"""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import pairwise
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

import torchreplay as tr


@dataclass
class Args:
    """Double DQN from camera frames that are stored raw, as PNG and as JPEG."""

    seed: int = 0
    """seed of the network, the draws, the environments and the evaluations"""
    forms: tuple[Literal["raw", "png", "jpeg"], ...] = ("raw", "png", "jpeg")
    """how frames are stored; each form learns by itself"""
    size: int = 64
    """pixels of a frame each way"""
    quality: int = 90
    """of JPEG, 1 to 100"""
    workers: int = 1
    """processes that draw and decode batches of pictures; 0: the learner does so itself"""
    timed_batches: int = 200
    """that are drawn after learning, for the batches a second of the table"""

    total_steps: int = 600
    """learner steps at most, for each form; it ends earlier once it is solved"""
    eval_every: int = 100
    """learner steps between two evaluations"""
    eval_episodes: int = 100
    """greedy episodes in an evaluation"""
    solved_at: float = 0.65
    """mean return of an evaluation that ends a form's run"""
    tensorboard: bool = True
    """whether to write curves to runs/camera_frames-<form>-seed<seed>"""

    num_envs: int = 16
    """environments, which take one step each for a learner step"""
    explore_steps: int = 200
    """learner steps over which epsilon falls from 1 to its end"""
    epsilon: float = 0.1
    """share of random actions in the end"""
    n_step: int = 3
    """steps that a transition spans"""
    gamma: float = 0.9
    """discount of one step"""

    capacity: int = 20_000
    """frames that the buffer holds"""
    learning_starts: int = 1_000
    """transitions in the buffer before the first learner step"""
    batch_size: int = 64
    """transitions in a batch"""
    learning_rate: float = 1e-3
    """of Adam"""
    target_rate: float = 0.02
    """how much of the network goes into the target network with each learner step"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value < (least := 0 if name in ("seed", "workers") else 1):
                raise ValueError(f"{name}={value}: expected a whole number of at least {least}")


@cache
def scene(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns what the camera sees of an empty table, `[size, size, 3]`, and the noise of 64 frames."""
    rng = np.random.default_rng(0)
    grain = np.asarray(Image.fromarray(rng.uniform(90, 150, (8, 32)).astype(np.uint8)).resize((size, size)))
    light = np.linspace(0.7, 1.2, size)[:, None, None] * np.array([1.0, 0.8, 0.6])
    return grain[:, :, None] * light, rng.normal(0, 2, (64, size, size, 3))


class Catch(gym.Env[np.ndarray, np.int64]):
    """A ball falls on a table of 8 by 8 places, and a gripper below goes left, stays, or goes right.

    Observations are what a camera sees, uint8 `[size, size, 3]`. The return is the share of seven steps after which the
    gripper is below the ball: 0.75 in the mean where it always goes there at once.
    """

    PLACES, ACTIONS = 8, 3

    def __init__(self, size: int) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(self.ACTIONS)
        self._table, self._noise = scene(size)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Lets go of a ball."""
        super().reset(seed=seed)
        self._row, (self._ball, self._gripper) = 0, self.np_random.integers(self.PLACES, size=2).tolist()
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Moves the gripper by one place."""
        self._gripper = min(max(self._gripper + int(action) - 1, 0), self.PLACES - 1)
        self._row, last = self._row + 1, self.PLACES - 1
        return self._seen(), (self._ball == self._gripper) / last, self._row == last, False, {}

    def _seen(self) -> np.ndarray:
        frame = self._table + self._noise[self.np_random.integers(64)]
        side = len(frame) // self.PLACES
        for row, place, colour in ((self._row, self._ball, (120, -60, -60)), (7, self._gripper, (-60, -40, 100))):
            frame[row * side : (row + 1) * side, place * side : (place + 1) * side] += colour
        return frame.clip(0, 255).astype(np.uint8)


def encoded(frames: np.ndarray, form: str, quality: int) -> Any:
    """Returns what is stored of frames `[n, H, W, 3]`: themselves, or the bytes of a picture each."""
    if form == "raw":
        return frames
    files = [BytesIO() for _ in frames]
    for frame, file in zip(frames, files, strict=True):
        Image.fromarray(frame).save(file, form, **({"quality": quality} if form == "jpeg" else {"compress_level": 1}))
    return [file.getvalue() for file in files]


def decoded(batch: tr.ReplayBatch) -> tr.ReplayBatch:
    """Puts frames `[B, H, W, 3]` in the place of pictures."""
    for name in ("obs", "next_obs"):
        if name in batch.get("lengths", {}):
            files = [BytesIO(batch[name][a:b].numpy()) for a, b in pairwise(batch.offsets(name).tolist())]
            batch[name] = torch.from_numpy(np.stack([np.asarray(Image.open(file)) for file in files]))
    return batch


class QNetwork(nn.Sequential):
    """Action values of frames, uint8 `[B, H, W, 3]` to `[B, 3]`."""

    def __init__(self) -> None:
        eyes = nn.Conv2d(3, 16, 8, 8), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()
        super().__init__(*eyes, nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, Catch.ACTIONS))

    def forward(self, frames: Tensor) -> Tensor:
        """Returns the values."""
        return super().forward(frames.permute(0, 3, 1, 2).float() / 64 - 2)


def td_errors(q: nn.Module, target: nn.Module, batch: tr.ReplayBatch) -> Tensor:
    """Returns the errors that double DQN (van Hasselt et al. 2016) makes small, `[B]`."""
    with torch.no_grad():
        best = q(batch["next_obs"]).argmax(-1, keepdim=True)
        value = target(batch["next_obs"]).gather(-1, best).squeeze(-1)
        goal = batch["reward"] + batch["discount"] * value  # the discount is 0 where the episode terminated
    return goal - q(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)


@torch.no_grad()
def evaluate(q: nn.Module, args: Args, seed: int) -> float:
    """Returns the mean return of greedy episodes, played side by side from what the camera sees."""
    envs = gym.vector.SyncVectorEnv([lambda: Catch(args.size)] * args.eval_episodes)
    obs, _ = envs.reset(seed=seed)
    returns = np.zeros(args.eval_episodes)
    for _ in range(Catch.PLACES - 1):
        obs, reward, *_ = envs.step(q(torch.from_numpy(obs)).argmax(-1).numpy())
        returns += reward
    return round(float(returns.mean()), 4)


def learn(args: Args, form: str) -> dict[str, str]:
    """Learns from frames that are stored in one form; returns a row of the table."""
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    envs = gym.vector.SyncVectorEnv([lambda: Catch(args.size)] * args.num_envs)
    share = {"png": 0.7, "jpeg": 0.2}.get(form)  # bytes beside those of pixels; where they are too few old rows go
    spec = tr.spec_from_env(envs) | ({"obs": tr.Ragged(torch.uint8)} if share else {})
    room = int(args.capacity * args.size**2 * 3 * share) if share else None
    options = {"view": tr.Transitions(args.n_step, args.gamma), "limiter": tr.MinSize(args.learning_starts)}
    buffer = tr.ReplayBuffer(spec, args.capacity, ragged_bytes=room, name="Catch", seed=args.seed, **options)
    q = QNetwork()
    q(torch.zeros(1, *envs.single_observation_space.shape))  # which makes its lazy layer
    target = copy.deepcopy(q).requires_grad_(False)
    optimizer = torch.optim.Adam(q.parameters(), lr=args.learning_rate)
    curves = SummaryWriter(f"runs/camera_frames-{form}-seed{args.seed}", purge_step=0) if args.tensorboard else None

    monitor, began, step, mean_return = tr.Monitor(buffer, curves), time.monotonic(), 0, 0.0
    dataset, workers = tr.ReplayDataset(buffer, args.batch_size), 0 if form == "raw" else args.workers
    batches = iter(DataLoader(dataset, batch_size=None, collate_fn=decoded, num_workers=workers))
    writer, (obs, _) = buffer.writer(envs), envs.reset(seed=args.seed)
    writer.reset(obs=encoded(obs, form, args.quality))
    while step < args.total_steps and mean_return < args.solved_at:
        action = q(torch.from_numpy(obs)).argmax(-1).numpy()
        random = rng.random(args.num_envs) < max(args.epsilon, 1 - step / args.explore_steps)
        action = np.where(random, rng.integers(Catch.ACTIONS, size=args.num_envs), action)
        obs, reward, terminated, truncated, _ = envs.step(action)
        stored = encoded(obs, form, args.quality)
        writer.step(obs=stored, action=action, reward=reward, terminated=terminated, truncated=truncated)
        if buffer.num_items < args.learning_starts:
            continue

        step += 1
        batch = next(batches)
        optimizer.zero_grad()
        td_errors(q, target, batch).square().mean().backward()
        optimizer.step()
        for slow, fast in zip(target.parameters(), q.parameters(), strict=True):
            slow.data.lerp_(fast.data, args.target_rate)

        monitor.step(step)
        if step % args.eval_every == 0 or step == args.total_steps:
            mean_return = evaluate(q, args, seed=args.seed + step)
            line = {"frames": form, "step": step, "mean_return": mean_return}
            line |= {"rows": buffer.stats().inserted, "seconds": round(time.monotonic() - began, 1)}
            print(json.dumps(line | {"solved": mean_return >= args.solved_at}), flush=True)
            if curves:
                curves.add_scalar("charts/mean_return", mean_return, step)
                curves.flush()

    began = time.monotonic()
    for _ in range(args.timed_batches):
        next(batches)
    rate, stats = args.timed_batches / (time.monotonic() - began), buffer.stats()
    taken = (buffer.nbytes - stats.ragged_bytes) / args.capacity + stats.ragged_fill * stats.ragged_bytes / stats.size
    row = {"frames": form, "bytes a transition": f"{taken:,.0f}", "batches a second": f"{rate:,.0f}"}
    return row | {"return": f"{mean_return:.2f}", "learner steps": f"{step:,}"}


def main(args: Args) -> None:
    """Learns from each form, and prints the table."""
    torch.set_num_threads(1)  # as fast as it gets with a network this small
    table = [learn(args, form) for form in args.forms]
    for row in [table[0].keys(), *(row.values() for row in table)]:
        print("".join(f"{cell:>20}" for cell in row))


if __name__ == "__main__":
    main(tyro.cli(Args))

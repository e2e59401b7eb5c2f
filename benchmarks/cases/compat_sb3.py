"""Stable-Baselines3's buffers and its DQN, beside those of `torchreplay.compat.sb3`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common import buffers

from benchmarks.line import OURS, Line
from benchmarks.plan import Plan
from torchreplay.checking.timing import Candidate, interleave
from torchreplay.compat import sb3

MICROSECONDS = 1e6
PEER = "stable_baselines3"
CAPACITY = 100_000
EPISODE = 64
STEPS = 100
"""Environment steps of a learner in one repetition: 25 updates."""
BOX = spaces.Box(-1, 1, (4,))
KINDS: Mapping[str, tuple[str, str, spaces.Space[Any]]] = {
    "rows": ("ReplayBuffer", "SharedReplayBuffer", BOX),
    "n-step": ("NStepReplayBuffer", "SharedNStepReplayBuffer", BOX),
    "Dict": ("DictReplayBuffer", "SharedDictReplayBuffer", spaces.Dict(near=BOX, far=spaces.Box(-1, 1, (3,)))),
}


def measure_sb3(plan: Plan) -> Iterator[Line]:
    """Yields the time of a step's `add`, of `sample`, and of a learner's step."""
    for kind, (theirs, ours, space) in KINDS.items():
        classes = {OURS: getattr(sb3, ours), PEER: getattr(buffers, theirs)}
        for n_envs in (1, 8):
            yield from _buffers(f"SB3 {kind}, {n_envs} env{'s' * (n_envs > 1)}", classes, space, n_envs, plan)
    models = {OURS: _learner(sb3.PrioritizedDQN), PEER: _learner(DQN)}
    works = [Candidate(name, _learning(model), calls=STEPS) for name, model in models.items()]
    note = f"torchreplay: PrioritizedDQN; {PEER}: DQN, which draws uniformly"
    yield _line("SB3 DQN, step", interleave(works, plan.rounds, plan.seconds), note)


def _line(name: str, seconds: Mapping[str, list[float]], note: str = "") -> Line:
    micros = {candidate: [value * MICROSECONDS for value in values] for candidate, values in seconds.items()}
    return Line("compat", name, "us", micros, note=note)


def _buffers(
    title: str, classes: Mapping[str, Any], space: spaces.Space[Any], n_envs: int, plan: Plan
) -> Iterator[Line]:
    size = plan.capacity(CAPACITY)
    full = {name: made(size, space, spaces.Discrete(2), "cpu", n_envs) for name, made in classes.items()}
    adds = [Candidate(name, _adding(buffer, space, n_envs), calls=EPISODE) for name, buffer in full.items()]
    for add in adds:
        add.run(size // n_envs // EPISODE + 1)
    yield _line(f"{title}: add", interleave(adds, plan.rounds, plan.seconds))
    for batch_size in (64, 256):
        samples = [Candidate(name, _sampling(buffer, batch_size)) for name, buffer in full.items()]
        yield _line(f"{title}: sample {batch_size}", interleave(samples, plan.rounds, plan.seconds))


def _adding(buffer: Any, space: spaces.Space[Any], n_envs: int) -> Callable[[int], None]:
    """Returns what adds episodes of 64 steps, with the values that a learner hands over."""
    rng = np.random.default_rng(0)

    def observation(space: spaces.Space[Any]) -> Any:
        if isinstance(space, spaces.Dict):
            return {name: observation(part) for name, part in space.spaces.items()}
        return rng.random((n_envs, *(space.shape or ())), dtype=np.float32)

    seen = [observation(space) for _ in range(EPISODE + 1)]
    dones = [np.full(n_envs, t == EPISODE - 1) for t in range(EPISODE)]
    action, reward = np.zeros(n_envs, np.int64), np.ones(n_envs, np.float32)
    infos = [{"TimeLimit.truncated": False} for _ in range(n_envs)]

    def run(n: int) -> None:
        add = buffer.add
        for _ in range(n):
            for t in range(EPISODE):
                add(seen[t], seen[t + 1], action, reward, dones[t], infos)

    return run


def _sampling(buffer: Any, batch_size: int) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            buffer.sample(batch_size)

    return run


def _learner(kind: type[DQN]) -> DQN:
    torch.set_num_threads(1)
    model = kind("MlpPolicy", "CartPole-v1", buffer_size=CAPACITY, learning_starts=100, device="cpu", seed=0)
    return model.learn(1_000)


def _learning(model: DQN) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            model.learn(STEPS, reset_num_timesteps=False)

    return run

"""Ape-X with the buffers of others: cpprb's in shared memory, and cpprb's in a Ray actor.

Explorers build n-step transitions themselves. These buffers do not hold the ratio of draws to rows, so the learner
counts rows and waits.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.learning.apex import (
    BATCH_SIZE,
    CAPACITY,
    MIN_ROWS,
    N_STEP,
    SAMPLES_PER_INSERT,
    TASK,
    Slow,
    epsilon_of,
    seconds_until_solved,
)
from benchmarks.learning.double_dqn import GAMMA, Learner, act

Row = dict[str, Any]
ENV = {
    "obs": {"shape": TASK.obs},
    "action": {"dtype": np.int64},
    "reward": {},
    "next_obs": {"shape": TASK.obs},
    "discount": {},
}
START_SECONDS = 120.0
"""Seconds in which all explorers must have begun."""
SEND = 50
"""Rows that an explorer sends to a Ray actor at a time."""


class NSteps:
    """Builds n-step transitions of an episode's steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Any, int, float]] = deque()

    def add(self, obs: Any, action: int, reward: float, next_obs: Any, terminated: bool, over: bool) -> Iterator[Row]:
        """Takes a step, and yields the transitions that it completes; at the end of an episode all that are left."""
        self._steps.append((obs, action, reward))
        while self._steps and (over or len(self._steps) == N_STEP):
            discount = 0.0 if terminated else GAMMA ** len(self._steps)
            total = sum(GAMMA**k * reward for k, (_, _, reward) in enumerate(self._steps))
            first, taken, _ = self._steps.popleft()
            yield {"obs": first, "action": taken, "reward": total, "next_obs": next_obs, "discount": discount}


@torch.no_grad()
def explore(policy: nn.Module, seed: int, index: int, explorers: int) -> Iterator[Row]:
    """Plays without end, and yields n-step transitions."""
    torch.set_num_threads(1)
    env, rng, epsilon = Slow(), np.random.default_rng([seed, index]), epsilon_of(index, explorers)
    obs, _ = env.reset(seed=1_000 * seed + index)
    steps = NSteps()
    while True:
        action = act(policy, obs, epsilon, rng)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        yield from steps.add(obs, action, reward, next_obs, terminated, terminated or truncated)
        obs = env.reset()[0] if terminated or truncated else next_obs


def _as_tensors(sample: Row) -> Row:
    """Returns a batch of cpprb's as the learner takes it: cpprb's scalars are `[B, 1]`."""
    batch = {name: torch.from_numpy(np.array(sample[name])) for name in ENV}
    batch |= {name: batch[name].squeeze(-1) for name in ("action", "reward", "discount")}
    return batch | {"weight": torch.from_numpy(np.array(sample["weights"])).float(), "indexes": sample["indexes"]}


def may_draw(drawn: int, written: int) -> bool:
    """Returns whether the ratio of rows drawn to rows written allows another batch."""
    return written >= MIN_ROWS and drawn <= (written - MIN_ROWS) * SAMPLES_PER_INSERT


def _solve(
    learner: Learner,
    draw: Callable[[int], Row | None],
    check: Callable[[], object],
    update: Any,
    publish: Any,
    seed: int,
) -> float:
    """Learns; `draw` takes the number of rows drawn so far and returns a batch, or None where it is too early.

    `check` raises when an explorer is gone.
    """

    def batches() -> Iterator[Row]:
        while True:
            sample = draw(learner.steps * BATCH_SIZE)
            if sample is None:
                check()
                time.sleep(0.001)
            else:
                yield _as_tensors(sample)

    def feed_back(batch: Row, errors: Tensor) -> None:
        update(batch["indexes"], errors.abs().numpy())

    return seconds_until_solved(learner, batches(), feed_back, publish, seed)


def _explore_into(buffer: Any, policy: nn.Module, written: Any, start: Any, seed: int, index: int) -> None:
    start.wait()
    for number, row in enumerate(explore(policy, seed, index, len(written)), 1):
        buffer.add(**row)
        written[index] = number


def with_cpprb(seed: int, explorers: int) -> float:
    """Returns seconds until it is solved, with explorers that are forked and share the buffer and the weights."""
    import cpprb

    fork = get_context("fork")
    buffer = cpprb.MPPrioritizedReplayBuffer(CAPACITY, ENV, alpha=0.6, ctx=fork)
    learner, policy = Learner(TASK, seed), TASK.network().share_memory()
    written, start = fork.RawArray("q", explorers), fork.Barrier(explorers + 1, timeout=START_SECONDS)
    policy.load_state_dict(learner.q.state_dict())
    processes = [
        fork.Process(target=_explore_into, args=(buffer, policy, written, start, seed, index), daemon=True)
        for index in range(explorers)
    ]
    for process in processes:
        process.start()
    try:
        start.wait()
        return _solve(
            learner,
            lambda drawn: buffer.sample(BATCH_SIZE, beta=0.4) if may_draw(drawn, sum(written)) else None,
            lambda: _require_alive(processes),
            buffer.update_priorities,
            lambda q: policy.load_state_dict(q.state_dict()),
            seed,
        )
    finally:
        for process in processes:
            process.kill()
            process.join()


def _require_alive(processes: list[ForkProcess]) -> None:
    if not all(process.is_alive() for process in processes):
        raise RuntimeError("an explorer has ended")


class ActorBuffer:
    """A prioritized buffer in a Ray actor, which hands out weights, too."""

    def __init__(self) -> None:
        import cpprb

        self._buffer = cpprb.PrioritizedReplayBuffer(CAPACITY, ENV, alpha=0.6)
        self._weights: Any = None
        self._explorers = self._written = 0

    def join(self) -> None:
        """Counts an explorer that is there."""
        self._explorers += 1

    def explorers(self) -> int:
        """Returns how many are there."""
        return self._explorers

    def add(self, rows: Row) -> Any:
        """Writes an explorer's rows; returns the newest weights."""
        self._buffer.add(**rows)
        self._written += len(rows["reward"])
        return self._weights

    def sample(self, drawn: int) -> Row | None:
        """Returns a batch, or None where it is too early."""
        if not may_draw(drawn, self._written):
            return None
        return {name: np.array(values) for name, values in self._buffer.sample(BATCH_SIZE, beta=0.4).items()}

    def update(self, indexes: Any, errors: Any) -> None:
        """Takes TD errors."""
        self._buffer.update_priorities(indexes, errors)

    def publish(self, weights: Any) -> None:
        """Takes new weights."""
        self._weights = weights


def _wait_for_all(buffer: Any, explorers: int, check: Callable[[], object] = int) -> None:
    import ray

    while ray.get(buffer.explorers.remote()) < explorers:
        check()
        time.sleep(0.01)


def _send_to(buffer: Any, seed: int, index: int, explorers: int) -> None:
    import ray

    policy, rows = TASK.network(), []
    ray.get(buffer.join.remote())
    _wait_for_all(buffer, explorers)
    for row in explore(policy, seed, index, explorers):
        rows.append(row)
        if len(rows) == SEND:
            weights = ray.get(buffer.add.remote({name: np.array([row[name] for row in rows]) for name in ENV}))
            rows.clear()
            if weights is not None:
                policy.load_state_dict(weights)


def with_ray_actor(seed: int, explorers: int) -> float:
    """Returns seconds until it is solved, with explorers that are Ray tasks and send their rows to an actor."""
    import ray

    same = {"worker_niceness": 0}  # as the explorers of the others
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False, _system_config=same)
    try:
        learner = Learner(TASK, seed)
        buffer: Any = ray.remote(num_cpus=0)(ActorBuffer).remote()
        explorer: Any = ray.remote(num_cpus=0)(_send_to)
        tasks = [explorer.remote(buffer, seed, index, explorers) for index in range(explorers)]

        def check() -> None:
            ray.get(ray.wait(tasks, timeout=0)[0])  # one that has ended has failed: its error is raised

        _wait_for_all(buffer, explorers, check)
        return _solve(
            learner,
            lambda drawn: ray.get(buffer.sample.remote(drawn)),
            check,
            buffer.update.remote,
            lambda q: buffer.publish.remote(q.state_dict()),
            seed,
        )
    finally:
        ray.shutdown()

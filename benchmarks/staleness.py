"""How old rollouts become, and who waits, where lengths have a heavy tail: in simulated time, on a real queue.

Generators write rollouts whose lengths are Pareto distributed, a token in a unit of time. A learner takes batches,
learns for some time, and publishes a version. Events are calls of the buffer in the order of the simulated time. So the
outcome depends on the seed alone, and not on the machine.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

import torchreplay as tr

Bound = Literal["admission", "admission alone", "dropping"]
"""What bounds the age: `Admission`, with `Fifo(max_age=)` for stragglers or without it, or `Fifo(max_age=)` alone."""
SPEC = {"policy_version": tr.Field((), torch.int64), "number": tr.Field((), torch.int64)}
SHORTEST, LONGEST = 100, 32_000
"""Tokens of a rollout; longer ones are cut, as trainers do."""
TAIL = 1.5
"""Exponent of the Pareto distribution. Uncut, its mean is three times the shortest, and its variance is infinite."""
MEAN: float = SHORTEST + SHORTEST / (TAIL - 1) * (1 - (SHORTEST / LONGEST) ** (TAIL - 1))
"""Mean length of the cut distribution, the integral of P(length > x)."""
ROOM = 16_384
"""Rows of a queue: far more than are ever written between two draws, which drop what is too old."""
LEARNER = -1
"""Whose event it is, where others are those of a generator."""


@dataclass(frozen=True)
class Scene:
    """What is simulated.

    Attributes:
        bound: What bounds the age.
        max_age: By how many versions.
        steps: Batches that the learner learns from.
        generators: That answer at the same time.
        batch_size: Rollouts of a batch.
        load: Time of a learner's step, over that in which the generators make a batch on average if nobody waits.
        seed: Of the lengths.
    """

    bound: Bound
    max_age: int
    steps: int = 200
    generators: int = 64
    batch_size: int = 64
    load: float = 1.0
    seed: int = 0

    @property
    def step_time(self) -> float:
        """Units of time of a learner's step."""
        return self.load * MEAN * self.batch_size / self.generators

    def queue(self) -> tr.ReplayBuffer:
        """Returns a queue that never becomes full, so that nothing but an admission has generators wait."""
        sampler = tr.Fifo(max_age=None if self.bound == "admission alone" else self.max_age)
        limiter = tr.MinSize(1) if self.bound == "dropping" else tr.Admission(self.batch_size, self.max_age)
        return tr.ReplayBuffer(SPEC, ROOM, sampler=sampler, limiter=limiter)


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        ages: Of the rollouts that were learned from, in versions.
        lengths: Of all rollouts that were begun.
        begun_at: When they were, in units of time.
        learned: The numbers of those that were learned from.
        time: Units until the last step was done.
        learner_waited: Units.
        generators_waited: Units, of all generators together.
        expired: Rollouts that were finished, and dropped for their age.
    """

    ages: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    begun_at: list[float] = field(default_factory=list)
    learned: list[int] = field(default_factory=list)
    time: float = 0.0
    learner_waited: float = 0.0
    generators_waited: float = 0.0
    expired: int = 0

    def early(self) -> tuple[list[int], list[int]]:
        """Returns the lengths of what was begun so early that it was finished, and of what of it was learned from."""
        early = [number for number, at in enumerate(self.begun_at) if at < self.time / 2 and at + LONGEST < self.time]
        learned = set(self.learned)
        return [self.lengths[n] for n in early], [self.lengths[n] for n in early if n in learned]


def lengths(seed: int) -> Iterator[int]:
    """Yields lengths of rollouts, without end."""
    dice = np.random.default_rng(seed)
    while True:
        yield from np.minimum(SHORTEST * (1 + dice.pareto(TAIL, 4096)), LONGEST).astype(int).tolist()


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Returns the largest distance of two empirical distribution functions: Kolmogorov and Smirnov's statistic."""
    places = np.union1d(one, other)
    shares = [np.searchsorted(np.sort(sample), places, side="right") / len(sample) for sample in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


class Simulation:
    """Generators and a learner around one queue."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self.outcome = scene, Outcome()
        self._queue = scene.queue()
        self._writers = [self._queue.writer() for _ in range(scene.generators)]
        self._blocks: dict[int, AbstractContextManager[None]] = {}
        self._lengths = lengths(scene.seed)
        self._order = itertools.count()
        self._events: list[tuple[float, int, int]] = []  # when, in which order, whose
        self._under_way: dict[int, int] = {}  # the number of each generator's rollout
        self._to_begin: dict[int, float] = dict.fromkeys(range(scene.generators), 0.0)  # and since when they wait
        self._idle_since: float | None = 0.0  # of the learner; None: it learns

    def run(self) -> Outcome:
        """Runs until the learner has made its steps."""
        scene, now, version = self._scene, 0.0, 0
        with self._queue:
            while version < scene.steps:
                self._begin(now)
                if self._learn(now):
                    self._begin(now)  # a draw drops what is too old, and gives it back
                now, _, who = heapq.heappop(self._events)
                if who == LEARNER:
                    version += 1
                    self._queue.commit()
                    self._queue.policy_version = version
                    self._idle_since = now
                else:
                    self._write(who, now)
            self.outcome.expired = self._queue.stats().expired_items
        self.outcome.time = now
        self.outcome.generators_waited += sum(now - since for since in self._to_begin.values())
        return self.outcome

    def _write(self, generator: int, now: float) -> None:
        """Has a generator store what it has finished."""
        self._writers[generator].append(number=self._under_way[generator])
        if block := self._blocks.pop(generator, None):
            block.__exit__(None, None, None)
        self._to_begin[generator] = now

    def _begin(self, now: float) -> None:
        """Has generators begin, as far as they are admitted."""
        for generator in tuple(self._to_begin):
            writer = self._writers[generator]
            if self._scene.bound != "dropping":
                block = writer.admit(timeout=0.0)
                try:
                    block.__enter__()
                except (tr.ReplayTimeout, tr.WouldBlockForever):
                    return
                self._blocks[generator] = block
            writer.policy_version = self._queue.policy_version
            length = next(self._lengths)
            self._under_way[generator] = len(self.outcome.lengths)
            self.outcome.lengths.append(length)
            self.outcome.begun_at.append(now)
            self.outcome.generators_waited += now - self._to_begin.pop(generator)
            heapq.heappush(self._events, (now + length, next(self._order), generator))

    def _learn(self, now: float) -> bool:
        """Has the learner begin with a batch, if there is one."""
        if self._idle_since is None or self._queue.num_items < self._scene.batch_size:
            return False
        try:
            batch = self._queue.sample(self._scene.batch_size, timeout=0.0)
        except (tr.ReplayTimeout, tr.WouldBlockForever):
            return False
        self.outcome.ages += batch["age"].tolist()
        self.outcome.learned += batch["number"].tolist()
        self.outcome.learner_waited += now - self._idle_since
        self._idle_since = None
        heapq.heappush(self._events, (now + self._scene.step_time, next(self._order), LEARNER))
        return True

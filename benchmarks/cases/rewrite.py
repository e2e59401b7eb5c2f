"""Rewriting rows that are there: how long it takes beside a gather, and what draws lose to it."""

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event

import numpy as np
import torch

import torchreplay as tr
from benchmarks.line import OURS, Line
from benchmarks.plan import Plan
from torchreplay.checking.timing import Candidate, interleave

MICROSECONDS = 1e6
BATCH_SIZE = 256
CAPACITY = 100_000
SPEC = {"latent": tr.Field(512)}
PLACES = 64
"""Choices of rows that a measurement goes through, so that few of them are in the caches."""

ALONE = "nobody rewrites"


def measure_rewrite(plan: Plan) -> Iterator[Line]:
    """Yields the times of ``rewrite`` and ``gather``, and of a draw beside a process that rewrites all the time."""
    with tr.ReplayBuffer(SPEC, plan.capacity(CAPACITY), seed=0) as buffer:
        rows = torch.rand(4096, 512)
        for _ in range(buffer.capacity // len(rows) + 1):
            buffer.extend(latent=rows)
        keys = _choices(buffer)
        candidates = [
            Candidate(OURS, _rewrites(buffer, keys)),
            Candidate("gather", _gathers(buffer, keys)),
            Candidate("discard", _discards(buffer, keys)),
        ]
        samples = _in_micros(interleave(candidates[:2], plan.rounds, plan.seconds))
        yield Line("rewrite", f"rewrite {BATCH_SIZE} rows of f32[512]", "us", samples)
        ratios = [ours / gather for ours, gather in zip(samples[OURS], samples["gather"], strict=True)]
        yield Line("rewrite", "... times a gather of them", "", {OURS: ratios})
        draws = Candidate(OURS, _draws(buffer))
        alone, beside = (
            _in_micros(interleave([draws], plan.rounds, plan.seconds))[OURS],
            _beside(buffer, keys, draws, plan),
        )
        yield Line("rewrite", f"sample {BATCH_SIZE}", "us", {OURS: beside, ALONE: alone})
        fractions = [free / busy for free, busy in zip(alone, beside, strict=True)]
        yield Line("rewrite", "... as fast as without", "", {OURS: fractions}, higher_is_better=True)
        yield Line(
            "rewrite",
            f"discard {BATCH_SIZE}",
            "us",
            _in_micros({OURS: interleave(candidates[2:], plan.rounds, plan.seconds)["discard"]}),
        )


def _in_micros(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [value * MICROSECONDS for value in values] for name, values in seconds.items()}


def _choices(buffer: tr.ReplayBuffer) -> list[torch.Tensor]:
    generator, held = np.random.default_rng(0), buffer.keys()
    return [held[torch.from_numpy(generator.choice(len(held), BATCH_SIZE, replace=False))] for _ in range(PLACES)]


def _rewrites(buffer: tr.ReplayBuffer, keys: list[torch.Tensor]) -> Callable[[int], None]:
    values = torch.rand(BATCH_SIZE, 512)

    def run(n: int) -> None:
        for i in range(n):
            buffer.rewrite(keys[i % PLACES], latent=values)

    return run


def _gathers(buffer: tr.ReplayBuffer, keys: list[torch.Tensor]) -> Callable[[int], None]:
    def run(n: int) -> None:
        for i in range(n):
            buffer.gather(keys[i % PLACES])

    return run


def _discards(buffer: tr.ReplayBuffer, keys: list[torch.Tensor]) -> Callable[[int], None]:
    def run(n: int) -> None:
        for i in range(n):
            buffer.discard(keys[i % PLACES])

    return run


def _draws(buffer: tr.ReplayBuffer) -> Callable[[int], None]:
    def run(n: int) -> None:
        for _ in range(n):
            buffer.sample(BATCH_SIZE)

    return run


def _beside(buffer: tr.ReplayBuffer, keys: list[torch.Tensor], draws: Candidate, plan: Plan) -> list[float]:
    """Returns the microseconds of draws while another process rewrites as fast as it can."""
    context = multiprocessing.get_context("fork")
    ready, over = context.Event(), context.Event()
    child = context.Process(target=_rewrite_on, args=(buffer, keys, ready, over))
    child.start()
    try:
        ready.wait()
        return _in_micros(interleave([draws], plan.rounds, plan.seconds))[OURS]
    finally:
        over.set()
        child.join()


def _rewrite_on(buffer: tr.ReplayBuffer, keys: list[torch.Tensor], ready: Event, over: Event) -> None:
    torch.set_num_threads(1)
    run = _rewrites(buffer, keys)
    run(1)
    ready.set()
    while not over.is_set():
        run(PLACES)

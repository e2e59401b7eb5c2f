"""Saving and loading a buffer of large rows, beside the disk's own rate."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import torchreplay as tr
from benchmarks.disk import (
    forget,
    read_into_shared_memory,
    read_sequentially,
    read_whole,
    seconds_of,
    write_sequentially,
)
from benchmarks.line import OURS, Line
from benchmarks.machine import require_memory
from benchmarks.plan import Plan

FRAMES = 300_000
SPEC = {
    "obs": tr.Field((84, 84), torch.uint8),
    "action": tr.Field(dtype=torch.int64),
    "reward": tr.Field(),
    "done": tr.Field(dtype=torch.bool),
}
BLOCK = 1000
DISK, NEW_MEMORY, SHARED = "the disk", "into new memory", "into new shared memory"
DIRECTORY = Path("build")
"""On a disk, which a temporary directory need not be."""


def measure_checkpoint(plan: Plan) -> Iterator[Line]:
    """Yields seconds and fractions of the disk's rate; each round writes and reads as many bytes by all of them."""
    capacity = plan.capacity(FRAMES) // BLOCK * BLOCK
    with _filled(capacity) as buffer:
        size = buffer.nbytes
        require_memory(2 * size, "a buffer that is loaded and the file beside it")
        DIRECTORY.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=DIRECTORY) as name:
            rounds = [_round(buffer, Path(name), size) for _ in range(plan.contest_rounds)]
    for what in ("save", "load"):
        samples = {candidate: [r[what][candidate] for r in rounds] for candidate in rounds[0][what]}
        yield Line("checkpoint", f"{what} {size / 2**30:.1f} GiB of frames", "s", samples)
        fractions = {
            candidate: [disk / one for disk, one in zip(samples[DISK], seconds, strict=True)]
            for candidate, seconds in samples.items()
            if candidate != DISK
        }
        yield Line("checkpoint", f"{what}, fraction of the disk", "", fractions, higher_is_better=True)


def _filled(capacity: int) -> tr.ReplayBuffer:
    buffer = tr.ReplayBuffer(SPEC, capacity, sampler=tr.Prioritized(), seed=0)
    frames = torch.randint(0, 256, (BLOCK, 84, 84), dtype=torch.uint8)
    zeros = torch.zeros(BLOCK)
    for _ in range(capacity // BLOCK):
        buffer.extend(obs=frames, action=zeros.long(), reward=zeros, done=zeros.bool())
    return buffer


def _round(buffer: tr.ReplayBuffer, directory: Path, size: int) -> dict[str, dict[str, float]]:
    """Returns the seconds that each took to save and to load."""
    plain, checkpoint = directory / "plain", directory / "checkpoint"
    save = {
        DISK: seconds_of(lambda: write_sequentially(plain, size)),
        OURS: seconds_of(lambda: buffer.save(checkpoint)),
    }
    loaders = {
        DISK: lambda: read_sequentially(plain),
        OURS: lambda: tr.ReplayBuffer.load(checkpoint).close(),
        NEW_MEMORY: lambda: read_whole(plain),
        SHARED: lambda: read_into_shared_memory(plain),
    }
    load = {}
    for candidate, loader in loaders.items():
        forget(directory)  # which also gives all of them the same memory: that of the page cache
        load[candidate] = seconds_of(loader)
    plain.unlink()
    return {"save": save, "load": load}

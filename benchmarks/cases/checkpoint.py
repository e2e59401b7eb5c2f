"""Saving and loading a buffer of large rows, beside the disk's own rate."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import torchreplay as tr
from benchmarks.disk import forget, read_sequentially, seconds_of, write_sequentially
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
DIRECTORY = Path("build")
"""On a disk, which a temporary directory need not be."""


def measure_checkpoint(plan: Plan) -> Iterator[Line]:
    """Yields seconds and fractions of the disk's rate; each round writes and reads as many bytes by both."""
    capacity = plan.capacity(FRAMES) // BLOCK * BLOCK
    with _filled(capacity) as buffer:
        size = buffer.nbytes
        require_memory(2 * size, "a buffer that is loaded and the file beside it")
        DIRECTORY.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=DIRECTORY) as name:
            rounds = [_round(buffer, Path(name), size) for _ in range(plan.contest_rounds)]
    for k, what in ((0, "save"), (2, "load")):
        name = f"{what} {size / 2**30:.1f} GiB of frames"
        yield Line("checkpoint", name, "s", {"the disk": [r[k] for r in rounds], OURS: [r[k + 1] for r in rounds]})
        fractions = [r[k] / r[k + 1] for r in rounds]
        yield Line("checkpoint", f"{what}, fraction of the disk", "", {OURS: fractions}, higher_is_better=True)


def _filled(capacity: int) -> tr.ReplayBuffer:
    buffer = tr.ReplayBuffer(SPEC, capacity, sampler=tr.Prioritized(), seed=0)
    frames = torch.randint(0, 256, (BLOCK, 84, 84), dtype=torch.uint8)
    zeros = torch.zeros(BLOCK)
    for _ in range(capacity // BLOCK):
        buffer.extend(obs=frames, action=zeros.long(), reward=zeros, done=zeros.bool())
    return buffer


def _round(buffer: tr.ReplayBuffer, directory: Path, size: int) -> tuple[float, float, float, float]:
    """Returns the seconds that the disk took to write, we to save, the disk to read, we to load."""
    plain, checkpoint = directory / "plain", directory / "checkpoint"
    written = seconds_of(lambda: write_sequentially(plain, size))
    saved = seconds_of(lambda: buffer.save(checkpoint))
    forget(directory)
    read = seconds_of(lambda: read_sequentially(plain))
    loaded = seconds_of(lambda: tr.ReplayBuffer.load(checkpoint).close())
    plain.unlink()
    return written, saved, read, loaded

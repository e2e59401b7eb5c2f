"""Attaching to a file that pretends to be a segment, with any header and any description of itself."""

import os
from dataclasses import replace

import torch

import torchreplay as tr
from torchreplay.segment.handle import make_handle

CHECKED = 80  # bytes of the header that are read before the file is trusted
NONCE, BYTES, CONFIG_BYTES = slice(24, 32), slice(32, 40), slice(40, 48)
CONFIG = 4096 + 4096 * 64  # where the description lies: after the header's page and the table of participants
MOST_BYTES = 64 << 20

ENDS = {"terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}
STEPS = {"obs": tr.Field((3,)), "goal": tr.Field((3,)), "reward": tr.Field(), **ENDS}


def buffers():
    """Buffers of every view, sampler and limiter."""
    nested = {"obs": {"image": tr.Field((40, 40), torch.uint8), "n": tr.Field((), torch.int64)}}
    yield tr.ReplayBuffer({"x": tr.Field()}, 1)
    yield tr.ReplayBuffer(nested, 300, sampler=tr.Prioritized(beta=tr.LinearSchedule(0.4, 1.0, 100)))
    yield tr.ReplayBuffer(STEPS, 40, view=tr.Transitions(3, stack={"obs": 2}), limiter=tr.MinSize(9))
    yield tr.ReplayBuffer(STEPS, 40, view=tr.Sequences(4, burn_in=2), limiter=tr.SamplesPerInsert(4.0))
    yield tr.ReplayBuffer(STEPS, 40, view=tr.Hindsight(None, "obs", "goal", observation=("obs", "goal")))


def seeds():
    for buffer in buffers():
        with open(f"/proc/self/fd/{buffer.handle().fd}", "rb") as file:
            header = file.read(CHECKED)
            file.seek(CONFIG)
            yield header + file.read(int.from_bytes(header[CONFIG_BYTES], "little"))


def run(data):
    header, description = data[:CHECKED], data[CHECKED:]
    size = int.from_bytes(header[BYTES], "little")
    fd = os.memfd_create("fuzz")
    try:
        os.ftruncate(fd, size if size <= MOST_BYTES else CONFIG + len(description))
        os.pwrite(fd, header, 0)
        os.pwrite(fd, description, CONFIG)
        handle = make_handle(fd, int.from_bytes(header[NONCE], "little"))
        try:
            buffer = tr.ReplayBuffer.attach(replace(handle, size=os.fstat(fd).st_size))
        except tr.AttachError:
            return
    finally:
        os.close(fd)
    # What was attached agrees with itself: every path that trusts the description can be taken.
    repr(buffer)
    for column in flat(buffer.storage):
        assert column.shape[0] == buffer.capacity
    buffer.writer().close()
    buffer.close()


def flat(values):
    for value in values.values():
        yield from flat(value) if isinstance(value, dict) else [value]

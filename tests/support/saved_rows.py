"""Buffers to be saved, whose rows all follow from their number."""

import json
import zlib

import torch
from safetensors.torch import load_file

import torchreplay as tr
from torchreplay.checkpoint.safetensors_io import BLOCK, room_for, write_shard

SPEC = {"x": {"a": tr.Field((3,), torch.int64), "b": tr.Field((), torch.bfloat16)}, "reward": tr.Field()}


RAGGED = SPEC | {"tail": tr.Ragged(torch.int64), "more": tr.Ragged(torch.bool, (2,), like="tail")}


def rows(first, n):
    """Rows whose values all follow from their number."""
    numbers = torch.arange(first, first + n)
    return {"x": {"a": numbers[:, None] * torch.tensor([1, 2, 3]), "b": numbers % 100}, "reward": numbers.float()}


def ragged_rows(first, n):
    """The same with values of any length, which follow from the number, too."""
    numbers = torch.arange(first, first + n)
    lengths = numbers * 7 % 20
    tail = torch.repeat_interleave(numbers, lengths)
    return rows(first, n) | {
        "tail": (tail, lengths),
        "more": (torch.stack([tail % 2 == 0, tail % 3 == 0], 1), lengths),
    }


def filled(n, capacity, **arguments):
    """With `ragged_bytes`, of values of any length, too."""
    ragged = "ragged_bytes" in arguments
    sampler = tr.Prioritized(alpha=0.7, beta=0.5)
    buffer = tr.ReplayBuffer(RAGGED if ragged else SPEC, capacity, sampler=sampler, seed=11, **arguments)
    given = ragged_rows(0, n) if ragged else rows(0, n)
    buffer.extend(**given, priority=torch.arange(n) % 7 + 1.0)
    return buffer


def assert_rows_are_those_of_their_keys(batch):
    assert torch.equal(batch["x"]["a"], batch["key"][:, None] * torch.tensor([1, 2, 3]))
    assert torch.equal(batch["reward"], batch["key"].float())
    assert torch.equal(batch["x"]["b"], (batch["key"] % 100).bfloat16())
    if "tail" in batch:
        lengths = batch["key"] * 7 % 20
        assert torch.equal(batch.lengths("tail"), lengths)
        tail = torch.repeat_interleave(batch["key"], lengths)
        assert torch.equal(batch["tail"], tail)
        assert torch.equal(batch["more"], torch.stack([tail % 2 == 0, tail % 3 == 0], 1))


def told_by(directory):
    """What the description of a checkpoint says."""
    return json.loads(json.loads((directory / "checkpoint.json").read_text())["checkpoint"])


def tell(directory, told):
    """Has it say something else."""
    text = json.dumps(told)
    (directory / "checkpoint.json").write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "checkpoint": text}))


def change_rows(directory, change):
    """Has the files of rows hold what `change(tensors)` makes of them, with checksums that fit."""
    told = told_by(directory)
    for number, (name, *_) in enumerate(told["shards"]):
        tensors = change(load_file(directory / name))
        (directory / name).unlink()
        told["shards"][number][1:] = write_shard(directory / name, tensors, room_for(BLOCK))
    tell(directory, told)


def make_format_3(directory):
    """Makes a checkpoint what versions that knew format 3 would have written."""
    told = told_by(directory)
    tell(directory, told | {"format": 3, "counts": told["counts"][:13]})
    change_rows(
        directory,
        lambda tensors: {
            f"row.{name[1:]}" if name.startswith("/") else name: tensor for name, tensor in tensors.items()
        },
    )

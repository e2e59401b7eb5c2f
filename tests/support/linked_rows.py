"""Rows of linked buffers for tests: specs, values that identify their row, flat names for nested fields."""

import numpy as np
import torch

import torchreplay as tr

STEPS = {
    "action": ((), np.int64),
    "reward": ((), np.float32),
    "terminated": ((), np.bool_),
    "truncated": ((), np.bool_),
}
PLAIN = {"obs": ((2,), np.float32), **STEPS}
NESTED = {
    "obs/image": ((32, 36), np.uint8),  # large enough for an array of its own in the segment
    "obs/goal": ((), np.float64),
    **STEPS,
    "reward": ((2,), np.float64),
    "state/h": ((3,), np.float16),
}
SEVERAL = {
    "pixels": ((2, 2), np.uint8),
    "speed": ((), np.int16),
    **STEPS,
    "state/h": ((2,), np.float32),
    "option/discount": ((), np.float16),
}


def nested(flat):
    """The nested dict of values under names such as `obs/goal`."""
    tree = {}
    for name, value in flat.items():
        *path, last = name.split("/")
        level = tree
        for part in path:
            level = level.setdefault(part, {})
        level[last] = value
    return tree


def flat(tree, path=""):
    """The inverse of `nested`, with NumPy arrays for tensors."""
    values = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            values |= flat(value, f"{path}{name}/")
        else:
            values[path + name] = value.numpy() if isinstance(value, torch.Tensor) else value
    return values


def spec_of(fields):
    return nested({name: tr.Field(shape, dtype) for name, (shape, dtype) in fields.items()})


def row_values(fields, number, terminated=False, truncated=False):
    """Values of every field, different for every number; rewards are small integers, discounts powers of two: returns
    are exact."""
    values = {}
    for name, (shape, dtype) in fields.items():
        n = int(np.prod(shape))
        values[name] = ((number * 31 + np.arange(n)) % 251).astype(dtype).reshape(shape)
    values["reward"] = np.full(fields["reward"][0], number * 7 % 17 - 8, fields["reward"][1])
    if "option/discount" in fields:
        values["option/discount"] = np.float16(2.0 ** -(number % 3))
    values["terminated"] = np.bool_(terminated)
    values["truncated"] = np.bool_(truncated)
    return values


def parted(values, observation):
    """(observation, everything else) of flat values."""
    observed = {name: value for name, value in values.items() if name.split("/")[0] in observation}
    return observed, {name: value for name, value in values.items() if name not in observed}


def stacked(rows):
    """A flat dict with a leading axis of a list of flat dicts."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def buffer_of(view, fields=PLAIN, capacity=100, **arguments):
    return tr.ReplayBuffer(spec_of(fields), capacity, view=view, seed=0, **arguments)


def observation(number):
    return {"obs": np.full(2, number, np.float32)}


def play(writer, length, end="terminated", start=0, priorities=None, observation=observation):
    """An episode of observations start, start + 1, ...; the action at an observation is its number, the reward 1."""
    keys = [writer.reset(**observation(start))]
    for t in range(length):
        last = t == length - 1
        flags = {"terminated": last and end == "terminated", "truncated": last and end == "truncated"}
        priority = priorities[t] if priorities else None
        keys.append(writer.step(**observation(start + t + 1), action=start + t, reward=1.0, **flags, priority=priority))
    return keys


def everything(buffer):
    """The items of all drawable anchors."""
    return buffer.gather(torch.arange(buffer.stats().rows_written))


def pairs(buffer):
    """(observation, next observation) of all drawable transitions."""
    batch = everything(buffer)
    return list(zip(batch["obs"][:, 0].tolist(), batch["next_obs"][:, 0].tolist(), strict=True))

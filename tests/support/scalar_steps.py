"""Steps of scalars: the smallest rows that a linked view takes."""

import torch

import torchreplay as tr

STEPS = {
    "obs": tr.Field((), torch.int64),
    "action": tr.Field((), torch.int64),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}

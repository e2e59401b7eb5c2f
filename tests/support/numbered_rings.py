"""A buffer whose rows are numbered, and tensors that its operators draw into."""

import torch

import torchreplay as tr

ROWS = 100
OPS = torch.ops.torchreplay
BETA = torch.tensor(0.4, dtype=torch.float64)


def filled_buffer(rows=ROWS, capacity=128, **arguments):
    """A prioritized buffer whose row with key k holds the number k."""
    spec = {"obs": {"position": tr.Field((3,))}, "number": tr.Field((), torch.int64), "done": tr.Field((), torch.bool)}
    sampler = tr.Prioritized(alpha=0.6, beta=0.4)
    buffer = tr.ReplayBuffer(spec, capacity, sampler=sampler, seed=7, **arguments)
    if rows:
        write(buffer, rows)
    return buffer


def write(buffer, rows):
    number = torch.arange(rows)
    position = number.float()[:, None].expand(rows, 3)
    buffer.extend(obs={"position": position}, number=number, done=number % 2 == 0, priority=number % 10 + 0.5)


def outputs(n=8):
    """Tensors for a batch of `filled_buffer`: fields, key, weight, probability."""
    fields = [torch.empty(n, 3), torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.bool)]
    return fields, torch.empty(n, dtype=torch.int64), torch.empty(n), torch.empty(n)

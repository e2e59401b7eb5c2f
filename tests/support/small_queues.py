"""Queues of numbered rows, and who writes to them."""

import threading

import numpy as np
import torch

import torchreplay as tr

SPEC = {"x": tr.Field((), "int64")}
FLAG = tr.Field((), torch.bool)
STEPS = {"obs": tr.Field((), "int64"), "action": tr.Field((), "int64"), "reward": tr.Field()}
STEPS |= {"terminated": FLAG, "truncated": FLAG}
VIEWS = {
    "one step": tr.Transitions(),
    "three steps": tr.Transitions(n_step=3),
    "stacked": tr.Transitions(stack={"obs": 3}),
    "sequences": tr.Sequences(length=4),
    "overlapping": tr.Sequences(length=4, stride=2),
}


def queue(capacity=100, items=0, view=None, spec=SPEC, **fifo):
    buffer = tr.ReplayBuffer(spec, capacity, view=view, sampler=tr.Fifo(**fifo))
    if items:
        buffer.extend(x=np.arange(items))
    return buffer


def values(batch):
    return batch["x"].tolist()


def writing(buffer, numbers):
    """A thread that writes them, one by one."""

    def write():
        with buffer.writer() as writer:
            for number in numbers:
                writer.append(x=number)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def step(writer, number, **flags):
    ends = {"terminated": False, "truncated": False} | flags
    writer.step(obs=number, action=number, reward=0.0, **ends)

"""Policies whose returns are their numbers, and an evaluator's worker in this process."""

import threading

import pytest
import torch
from forked import eventually
from safetensors.torch import load_file

from torchreplay.workers.worker_process import Launch
from torchreplay.workers.worker_table import WorkerTable

SPREAD = [-2.0, 0.0, 1.0]  # of three episodes' returns around the policy's number


class Policy(torch.nn.Module):
    """A policy whose episodes return its number, more or less."""

    def __init__(self, number=0.0):
        super().__init__()
        self.number = torch.nn.Parameter(torch.tensor(float(number)))


def evaluate(policy, seed):
    assert not policy.training
    assert not torch.is_grad_enabled()
    return [policy.number.item() + spread for spread in SPREAD]


class Loop:
    """The evaluator's worker, in a thread of this process."""

    def __init__(self, evaluator):
        self.evaluator, self.table = evaluator, WorkerTable(1)
        work = evaluator._make_work().begin(Launch(0, 1, 0, 0), self.table)
        self.thread = threading.Thread(target=work.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.table.stopped = True
        self.thread.join()

    def look_around(self):
        """Returns when the worker has looked for something to do, after this call."""
        for _ in range(2):
            before = self.table.entries[0]["heartbeat"]
            eventually(lambda before=before: self.table.entries[0]["heartbeat"] > before)

    def versions(self):
        self.look_around()
        return [evaluation.version for evaluation in self.evaluator.evaluations]


def publish(weights, *numbers):
    for number in numbers:
        weights.publish(Policy(number))


def run_once(evaluator):
    """A worker that ends with its first evaluation, by any error in it."""
    table = WorkerTable(1)
    log = evaluator._results.log
    add = log.add

    def add_and_stop(*found):
        add(*found)
        table.stopped = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "add", add_and_stop)
        evaluator._make_work().begin(Launch(0, 1, 0, 0), table).run()


def kept(directory):
    return load_file(directory / "best.safetensors")["number"].item()

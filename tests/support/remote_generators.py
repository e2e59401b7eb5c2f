"""Generators of a queue with admission for tests of remote writers: they run on a cluster's nodes."""

import os
import signal
import time

import torch

import torchreplay as tr

SPEC = {"who": tr.Field((), torch.int64), "policy_version": tr.Field((), torch.int64)}


def generate(ctx):
    """One item in each block, by the weights that are pulled there. Every fifth block of explorer 0 fails."""
    policy, blocks = torch.nn.Linear(1, 1), 0
    with ctx.writer() as writer:
        while not ctx.stopped:
            blocks += 1
            try:
                with ctx.admit():
                    ctx.pull_weights(policy)
                    if ctx.index == 0 and blocks % 5 == 0:
                        raise KeyError("a task that cannot be done")
                    time.sleep(0.002)  # so that the others have their turns
                    writer.append(who=ctx.index)
            except KeyError:
                continue


class Holder:
    """Begins items, and does nothing more."""

    def begin(self, queue, n):
        self.writer = queue.writer()
        self.block = self.writer.admit(n)
        self.block.__enter__()
        return os.getpid()

    def write(self, n):
        self.writer.extend(who=[7] * n)
        self.writer.flush()

    def try_to_begin(self, timeout):
        try:
            self.writer.admit(timeout=timeout).__enter__()
        except tr.ReplayTimeout as error:
            return str(error)

    def version(self, queue):
        return queue.policy_version

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

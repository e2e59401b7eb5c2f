"""Shards in this process, called directly: what rounds need of a cluster, for tests of their arithmetic."""

import pickle
from types import SimpleNamespace

import numpy as np

import torchreplay as tr
from torchreplay import _C
from torchreplay.ray.sharded.batch_block import Layout
from torchreplay.ray.sharded.local_shard import LocalShard
from torchreplay.ray.sharded.sample_request import SampleRequest, weights_of
from torchreplay.ray.sharded.shard_actor import Shard
from torchreplay.schema.config import Config

SPEC = {"home": tr.Field((), "int64"), "index": tr.Field((), "int64")}


def through_the_object_store(value):
    """Returns what comes out there: large arrays are read only, and no copies of their own."""
    buffers = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(pickled, buffers=[bytes(buffer.raw()) for buffer in buffers])


class LocalShards:
    """`sizes[k]` rows in shard k, whose values say which they are; shard `here` is the one on the learner's node.

    `ragged`: fields with values of any length, the bytes for them, and what gives the values of row i of shard k.

    Attributes:
        before_draw: Called with each shard's number and buffer before its candidates are drawn: what explorers and
            other learners do while an order is on its way.
        orders: So far.
    """

    def __init__(self, sizes, sampler, here=None, capacity=1 << 14, ragged=None):
        fields, ragged_bytes, values_of = ragged or ({}, None, None)
        config = Config.of(SPEC | fields, capacity, sampler, None, None, None, ragged_bytes)
        self.sampler = config.sampler
        self.layout = Layout(config.outputs())
        self.shards, self.keys = [], []
        for number, size in enumerate(sizes):
            shard = Shard(number, config, 100 + number, None)
            shard.open()
            rows = {"home": np.full(size, number), "index": np.arange(size)}
            for name in fields:
                rows[name] = [values_of(number, i)[name] for i in range(size)]
            self.keys.append(shard._buffer.extend(**rows) if size else None)
            self.shards.append(shard)
        self.table = SimpleNamespace(entries=dict.fromkeys(range(len(sizes))))
        self.figures = {}
        self.here = here
        if here is not None:
            self.nearby = LocalShard(here, self.buffer(here).handle())
        self.before_draw = lambda number, buffer: None
        self.orders = 0
        self.calls = SimpleNamespace(fetch=list, collect=lambda calls, wait: calls)

    def buffer(self, number):
        return self.shards[number]._buffer

    def order(self, candidates, layout=None, room=None):
        answers = {}
        for number, count in candidates.items():
            self.before_draw(number, self.buffer(number))
            if layout is not None and number == self.here:
                answers[number] = self.nearby.draw(count, 1.0, layout, room).result()
            else:
                figures, block = self.shards[number].draw(count, 1.0)
                # The block is the shard's to use again: the object store takes a copy.
                answers[number] = figures, through_the_object_store(block)
            self.orders += 1
        return answers

    def union(self, layout):
        return None

    union_now = None

    def alone(self):
        return None

    def report(self, n=0, last=False, most=1):
        pass

    def hear(self, calls, wait):
        return self.take_in(self.calls.collect(calls, wait))

    def take_in(self, calls):
        self.figures |= {number: figures for number, (figures, _) in calls.items()}
        return calls

    def batch(self, n, step, beta=0.4, slack=1 / 64, place=None, budget=None):
        here, chance, weights = self.here is not None, (7, 0, step), weights_of(self.sampler)
        round = _C.DrawTally().begin(n, None)
        request = SampleRequest(self, None, self.layout, round, chance, weights, beta, slack, here, place, budget)
        return request.finish(None)

    def close(self):
        if self.here is not None:
            self.nearby.close()
        for shard in self.shards:
            shard._buffer.close()

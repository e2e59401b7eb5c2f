"""`Shard`: the actor that holds one node's part of a `ShardedReplay`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay import _C
from torchreplay.buffer.base import MAX_BATCH
from torchreplay.buffer.replay_buffer import ReplayBuffer, local_sampler
from torchreplay.checkpoint.buffer_checkpoint import load_rows, save
from torchreplay.checkpoint.description import Description
from torchreplay.checkpoint.directory import is_checkpoint
from torchreplay.errors import CheckpointError
from torchreplay.ray.runtime.session import import_ray
from torchreplay.ray.sharded.batch_block import Layout
from torchreplay.ray.sharded.shard_sampler import Answer, ShardSampler
from torchreplay.ray.sharded.shard_wire import ShardServer
from torchreplay.ray.wire.connection import Address
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import MinSize
from torchreplay.schema.samplers import Prioritized
from torchreplay.schema.spec import nest
from torchreplay.segment.handle import Handle
from torchreplay.segment.ray_node import ray_node

SHARD_NAME = 56
"""Characters of the union's name in that of a shard, which has its number behind them."""


DRAWS_PER_ITEM: Final = float(1 << 40)
LOWEST_BALANCE: Final = -1e300
"""A shard's own limiter: the union's learners say how many items come in, and the shard's draws change nothing.

The native core has one kind of limiter, which keeps `inserted * ratio - sampled` within two bounds. At a ratio beyond
all draws of a shard the upper bound is a number of items. A lower bound that no balance reaches lets draws go on."""


class Shard:
    """One buffer, written by the processes of its node, and drawn from by calls from the others.

    Draws and feedback of each caller come in the order of its calls. Weights, and who may draw, are matters of the
    union: the learners' affair.

    Args:
        number: Of this shard, never used again: the high bits of its keys.
        config: Of the buffer.
        seed: Of its draws.
        limit: Items up to which writers are admitted until the coordinator says otherwise; None for no limit.
    """

    _buffer: ReplayBuffer
    _candidates: ShardSampler
    _native: _C.ShardService

    def __init__(self, number: int, config: Config, seed: int, limit: int | None) -> None:
        self._config, self._seed, self._limit = config, seed, limit
        self._number, self._cleared = number, 0
        self._layout = Layout(config.outputs())
        self._executor = ThreadPoolExecutor(1, "torchreplay-shard")
        self._server: ShardServer | None = None
        self._turn = threading.Lock()  # of learners whom the native core does not answer
        self._under_way: dict[str, Future[None]] = {}

    def open(self) -> Handle:
        """Makes the buffer, and returns what processes of this node attach. Called first, and once.

        Raises:
            MemoryError: There is too little memory left.
        """
        config, sampler = self._config, self._config.sampler
        if isinstance(sampler, Prioritized):
            sampler = replace(sampler, beta=0.0)  # each draw says which
        self._buffer = ReplayBuffer(
            nest(config.fields),
            config.capacity,
            sampler=sampler,
            view=config.view,
            limiter=MinSize(),
            seed=self._seed,
            name=None if config.name is None else f"{config.name[:SHARD_NAME]}/{self._number}",
            ragged_bytes=config.ragged_bytes,
        )
        handle = self._buffer.handle()
        self._candidates = ShardSampler(self._buffer, self._number)
        self._native = _C.ShardService(local_sampler(self._buffer).segment, self._number, MAX_BATCH)
        if self._limit is not None:
            self._set_limit(self._limit)
        return handle

    def address(self) -> Address:
        """Returns where learners of other nodes are answered over TCP: that costs less than calls of Ray's.

        Raises:
            OSError: Nothing can listen there.
        """
        if self._server is None:
            self._server = ShardServer(import_ray().util.get_node_ip_address(), self.draw, self.update, self._native)
        return self._server.address

    def draw(self, candidates: int, largest: float) -> Answer:
        """Draws so many candidates, as `ShardSampler.draw` does."""
        with self._turn:  # the object store has its own copy of the block
            return self._candidates.draw(candidates, largest, self._layout)

    def gather(self, keys: NDArray[np.int64]) -> Answer:
        """Finds items by the shard's own keys `[n]`, as `ShardSampler.gather` does."""
        return self._candidates.gather(keys, self._layout)

    def save(self, directory: str) -> bool:
        """Saves the buffer while others go on writing and drawing; returns whether that has ended.

        It begins with the first call for a new directory.

        Raises:
            OSError: The disk is full, or this node does not see the directory.
        """
        return self._has_ended(directory, lambda: self._save(Path(directory)))

    def restore(self, number: int, directories: Sequence[str]) -> bool:
        """Takes another number, and the rows of checkpoints, whose first keeps its keys.

        It begins with the first call; returns whether it has ended.

        Raises:
            CheckpointError: It is damaged, or this node does not see it.
        """
        return self._has_ended(f"{number}", lambda: self._restore(number, directories))

    def admit(self, limit: int | None) -> None:
        """Lets writers go on until so many items are in; None: for as long as they like."""
        if limit != self._limit:
            self._limit = limit
            self._set_limit(limit)

    def update(self, keys: NDArray[np.int64], td: NDArray[np.float64]) -> int:
        """Feeds back TD errors for keys of this shard's own; both were checked. Returns how many."""
        local_sampler(self._buffer).segment.update(keys, td)
        return len(keys)

    def clear(self) -> int:
        """Takes all rows away; returns how many items had become drawable by then, in all."""
        self._cleared = self._buffer.stats().inserted  # before: what comes meanwhile must not be held back
        self._buffer.clear()
        self._set_limit(self._limit)
        return self._buffer.stats().inserted

    def ask(self, method: str, *args: Any, named: Mapping[str, Any] | None = None) -> Any:
        """Returns what a method of the buffer returns, a tensor as an array.

        `named` are its arguments by name, such as a user's fields. Keys are the shard's own, and were checked.
        """
        answer = getattr(self._buffer, method)(*args, **(named or {}))
        return answer.numpy() if isinstance(answer, torch.Tensor) else answer

    def _has_ended(self, name: str, work: Callable[[], None]) -> bool:
        """Has work done once, by a thread of its own, beside draws, and returns whether it has been."""
        if name not in self._under_way:
            for other in [other for other, future in self._under_way.items() if future.done()]:
                del self._under_way[other]
            self._under_way[name] = self._executor.submit(work)
        future = self._under_way[name]
        if not future.done():
            return False
        if future.exception() is not None:
            del self._under_way[name]
        future.result()
        return True  # also when asked again, because the answer was lost

    def _save(self, directory: Path) -> None:
        if not directory.parent.is_dir():
            raise FileNotFoundError(
                f"node {ray_node()} does not see {directory.parent}, which the process that saves has made: save a "
                f"ShardedReplay to a directory that all its nodes share"
            )
        save(local_sampler(self._buffer).segment, self._config, directory)

    def _restore(self, number: int, directories: Sequence[str]) -> None:
        for directory in directories:
            if not is_checkpoint(directory):
                raise CheckpointError(
                    f"node {ray_node()} does not see {directory}: load a ShardedReplay from a directory that all its "
                    f"nodes share"
                )
        if directories:
            segment, (home, *others) = local_sampler(self._buffer).segment, map(Path, directories)
            load_rows(segment, self._config, Description.read(home), home, others=others)
            self._set_limit(self._limit)  # what was loaded has counted from elsewhere
        self._candidates = ShardSampler(self._buffer, number)
        self._native.renumber(number)

    def _set_limit(self, limit: int | None) -> None:
        if limit is None:
            self._buffer.limiter = MinSize()
            return
        inserted = self._buffer.stats().inserted
        # A new limiter counts as if its min_size, 1, had just come, where there is one: from there on.
        items = max(0, limit - inserted) + min(inserted - self._cleared, 1)
        cap = 1, DRAWS_PER_ITEM, LOWEST_BALANCE, items * DRAWS_PER_ITEM, 0.0
        local_sampler(self._buffer).segment.set_limiter(cap)

"""Weights that a learner publishes on another node of the Ray cluster."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from torchreplay.errors import AttachError
from torchreplay.ray.runtime.actor_client import NodeActor
from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.schema.tensor_info import TensorInfo
from torchreplay.segment.handle import Handle
from torchreplay.weights.module_state import load_copies
from torchreplay.weights.shared_weights import SharedWeights, Versioned, attached_weights, newest_of

ANSWER_AFTER: Final = 5.0
"""Seconds after which a question for newer weights is answered although there are none."""

LOOK_EVERY: Final = 0.02
PAUSE: Final = 0.05
"""Seconds between two questions: weights are known to be newer so much later at most, and a message's way."""

LINGER: Final = 30.0
"""Seconds without a question after which the actor goes."""

LISTENERS: Final = 10_000
"""Processes that may wait for news at a time; one more would keep others from reading."""


class WeightsActor:
    """The Ray actor on the weights' node that reads them out: one for each set of weights.

    Each version is put into the object store once, however many processes ask for it; each node fetches it once.
    """

    def __init__(self, handle: Handle, infos: dict[str, TensorInfo], nbytes: int) -> None:
        self._ray = import_ray()
        self._me = self._ray.get_runtime_context().current_actor
        self._asked = time.monotonic()
        self._put: tuple[int, Any] = (-1, None)
        self._gone = ""
        try:
            self._weights = attached_weights(handle, infos, nbytes)
        except AttachError as error:
            self._gone = str(error)
        threading.Thread(target=self._watch, name="torchreplay-weights-actor", daemon=True).start()

    async def newer(self, version: int) -> tuple[int, str]:
        """Returns the newest version, once it is not `version` or after some seconds; or why there is none."""
        self._asked = time.monotonic()
        if self._gone:
            return version, self._gone
        while self._weights.version == version and time.monotonic() - self._asked < ANSWER_AFTER:
            await asyncio.sleep(LOOK_EVERY)
        return self._weights.version, ""

    async def read(self) -> tuple[int, Any]:
        """Returns the newest version, and a reference to its bytes."""
        self._asked = time.monotonic()
        if self._gone:
            raise AttachError(self._gone)
        if self._put[0] != self._weights.version:
            version, content = newest_of(self._weights)
            self._put = version, self._ray.put(content.numpy())
        return self._put

    def _watch(self) -> None:
        while time.monotonic() - self._asked < LINGER:
            time.sleep(LINGER / 10)
        self._ray.kill(self._me, no_restart=True)


class _News:
    """The newest version that this process has heard of."""

    version = 0
    closed = False

    def close(self) -> None:
        self.closed = True


ADMITTED: Final = _News()
"""The learner's version at which a writer of this process was admitted last: weights of it are there."""


class RemoteWeights(SharedWeights):
    """What `SharedWeights` become on another node of the Ray cluster than the learner's: there to be pulled.

    A thread asks for news, so that `pull` costs nothing when there is none; it fetches the newest weights when there
    is. When the learner is gone there is no more news. Beside the errors of `SharedWeights.pull` it raises AttachError
    where the learner's node is gone before the first pull, and RuntimeError in a process that was forked off one of
    Ray's, where nobody listens for news.
    """

    def __init__(self, handle: Handle, infos: dict[str, TensorInfo], nbytes: int) -> None:
        self._handle = handle
        self._infos = infos
        self._nbytes = nbytes
        self._pulled = -1
        self._looked_for = 0
        self._pulled_into = lambda: None
        self._content = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        name = f"torchreplay-weights-{handle.nonce:016x}"
        self._actor = NodeActor(handle.node, WeightsActor, name, (handle, infos, nbytes), LISTENERS)
        self._news = _News()
        threading.Thread(target=_listen, args=(self._actor, self._news), name="torchreplay-news", daemon=True).start()
        weakref.finalize(self, self._news.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return attached_weights, (self._handle, self._infos, self._nbytes)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"these weights are published on node {self._handle.node}: copy them there, or pull them into a module and "
            f"make SharedWeights of that"
        )

    @property
    def version(self) -> int:
        """Number of publications so far, as far as it is known here. Costs nothing."""
        return self._news.version

    def publish(self, module: nn.Module, *, buffer: Versioned | None = None) -> NoReturn:
        """Weights are published on the node where they were made.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(f"weights are published where they were made, on node {self._handle.node}")

    def _pull(self, module: nn.Module) -> bool:
        self._actor.require_own_process()
        if self._looked_for < ADMITTED.version:  # once for each: news of it may not have come yet
            self._looked_for = ADMITTED.version
            if self._news.version < self._looked_for:
                with suppress(AttachError):
                    self._news.version = max(self._news.version, self._actor.ask("newer", -1)[0])
        if self._news.version <= self._pulled and self._pulled_into() is module:
            return False
        state = self.require_like(module)
        try:
            version, array = self._fetch()
        except AttachError:
            if self._pulled < 0:
                raise
            if self._pulled_into() is module:
                return False
            version = self._pulled
        else:
            self._pulled = -1  # until all of it is there: an exception out of a signal's handler may come
            self._content.numpy()[:] = array
        self._pulled_into = lambda: None
        self._copy_to(state, self._content)
        load_copies(module, state)
        self._pulled = version
        self._pulled_into = weakref.ref(module)
        self._news.version = max(self._news.version, version)
        return True

    def _fetch(self) -> tuple[int, npt.NDArray[np.uint8]]:
        """Returns the newest version, and its bytes; raises AttachError where they cannot be had."""

        def read() -> tuple[int, npt.NDArray[np.uint8]]:
            version, content = self._actor.ask_once("read")
            return version, import_ray().get(content)  # which fails where the actor that has put them there has died

        return self._actor.again(read)

    def __repr__(self) -> str:
        return f"RemoteWeights(version {self.version} on node {self._handle.node}, {len(self._infos)} tensors)"


def _listen(actor: NodeActor, news: _News) -> None:
    """Asks for newer versions until the weights are gone, or nobody here wants them."""
    while not news.closed:
        try:
            news.version, gone = actor.ask("newer", news.version)
        except AttachError as error:
            gone = "" if actor.is_there() else str(error)
        except Exception as error:  # Ray was shut down, most likely
            gone = str(error)
        if gone:
            logger.info("there is no more news of the weights on node %s: %s", actor.node, gone)
            return
        time.sleep(PAUSE)

"""A pool's shared pages in workers on other nodes of the Ray cluster: copies, kept like the originals by messages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from torchreplay.errors import AttachError, Stopped
from torchreplay.ray.runtime.session import import_ray

if TYPE_CHECKING:
    from torchreplay.ray.workers.shared_state import SharedState
    from torchreplay.ray.workers.worker_table import WorkerTable

logger = logging.getLogger("torchreplay.ray")

EXCHANGE_EVERY: Final = 0.5
"""Seconds between two exchanges; also those for which a worker knows of its stop before it is interrupted."""

FAREWELL: Final = 5.0
"""Seconds in which the last words of a worker should arrive."""


class StateServer:
    """The Ray actor on a pool's node through which workers on other nodes reach what is there. It keeps nothing.

    Args:
        helper: Has the methods that the workers want called on the pool's node; None where they want none.
        board: Of the pool.
        others: The pages besides.
    """

    def __init__(self, helper: Any, board: WorkerTable, *others: SharedState) -> None:
        self._helper, self._board, self._pages = helper, board, (board, *others)

    def enter(self, index: int, run: int) -> list[tuple[bytes, bytes]] | None:
        """Returns what the pages say for run number `run` of worker `index`; None when it has a successor already."""
        if not self._board.is_of(index, run):
            return None
        return [(page.told(index), page.orders(index)) for page in self._pages]

    def exchange(self, index: int, run: int, told: Sequence[bytes]) -> list[bytes] | None:
        """Takes over what a worker tells, and returns its orders; None when it has a successor already."""
        if not self._board.is_of(index, run):
            return None
        for page, news in zip(self._pages, told, strict=True):
            page.hear(index, news)
        return [page.orders(index) for page in self._pages]

    def help(self, method: str, *args: Any) -> Any:
        """Calls a method of the helper's."""
        return getattr(self._helper, method)(*args)


class StateReplica:
    """Keeps a worker's copies of its pool's pages, in a thread of its own.

    Args:
        keeper: The `StateServer`.
        index: The worker.
        run: Number of its run.
        board: The copy of the board.
        others: The other copies.

    Raises:
        AttachError: The pool is gone, or there is no keeper.
        Stopped: The worker has a successor: it was given up.
    """

    def __init__(self, keeper: Any, index: int, run: int, board: WorkerTable, others: Sequence[SharedState]) -> None:
        self._ray = import_ray()
        self._keeper, self._index, self._run = keeper, index, run
        self._board, self._pages = board, (board, *others)
        self._interrupt: Callable[[], object] | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="torchreplay-mirror", daemon=True)
        if keeper is None:
            raise AttachError("this worker is on another Ray node than its pool, which was to run on its own alone")
        try:
            found = self._ray.get(keeper.enter.remote(index, run))
        except self._ray.exceptions.RayError as error:
            raise AttachError(f"the pool of this worker does not answer: {error}") from None
        if found is None:
            raise Stopped("another run has taken the place of this one")
        for page, (told, orders) in zip(self._pages, found, strict=True):
            page.hear(index, told)
            page.obey(index, orders)

    def start(self, interrupt: Callable[[], object]) -> None:
        """Tells that the worker has begun, and goes on telling.

        Args:
            interrupt: Called once, in another thread, when the worker has known for a while that it is to stop, and
                the pool wants it to at once.
        """
        self._interrupt = interrupt
        self._exchange(None)
        self._thread.start()

    def help(self, method: str, *args: Any) -> Any:
        """Has a method of the helper's called on the pool's node, and returns what it returns.

        Raises:
            Exception: What the method raises.
        """
        return self._ray.get(self._keeper.help.remote(method, *args))

    def close(self) -> None:
        """Tells what the worker has written last, and ends."""
        self._ending.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join(FAREWELL)
        with suppress(self._ray.exceptions.RayError):  # it is known what the worker told half a second ago
            self._exchange(FAREWELL)

    def _work(self) -> None:
        try:
            while not self._ending.wait(EXCHANGE_EVERY):
                self._exchange(None)
        except self._ray.exceptions.RayError:  # Ray brings the keeper back while the pool is there
            logger.warning("the pool of this worker is gone", exc_info=True)
            self._board.stopped = True

    def _exchange(self, timeout: float | None) -> None:
        knew = self._board.stopped
        told = [page.told(self._index) for page in self._pages]
        answer = self._ray.get(self._keeper.exchange.remote(self._index, self._run, told), timeout=timeout)
        if answer is None:
            self._board.stopped = True
            self._board.interrupt(self._index)
        else:
            for page, orders in zip(self._pages, answer, strict=True):
                page.obey(self._index, orders)
        if knew and self._interrupt is not None and self._board.is_interrupted(self._index):
            interrupt, self._interrupt = self._interrupt, None
            interrupt()

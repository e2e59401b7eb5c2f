"""A pool's table in workers on other nodes of the Ray cluster: a copy, kept like the original by messages.

The workers report, and are not asked. An actor that answers beside its function runs it in a thread of its own, where
no signal interrupts it. And what they report arrives while the program is busy or stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, SupportsBytes

from torchreplay.errors import AttachError, Stopped
from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.workers.worker_process import Launch
from torchreplay.workers.worker_table import WorkerTable

EXCHANGE_EVERY: Final = 0.5
"""Seconds between two exchanges; also those for which a worker knows of its stop before it is interrupted."""

FAREWELL: Final = 5.0
"""Seconds in which the last report of a worker should arrive."""


class TableServer:
    """The Ray actor on a pool's node through which workers on other nodes reach what is there. It keeps nothing.

    `helper` has the methods that the workers want called on the pool's node; None where they want none. `payload` is
    what they unpickle.
    """

    def __init__(self, helper: Any, table: WorkerTable, payload: SupportsBytes) -> None:
        self._helper, self._table, self._payload = helper, table, payload

    def payload(self) -> bytes:
        """Returns what the workers unpickle."""
        return bytes(self._payload)

    def enter(self, index: int, run: int) -> bytes | None:
        """Returns the entry for run number `run` of worker `index`; None when it has a successor already."""
        return self._table.dump_status(index) if self._table.is_of(index, run) else None

    def exchange(self, index: int, run: int, status: bytes) -> tuple[bool, bool, int]:
        """Takes over the entry of a worker.

        Returns:
            Whether it is to stop, whether at once, and the version that is wanted of an evaluator.
        """
        if not self._table.is_of(index, run):  # it has a successor already
            return True, True, 0
        self._table.load_status(index, status)
        return self._table.stopped, self._table.is_interrupted(index), self._table.wanted

    def help(self, method: str, *args: Any) -> Any:
        """Calls a method of the helper's."""
        return getattr(self._helper, method)(*args)


class RemoteHelper:
    """A `TableServer`'s helper: its methods, which are called on the pool's node, and raise here what they raise."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: import_ray().get(self._server.help.remote(method, *args))


class TableReplica:
    """Keeps a worker's copy of its pool's table, in a thread of its own, for one run of the worker.

    Attributes:
        helper: Has the methods that the worker calls on the pool's node.

    Raises:
        AttachError: The pool is gone.
        Stopped: The worker has a successor: it was given up.
    """

    def __init__(self, server: Any, launch: Launch, table: WorkerTable) -> None:
        self._ray = import_ray()
        self._server, self._index, self._run, self._table = server, launch.index, launch.restarts, table
        self.helper = RemoteHelper(server)
        self._interrupt: Callable[[], object] | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="torchreplay-table", daemon=True)
        try:
            status = self._ray.get(server.enter.remote(self._index, self._run))
        except self._ray.exceptions.RayError as error:
            raise AttachError(f"the pool of this worker does not answer: {error}") from None
        if status is None:
            raise Stopped("another run has taken the place of this one")
        table.load_status(self._index, status)

    def start(self, interrupt: Callable[[], object]) -> None:
        """Reports that the worker has begun, and goes on reporting.

        `interrupt` is called once, in another thread, when the worker has known for a while that it is to stop, and the
        pool wants it to at once.
        """
        self._interrupt = interrupt
        self._exchange(None)
        self._thread.start()

    def close(self) -> None:
        """Reports what the worker has written last, and ends."""
        self._ending.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join(FAREWELL)
        with suppress(self._ray.exceptions.RayError):  # the report of half a second ago has arrived
            self._exchange(FAREWELL)

    def _work(self) -> None:
        try:
            while not self._ending.wait(EXCHANGE_EVERY):
                self._exchange(None)
        except self._ray.exceptions.RayError:  # Ray brings the server back while the pool is there
            logger.warning("the pool of this worker is gone", exc_info=True)
            self._table.stopped = True

    def _exchange(self, timeout: float | None) -> None:
        knew = self._table.stopped
        status = self._table.dump_status(self._index)
        answer = self._ray.get(self._server.exchange.remote(self._index, self._run, status), timeout=timeout)
        self._table.stopped, at_once, self._table.wanted = answer
        if knew and at_once and self._interrupt is not None:
            interrupt, self._interrupt = self._interrupt, None
            interrupt()

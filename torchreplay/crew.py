"""Threads that work beside the one that wants something done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

_Job: TypeAlias = "tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]"


class Crew:
    """A few threads for one task, a context manager that waits for them.

    Where none can be started, as in an exit handler or short of memory, the calling thread does everything. A
    `ThreadPoolExecutor` takes nothing more from when the main thread has ended, whoever still uses it.

    Args:
        size: Number of threads.
    """

    def __init__(self, size: int) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        with suppress(RuntimeError):
            for _ in range(size):
                thread = threading.Thread(target=self._work, daemon=True)
                thread.start()
                self._threads.append(thread)

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Has a call made, in the order of submission; returns what will have its outcome."""
        job = Future[T](), call, args
        if self._threads:
            self._jobs.put(job)
        else:
            _do(*job)
        return job[0]

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _do(*job)
            del job  # what it holds is for whoever waits for its outcome

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for _thread in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


def _do(outcome: Future[T], call: Callable[..., T], args: tuple[Any, ...]) -> None:
    try:
        result = call(*args)
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)

"""Threads that work beside the one that wants something done."""

from __future__ import annotations

import mmap
import os
import resource
import weakref
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from torchreplay.segment.closeable import Closeable

T = TypeVar("T")

THREAD_BYTES = 160 << 20
"""Addresses that a thread takes: 8 MB for its stack, and two times 64 MB for what the C library allocates in it."""
THREAD_START_SECONDS = 0.1
"""Seconds after which a thread that has not begun may never begin, for want of memory."""

_Job: TypeAlias = "tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]"


class Future(Generic[T]):
    """What a call will have come to: a result or an error.

    A thread that Ctrl-C interrupts while it waits for a `concurrent.futures.Future` may keep its lock for ever.
    """

    def __init__(self) -> None:
        self.told: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def of(self, call: Callable[..., T], args: tuple[Any, ...]) -> None:
        """Makes the call."""
        try:
            self.told.put((call(*args), None))
        except BaseException as error:
            self.told.put((None, error))
            del self  # to which the error leads: what the call held would stay until a collection of garbage


class ThreadPool(Closeable):
    """A few threads for one task, a context manager that waits for them.

    Where none can be started, as in an exit handler or short of memory, the calling thread does everything. A
    `ThreadPoolExecutor` takes no more work once the main thread has ended.

    Ctrl-C may come between any two steps, also in here. The threads know the queues only, and end when the object is
    gone. The interpreter itself puts a weak reference among the jobs then, in one step that nothing interrupts.
    `threading.Thread` takes several steps to start one, and waits for ever for one that found no memory to begin.

    Args:
        size: Number of threads.
    """

    def __init__(self, size: int) -> None:
        self._jobs: SimpleQueue[_Job | object] = SimpleQueue()
        self._begun: list[None] = []
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._process, self._started = os.getpid(), 0
        gone = weakref.ref(self, self._jobs.put)
        if _has_addresses_for(size):
            with suppress(RuntimeError, MemoryError):
                for _ in range(size):
                    start_new_thread(_work, (self._jobs, self._begun, self._ended, gone))
                    self._started += 1

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Has a call made, in the order of submission; returns what `result` is asked for."""
        future = Future[T]()
        self._jobs.put((future, call, args))
        return future

    def result(self, future: Future[T]) -> T:
        """Returns what a call has come to, or raises its error."""
        result, error = self.get(future.told)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def get(self, told: SimpleQueue[T]) -> T:
        """Returns what a call puts into a queue. It is made here if there is no thread for it."""
        while True:
            try:
                return told.get(timeout=THREAD_START_SECONDS if self._started else 0)
            except Empty:
                self._help()

    def _help(self) -> None:
        with suppress(Empty):
            if not self._begun and isinstance(job := self._jobs.get_nowait(), tuple):
                future, call, args = job
                future.of(call, args)

    def close(self) -> None:
        """Waits for calls that are being made. Others are not made any more."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        if os.getpid() == self._process:  # a forked child has no threads to wait for
            while self._begun:
                self._begun.pop()
                self._ended.get()


def _work(jobs: SimpleQueue[_Job | object], begun: list[None], ended: SimpleQueue[None], _gone: object) -> None:
    # `_gone` is kept for its callback.
    begun.append(None)
    while isinstance(job := jobs.get(), tuple):
        future, call, args = job
        future.of(call, args)
        del job, future, call, args  # what they hold belongs to the waiting thread
    jobs.put(None)  # for the other threads
    ended.put(None)


def _has_addresses_for(threads: int) -> bool:
    """Returns whether RLIMIT_AS and RLIMIT_DATA leave enough for so many threads.

    Without that one that has begun may end the process: the C library gives up where it finds no memory for the
    variables of a thread.
    """
    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    if limits == [resource.RLIM_INFINITY] * 2:
        return True
    total, *_, data, _ = (int(pages) * mmap.PAGESIZE for pages in Path("/proc/self/statm").read_text().split())
    left = (limit - used for limit, used in zip(limits, (total, data), strict=True) if limit != resource.RLIM_INFINITY)
    return all(addresses >= threads * THREAD_BYTES for addresses in left)

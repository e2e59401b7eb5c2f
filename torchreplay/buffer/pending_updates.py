"""TD errors that are still on their way from a device when they are fed back."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from torchreplay.cuda.copies import HostCopy
from torchreplay.schema.spec import ELEMENTS
from torchreplay.validation import column_hint

T = TypeVar("T")


def require_one_each(td: torch.Tensor, n: int) -> None:
    """Raises ValueError unless `td` is one real number for each of `n` keys."""
    if td.shape != (n,) or td.dtype not in ELEMENTS:
        raise ValueError(
            f"the TD errors are {td.dtype} of shape {tuple(td.shape)}, expected one real number for each key: "
            f"shape ({n},){column_hint(td.shape, n)}"
        )


class _Update(NamedTuple):
    number: int
    keys: torch.Tensor
    td: HostCopy


class PendingUpdates:
    """Updates of priorities whose TD errors have not arrived, in the order in which they were given.

    The next call in any thread applies those that have arrived, and so does a call that waits for all. None is applied
    before one that was given earlier. A forked child has none: they are the parent's to apply.

    Args:
        apply: Applies the TD errors of keys; raises ValueError, having done nothing, for some that are NaN or infinite.

    Attributes:
        waiting: What has not been applied.
    """

    def __init__(self, apply: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        self._apply = apply
        self.waiting = deque[_Update]()
        self._numbers = itertools.count(1)
        # For applying in order. A signal handler that runs meanwhile in the same thread leaves it alone.
        self._lock = threading.RLock()
        self._applying = False

    def add(self, keys: torch.Tensor, td: HostCopy) -> None:
        """Takes an update over.

        Args:
            keys: int64 `[n]`, of memory that nobody changes.
            td: Its TD errors `[n]`.
        """
        self.waiting.append(_Update(next(self._numbers), keys, td))

    def apply_arrived(self) -> None:
        """Applies what has arrived; returns at once where another thread is at it.

        Raises:
            ValueError: TD errors are NaN or infinite: they are dropped. Those after them wait for the next call.
            RuntimeError: The device has failed; all that was on its way is lost.
        """
        if self.waiting and self._lock.acquire(blocking=False):
            try:
                while not self._applying and (first := self._first()) and self._ask(first.td.done):
                    self._apply_first(first)
            finally:
                self._lock.release()

    def flush(self) -> None:
        """Waits until everything given so far has arrived, and applies it.

        Raises:
            ValueError: TD errors are NaN or infinite: they are dropped, the others applied. Notes name further ones.
            RuntimeError: The device has failed; all that was on its way is lost.
        """
        failure: ValueError | None = None
        with self._lock:
            for _ in range(len(self.waiting)):
                first = self._first()
                if self._applying or first is None:  # this is a signal handler, or one was faster
                    break
                self._ask(first.td.wait)
                try:
                    self._apply_first(first)
                except ValueError as error:
                    if failure is None:
                        failure = error
                    else:
                        failure.add_note(str(error))
        if failure is not None:
            raise failure

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError:  # CUDA's: nothing comes from there any more, and it is said once
            self.waiting.clear()
            raise

    def _first(self) -> _Update | None:
        try:
            return self.waiting[0]
        except IndexError:
            return None

    def _apply_first(self, update: _Update) -> None:
        """Applies the first, which stays there when that is interrupted, such as by Ctrl-C in a wait for the lock."""
        self._applying = True
        try:
            if self._first() is not update:  # a signal handler was faster
                return
            self._apply(update.keys, update.td.values)
        except ValueError as error:
            self.waiting.popleft().td.release()
            raise ValueError(
                f"update_priorities number {update.number} of those with a tensor on a device, of {len(update.keys)} "
                f"items: {error}"
            ) from None
        else:
            self.waiting.popleft().td.release()
        finally:
            self._applying = False

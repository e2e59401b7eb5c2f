"""Items that a writer has begun, for `with`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol

if TYPE_CHECKING:
    from types import TracebackType


class Admits(Protocol):
    """What an `AdmittedItems` calls of its writer."""

    @property
    def _begun_items(self) -> int: ...
    def _admit(self, n: int, timeout: float | None, /) -> None: ...
    def _end_admission(self, n: int, /) -> None: ...
    def _settle(self) -> None: ...


class AdmittedItems:
    """A block that writes items which were admitted. Made by `Writer.admit`.

    Args:
        writer: Whose items they are.
        n: Their number.
        timeout: Seconds to wait at most until they are admitted; None: what the writer says.
    """

    __slots__ = ("_n", "_open", "_timeout", "_writer")

    def __init__(self, writer: Admits, n: int, timeout: float | None) -> None:
        self._writer, self._n, self._timeout, self._open = writer, n, timeout, False

    def __enter__(self) -> None:
        if self._open:
            raise RuntimeError("this block has been entered: call admit() again for more items")
        begun = self._writer._begun_items
        try:
            self._writer._admit(self._n, self._timeout)
            self._open = True
        except BaseException:
            self._open = False
            if self._writer._begun_items > begun:  # a signal came when they were admitted
                self._writer._end_admission(self._n)
                self._writer._settle()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            raise RuntimeError("this block has not been entered: write `with writer.admit():`")
        self._open = False
        self._writer._end_admission(self._n)
        self._writer._settle()

    def __del__(self) -> None:
        if getattr(self, "_open", False):  # a signal came before __exit__ had begun, or __init__
            self._open = False
            self._writer._end_admission(self._n)
            self._writer._settle()

    def __aenter__(self) -> NoReturn:
        raise TypeError(
            "admit() waits in its thread, so it is not for `async with`: write `with writer.admit(timeout=0):`, and "
            "after ReplayTimeout `await asyncio.sleep(...)` and try again"
        )

    async def __aexit__(self, *_: object) -> None:
        """Is never called: `async with` looks for it first."""

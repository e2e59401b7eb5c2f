"""Items that a writer has begun, for `with`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from torchreplay import _C


class AdmittedItems:
    """A block that writes items which were admitted. Made by `Writer.admit`.

    Args:
        writer: Whose items they are.
        n: Their number.
        timeout: Seconds to wait at most until they are admitted; None: what the writer says.
    """

    __slots__ = ("_n", "_timeout", "_writer")

    def __init__(self, writer: _C.Writer, n: int, timeout: float | None) -> None:
        self._writer, self._n, self._timeout = writer, n, timeout

    def __enter__(self) -> None:
        begun = self._writer._begun_items
        try:
            self._writer._admit(self._n, self._timeout)
        except BaseException:
            if self._writer._begun_items > begun:  # a signal came when they were admitted
                self._writer._end_admission(self._n)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer._end_admission(self._n)

"""What is closed at the end of a `with` block."""

from __future__ import annotations

from typing import Self


class Closeable:
    """A base class for what holds memory, descriptors or threads until it is closed. `with` closes it."""

    def close(self) -> None:
        """Lets go of what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""What a training needs of its explorers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from torchreplay.buffer.base import Replay


@runtime_checkable
class Explorers(Protocol):
    """Fills a buffer while learners train: an `ExplorerPool`, or any object with an idempotent `start` and `stop`."""

    def start(self) -> Any:
        """Starts exploring; returns at once."""

    def stop(self) -> Any:
        """Ends all exploring; called more than once, and also where `start` failed."""


ExplorersSource: TypeAlias = "Explorers | Callable[[Any], Explorers]"


def checked_source(explorers: ExplorersSource | None) -> ExplorersSource | None:
    """Returns what was given as `explorers`.

    Raises:
        TypeError: It is neither explorers nor a function that makes them.
    """
    if explorers is not None and not isinstance(explorers, Explorers) and not callable(explorers):
        raise TypeError(
            f"explorers is {type(explorers).__name__}; it must have start() and stop(), such as an ExplorerPool, "
            "or be a function of the buffer that makes such an object"
        )
    return explorers


def made_explorers(source: ExplorersSource, buffer: Replay) -> Explorers:
    """Returns the explorers that were given, or those that the given function makes for the buffer.

    Raises:
        TypeError: The function returned something else.
    """
    # A class has the methods of its objects, but is a function that makes one.
    given = isinstance(source, Explorers) and not isinstance(source, type)
    explorers: object = source if given else source(buffer)  # type: ignore[operator]
    if not isinstance(explorers, Explorers):
        raise TypeError(
            f"the function given as `explorers` returned {explorers!r}; it must return an object with start() and "
            "stop()"
        )
    return explorers

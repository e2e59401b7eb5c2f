"""`SteppedDataset`: a stream of ready batches of some length, or endless."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from torch.utils.data import IterableDataset

from torchreplay.segment.transient import Transient

T_co = TypeVar("T_co", covariant=True)


class Loop(Protocol):
    """Who takes the batches of an iteration, where a dataset must know of more than a `for`."""

    def begin(self) -> None:
        """Called when an iteration begins, before a batch is asked for."""

    @property
    def is_over(self) -> bool:
        """Whether the iteration will not be asked for another batch, however many it has."""


class SteppedDataset(Transient, IterableDataset[T_co]):
    """A stream of ready batches that is infinite or `steps` long."""

    steps: int | None
    _loop: Loop | None = None

    def __len__(self) -> int:
        """Returns `steps`.

        Raises:
            TypeError: If the stream is endless; this is how loaders learn that there is no length.
        """
        if self.steps is None:
            raise TypeError(f"this {type(self).__name__} is endless and has no length; give it steps=... to get one")
        return self.steps

    def __bool__(self) -> bool:
        return True  # otherwise truth would ask for the length, which an endless stream does not have

    def _taken_by(self, loop: Loop) -> None:
        """Says whose iterations those of this process are from here on."""
        self._loop = loop

    def _begin(self) -> None:
        if self._loop is not None:
            self._loop.begin()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loop": None}  # it is of this process


def tell_loop(dataset: SteppedDataset[Any], loop: Loop) -> None:
    """Says whose iterations those of `dataset` are in this process from here on."""
    dataset._taken_by(loop)

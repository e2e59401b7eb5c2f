"""The ways of a batch to a device, and which of them is the shorter one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from torchreplay.schema.spec import Path
from torchreplay.segment.waits import logger


class Copy(Protocol):
    """The copy of a block to a device, which may be under way."""

    def done(self) -> bool:
        """Returns whether it has ended, so that its source may change."""

    def wait(self) -> None:
        """Returns when it has."""

    def intact(self) -> bool:
        """Returns whether what arrives is what was drawn; where that is not certain, once the copy has ended."""

    def seconds(self) -> float:
        """Returns how long the copy took, which has ended, and was to be timed."""

    def take(self) -> torch.Tensor:
        """Returns the block on the device, for what the calling thread has the device do from now on; once."""


class Copies(Protocol):
    """What copies blocks to a device: one after the other, and without the host waiting."""

    device: torch.device

    def memory(self, nbytes: int) -> torch.Tensor:
        """Returns memory to copy from: uint8 `[nbytes]`, the whole of its storage."""

    def start(self, block: torch.Tensor, timed: bool = False) -> Copy:
        """Starts the copy of a block, which must not change until it is done; `timed`: `seconds` will be asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A way of batches to a device.

    Attributes:
        name: What is done on it, for people.
        copies: What copies to the device.
        nbytes: Of the block that a batch is drawn into on the host.
        drawn: Returns what is drawn into it: a tensor for each of the batch's.
        arrived: Returns the batch's tensors in the block that has arrived.
    """

    name: str
    copies: Copies
    nbytes: int
    drawn: Callable[[torch.Tensor], dict[Path, torch.Tensor]]
    arrived: Callable[[torch.Tensor], dict[Path, torch.Tensor]]


class PathSelector:
    """Sends batches on every route in turn, until it is known which one is quickest, and from then on on that one.

    What counts is the longer one of a batch's draw, which ends with what the host copies, and of the device's copy:
    they run beside each other and beside the learner's step. What else goes on makes some batches late: the quickest of
    `TRIED` counts. The first one of each route finds fresh memory, and does not count.

    A route on which more than `MOST_LOST` of the batches are lost on their way is given up for good.

    Args:
        routes: The first one, which loses nothing, is taken unless another takes less than `MARGIN` of its time.

    Attributes:
        open: Times are wanted.
    """

    TRIED = 5
    MARGIN = 0.8
    MOST_LOST = 0.02

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = routes
        self.open = len(routes) > 1
        self._turn = itertools.cycle(routes)
        self._best = routes[0]
        self._took: dict[Route, list[float]] = {route: [] for route in routes}
        self._lost = 0.0  # share of the last hundred batches or so that did not take the first route

    def next(self) -> Route:
        """Returns the route for another batch."""
        return next(self._turn) if self.open else self._best

    def note(self, route: Route, draw: float, copy: float) -> None:
        """Takes account of a batch that arrived: of the seconds for its draw and its copy."""
        self._took[route].append(max(draw, copy))
        if self.open and all(len(took) > self.TRIED for took in self._took.values()):
            usual, *others = self.routes
            quickest = {route: min(took[1:]) for route, took in self._took.items()}
            best = min(others, key=lambda route: quickest[route])
            times = ", ".join(f"{route.name} {seconds * 1e3:.2f} ms" for route, seconds in quickest.items())
            self._decide(best if quickest[best] < self.MARGIN * quickest[usual] else usual, times)

    def note_outcome(self, route: Route, lost: bool) -> None:
        """Takes account of whether a batch was lost on its way."""
        if route is self.routes[0]:
            return
        self._lost += (lost - self._lost) / 100
        if self._lost > self.MOST_LOST and (self.open or self._best is route):
            self._decide(self.routes[0], f"too many rows were overwritten while they were {route.name}")

    def _decide(self, best: Route, why: str) -> None:
        self._best, self.open = best, False
        logger.info("batches to %s are %s: %s", best.copies.device, best.name, why)

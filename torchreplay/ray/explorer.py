"""One run of an explorer's function, in its own process."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final, Literal

import torch

from torchreplay.errors import Stopped
from torchreplay.ray.context import ExplorerContext

Explore = Callable[[ExplorerContext], object]
"""A user's function: runs until `ctx.stopped`, or as long as it likes; its result is dropped."""


STOP_SIGNAL: Final = signal.SIGUSR1
"""Raises `Stopped` in an explorer. Not SIGINT, which Ray blocks so that Ctrl-C ends the program alone."""


@dataclass(frozen=True)
class Launch:
    """Which explorer to run.

    Attributes:
        index: The explorer.
        num_explorers: How many there are.
        seed: Seed of this run.
        restarts: How often the explorer has been restarted.
    """

    index: int
    num_explorers: int
    seed: int
    restarts: int


@dataclass(frozen=True)
class Outcome:
    """How a run ended, as text: an explorer's exception need not pickle.

    Attributes:
        kind: Its function returned or was told to stop; raised; or its process died.
        error: One line about the failure.
        traceback: The explorer's traceback.
    """

    kind: Literal["ended", "raised", "died"]
    error: str = ""
    traceback: str = ""


class ExplorerProcess:
    """The Ray actor of one explorer; each run gets a process of its own."""

    def run(self, path: Sequence[str], payload: bytes, launch: Launch) -> Outcome:
        """Runs the function that `payload` holds until it returns, raises or is stopped.

        Args:
            path: The program's `sys.path`: what it can import, its explorers can.
            payload: Pickled `(explore, buffer, weights, board)`; unpickling attaches to the
                shared memory, and may fail, which is reported like any other error.
            launch: Which explorer this is.
        """
        torch.set_num_threads(1)  # as many explorers as cores: more threads only get in the way
        sys.path.extend(place for place in path if place not in sys.path)
        try:
            _explore(payload, launch)
        except Stopped:
            return Outcome("ended")
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: nothing gets lost
            if isinstance(error, SystemExit) and not error.code:
                return Outcome("ended")
            return _raised(error)
        return Outcome("ended")


def _explore(payload: bytes, launch: Launch) -> None:
    explore, buffer, weights, board = pickle.loads(payload)
    ctx = ExplorerContext(buffer, weights, launch.index, launch.num_explorers, launch.seed, launch.restarts, board)

    def stop_here(signal_number: int, frame: FrameType | None) -> None:
        if not ctx.noticed_stop:  # otherwise it is finishing already
            raise Stopped("the pool that runs this explorer was stopped")

    signal.signal(STOP_SIGNAL, stop_here)
    board.entries[launch.index]["pid"] = os.getpid()
    try:
        explore(ctx)
    finally:
        signal.signal(STOP_SIGNAL, signal.SIG_IGN)
        ctx.close()


def _raised(error: BaseException) -> Outcome:
    summary = "".join(traceback.format_exception_only(error)).strip()
    # The first two frames are ours: `run` and `_explore`.
    frames = error.__traceback__ and error.__traceback__.tb_next
    frames = (frames and frames.tb_next) or frames or error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Outcome("raised", summary, text.rstrip())

"""Errors that a worker of a DataLoader raises, and that the loop gets."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raised_by_worker(match: str) -> Iterator[None]:
    """Expects a RuntimeError of a worker, and lets go of the iteration.

    torch raises it from a frame that holds it. This circle keeps the iteration until garbage is collected, and its
    queues go with it then. So the workers are not told to end, and it waits five seconds for them.
    """
    with pytest.raises(RuntimeError, match=match) as error:
        yield
    traceback.clear_frames(error.tb)

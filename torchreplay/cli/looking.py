"""The loop of commands that look at a buffer again and again, and what they have in common."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import suppress

import click
import torch

from torchreplay.monitoring.discovery import NoSuchBuffer
from torchreplay.monitoring.snapshot import LiveBuffer
from torchreplay.monitoring.survey import choose

RATE = 10.0
"""Looks a second."""

NICENESS = 10
"""Of those who look: where all cores are busy they get a tenth of one, and need less."""

USE_SECONDS = 1.0
"""Between two looks whether anybody still has the buffer."""


def opened(given: str | None) -> LiveBuffer:
    """Returns the buffer that is meant.

    Raises:
        click.ClickException: It is not there; the text says what is.
    """
    try:
        return choose(given)
    except (NoSuchBuffer, ConnectionError, OSError) as error:
        raise click.ClickException(str(error)) from None


def step_back() -> None:
    """Leaves the cores to the run: a low priority, and one thread."""
    torch.set_num_threads(1)
    gc.freeze()  # or collections would go through all of torch
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def looks(buffer: LiveBuffer, rate: float, seconds: float | None) -> Iterator[float]:
    """Yields the seconds since the first look, `rate` times a second, until nobody else has the buffer.

    Looks that come too late are left out.

    Args:
        buffer: The buffer.
        rate: Looks a second.
        seconds: After which it ends in any case; None: it does not.
    """
    start = time.monotonic()
    look, used_until = 0, start + USE_SECONDS
    while True:
        now = time.monotonic()
        if now >= used_until:
            if not buffer.in_use():
                return
            used_until = now + USE_SECONDS
        yield now - start
        look = max(look + 1, int((time.monotonic() - start) * rate))
        until = start + look / rate
        if seconds is not None and until - start > seconds:
            return
        time.sleep(max(0.0, until - time.monotonic()))

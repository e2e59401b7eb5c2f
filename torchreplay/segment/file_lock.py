"""Waiting for a `flock`, which others may hold for as long as a disk takes: never in silence."""

from __future__ import annotations

import fcntl
import math
import time

from torchreplay.segment.waits import LOG_EVERY, logger

PAUSE = 0.02
"""Seconds between two tries."""


def lock(fd: int, how: int, waiting_for: str, patience: float = math.inf) -> None:
    """Takes a `flock`; a long wait is logged.

    Args:
        fd: The file's descriptor.
        how: `fcntl.LOCK_SH` or `fcntl.LOCK_EX`.
        waiting_for: Who holds it, for the log.
        patience: Seconds to wait.

    Raises:
        TimeoutError: It was not free in that time.
    """
    start, log_at = time.monotonic(), LOG_EVERY
    while True:
        try:
            return fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - start
        if waited >= patience:
            raise TimeoutError(f"waited {waited:.1f} s for {waiting_for}")
        if waited >= log_at:
            log_at += LOG_EVERY
            logger.warning("waiting for %s since %.0f s", waiting_for, waited)
        time.sleep(PAUSE)

"""`Way`: what makes the connection to a server on another node, and makes it anew."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.ray.wire.connection import Address

LOCATE_SECONDS: Final = 0.2
"""Seconds for which an address is waited for; after that its actor is called through Ray until it has come."""

AGAIN_SECONDS: Final = 10.0
"""Seconds after which a connection that could not be made is tried again, where there was one."""

BROKEN_SECONDS: Final = 1.0
"""Seconds after which a connection that broke is made anew."""


class Connection(Protocol):
    """What a way makes."""

    @property
    def broken(self) -> Exception | None:
        """Why nothing comes through any more; None while it does."""

    def close(self) -> None:
        """Ends it."""


L = TypeVar("L", bound=Connection)


class Way(Generic[L]):
    """The way to one server: a connection, made when it is needed, and anew when it broke.

    Args:
        connect: Makes a connection; OSError: none can be made.
        called: What the warning calls the server that says that none can be made.
        locate: Calls its actor through Ray for its address.
    """

    def __init__(self, connect: Callable[[Address], L], called: str, locate: Callable[[], Any]) -> None:
        self._ray, self._connect, self._called, self._locate = import_ray(), connect, called, locate
        self._link: L | None = None
        self._end: Callable[[], object] = bool  # ends the connection, also when this object is gone
        self._located: Any = None  # the call for an address that is under way
        self._not_before = 0.0  # monotonic time of the next try
        self._reached = False  # whether there was a connection
        self._lock = threading.RLock()

    def link(self) -> L | None:
        """Returns the connection; None: call the actor through Ray."""
        with self._lock:
            link = self._link
            if link is not None and link.broken is None:
                return link
            if link is not None:  # whether the server is gone a call through Ray finds out first
                self.close()
                self._not_before = time.monotonic() + BROKEN_SECONDS
            if time.monotonic() < self._not_before:
                return None
            try:
                call, patience = self._located or self._locate(), 0.0 if self._located else LOCATE_SECONDS
                self._located = None
                if not self._ray.wait([call], timeout=patience)[0]:
                    self._located = call
                    return None
                link = self._link = self._connect(self._ray.get(call))
                self._end = end = weakref.finalize(self, link.close)
                end.atexit, self._reached = False, True
                return link
            except (self._ray.exceptions.RayTaskError, OSError) as error:  # one that never could be is not tried again
                self._not_before = time.monotonic() + AGAIN_SECONDS if self._reached else math.inf
                if not self._reached:
                    text = "%s is called through Ray, which is slower: no connection can be made to it (%s)"
                    logger.warning(text, self._called, str(getattr(error, "cause", error)))
            except self._ray.exceptions.RayError:  # whether it is gone, or is started again, the next call finds out
                self._not_before = time.monotonic() + BROKEN_SECONDS
            return None

    def close(self) -> None:
        """Ends the connection."""
        self._end()
        self._link = None

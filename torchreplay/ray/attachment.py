"""`Attachment`: whether the shard on this process's node is attached, and which one."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torchreplay.errors import AttachError
from torchreplay.ray.directory import Place
from torchreplay.ray.nearby import Nearby
from torchreplay.segment import Handle

logger = logging.getLogger("torchreplay.ray")


class Attachment:
    """The shard on this node, once it is attached. For one thread at a time.

    Attributes:
        nearby: It; None: none is.
    """

    def __init__(self) -> None:
        self.nearby: Nearby | None = None
        self._refused = -1  # the number of the one that cannot be attached

    def to(self, place: Place, handle: Callable[[], Handle | None]) -> Nearby | None:
        """Attaches the shard of this node, unless it is already.

        Args:
            place: The shard.
            handle: Asks its actor for the handle; None: it is gone.

        Returns:
            It; None if it is gone.

        Raises:
            AttachError: It cannot be attached, and its actor is alive.
        """
        if self.nearby is not None and self.nearby.number == place.number:
            return self.nearby
        self.release()
        for attempt in range(2):
            told = handle()
            try:
                if told is not None:
                    self.nearby = Nearby(place.number, told)
                break
            except AttachError:  # it may have died just now, which the next call tells
                if attempt:
                    raise
        return self.nearby

    def draws_from(self, place: Place, handle: Callable[[], Handle | None]) -> bool:
        """Does what `to` does, once for a shard that cannot be attached, and returns whether it is."""
        if place.number == self._refused:
            return False
        try:
            return self.to(place, handle) is not None
        except AttachError as error:
            self._refused = place.number
            logger.warning("shard %d is on this node, and draws from it go through Ray: %s", place.number, error)
            return False

    def release(self) -> None:
        """Lets go of it."""
        nearby, self.nearby = self.nearby, None
        if nearby is not None:
            nearby.close()

"""`LocalAttachment`: whether the shard on this process's node is attached, and which one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from torchreplay.errors import AttachError
from torchreplay.ray.sharded.coordinator import Place
from torchreplay.ray.sharded.local_shard import LocalShard
from torchreplay.segment.handle import Handle
from torchreplay.segment.waits import Wait

logger = logging.getLogger("torchreplay.ray")


class LocalAttachment:
    """The shard on this node, once it is attached.

    Its handle is asked for without the lock: where its actor is silent, only those wait who want to attach.

    Args:
        lock: What its owner guards the places with; it is re-entrant.
        place: Returns the shard of this node, as far as this process knows, with the lock held; None: there is none.
        handle: Asks a shard's actor for its handle; None: it is gone.

    Attributes:
        nearby: It; None: none is.
    """

    def __init__(
        self,
        lock: threading.RLock,
        place: Callable[[], Place | None],
        handle: Callable[[Place, Wait | None], Handle | None],
    ) -> None:
        self.nearby: LocalShard | None = None
        self._lock, self._place, self._handle = lock, place, handle
        self._refused = -1  # the number of the one that cannot be attached

    def attach(self, wait: Wait | None) -> LocalShard | None:
        """Attaches the shard of this node, unless it is already.

        Args:
            wait: How long it may take; None: as long as the shard is there.

        Returns:
            It; None if there is none, or it is gone.

        Raises:
            AttachError: It cannot be attached, and its actor is alive.
            ReplayTimeout: It takes too long.
        """
        refused = False
        while (place := self._wanted()) is not None:
            handle = self._handle(place, wait)
            if handle is None:
                break
            with self._lock:
                wanted = self._wanted()
                if wanted is None or wanted.number != place.number:
                    continue  # another thread has attached it, or it was lost
                self.release()
                try:
                    self.nearby = LocalShard(place.number, handle)
                except AttachError:  # it may have died just now, which the next call shows
                    if refused:
                        raise
                    refused = True
        return self.nearby

    def draws(self, wait: Wait | None) -> bool:
        """Does what `attach` does, once for a shard that cannot be attached, and returns whether it is."""
        with self._lock:
            place = self._place()
        if place is None or place.number == self._refused:
            return False
        try:
            return self.attach(wait) is not None
        except AttachError as error:
            self._refused = place.number
            logger.warning("shard %d is on this node, and draws from it go through Ray: %s", place.number, error)
            return False

    def release(self) -> None:
        """Lets go of it."""
        with self._lock:
            nearby, self.nearby = self.nearby, None
        if nearby is not None:
            nearby.close()

    def _wanted(self) -> Place | None:
        """Returns the shard that is to be attached; None: there is none, or it is attached."""
        with self._lock:
            place, nearby = self._place(), self.nearby
        return None if place is None or (nearby is not None and nearby.number == place.number) else place

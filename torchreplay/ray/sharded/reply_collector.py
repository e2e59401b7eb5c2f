"""`ReplyCollector`: waiting for what shards answer, and noticing those that never will."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, TimeoutError
from contextlib import suppress
from typing import Any, Final

from torchreplay.errors import AttachError, ReplayTimeout
from torchreplay.ray.runtime.session import import_ray, logger
from torchreplay.ray.sharded.local_shard import Gone
from torchreplay.ray.sharded.shard_wire import ShardReply
from torchreplay.ray.wire.connection import LinkBroken
from torchreplay.segment.waits import LOG_EVERY, SLICE_NS, Wait

HERE: Final = (Future, ShardReply)
"""Answers that do not come through Ray."""

UNREACHABLE_SECONDS: Final = 30.0
"""Seconds for which a shard that Ray cannot reach, and does not know to be dead, is asked again before it is lost."""

WATCH_SECONDS: Final = 2.0
"""Seconds without an answer over a connection after which Ray is asked whether a shard is there."""

PROBE_SECONDS: Final = 1.0
"""Seconds for which such a shard is then asked whether it is there; one that is merely slow is."""


class ReplyCollector:
    """Answers to come: of actors through Ray, and of the shard that is attached, which answers in this process.

    Args:
        lose: Called with a shard's number and the reason when it turns out to be gone.
        name: Names a shard, by number, for messages.
        probe: Calls a shard, by number, and returns what the answer will be got by; None: there is no such shard.
    """

    def __init__(
        self,
        lose: Callable[[int, str], None],
        name: Callable[[int], str],
        probe: Callable[[int], Any] = lambda number: None,
    ) -> None:
        self._ray = import_ray()
        self._lose, self._name, self._probe = lose, name, probe
        self._unreachable: dict[int, float] = {}  # since when, by the monotonic clock
        self._said_at: dict[int, float] = {}  # when the log said last that they are

    def fetch(self, calls: Iterable[Any]) -> None:
        """Has those answers that are there brought to this node, without waiting for them."""
        remote = [call for call in calls if not isinstance(call, HERE)]
        if remote:
            # What is asked for so is brought here also after the call has come back.
            self._ray.wait(remote, num_returns=len(remote), timeout=0)

    def are_there(self, calls: Iterable[Any]) -> bool:
        """Returns whether all answers are on this node."""
        return not self._unanswered(list(calls), 0)

    def collect(self, calls: Mapping[int, Any], wait: Wait | None = None) -> dict[int, Any]:
        """Returns what the shards called answer, by number; those that are lost, or let go of here, are left out.

        Without `wait` it waits for as long as the shards are there.

        Raises:
            ReplayTimeout: One takes too long.
        """
        log_at = looked_at = started = time.monotonic()
        left, probes = list(calls.values()), dict[int, Any]()
        while left:
            seconds = (SLICE_NS if wait is None else wait.slice_ns()) * 1e-9
            left = self._unanswered(left, seconds)
            expired = wait is not None and wait.expired
            if left and time.monotonic() - looked_at >= WATCH_SECONDS:
                looked_at = time.monotonic()
                self._look({number: call for number, call in calls.items() if call in left}, probes)
            if left and (expired or time.monotonic() - log_at >= LOG_EVERY):
                log_at = time.monotonic()
                text = self.silence({number: call for number, call in calls.items() if call in left}, started)
                if expired:
                    raise ReplayTimeout(text)
                logger.warning(text)
        return {number: answer for number, call in calls.items() if (answer := self.answer(number, call)) is not None}

    def silence(self, calls: Mapping[int, Any], since: float) -> str:
        """Returns that there are no answers to these calls."""
        silent = ", ".join(map(self._name, calls))
        return f"no answer from {silent or 'the shards'} for {time.monotonic() - since:.1f} s"

    def answer(self, number: int, call: Any) -> Any:
        """Returns what an answered call returned; None if that did not arrive, or the shard is lost or let go of."""
        errors = self._ray.exceptions
        try:
            answer = call.result() if isinstance(call, HERE) else self._ray.get(call)
        except CancelledError:  # this process has let go of the shard, which others still use
            return None
        except (LinkBroken, errors.ObjectLostError) as error:  # the next call shows whether the shard is there
            logger.warning("an answer from %s was lost on its way: %s", self._name(number), _first_line(error))
            return None
        except errors.ActorUnavailableError as error:  # a broken connection, or a process that is stopped
            now = time.monotonic()
            if now - self._said_at.get(number, -LOG_EVERY) >= LOG_EVERY:
                self._said_at[number] = now
                logger.warning("%s cannot be reached: %s", self._name(number), _first_line(error))
            if now - self._unreachable.setdefault(number, now) >= UNREACHABLE_SECONDS:
                self._unreachable.pop(number, None)
                if not self._is_there(number):  # the answer may have been lost long ago, and be looked at only now
                    self._lose(number, str(error))
            return None
        except (errors.RayActorError, Gone) as error:
            self._lose(number, str(error))
            return None
        self._unreachable.pop(number, None)
        return answer

    def _look(self, calls: Mapping[int, Any], probes: dict[int, Any]) -> None:
        """Asks Ray for shards that are silent over their connections: a node that is lost ends none."""
        if not self._ray.is_initialized():  # a call would start another one
            raise AttachError("Ray was shut down in this process: nothing reaches the shards from here")
        for number in [number for number, call in calls.items() if isinstance(call, HERE)]:
            if number not in probes:
                probes[number] = self._probe(number)
            elif probes[number] is not None and self.are_there([probes[number]]):
                self.answer(number, probes.pop(number))  # if it is gone, its connection is ended

    def _is_there(self, number: int) -> bool:
        """Returns whether a shard answers now, or is merely slow."""
        errors, call = self._ray.exceptions, self._probe(number)
        try:
            if call is not None:
                self._ray.get(call, timeout=PROBE_SECONDS)
        except (errors.RayTaskError, errors.GetTimeoutError):  # what its method has raised is an answer, too
            return True
        except errors.RayError:
            return False
        return True

    def _unanswered(self, calls: list[Any], seconds: float) -> list[Any]:
        """Waits for answers, so long at most, and returns the calls that have none."""
        here = [call for call in calls if isinstance(call, HERE)]
        left = [call for call in calls if not isinstance(call, HERE)]
        if left:
            left = self._ray.wait(left, num_returns=len(left), timeout=seconds)[1]
        until = time.monotonic() + seconds
        for call in here:
            if not call.done():
                with suppress(CancelledError, TimeoutError):
                    call.exception(max(0.0, until - time.monotonic()))
        return left + [call for call in here if not call.done()]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

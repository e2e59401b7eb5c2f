"""The buffers of several processes: `MPReplayBuffer`, `MPPrioritizedReplayBuffer`."""

from __future__ import annotations

from multiprocessing import ProcessError
from multiprocessing.managers import SyncManager
from typing import Any

from torchreplay.compat.cpprb.buffers import PrioritizedReplayBuffer, ReplayBuffer
from torchreplay.validation import checked_choice

BACKENDS = ("sharedctypes", "SharedMemory")


class MPReplayBuffer(ReplayBuffer):
    """Uniform replay for several processes: cpprb's `MPReplayBuffer`.

    Pass it to processes that are forked or spawned, and to Ray actors and tasks: it is the same memory everywhere. Any
    number of processes may add, draw and feed back, and may be killed. No server is needed, and no authentication key.

    Args:
        size: Transitions that fit.
        env_dict: As for `ReplayBuffer`.
        ctx: A context of `multiprocessing` or a `SyncManager`, which is started where it was not. The buffer needs
            neither.
        backend: `"sharedctypes"` or `"SharedMemory"`: the same here.
        logger: Without effect, as in cpprb.
        **options: As for `ReplayBuffer`. Unlike cpprb's, `next_of`, `stack_compress` and `Nstep` work.

    Raises:
        ValueError: As for `ReplayBuffer`, or `backend` is unknown.
        multiprocessing.ProcessError: `ctx` is a manager that has shut down.
    """

    def __init__(
        self,
        size: float,
        env_dict: dict[str, Any] | None = None,
        *,
        ctx: Any = None,
        backend: str = "sharedctypes",
        logger: Any = None,
        **options: Any,
    ) -> None:
        start_manager(ctx)
        checked_choice("backend", backend, BACKENDS)
        super().__init__(size, env_dict, **options)

    def __reduce__(self) -> Any:
        return restored, (type(self), self.__getstate__())


class MPPrioritizedReplayBuffer(MPReplayBuffer, PrioritizedReplayBuffer):
    """Prioritized replay for several processes: cpprb's `MPPrioritizedReplayBuffer`.

    Args:
        size: Transitions that fit.
        env_dict: As for `ReplayBuffer`.
        **options: As for `MPReplayBuffer` and `PrioritizedReplayBuffer`; `check_for_update` is always on.
    """

    def __init__(self, size: float, env_dict: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(size, env_dict, **(options | {"check_for_update": True}))


def restored(kind: type[ReplayBuffer], state: dict[str, Any]) -> ReplayBuffer:
    """Returns a buffer over the memory that it was pickled with."""
    made = kind.__new__(kind)
    made.__setstate__(state)
    return made


def start_manager(ctx: Any) -> None:
    """Starts a `SyncManager` that was not started, as cpprb does: the program may use it for other things.

    Raises:
        multiprocessing.ProcessError: It has shut down.
    """
    if isinstance(ctx, SyncManager):
        try:
            ctx.start()
        except ProcessError as error:
            if "shut down" in str(error):  # it is started already otherwise
                raise

"""`Learners`: the ranks of one machine that train from one buffer."""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from torchreplay.buffer.base import Replay
from torchreplay.distributed.explorers import Explorers, checked_source, made_explorers
from torchreplay.distributed.rank_monitor import REASON_SECONDS, Member, RankMonitor
from torchreplay.errors import LearnerLost, Stopped
from torchreplay.schema.samplers import Prioritized
from torchreplay.segment.handle import machine_id

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")


class Learners:
    """The ranks of a `torch.distributed` run on one machine, which train from one buffer; also a single process.

    Every rank enters the same lines, under plain `torch.distributed`, Fabric or `torchrun`, once its process group is
    there, such as after `fabric.launch()`. `ReplayDataModule` does it for a Lightning Trainer.

    Rank 0 makes the buffer and starts the explorers, the others attach. Each rank draws its own batches from the one
    buffer; limiter, priorities and weights are those of the buffer.

    When a rank dies or fails, the run is over for all. The buffer and the explorers are stopped. Waits in `sample` and
    in collectives end within seconds. Every other rank gets `LearnerLost`, which names the lost rank. A rank that has
    not come out of the block 30 s later is ended with its stacks printed.

    Args:
        buffer: A function without arguments that makes the buffer, called on rank 0; the buffer is stopped and closed
            at the end. Or a `ReplayBuffer` of rank 0's, which stays open; what the other ranks give is not used.
        explorers: An object with `start()` and `stop()`, or a function of the buffer that makes one; used on rank 0.

    Raises:
        TypeError: If `buffer` or `explorers` is neither of the two things it may be.

    Example:
        >>> def make_buffer():
        ...     return tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
        >>> with tr.Learners(make_buffer) as buffer:
        ...     dataset = tr.ReplayDataset(buffer, batch_size=32)
    """

    def __init__(
        self,
        buffer: Replay | Callable[[], Replay],
        explorers: Explorers | Callable[[Any], Explorers] | None = None,
    ) -> None:
        _check_source(buffer)
        self._buffer_source = buffer
        self._explorers_source = checked_source(explorers)
        self._peers: RankMonitor | None = None
        self._release: weakref.finalize[..., Any] | None = None
        self._explorers: list[Explorers] = []

    @property
    def loss(self) -> str | None:
        """Why the run is lost, as `LearnerLost` says it; None while all ranks are well. Hears all that was said."""
        return None if self._peers is None else self._peers.hear()

    @property
    def several(self) -> bool:
        """Whether other ranks share the buffer; known once this one has joined."""
        return self._peers is not None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, or the only one; known once it has joined."""
        return self._peers is None or self._peers.me.rank == 0

    def join(self, start_explorers: bool = True) -> Replay:
        """Returns the buffer that all ranks share; called by all of them.

        Args:
            start_explorers: False leaves it to `start`.

        Raises:
            RuntimeError: The run spans several machines, or this rank has joined already.
            ValueError: The buffer's weights would differ between ranks (`Prioritized(weights="batch")`).
            AttachError: The ranks do not see each other's processes.
            LearnerLost: Another rank failed to make the buffer or to attach to it.

        Example:
            >>> learners = tr.Learners(make_buffer)
            >>> buffer = learners.join()  # `with learners as buffer` does so, and leaves at the end
            >>> loss = learners.leave()
        """
        if self._release is not None:
            raise RuntimeError("these Learners have joined already; leave() first, or make others")
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        buffer, ours = self._join_others() if several else self._own_buffer()
        leads = self.leads
        # Registered before anything is started, so that a failure half-way is cleaned up too.
        self._explorers = []
        self._release = weakref.finalize(
            self, _shut_down, os.getpid(), self._explorers, buffer if ours else None, leads, self._peers
        )
        try:
            if leads and self._explorers_source is not None:
                self._explorers.append(made_explorers(self._explorers_source, buffer))
            if start_explorers:
                self.start()
        except BaseException as error:
            self.leave(error)
            raise
        return buffer

    def start(self) -> None:
        """Starts the explorers, on rank 0, where `join` did not.

        Example:
            >>> learners = tr.Learners(make_buffer)
            >>> buffer = learners.join(start_explorers=False)
            >>> buffer.limiter = tr.MinSize(10)  # what has to be done before they begin
            >>> learners.start()
            >>> loss = learners.leave()
        """
        for explorers in self._explorers:
            explorers.start()

    def leave(self, error: BaseException | None = None) -> str | None:
        """Stops the explorers and closes the buffer, unless it was given. Idempotent.

        Args:
            error: Why this rank leaves; the others then end too. None: it has finished.

        Returns:
            None, or why the run is lost if another rank is the reason.

        Example:
            >>> learners = tr.Learners(make_buffer)
            >>> buffer = learners.join()
            >>> print(learners.leave())
            None
            >>> buffer
            ReplayBuffer(closed)
        """
        release, self._release = self._release, None
        if release is None:
            return None
        loss = None
        try:
            if self._peers is not None:
                loss = _part(self._peers, error)
        finally:
            self._peers, self._explorers = None, []
            release()
        return loss

    def __enter__(self) -> Replay:
        return self.join()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loss = self.leave(error)
        if loss is None or isinstance(error, LearnerLost):
            return
        if error is None or isinstance(error, RuntimeError):
            raise LearnerLost(loss) from error
        error.add_note(loss)

    def _own_buffer(self) -> tuple[Replay, bool]:
        """Returns the buffer that this process was given or makes, and whether it is ours to close."""
        if isinstance(self._buffer_source, Replay):
            return self._buffer_source, False
        buffer = self._buffer_source()
        if not isinstance(buffer, Replay):
            raise TypeError(f"the function given as `buffer` returned {buffer!r}; it must return a ReplayBuffer")
        return buffer, True

    def _join_others(self) -> tuple[Replay, bool]:
        """Does the same for a rank among several; each step ends alike on all of them."""
        _refuse_several_machines()
        peers = RankMonitor(dist.get_rank(), machine_id())
        mine: list[tuple[Replay, bool]] = []

        def make() -> bytes | None:
            if peers.me.rank > 0:
                return None
            mine.append(self._own_buffer())
            _require_equal_weights(mine[0][0])
            return pickle.dumps(mine[0][0])

        def attach() -> None:
            if not mine:
                mine.append((pickle.loads(made), True))

        try:
            members = _from_all(peers.me)
            _refuse_foreign(members)
            _on_all(peers.me, lambda: peers.meet(members))
            peers.watch(lambda: _end_waits(mine))
            made: Any = _on_all(peers.me, make)[0]
            _on_all(peers.me, attach)
        except BaseException as error:
            loss = _part(peers, error)
            for buffer, ours in mine:
                if ours:
                    buffer.close()
            if loss is not None and isinstance(error, RuntimeError) and not isinstance(error, LearnerLost):
                raise LearnerLost(loss) from error
            raise
        self._peers = peers
        return mine[0]


def _from_all(value: T) -> list[T]:
    """Returns what each rank gives."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _on_all(me: Member, attempt: Callable[[], T]) -> list[T]:
    """Returns what `attempt` returns on each rank.

    Raises:
        LearnerLost: It failed on another rank; where it failed, its own error is raised.
    """
    result, failure, error = None, None, None
    try:
        result = attempt()
    except Exception as caught:
        error, failure = caught, f"{me} {_failure(caught)}"
    outcomes = _from_all((result, failure))
    if error is not None:
        raise error
    failures = [failure for _, failure in outcomes if failure is not None]
    if failures:
        raise LearnerLost(f"{failures[0]} when the ranks were to share a replay buffer")
    return [result for result, _ in outcomes]  # type: ignore[misc]  # of type T where it did not fail


def _failure(error: BaseException) -> str:
    return f"ended with {type(error).__name__}{f': {error}' if str(error) else ''}"


def several_machines(what: str) -> str:
    """Returns what to say to a run on several machines; `what` says which run, and on how many."""
    return (
        f"{what}, and the buffer that Learners and ReplayDataModule share lies in the memory of one: run all ranks on "
        f"one machine; or have each draw from a torchreplay.ray.ShardedReplay with a ReplayDataset of its own as the "
        f"loader, and without these two"
    )


def _refuse_several_machines() -> None:
    """Raises where torchrun has said that there are ranks on other machines."""
    ranks, here = (int(os.environ.get(name, 0)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if 0 < here < ranks:
        raise RuntimeError(several_machines(f"the run has {ranks} ranks, {here} of them on this machine"))


def _refuse_foreign(members: list[Member]) -> None:
    machines = len({member.machine for member in members})
    if machines > 1:
        raise RuntimeError(several_machines(f"the run's {len(members)} ranks are spread over {machines} machines"))


def _require_equal_weights(buffer: Replay) -> None:
    sampler = buffer.sampler
    if isinstance(sampler, Prioritized) and sampler.weights == "batch":
        raise ValueError(
            'the buffer has Prioritized(weights="batch"), which divides by the largest weight of each rank\'s own '
            'batch, so that equal items would count differently on different ranks; use weights="buffer"'
        )


def _end_waits(buffers: list[tuple[Replay, bool]]) -> None:
    """Frees this rank from its waits when another one is lost."""
    for buffer, _ in buffers:
        with suppress(Exception):  # it is being closed, or cannot be reached through Ray
            buffer.stop()
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is not None:
        group.abort()  # frees NCCL's collectives; gloo's end when who failed hangs up


def _part(peers: RankMonitor, error: BaseException | None) -> str | None:
    """Leaves the other ranks, in order or because of `error`; returns why the run is lost if one of them is why."""
    # A collective that fails because of a rank that died does so before anyone knows of the death.
    collective = isinstance(error, RuntimeError) and not isinstance(error, Stopped | LearnerLost)
    loss = peers.hear(REASON_SECONDS if collective else 0.0)
    peers.leave(None if error is None or isinstance(error, LearnerLost) else _failure(error))
    return loss


def _check_source(buffer: object) -> None:
    if not isinstance(buffer, Replay) and not callable(buffer):
        raise TypeError(
            f"buffer is {type(buffer).__name__}; it must be a ReplayBuffer or a function without arguments that makes "
            "one"
        )


def _shut_down(
    pid: int, explorers: list[Explorers], buffer: Replay | None, leads: bool, peers: RankMonitor | None
) -> None:
    """Ends what `join` began; `buffer` is None where it is the user's to close."""
    if os.getpid() != pid:  # a forked child holds a copy of the finalizer, not of the duty
        return
    if peers is not None:  # has left already, unless the object was forgotten or the process exits
        peers.leave("left before its training was over")
    if buffer is not None and leads:
        buffer.stop()  # explorers that wait for room return at once
    try:
        for running in explorers:
            running.stop()
    finally:
        if buffer is not None:
            buffer.close()

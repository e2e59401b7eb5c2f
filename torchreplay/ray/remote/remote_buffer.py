"""A replay buffer on another node of the Ray cluster: what explorers do with it, done through Ray."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from torchreplay.buffer.base import WritableReplay
from torchreplay.buffer.replay_buffer import ReplayBuffer, attached
from torchreplay.buffer.stats import Stats
from torchreplay.buffer.writer import Autoreset, Writer, roles_of, streams_of
from torchreplay.errors import AttachError, Stopped
from torchreplay.ray.remote.ingest_actor import Ingest
from torchreplay.ray.remote.remote_weights import ADMITTED
from torchreplay.ray.remote.row_sender import RowSender
from torchreplay.ray.remote.send_buffer import SendBuffer
from torchreplay.ray.runtime.actor_client import NodeActor
from torchreplay.schema.casting import cast_values
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import Admission, Limiter
from torchreplay.schema.views import View
from torchreplay.segment.handle import Handle
from torchreplay.segment.ray_node import ray_node
from torchreplay.segment.waits import LISTENERS, Listener

_open_writers: weakref.WeakSet[RemoteWriter] = weakref.WeakSet()


class RemoteWriter(Writer):
    """Writes rows of a buffer on another Ray node; made by `RemoteBuffer.writer()`.

    The calls, their checks and their errors are those of every writer, but `append`, `extend`, `reset` and `step`
    return None: keys are given where the rows arrive. They are sent in chunks, at most a tenth of a second later. A
    forked child finds it closed.
    """

    def __init__(
        self,
        sender: RowSender,
        config: Config,
        num_envs: int | None,
        autoreset: Autoreset,
        of_buffer: weakref.WeakSet[RemoteWriter] | None = None,
    ) -> None:
        roles_of(config, num_envs, autoreset)  # raises before anybody hears of a writer that there will not be
        self._sender, self._is_admitted = sender, isinstance(config.limiter, Admission)
        self._send_buffer: SendBuffer = sender.open(config, num_envs or 1)
        self._leave = weakref.finalize(self, sender.leave, self._send_buffer)
        super().__init__(self._send_buffer.segment, config, num_envs, autoreset, first_key=-1)  # its keys are not told
        _open_writers.add(self)
        if of_buffer is not None:
            of_buffer.add(self)

    if TYPE_CHECKING:
        append: Callable[..., None]  # type: ignore[assignment]
        extend: Callable[..., None]  # type: ignore[assignment]
        reset: Callable[..., None]
        step: Callable[..., None]

    def end_episode(self, mask: Any = None) -> None:
        """Ends the running episode, as `Writer.end_episode` does, and returns when the buffer knows.

        Raises:
            ValueError: The view is `Rows()`, or the mask does not fit.
            Stopped, RuntimeError: As `flush`.
        """
        ends = self._end_episode(mask)
        if len(ends):
            self._sender.truncate(self._send_buffer, ends.numpy())

    @property
    def refused(self) -> bool:
        """Whether its rows are taken no more although the buffer is there."""
        ended = self._send_buffer.ended
        return ended is not None and ended.refused

    def flush(self) -> None:
        """Returns when everything written so far is in the buffer.

        Raises:
            Stopped: The buffer was stopped: some of it may not be.
            ReplayLost: The buffer is gone.
            RuntimeError: The rows are not taken; the text says why.
            ValueError: The writer is closed.
        """
        super().flush()
        self._settle()
        self._sender.flush(self._send_buffer)

    def close(self) -> None:
        """Flushes, unless the buffer was stopped, and gives up the writer's place. Idempotent.

        Raises:
            RuntimeError: As `flush` does; the place is given up all the same.
        """
        if self.closed:
            return
        super().close()  # first: while another thread is in a call, nothing is given up
        try:
            with suppress(Stopped):
                self._sender.flush(self._send_buffer)
        finally:
            self._leave()

    # Items are admitted on the buffer's node, and then here.

    def _admit(self, n: int, timeout: float | None) -> None:
        if self._is_admitted:
            self._require_open()
            timeout, end = self.timeout if timeout is None else timeout, self.rows + self._open_items
            try:
                ADMITTED.version = max(ADMITTED.version, self._sender.admit(self._send_buffer, end, n, timeout))
                super()._admit(n, None)
            except BaseException:
                self._settle()
                raise
        else:
            super()._admit(n, timeout)

    def _settle(self) -> None:
        if self._is_admitted and not self.closed:
            self._sender.settle(self._send_buffer, self.rows + self._open_items)

    def _look_before_admission(self, n: int, timeout: float | None, waited: float) -> None:
        if self._send_buffer.ended is not None:
            raise self._send_buffer.ended.error()

    def _look(self, stalled: bool, waited: float, pages: bool = False) -> None:
        self._send_buffer.wanted = self._wanted_bytes()  # until the next wait: the row has not its pages yet
        self._sender.make_room(self._send_buffer, self._admitted, self.timeout)


class RemoteBuffer(WritableReplay):
    """A replay buffer on another node of the Ray cluster, for explorers.

    What a `ReplayBuffer` becomes when it is passed to a Ray task or actor on another node than its own. It has the
    calls with which one writes, and those that ask; learners run on the buffer's node. Pickles like the buffer, and is
    that buffer again on its own node.

    Args:
        handle: Of the buffer.
        view: The buffer's own view, with functions that a handle does not carry.

    It finds the buffer when it is first used, which raises `AttachError` where the buffer, its owner or its node is
    gone.
    """

    _listeners: ClassVar[Sequence[Listener]] = LISTENERS
    """The participants of which one must be there, or the buffer is gone."""

    _writer_kind: ClassVar = RemoteWriter

    def __init__(self, handle: Handle, view: View | None = None) -> None:
        self._handle = handle
        self._given_view = view
        name, args = f"torchreplay-ingest-{handle.nonce:016x}", (handle, view, self._listeners)
        self._actor = NodeActor(handle.node, Ingest, name, args, 64)  # calls: writers wait in them
        self._connecting = threading.Lock()
        self._connection: tuple[Config, RowSender] | None = None
        self._local = threading.local()
        self._closed = False
        self._writers: weakref.WeakSet[RemoteWriter] = weakref.WeakSet()

    # Connecting, at the first use. Not before: while Ray unpickles arguments, answers of actors cannot get through.

    def _connected(self) -> tuple[Config, RowSender]:
        if self._connection is None:
            self._require_open()
        self._actor.require_own_process()
        with self._connecting:
            if self._connection is None:
                text, ending = self._actor.ask("describe")
                if not text:
                    raise AttachError(str(ending))
                config, sender = Config.from_text(text).with_functions(self._given_view), RowSender(self._actor, ending)
                weakref.finalize(self, sender.close)
                self._connection = config, sender
            return self._connection

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the replay buffer is closed")

    def _ask(self, name: str) -> Any:
        self._require_open()
        return self._actor.ask("ask", name)

    @property
    def _config(self) -> Config:  # type: ignore[override]  # nobody sets it: connecting brings it
        return self._connected()[0]

    @property
    def _sender(self) -> RowSender:
        self._require_open()
        return self._connected()[1]

    # Writing

    def writer(
        self, envs: Any = None, autoreset: Autoreset | None = None, *, num_envs: int | None = None
    ) -> RemoteWriter:
        """Returns a writer for the calling thread's rows, as `ReplayBuffer.writer` does.

        Raises:
            Stopped: The buffer was stopped.
            ReplayLost: The buffer is gone.
            ValueError: As there.
            RuntimeError: This process was forked off one of Ray's, or rows can no longer be sent from it.
        """
        streams = streams_of(envs, num_envs, autoreset)
        writer = self._writer_kind(self._sender, self._config, *streams, self._writers)
        writer._buffer_closed = self._closed  # by another thread, before it knew this writer
        return writer

    def extend(self, /, *args: Any, priority: Any = None, casting: Any = "same_kind", **fields: Any) -> None:
        """Writes n rows or episodes, as `ReplayBuffer.extend` does, and returns when they are in the buffer."""
        self._rows_extended += self.deliver(*args, priority=priority, casting=casting, **fields)

    def deliver(self, /, *args: Any, priority: Any = None, casting: Any = "same_kind", **fields: Any) -> int:
        """Does what `extend` does, and returns how many rows it has written."""
        fields = cast_values(self._config.fields, fields, casting)
        num_envs = self._config.num_envs_of(fields)
        if num_envs is not None:
            with self.writer(num_envs=num_envs) as block_writer:
                self._tell_version(block_writer)
                block_writer.extend(*args, priority=priority, **fields)
                block_writer.flush()
                return block_writer.rows
        try:
            writer: RemoteWriter = self._local.writer
        except AttributeError:
            writer = self._local.writer = self.writer()
        before = writer.rows
        self._tell_version(writer)
        try:
            writer.extend(*args, priority=priority, **fields)
            writer.flush()
        except RuntimeError:
            if writer.refused:  # such as one whose place was given to others: the next call has another
                del self._local.writer
            raise
        return writer.rows - before

    def _tell_version(self, writer: Writer) -> None:
        if self._config.has_versions:
            writer.policy_version = self.policy_version if self._extends_as is None else self._extends_as

    # Life cycle

    def connect(self) -> None:
        """Finds the buffer, unless it was found before.

        Raises:
            AttachError: It is gone, or its owner or its node is.
        """
        self._connected()

    @property
    def ending(self) -> Stopped | None:
        """What its writers get instead of writing, as far as this process knows: `ReplayLost` if the buffer is gone."""
        return None if self._connection is None else self._connection[1].ending

    def stop(self) -> None:
        """Stops the buffer for all processes, on all nodes."""
        self._ask("stop")
        if self._connection is not None:
            self._connection[1].end(Stopped("the replay buffer was stopped"))

    @property
    def stopped(self) -> bool:
        """Whether the buffer was stopped, or is gone: known about half a second later. Costs nothing."""
        return bool(self._sender.ending)

    def close(self) -> None:
        """Lets this object's writers of `extend` go; using it again is a `RuntimeError`. Idempotent.

        Its writers write no more: their calls are a `RuntimeError` as well. What they have written is sent all the
        same, and their `close` returns when it is there.
        """
        self._local, self._closed = threading.local(), True
        for writer in list(self._writers):
            writer._buffer_closed = True

    def give_up(self) -> None:
        """Has this process's writers wait no longer for the limiter: what it keeps out is dropped, with `Stopped`."""
        if self._connection is not None:
            self._connection[1].give_up()

    def drain(self) -> None:
        """Closes this process's writers for good, and returns when the buffer's node knows, or after some seconds."""
        if self._connection is not None:
            self._connection[1].drain()

    def handle(self) -> Handle:
        """Returns the buffer's own handle."""
        return self._handle

    def __reduce__(self) -> tuple[Any, ...]:
        view = () if self._given_view is None else (self._given_view,)
        return attached, (ReplayBuffer, self._handle, *view)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"the rows of this buffer are on node {self._handle.node}: call copy() there, or save it there and load it "
            f"here; copy.copy() gives another object over the same rows"
        )

    def __enter__(self) -> RemoteBuffer:
        self._require_open()
        return self

    # Asking

    def __len__(self) -> int:
        """Returns the number of rows held; asks the buffer's node."""
        return self.stats().size

    def stats(self) -> Stats:
        """Returns what has happened so far, over all processes; asks the buffer's node."""
        stats: Stats = self._ask("stats")
        return stats

    @property
    def limiter(self) -> Limiter:
        """Who must wait; asks the buffer's node."""
        limiter: Limiter = self._ask("limiter")
        return limiter

    @limiter.setter
    def limiter(self, limiter: Limiter | None) -> NoReturn:
        raise AttributeError(self._out_of_reach("setting the limiter"))

    @property
    def policy_version(self) -> int:
        """The learner's; asks the buffer's node."""
        version: int = self._ask("policy_version")
        return version

    @property
    def capacity(self) -> int:
        """Rows that fit."""
        return self._config.capacity

    def _out_of_reach(self, what: str) -> str:
        return (
            f"{what} needs the buffer's memory, which is on node {self._handle.node} (here {ray_node()}): explorers "
            f"write from every node, learners run on the buffer's"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if not name.startswith("_") and hasattr(ReplayBuffer, name):
            raise AttributeError(self._out_of_reach(name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"RemoteBuffer(on node {self._handle.node})"


def _in_child() -> None:
    # The rows that they collect are the parent's, and so is what sends them.
    for writer in list(_open_writers):
        Writer.close(writer)


os.register_at_fork(after_in_child=_in_child)

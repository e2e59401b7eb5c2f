"""Module weights from the learner to the explorers, through shared memory."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from torchreplay import _C
from torchreplay.errors import AttachError, ReplayTimeout
from torchreplay.schema.samplers import MOST_VERSIONS
from torchreplay.schema.tensor_info import TensorInfo, pack
from torchreplay.segment.handle import Handle, lasting_handle, new_nonce, open_handle
from torchreplay.segment.ray_node import RemoteKind, is_elsewhere
from torchreplay.segment.reservation import reserve
from torchreplay.segment.transient import Transient
from torchreplay.segment.waits import SLICE_NS
from torchreplay.validation import checked_int
from torchreplay.weights.module_state import load_copies, module_state

PUBLISH_SECONDS = 20.0  # seconds that a publisher waits for another one


class Versioned(Protocol):
    """What knows the version of weights: a buffer that of the learner's, a writer that of its rows."""

    policy_version: int


REMOTE_WEIGHTS: RemoteKind[[Handle, dict[str, TensorInfo], int], SharedWeights] = RemoteKind()
"""Attaches the weights of another node."""


class SharedWeights(Transient):
    """The newest weights of a module, in shared memory; pickles like the buffer.

    `copy.deepcopy` makes weights of their own memory: the newest ones, and their version.

    On another node of a Ray cluster than the learner's they are fetched through Ray; `pull` is the same.

    Modules are looked at through `torch.compile`, `DistributedDataParallel` and `DataParallel`: a learner may wrap its
    module, or parts of it, otherwise than its explorers do.

    Two buffers: a publication is written into one while readers copy the other. So nobody waits, and a reader never
    sees half of one. A publisher that dies halfway leaves the last complete publication.

    Args:
        module: Its `state_dict()` (parameters, buffers) gives names, shapes and dtypes, and the first weights.
        version: Of these. A learner that goes on with a buffer gives `buffer.policy_version`.

    Raises:
        ValueError: The module has no weights, or the version is negative.
        MemoryError: Too little memory is left.

    Example:
        >>> policy = torch.nn.Linear(4, 2)
        >>> weights = tr.SharedWeights(policy)  # explorers get it as an argument
        >>> acting = torch.nn.Linear(4, 2)  # in an explorer
        >>> weights.pull(acting)
        True
        >>> torch.equal(acting.weight, policy.weight)
        True
    """

    def __init__(self, module: nn.Module, version: int = 0) -> None:
        version = checked_int("version", version, 0, MOST_VERSIONS)
        state = module_state(module)
        infos, nbytes = pack((tensor.dtype, tuple(tensor.shape)) for tensor in state.values())
        if not nbytes:
            raise ValueError("the module has no weights to share")
        self._create(dict(zip(state, infos, strict=True)), nbytes, version)
        self._write(state, version)

    def _create(self, infos: dict[str, TensorInfo], nbytes: int, version: int) -> None:
        """Makes the memory, whose buffer of that version is to be filled before anybody else has this object."""
        self._map(reserve(_C.weights_bytes(nbytes), "shared weights"), new_nonce(), None, infos, nbytes, version)

    def _map(
        self, fd: int, nonce: int, origin: Handle | None, infos: dict[str, TensorInfo], nbytes: int, version: int = 0
    ) -> None:
        """Maps the memory of `fd` and closes that; it is new without an `origin`, the handle that led to it."""
        try:
            self._native = _C.Weights(fd, origin is None, nonce, nbytes, version)
        finally:
            os.close(fd)
        self._infos = infos
        self._nonce = nonce
        self._origin = origin
        self._nbytes = nbytes
        self._pulled = -1
        self._pulled_into: Callable[[], nn.Module | None] = _nowhere

    @classmethod
    def _attach(cls, handle: Handle, infos: dict[str, TensorInfo], nbytes: int) -> SharedWeights:
        if is_elsewhere(handle.node):
            return REMOTE_WEIGHTS.attach(handle, infos, nbytes)
        fd = open_handle(handle, "set of shared weights")
        self = cls.__new__(cls)
        try:
            self._map(fd, handle.nonce, handle, infos, nbytes)
        except RuntimeError as error:
            raise AttachError(str(error)) from None
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        handle = lasting_handle(self._native.fd, self._nonce, self._origin)
        return attached_weights, (handle, self._infos, self._nbytes, type(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedWeights:
        version, newest = newest_of(self)
        made = memo[id(self)] = type(self).__new__(type(self))
        made._create(self._infos, self._nbytes, version)
        made._native.buffer(version).copy_(newest)
        return made

    @property
    def version(self) -> int:
        """Number of publications so far, from the first version on. One atomic read."""
        return self._native.version

    @property
    def pulled_version(self) -> int:
        """The version that this object pulled last; -1 before the first pull."""
        return self._pulled

    def publish(self, module: nn.Module, *, buffer: Versioned | None = None) -> int:
        """Makes the module's weights the newest, and returns their version.

        Args:
            module: Built like the one given to the constructor.
            buffer: Its `policy_version` becomes that version, once everybody can pull the weights. So a writer that
                the new version admits pulls these. It stays where another publisher has set a later one meanwhile.
                None: none's.

        Raises:
            ValueError: The module's weights differ in name, shape or dtype from those of the constructor. Or the
                buffer is at a later version already: then nothing is published.
            TypeError: `buffer` is none; nothing is published.
            ReplayTimeout: Another publisher is stopped in the middle.
            RuntimeError: It is called by a signal's handler while its own thread publishes these weights.

        Example:
            >>> torch.nn.init.zeros_(policy.weight).sum().item()
            0.0
            >>> weights.publish(policy)
            1
        """
        if buffer is not None and not hasattr(buffer, "policy_version"):
            raise TypeError(
                f"buffer is {buffer!r:.200}: expected one with a policy_version, such as a ReplayBuffer, or None"
            )
        state = self.require_like(module)
        if self._native.publisher == threading.get_native_id():  # to end this one would end that one, half done
            raise RuntimeError(
                "this thread is publishing these weights already, and a signal's handler came in between: have the "
                "handler set a flag, and publish when the thread sees it"
            )
        complete = False
        try:  # before the lock is taken: a signal's handler may raise as soon as it is
            self._begin_publish()
            version = self.version + 1
            if buffer is not None and buffer.policy_version > version:
                raise ValueError(
                    f"these weights would be of version {version:,}, and the buffer's policy_version is at "
                    f"{buffer.policy_version:,}: it only grows, or rows of other weights would have the same version; "
                    f"go on counting, such as by SharedWeights(module, version=buffer.policy_version)"
                )
            self._write(state, version)
            complete = True
        finally:
            self._native.end_publish(complete)
        if buffer is not None:
            _raise_version(buffer, version)
        return version

    def _begin_publish(self) -> None:
        for _ in range(int(PUBLISH_SECONDS * 1e9 / SLICE_NS)):
            if self._native.begin_publish(SLICE_NS):
                return
        thread = self._native.publisher
        where = "this process" if os.path.exists(f"/proc/self/task/{thread}") else "another process"
        raise ReplayTimeout(
            f"thread {thread} of {where} has been publishing weights for {PUBLISH_SECONDS} s: it is stopped, or hangs"
        )

    def pull(self, module: nn.Module, *, writer: Versioned | None = None) -> bool:
        """Copies the newest weights into the module, in place, unless the last pull put them there.

        Args:
            module: Built like the one given to the constructor.
            writer: Whose `policy_version` becomes that of the weights in the module. None: none's.

        Returns:
            False when there is nothing newer, which costs one atomic read. The first pull into a module copies.

        Raises:
            ValueError: The module's weights differ in name, shape or dtype from those of the constructor.

        Example:
            >>> weights.pull(acting)  # nothing is newer
            False
            >>> version = weights.publish(policy)
            >>> weights.pull(acting)
            True
        """
        is_new = self._pull(module)
        if writer is not None:
            writer.policy_version = self._pulled
        return is_new

    def _pull(self, module: nn.Module) -> bool:
        if self._native.version == self._pulled and self._pulled_into() is module:
            return False
        state = self.require_like(module)
        while True:
            version = self._native.version
            self._copy_to(state, self._native.buffer(version))
            if self._native.intact(version):
                break  # otherwise two publications came meanwhile: copy again
        load_copies(module, state)
        self._pulled_into = _nowhere  # first: the module before this one has not got that version
        self._pulled = version
        self._pulled_into = weakref.ref(module)
        return True

    def _copy_to(self, state: dict[str, torch.Tensor], buffer: torch.Tensor) -> None:
        for name, info in self._infos.items():
            state[name].copy_(info.view(buffer))

    def _write(self, state: dict[str, torch.Tensor], version: int) -> None:
        buffer = self._native.buffer(version)
        for name, info in self._infos.items():
            info.view(buffer).copy_(state[name])

    def require_like(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the module's weights and buffers by the names that they have without wrappers.

        Raises:
            ValueError: They differ from those shared in name, dtype or shape.

        Example:
            >>> state = weights.require_like(policy)
            >>> weights.require_like(torch.nn.Linear(4, 3))
            Traceback (most recent call last):
            ValueError: the module's weights differ from those shared in bias, weight: ...
        """
        state = module_state(module)
        given = {name: (t.dtype, tuple(t.shape)) for name, t in state.items()}
        expected = {name: (info.dtype, info.shape) for name, info in self._infos.items()}
        if given != expected:
            differing = sorted(n for n in given.keys() | expected.keys() if given.get(n) != expected.get(n))
            first = differing[0]
            raise ValueError(
                f"the module's weights differ from those shared in {', '.join(differing[:5])}: {first} is "
                f"{_told(given.get(first))}, expected {_told(expected.get(first))}; pass a module built like the one "
                f"given to SharedWeights"
            )
        return state

    def __repr__(self) -> str:
        return f"SharedWeights(version {self.version}, {len(self._infos)} tensors, {self._nbytes / 2**20:.2f} MiB)"


def attached_weights(
    handle: Handle, infos: dict[str, TensorInfo], nbytes: int, kind: type[SharedWeights] = SharedWeights
) -> SharedWeights:
    """Returns the weights in the memory of others. Pickles name it: see `torchreplay.buffer.replay_buffer.attached`."""
    return kind._attach(handle, infos, nbytes)


def newest_of(weights: SharedWeights) -> tuple[int, torch.Tensor]:
    """Returns the newest version, and a copy of its bytes. For the other rooms of this package."""
    native = weights._native
    while True:
        version = native.version
        content = native.buffer(version).clone()
        if native.intact(version):  # otherwise two publications came meanwhile: copy again
            return version, content


def go_on_from(weights: SharedWeights, version: int) -> None:
    """Has the newest weights be of that version, unless they are of a later one: the next publication follows on it.

    A run that resumes has made its weights before its buffer is restored. For the other rooms of this package.
    """
    native, complete = weights._native, False
    try:
        weights._begin_publish()
        newest = weights.version
        if newest < version:
            if (version - newest) % 2:  # it lies in the other one of the two buffers
                native.buffer(version).copy_(native.buffer(newest))
            complete = True
    finally:
        native.end_publish(complete, version)


def _raise_version(buffer: Versioned, version: int) -> None:
    """Sets the buffer's version, unless a later publication has done so since."""
    try:
        buffer.policy_version = version
    except ValueError:
        if buffer.policy_version < version:
            raise


def _nowhere() -> nn.Module | None:
    """In place of a weak reference, before the first pull."""
    return None


def _told(weight: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "none" if weight is None else f"{weight[0]} {list(weight[1])}"

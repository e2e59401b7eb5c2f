"""`TensorDictReplayBuffer`: the calls of TorchRL's buffer of the same name, over a torchreplay buffer.

Tested with torchrl 0.14.1 and tensordict 0.14.3. It needs tensordict alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase

from torchreplay.buffer.replay_buffer import ReplayBuffer, draw
from torchreplay.schema.limiters import Limiter
from torchreplay.schema.samplers import Prioritized, Sampler
from torchreplay.schema.spec import spec_like
from torchreplay.validation import as_numbers, checked_int

OWN = ("index", "priority_weight")
"""What a batch has beside the rows' entries."""


class TensorDictReplayBuffer:
    """Rows of a TensorDict in shared memory, with the calls that TorchRL's collectors and losses make.

    ```python
    rb = TensorDictReplayBuffer(100_000, batch_size=256, sampler=tr.Prioritized(0.6, 0.4))
    for data in collector:
        rb.extend(data.reshape(-1))
        td = rb.sample()
        loss = loss_module(td)["loss"]                    # uses td["priority_weight"], writes td["td_error"]
        rb.update_tensordict_priority(td)
    ```

    Each entry of a TensorDict is a field; what a row consists of is learned from the first one. Other processes write
    into the same memory: give them this object after that, or `buffer`, which is a `torchreplay.ReplayBuffer`.

    What differs from TorchRL: `index` is the row's key, which is never given again. So TD errors never reach a row that
    came later into the same place. `priority_weight` is divided by the largest weight of the buffer, as in TorchRL;
    with `weights="batch"` of the sampler by that of the batch.

    Args:
        capacity: Rows that fit.
        batch_size: Rows of a batch, where `sample` gets no other number.
        sampler: As for a `ReplayBuffer`: `Uniform()` or `Prioritized(...)`.
        priority_key: The entry with the TD errors that losses write.
        limiter: As for a `ReplayBuffer`.
        path: As for a `ReplayBuffer`.
        seed: As for a `ReplayBuffer`.
        device: Where batches go; None: they stay on the CPU.
    """

    def __init__(
        self,
        capacity: int,
        *,
        batch_size: int | None = None,
        sampler: Sampler | None = None,
        priority_key: str = "td_error",
        limiter: Limiter | None = None,
        path: str | os.PathLike[str] | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._capacity = checked_int("capacity", capacity, 1)
        self.batch_size = None if batch_size is None else checked_int("batch_size", batch_size, 1)
        self.priority_key, self.device = priority_key, device
        self._arguments: dict[str, Any] = {"sampler": sampler, "limiter": limiter, "path": path, "seed": seed}
        self._buffer: ReplayBuffer | None = None
        self._making = threading.Lock()

    @property
    def buffer(self) -> ReplayBuffer:
        """The rows.

        Raises:
            RuntimeError: Nothing was written: nobody knows yet what a row is.
        """
        if self._buffer is None:
            raise RuntimeError("nobody knows yet what a row is: call extend(td) first, or init(td) with an example")
        return self._buffer

    def init(self, example: TensorDictBase) -> ReplayBuffer:
        """Makes the buffer for rows like those of `example`, writes nothing, and returns it."""
        with self._making:
            if self._buffer is None:
                self._buffer = ReplayBuffer(self._spec_of(example), self._capacity, **self._arguments)
        return self._buffer

    # Writing

    def add(self, data: TensorDictBase) -> int:
        """Writes one row, a TensorDict of batch size [], and returns its index."""
        return int(self.extend(data.unsqueeze(0))[0])

    def extend(self, data: TensorDictBase) -> torch.Tensor:
        """Writes rows.

        Args:
            data: A TensorDict of batch size [n], or [n, ...], which is taken as so many rows. Entries on a device are
                copied to the CPU. `index` and `priority_weight`, of batches drawn before, are left out. Where there is
                an entry `priority_key`, it holds the rows' first priorities.

        Returns:
            Their indices, int64 `[n]`.

        Raises:
            TypeError: It is no TensorDict, or an entry is no tensor.
            ValueError: It has no batch size, or entries, shapes or dtypes that the rows before had not.
        """
        rows = _rows_of(data)
        buffer = self.init(rows)
        priority = rows.get(self.priority_key, None)
        first = None if priority is None else priority.detach().reshape(len(rows))
        return buffer.extend(priority=first, **self._fields_of(rows))

    # Drawing, and feeding back

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Draws a batch, as `ReplayBuffer.sample` does.

        Returns:
            A TensorDict of batch size [B], with `index` int64 `[B]` and `priority_weight` float32 `[B]`.

        Raises:
            ValueError: There is no batch size, here or in the constructor.
        """
        n = self.batch_size if batch_size is None else batch_size
        if n is None:
            raise ValueError("batch_size is missing: give it to sample(), or to the constructor")
        batch = draw(self.buffer, n)
        del batch["probability"]
        fields = dict(batch)
        fields["index"], fields["priority_weight"] = fields.pop("key"), fields.pop("weight")
        drawn = TensorDict(fields, batch_size=[n])
        return drawn if self.device is None else drawn.to(self.device)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Draws batches, endlessly."""
        while True:
            yield self.sample()

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Feeds back the TD errors that a loss has written into a batch; under `Uniform` nothing happens.

        Raises:
            KeyError: There are none, or no `index`.
        """
        if isinstance(self.buffer.sampler, Prioritized):
            self.update_priority(data["index"], data[self.priority_key])

    def update_priority(self, index: torch.Tensor | int, priority: torch.Tensor | float) -> None:
        """Feeds back TD errors; those of rows overwritten since are dropped and counted.

        Args:
            index: Of the rows, `[n]`, or of one.
            priority: Raw TD errors, `[n]` or `[n, 1]`, or one for all; their absolute values are taken.

        Raises:
            ValueError: The shapes do not fit, an error is NaN or infinite, or an index was never given; nothing is
                applied.
        """
        keys = as_numbers("index", index, "integers").cpu().reshape(-1)
        td = as_numbers("priority", priority, "numbers").detach()
        if td.dim() == 2 and td.shape[1] == 1:
            td = td[:, 0]
        self.buffer.update_priorities(keys, td if td.dim() else td.expand(len(keys)))

    def _fields_of(self, data: TensorDictBase) -> dict[str, Any]:
        return {name: value for name, value in _as_dict(data).items() if name not in (*OWN, self.priority_key)}

    def _spec_of(self, data: TensorDictBase) -> dict[str, Any]:
        """Returns the spec of rows like those of `data`, whose batch size is [n]."""
        return spec_like(self._fields_of(_rows_of(data)))

    # Life cycle

    def __len__(self) -> int:
        """Returns the number of rows held."""
        return 0 if self._buffer is None else len(self._buffer)

    def __bool__(self) -> bool:
        return True

    def empty(self) -> None:
        """Takes all rows away, for every process."""
        if self._buffer is not None:
            self._buffer.clear()

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Saves the rows into a directory, as `ReplayBuffer.save` does."""
        self.buffer.save(path)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Takes the rows that `dumps` saved, in memory of their own. Other processes keep the rows that were here.

        Raises:
            CheckpointError: There is no checkpoint, or it is damaged; the rows that are here stay.
            ValueError: They were saved with another sampler than the constructor's; the rows that are here stay.
        """
        loaded = ReplayBuffer.load(path, self._capacity, sampler=self._arguments["sampler"])
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = loaded

    def __getstate__(self) -> dict[str, Any]:
        _ = self.buffer  # of its own each process would make one, and none would see the others' rows
        return {name: value for name, value in self.__dict__.items() if name != "_making"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _making=threading.Lock())

    def __repr__(self) -> str:
        return f"TensorDictReplayBuffer({'empty' if self._buffer is None else self._buffer!r})"


def _rows_of(data: Any) -> TensorDictBase:
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"got a value of type {type(data).__name__}: expected a TensorDict of batch size [n]")
    if not data.batch_dims:
        raise ValueError("the TensorDict has batch size []: expected [n]; add(td) writes one row")
    return data.reshape(-1) if data.batch_dims > 1 else data  # tensordict reshapes none that is empty


def _as_dict(data: TensorDictBase) -> dict[str, Any]:
    """Returns the entries by name, nested, on the CPU and without graphs."""

    def entry(name: str, value: Any) -> Any:
        if isinstance(value, TensorDictBase):
            return {inner: entry(f"{name}/{inner}", v) for inner, v in value.items()}
        if not isinstance(value, torch.Tensor):
            _refuse(name, value)
        return value.detach().cpu()

    return {str(name): entry(str(name), value) for name, value in data.items()}


def _refuse(name: str, value: Any) -> NoReturn:
    raise TypeError(f"entry {name!r} is a value of type {type(value).__name__}: expected a tensor")

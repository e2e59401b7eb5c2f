"""A drawn batch: a dict of tensors that knows which buffer it came from."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from torchreplay.schema.spec import mapped

if TYPE_CHECKING:
    from tensordict import TensorDict

Finish: TypeAlias = Callable[[dict[str, Any]], None]
"""Computes what a view's functions have to add to a batch."""


OWN: Final = ("key", "weight", "probability", "buffer")
"""What a batch has beside the fields."""

OF_THE_STEP: Final = ("reward", "done", "terminated", "truncated")
"""What the environment returned together with the next observation."""


class ReplayBatch(dict[str, Any]):
    """The fields of the items drawn, each `[B, ...]` and nested as the spec is, and three keys of its own.

    `batch["key"]` (int64 `[B]`, always on the CPU) names the rows for `ReplayBuffer.update_priorities`;
    `batch["weight"]` (float32 `[B]`) are the importance-sampling weights; `batch["probability"]` (float32 `[B]`) the
    probabilities of the draw.

    A batch of a `MixedDataset` has a fourth, `batch["buffer"]` (int64 `[B]`): the position of each item's buffer.

    It is a plain dict to other code, and keeps its keys through `DataLoader`, Lightning, pickling and copying.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3), "reward": tr.Field()}, capacity=100)
        >>> keys = buffer.extend(obs=torch.zeros(5, 3), reward=torch.ones(5))
        >>> batch = buffer.sample(4)
        >>> batch
        ReplayBatch(obs: float32[4, 3], reward: float32[4], key: int64[4], weight: float32[4], probability: float32[4])
    """

    __slots__ = ("holder", "source")

    source: int | tuple[int, ...] | None
    """Identity of the buffer it was drawn from, or of those of a mixture in their order, where known."""

    holder: int
    """Of a batch of a queue that a worker of a `DataLoader` has drawn: the number of that process's attachment."""

    @property
    def batch_size(self) -> int:
        """The number of items, B."""
        return len(self["key"])

    def to(self, device: torch.device | str | int, non_blocking: bool = True) -> ReplayBatch:
        """Returns the batch with every tensor but `key` on `device`.

        Args:
            device: Where to. A dtype is refused: `tensor.to(dtype)` would cast actions and flags, too.
            non_blocking: Whether copies from page-locked memory may run asynchronously. Copies to the CPU are always
                waited for: nobody could know when their values are there.

        Raises:
            TypeError: `device` is a dtype.

        Example:
            >>> batch.to("meta")["obs"].device, batch["key"].device  # "cuda", usually
            (device(type='meta'), device(type='cpu'))
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"device is {device}: expected a device; cast the entries that are to be cast")
        to_cpu = isinstance(device, str | torch.device) and torch.device(device).type == "cpu"
        return self._map(lambda t: t.to(device, non_blocking=non_blocking and not to_cpu))

    def pin_memory(self, device: object = None) -> ReplayBatch:
        """Returns the batch with every CPU tensor but `key` in page-locked memory; `device` is ignored."""
        return self._map(lambda t: t.pin_memory() if t.device.type == "cpu" else t)

    def to_tensordict(self, *, nest_next: bool = True, column: bool = False) -> TensorDict:
        """Returns the batch as a `tensordict.TensorDict` of batch size [B], as TorchRL's losses take it.

        The tensors are the same, not copies. `tensordict` must be installed. Losses look for weights under
        `priority_weight`, and for the steps of n-step returns under `steps_to_next_obs`: set these two, as
        docs/coming_from_torchrl.md does.

        Args:
            nest_next: Fields `next_<name>`, such as those of `Transitions`, go to `("next", name)`. So do `reward`,
                `terminated` and `truncated`, which belong to the same step. There `done`, bool, says whether either
                flag is set, unless the batch has a `done` of its own.
            column: Fields of shape `[B]`, rewards and flags, become `[B, 1]`. `key`, `weight` and `probability`, which
                are not TorchRL's, keep their shape.

        Example:
            >>> batch.to_tensordict(column=True)["reward"].shape
            torch.Size([4, 1])
        """
        from tensordict import TensorDict  # which takes a second to import

        fields = dict(self)
        if nest_next and any(name.startswith("next_") for name in fields):
            following = {
                name.removeprefix("next_"): fields.pop(name) for name in list(fields) if name.startswith("next_")
            }
            following |= {name: fields.pop(name) for name in OF_THE_STEP if name in fields}
            if "done" not in following and {"terminated", "truncated"} <= following.keys():
                following["done"] = following["terminated"] | following["truncated"]
            fields["next"] = following
        if column:
            own = {name: fields.pop(name) for name in OWN if name in fields}
            fields = _moved(fields, lambda t: t.unsqueeze(-1) if t.dim() == 1 else t) | own
        return TensorDict(fields, batch_size=[self.batch_size])

    def __missing__(self, name: Any) -> Any:
        """Called for `batch[name]` alone: raises KeyError, with the names that are most like it."""
        near = difflib.get_close_matches(str(name), map(str, self), n=3)
        meant = f": did you mean {' or '.join(map(repr, near))}?" if near else "."
        raise KeyError(f"the batch has no {name!r}{meant} It has {', '.join(map(repr, self)) or 'nothing'}")

    def copy(self) -> ReplayBatch:
        """Returns a batch of the same tensors.

        Example:
            >>> other = batch.copy()
            >>> other["reward"] = other["reward"] * 2
            >>> batch["reward"]
            tensor([1., 1., 1., 1.])
        """
        copied = ReplayBatch(self)
        copied._take_origin(self)
        return copied

    def __or__(self, other: Mapping[str, Any]) -> ReplayBatch:  # type: ignore[override]
        if not isinstance(other, Mapping):
            return NotImplemented
        merged = self.copy()
        merged.update(other)
        return merged

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> ReplayBatch:
        moved = ReplayBatch()
        moved._take_origin(self)
        for name, value in self.items():
            moved[name] = value if name == "key" else _moved(value, move)
        return moved

    def _take_origin(self, batch: ReplayBatch) -> None:
        self.source = getattr(batch, "source", None)  # code that rebuilds a dict from its items loses it
        if hasattr(batch, "holder"):
            self.holder = batch.holder

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {_shape(value)}" for name, value in self.items())
        return f"ReplayBatch({shapes})"


def keys_of(batch: dict[str, Any], source: int) -> Any:
    """Returns the keys in a batch; None if it has none.

    Args:
        batch: Drawn from the buffer whose identity `source` is, or of unknown origin: a plain dict, for one.
        source: That identity.

    Raises:
        ValueError: It is of another buffer, or of several.
    """
    if "buffer" in batch:
        raise ValueError(
            "the batch mixes items of several buffers: feed its TD errors back by the MixedDataset that drew "
            "it, dataset.update_priorities(batch, td)"
        )
    if getattr(batch, "source", None) not in (source, None):
        raise ValueError("the batch was drawn from another buffer: give it to that one")
    return batch.get("key")


def _moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return mapped(lambda part: move(part) if isinstance(part, torch.Tensor) else part, value)


def _shape(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shape(v)}" for name, v in value.items()) + "}"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__

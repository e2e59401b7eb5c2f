"""A drawn batch: a dict of tensors that knows which buffer it came from."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, get_args

import torch

from torchreplay.schema.spec import mapped
from torchreplay.validation import checked_choice, checked_int

if TYPE_CHECKING:
    from tensordict import TensorDict

Finish: TypeAlias = Callable[[dict[str, Any]], None]
"""Computes what a view's functions have to add to a batch."""


OWN: Final = ("key", "weight", "probability", "age", "buffer")
"""What a batch has beside the fields."""

OF_THE_STEP: Final = ("reward", "done", "terminated", "truncated")
"""What the environment returned together with the next observation."""


Side = Literal["right", "left"]
SIDES: tuple[Side, ...] = get_args(Side)
"""Where padding goes."""

SIGNED: Final = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Of the same bytes: torch copies few unsigned ones by index."""


class Bounds(NamedTuple):
    """Where the values of a ragged field begin and end in its tensor."""

    offsets: torch.Tensor
    """int32 `[n + 1]`, on the device of the values."""
    lengths: torch.Tensor
    """int64 `[B]`, or `[B, T]`; on the CPU."""


class ReplayBatch(dict[str, Any]):
    """The fields of the items drawn, each `[B, ...]` and nested as the spec is, and three keys of its own.

    `batch["key"]` (int64 `[B]`, always on the CPU) names the rows for `ReplayBuffer.update_priorities`;
    `batch["weight"]` (float32 `[B]`) are the importance-sampling weights; `batch["probability"]` (float32 `[B]`) the
    probabilities of the draw.

    Where rows have a field `policy_version`, `batch["age"]` (int64 `[B]`) says by how many versions each item was
    behind the learner's when the batch was handed out; of several steps the oldest counts. It is negative where an item
    is ahead: nobody has told the buffer the learner's version.

    A batch of a `MixedDataset` has one more, `batch["buffer"]` (int64 `[B]`): the position of each item's buffer.

    A ragged field has all its values one after the other, `[sum of lengths, *shape]`. `offsets(name)` and
    `lengths(name)` say where each begins and ends; `padded(name)` and `nested(name)` give them another form. The dict
    has both by the same names, in `batch["offsets"]` and `batch["lengths"]`, so they go wherever the batch goes.

    It is a plain dict to other code, and keeps its keys through `DataLoader`, Lightning, pickling and copying.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3), "reward": tr.Field()}, capacity=100)
        >>> keys = buffer.extend(obs=torch.zeros(5, 3), reward=torch.ones(5))
        >>> batch = buffer.sample(4)
        >>> batch
        ReplayBatch(obs: float32[4, 3], reward: float32[4], key: int64[4], weight: float32[4], probability: float32[4])
        >>> texts = tr.ReplayBuffer({"tokens": tr.Ragged(torch.int32)}, capacity=100, ragged_bytes=1 << 20)
        >>> ragged = texts.gather(texts.extend(tokens=[[1, 2, 3], [4]]))
        >>> ragged
        ReplayBatch(tokens: int32[4 in 2], key: int64[2], weight: float32[2], probability: float32[2])
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

    def offsets(self, name: str) -> torch.Tensor:
        """Returns where the values of a ragged field begin in `batch[name]`, and where the last one ends.

        Args:
            name: Of the field; nested ones joined by '/', such as `"obs/tokens"`.

        Returns:
            int32 `[B + 1]`, as flash-attention takes it for `cu_seqlens`, on the device of the values. Under
            `Sequences` `[B * T + 1]`, a value for each step, of which an observation has one more. Fields that are
            `like` each other have one tensor.

        Raises:
            KeyError: The batch has no ragged field of that name.

        Example:
            >>> ragged["tokens"], ragged.offsets("tokens")
            (tensor([1, 2, 3, 4], dtype=torch.int32), tensor([0, 3, 4], dtype=torch.int32))
        """
        return self._bounds_of(name).offsets

    def lengths(self, name: str) -> torch.Tensor:
        """Returns how many elements each value of a ragged field has.

        Args:
            name: As for `offsets`.

        Returns:
            int64 `[B]`, always on the CPU. Under `Sequences` `[B, T]`, of observations `[B, T + 1]`; steps
            beyond an episode's end have 0.

        Raises:
            KeyError: As `offsets`.

        Example:
            >>> ragged.lengths("tokens")
            tensor([3, 1])
        """
        return self._bounds_of(name).lengths

    def padded(self, name: str, value: float = 0, side: Side = "right", multiple_of: int = 1) -> torch.Tensor:
        """Returns the values of a ragged field, each filled up to the longest.

        Args:
            name: As for `offsets`.
            value: What they are filled up with.
            side: Where: `"right"`, behind the values, or `"left"`, before them.
            multiple_of: The length is a multiple of this.

        Returns:
            `[B, longest, *shape]`, new memory on the device of the values; under `Sequences` `[B, T, longest, *shape]`.

        Raises:
            KeyError: As `offsets`.
            ValueError: The field's dtype does not hold `value`, `side` is neither, or `multiple_of` is below 1.

        Example:
            >>> ragged.padded("tokens", value=-1, multiple_of=2)
            tensor([[ 1,  2,  3, -1],
                    [ 4, -1, -1, -1]], dtype=torch.int32)
        """
        offsets, lengths = self._bounds_of(name)
        values = self._leaf(name)
        side, multiple_of = checked_choice("side", side, SIDES), checked_int("multiple_of", multiple_of, 1)
        longest = -(-int(lengths.max()) // multiple_of) * multiple_of if lengths.numel() else 0
        padded = _filled((lengths.numel() * longest, *values.shape[1:]), value, values)
        # The place of each element. Sizes are known on the CPU, so that a device is not waited for.
        begin = torch.arange(lengths.numel(), device=values.device) * longest
        shift = begin - offsets[:-1] if side == "right" else begin + longest - offsets[1:]
        repeats = torch.repeat_interleave(shift, offsets.diff(), output_size=len(values))
        signed = SIGNED.get(values.dtype, values.dtype)
        at = torch.arange(len(values), device=values.device) + repeats
        padded.view(signed).index_copy_(0, at, values.view(signed))
        return padded.view(*lengths.shape, longest, *values.shape[1:])

    def nested(self, name: str) -> torch.Tensor:
        """Returns the values of a ragged field as a nested tensor of torch's, of the jagged layout. Nothing is copied.

        Args:
            name: As for `offsets`.

        Returns:
            `[B, j, *shape]`, whose second dimension is ragged; under `Sequences` `[B * T, j, *shape]`. Those of fields
            that are `like` each other may be computed with each other.

        Raises:
            KeyError: As `offsets`.

        Example:
            >>> [value.tolist() for value in ragged.nested("tokens").unbind()]
            [[1, 2, 3], [4]]
        """
        return _jagged(self._leaf(name), *self._bounds_of(name))

    def to(self, device: torch.device | str | int, non_blocking: bool = True) -> ReplayBatch:
        """Returns the batch with every tensor but `key`, and the lengths of ragged fields, on `device`.

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
        """Returns the batch with every CPU tensor but `key` and lengths in page-locked memory; `device` is ignored."""
        return self._map(lambda t: t.pin_memory() if t.device.type == "cpu" else t)

    def to_tensordict(self, *, nest_next: bool = True, column: bool = False) -> TensorDict:
        """Returns the batch as a `tensordict.TensorDict` of batch size [B], as TorchRL's losses take it.

        The tensors are the same, not copies. A ragged field becomes a nested tensor, as `nested` says. Under
        `Sequences` it is `[B, j, *shape]`: j is what an item's steps have together, and `("lengths", name)`, `[B, T]`,
        what each has.

        `tensordict` must be installed. Losses look for weights under
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

        fields = self._with_nested_tensors()
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
        bounds = self._bounds()
        stay = ("key", "lengths") if bounds else ("key",)
        once: dict[
            int, torch.Tensor
        ] = {}  # of fields that are like each other, by which nested tensors know each other

        def move_once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in once:
                once[id(tensor)] = move(tensor)
            return once[id(tensor)]

        for name, value in self.items():
            how = move_once if bounds and name == "offsets" else move
            moved[name] = value if name in stay else _moved(value, how)
        return moved

    def _bounds(self) -> dict[str, Bounds]:
        """Returns where the values of the ragged fields begin and end, by name; of a batch without any: {}."""
        offsets, lengths = self.get("offsets"), self.get("lengths")
        if not isinstance(offsets, Mapping) or not isinstance(lengths, Mapping):
            return {}
        ends, sizes = dict(_leaves(offsets)), dict(_leaves(lengths))
        # No field of one shape has a value more than another: a spec of such fields may use these names.
        return {name: Bounds(ends[name], sizes[name]) for name in ends if _are_bounds(ends[name], sizes.get(name))}

    def _bounds_of(self, name: str) -> Bounds:
        bounds = self._bounds()
        if name not in bounds:
            known = f"those of the batch are {', '.join(map(repr, bounds))}" if bounds else "the batch has none"
            raise KeyError(f"{name!r} is no ragged field: {known}")
        return bounds[name]

    def _leaf(self, name: str) -> torch.Tensor:
        value: Any = self
        for part in name.split("/"):
            value = value[part]
        found: torch.Tensor = value
        return found

    def _with_nested_tensors(self) -> dict[str, Any]:
        """Returns the entries, with nested tensors in the place of ragged values and their bounds."""
        bounds = self._bounds()
        if not bounds:
            return dict(self)
        once: dict[int, Bounds] = {}  # of fields that are like each other
        bounds = {name: once.setdefault(id(own.offsets), _of_items(own)) for name, own in bounds.items()}

        def nested(value: Any, name: str) -> Any:
            if isinstance(value, Mapping):
                return {key: nested(inner, f"{name}/{key}") for key, inner in value.items()}
            return _jagged(value, *bounds[name]) if name in bounds else value

        entries = {name: nested(value, name) for name, value in self.items() if name != "offsets"}
        if all(own.lengths.dim() == 1 for own in self._bounds().values()):
            del entries["lengths"]
        return entries

    def _take_origin(self, batch: ReplayBatch) -> None:
        self.source = getattr(batch, "source", None)  # code that rebuilds a dict from its items loses it
        if hasattr(batch, "holder"):
            self.holder = batch.holder

    def __repr__(self) -> str:
        bounds = self._bounds()
        hidden = ("offsets", "lengths") if bounds else ()
        shapes = ", ".join(
            f"{name}: {_shape(value, name, bounds)}" for name, value in self.items() if name not in hidden
        )
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


def ragged_bounds(batch: Mapping[str, Any]) -> dict[str, Bounds]:
    """Returns where the values of a batch's ragged fields begin and end, by name; of a batch without any: {}."""
    return ReplayBatch(batch)._bounds()


def joined_offsets(batches: Sequence[ReplayBatch]) -> dict[str, Any] | None:
    """Returns the offsets of the values of several batches, one after the other; None: they have no ragged fields.

    Raises:
        OverflowError: There are more elements of a field than int32 offsets can say.
    """
    if not batches[0]._bounds():
        return None
    once: dict[int, torch.Tensor] = {}  # of fields that are like each other

    def joined(levels: list[Any]) -> Any:
        if isinstance(levels[0], Mapping):
            return {name: joined([level[name] for level in levels]) for name in levels[0]}
        return once.setdefault(id(levels[0]), _one_after_the_other(levels))

    offsets: dict[str, Any] = joined([batch["offsets"] for batch in batches])
    return offsets


def _one_after_the_other(offsets: Sequence[torch.Tensor]) -> torch.Tensor:
    ends = [int(part[-1]) for part in offsets]
    if sum(ends) > torch.iinfo(torch.int32).max:
        raise OverflowError(f"a batch would have {sum(ends):,} elements in a ragged field: draw fewer items")
    before = [sum(ends[:position]) for position in range(len(ends))]
    return torch.cat([offsets[0][:1], *(part[1:] + shift for part, shift in zip(offsets, before, strict=True))])


def _moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return mapped(lambda part: move(part) if isinstance(part, torch.Tensor) else part, value)


def _shape(value: Any, name: str, bounds: Mapping[str, Bounds]) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shape(v, f'{name}/{key}', bounds)}" for key, v in value.items()) + "}"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    dtype = str(value.dtype).removeprefix("torch.")
    if name not in bounds:
        return f"{dtype}{list(value.shape)}"
    places = " x ".join(map(str, bounds[name].lengths.shape))
    return f"{dtype}[{', '.join([f'{len(value):,} in {places}', *map(str, value.shape[1:])])}]"


def _leaves(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields what is in nested dicts, by names that are joined by '/'."""
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{above}{name}/")
        else:
            yield above + name, inner


def _are_bounds(offsets: Any, lengths: Any) -> bool:
    tensors = isinstance(offsets, torch.Tensor) and isinstance(lengths, torch.Tensor)
    return tensors and offsets.dim() == 1 and offsets.dtype == torch.int32 and len(offsets) == lengths.numel() + 1


def _filled(shape: tuple[int, ...], value: Any, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the dtype of `like`; raises ValueError where that does not hold `value`."""
    try:
        number = torch.full((), value, dtype=like.dtype, device="cpu").item()
    except (RuntimeError, TypeError):
        number = None
    if number is None or (number != value and (not like.is_floating_point() or math.isinf(number))):
        raise ValueError(f"value is {value!r:.200}: expected a number that {like.dtype} holds")
    return torch.full(shape, value, dtype=like.dtype, device=like.device)


def _jagged(values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns values that lie one after the other as a nested tensor; the longest is known without a look at them."""
    shortest, longest = (int(lengths.min()), int(lengths.max())) if lengths.numel() else (0, 0)
    made: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=shortest, max_seqlen=longest
    )
    return made


def _of_items(bounds: Bounds) -> Bounds:
    """Returns the bounds of items, where those given may be of each step of them."""
    offsets, lengths = bounds
    if lengths.dim() == 1:
        return bounds
    return Bounds(offsets[:: lengths.shape[1]].contiguous(), lengths.sum(1))

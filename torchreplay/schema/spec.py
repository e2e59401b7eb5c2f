"""What a row holds: named, typed, shaped fields, which may be nested in dicts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

# In the order of the native core's `Element`: the position is the code in the segment.
ELEMENTS: tuple[torch.dtype, ...] = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
NAMED_ELEMENTS = {str(dtype).removeprefix("torch."): dtype for dtype in ELEMENTS}
ELEMENT_NAMES = ", ".join(NAMED_ELEMENTS)
# compat.cpprb stores a column of such a name under another one: a new name here makes its older files unreadable.
RESERVED = frozenset({"key", "weight", "probability", "priority", "buffer", "casting"})
MAX_DIMS = 15  # one of the native core's 16 is the batch's
MAX_BYTES = 1 << 46  # of a row: more than any machine maps
MAX_FIELDS = 4096  # the native core attaches to no buffer with more
OF_RAGGED = frozenset({"offsets", "lengths"})  # what batches have beside the values of ragged fields
VERSION = "policy_version"
"""The field that says by which policy a row came about."""
OF_VERSIONS = frozenset({"age"})  # what batches have beside it

Spec: TypeAlias = Mapping[str, "Field | Ragged | Spec"]
"""What a buffer's rows hold: names to fields, or to dicts of them."""

Path: TypeAlias = tuple[str, ...]

Column: TypeAlias = "Field | Ragged"
"""What a name of a spec stands for: values of one shape, or of any length."""


@dataclass(frozen=True, slots=True, init=False)
class Field:
    """One named column: every row holds a value of this shape and dtype.

    `Field()` is a float32 scalar.

    Args:
        shape: An int or a tuple of positive ints; `()` for a scalar.
        dtype: A torch dtype (bool, any integer, float16, bfloat16, float32, float64), its name, or what
            `numpy.dtype` takes.

    Raises:
        ValueError: The shape has a size below 1 or too many dimensions, or rows cannot hold the dtype.
        TypeError: A size is no integer.

    Example:
        >>> spec = {
        ...     "obs": {"image": tr.Field((3, 84, 84), torch.uint8), "speed": tr.Field(2)},
        ...     "action": tr.Field((), torch.int64),
        ...     "reward": tr.Field(),
        ... }
        >>> spec["obs"]["image"].nbytes
        21168
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __init__(self, shape: int | tuple[int, ...] = (), dtype: Any = torch.float32) -> None:
        hint = f"; did you mean Field(dtype={shape!r})?" if isinstance(shape, (torch.dtype, type)) else ""
        sizes = _checked_shape(shape, hint)
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "dtype", as_torch_dtype(dtype))
        if self.nbytes > MAX_BYTES:
            raise ValueError(f"a field of shape {shape!r} and {self.dtype} needs {self.nbytes:,} bytes a row")

    @property
    def nbytes(self) -> int:
        """Bytes of one row's value."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"Field({self.shape}, {self.dtype})"


@dataclass(frozen=True, slots=True, init=False)
class Ragged:
    """One named column whose values have any length: a row holds an array of shape `(n, *shape)`, n from 0.

    Args:
        dtype: As for `Field`.
        shape: Of one element, as for `Field`; `()` for a number, such as a token or a byte.
        like: The name of another ragged field, `"obs/tokens"` for a nested one, also as it is called within the same
            dict. Each row has as many elements in this field as in that one, and batches have one set of offsets for
            both.

    Raises:
        ValueError: As `Field`, or `like` is empty.
        TypeError: As `Field`, or `like` is no name.

    Example:
        >>> spec = {"tokens": tr.Ragged(torch.int32), "logprob": tr.Ragged(torch.float32, like="tokens")}
        >>> buffer = tr.ReplayBuffer(spec, capacity=100, ragged_bytes=1 << 20)
        >>> keys = buffer.extend(tokens=[[1, 2, 3], [4]], logprob=[[0.5, 0.5, 1.0], [1.0]])
        >>> batch = buffer.gather(keys)
        >>> batch["tokens"], batch.offsets("tokens")
        (tensor([1, 2, 3, 4], dtype=torch.int32), tensor([0, 3, 4], dtype=torch.int32))
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    like: str | None

    def __init__(self, dtype: Any, shape: int | tuple[int, ...] = (), like: str | None = None) -> None:
        if dtype is None or isinstance(dtype, (int, tuple, list)):
            raise TypeError(
                f"a ragged field has dtype {dtype!r}: expected a dtype, and then the shape of one element; the length "
                f"of values is said nowhere"
            )
        if like is not None and not isinstance(like, str):
            raise TypeError(f"like is {like!r:.200}: expected the name of another ragged field, or None")
        if like is not None and not all(like.split("/")):
            raise ValueError(f"like is {like!r}: expected the name of another ragged field, such as 'obs/tokens'")
        given: Any = shape
        sizes = _checked_shape(shape, f"; did you mean like={shape!r}?" if isinstance(given, str) else "")
        object.__setattr__(self, "dtype", as_torch_dtype(dtype))
        object.__setattr__(self, "shape", sizes)
        object.__setattr__(self, "like", like)
        if self.nbytes > MAX_BYTES:
            raise ValueError(f"an element of shape {shape!r} and {self.dtype} needs {self.nbytes:,} bytes")

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        shape = f", {self.shape}" if self.shape else ""
        like = f", like={self.like!r}" if self.like is not None else ""
        return f"Ragged({self.dtype}{shape}{like})"


def _checked_shape(shape: Any, hint: str) -> tuple[int, ...]:
    try:
        if isinstance(shape, (bool, str, bytes, Mapping)):
            raise TypeError  # Python would count with what is in them
        sizes = tuple(map(operator.index, (shape,) if isinstance(shape, (int, np.integer)) else shape))
    except TypeError:
        raise TypeError(f"a field has shape {shape!r}: expected an int or a tuple of ints{hint}") from None
    if len(sizes) > MAX_DIMS or min(sizes, default=1) < 1:
        raise ValueError(f"a field has shape {shape!r}: expected at most {MAX_DIMS} dimensions, each a positive int")
    return sizes


def as_torch_dtype(dtype: Any) -> torch.dtype:
    """Returns the torch dtype for a torch dtype, its name or anything that `numpy.dtype` takes.

    Raises:
        ValueError: Rows cannot hold values of this dtype.
    """
    found = NAMED_ELEMENTS.get(dtype.removeprefix("torch."), dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) and dtype is not None:  # NumPy takes None for float64
        try:
            found = getattr(torch, np.dtype(dtype).name, None)
        except (TypeError, ValueError):
            found = None
    if found not in ELEMENTS:
        raise ValueError(f"a row cannot hold values of dtype {dtype!r}: expected one of {ELEMENT_NAMES}")
    return found


def flatten(spec: Spec) -> dict[Path, Column]:
    """Returns the fields of a spec by their path, in the spec's order.

    `like` of a ragged field leads to one that has none: of fields that are like each other it names the first one.

    Raises:
        ValueError: No field at all or more than 4,096, a reserved or unusable name, or a value that is neither a field
            nor dict. Or `policy_version` is no int64 scalar. Or `like` is the field itself, no ragged field, or leads
            in a circle.
    """
    given: Any = spec
    if not isinstance(given, Mapping) or not given or _advice(given):
        raise ValueError(
            f"the spec is {given!r:.200}: expected a non-empty dict of names to torchreplay.Field{_advice(given)}"
        )
    columns: dict[Path, Column] = dict(_columns_of(spec, ()))
    if len(columns) > MAX_FIELDS:
        raise ValueError(f"the spec has {len(columns):,} fields: expected at most {MAX_FIELDS:,}; make arrays of them")
    ragged = any(isinstance(column, Ragged) for column in columns.values())
    reserved = RESERVED | (OF_RAGGED if ragged else frozenset()) | (OF_VERSIONS if VERSION in given else frozenset())
    for path in columns:
        if path[0] in reserved:
            others = sorted(reserved - {path[0]})
            raise ValueError(f"the field name {path[0]!r} is reserved, as are {others}: choose another")
        if path[0] == VERSION and (len(path) > 1 or columns[path] != Field((), torch.int64)):
            raise ValueError(
                f"field {'/'.join(path)!r} is {columns[path]}: a field of this name says by which policy a row came "
                f"about; expected {VERSION!r}: Field((), torch.int64), or another name"
            )
    return {path: _resolved(columns, path) for path in columns} if ragged else columns


def ragged_fields(columns: Mapping[Path, Column]) -> list[str]:
    """Returns the names of the ragged fields, nested ones joined by '/'."""
    return ["/".join(path) for path, column in columns.items() if isinstance(column, Ragged)]


def has_versions(columns: Mapping[Path, Column]) -> bool:
    """Returns whether rows say by which policy they came about."""
    return (VERSION,) in columns


def length_names(columns: Mapping[Path, Column]) -> list[str]:
    """Returns the names of the ragged fields whose lengths are kept. Of several fields of one length, it is the first.

    In this order the native core has the lengths of a row.
    """
    ragged = {"/".join(path): column for path, column in columns.items() if isinstance(column, Ragged)}
    return list(dict.fromkeys(column.like or name for name, column in ragged.items()))


def fixed_fields(columns: Mapping[Path, Column], what: str) -> dict[Path, Field]:
    """Returns the fields; raises ValueError where there are ragged ones, which `what` does not take."""
    if names := ragged_fields(columns):
        raise ValueError(
            f"{what} takes fields of one shape only, and {', '.join(map(repr, names))} "
            f"{'is' if len(names) == 1 else 'are'} Ragged: pad the values to a Field((longest, ...)), or leave them out"
        )
    return {path: column for path, column in columns.items() if isinstance(column, Field)}


def _resolved(columns: Mapping[Path, Column], path: Path) -> Column:
    """Returns a column whose `like`, if it has one, is the first of the fields that it leads to."""
    column = first = columns[path]
    way = [path]
    while isinstance(first, Ragged) and first.like is not None:
        way.append(_named_by(first.like, columns, way[-1]))
        names = " -> ".join(repr("/".join(step)) for step in way)
        if way[-1] in way[:-1]:
            raise ValueError(f"like leads in a circle, {names}: expected a field of a length of its own at the end")
        found = columns.get(way[-1])
        if not isinstance(found, Ragged):
            others = [repr("/".join(p)) for p, c in columns.items() if isinstance(c, Ragged) and p != path]
            what = "which is no field of the spec" if found is None else f"which is {found}"
            raise ValueError(
                f"like leads to no ragged field, {names}, {what}: expected {' or '.join(others) or 'None, here'}"
            )
        first = found
    return (
        column if len(way) == 1 or isinstance(column, Field) else Ragged(column.dtype, column.shape, "/".join(way[-1]))
    )


def _named_by(like: str, columns: Mapping[Path, Column], path: Path) -> Path:
    """Returns the path that `like` of the field at `path` names: of the whole spec, or within a dict that it is in."""
    name = tuple(like.split("/"))
    within = (path[:depth] + name for depth in range(len(path)))
    return next((found for found in within if found in columns), name)


def _columns_of(value: Any, path: Path) -> Iterator[tuple[Path, Column]]:
    name = "/".join(path)
    if isinstance(value, (Field, Ragged)):
        yield path, value
    elif isinstance(value, Mapping) and value and not _advice(value):
        for key, inner in value.items():
            if not isinstance(key, str) or not key or "/" in key or "\0" in key:
                raise ValueError(f"a field of {name or 'the spec'!r} is named {key!r}: expected a name without '/'")
            try:
                key.encode()
            except UnicodeEncodeError:
                raise ValueError(f"a field of {name or 'the spec'!r} is named {key!r}: expected Unicode text") from None
            yield from _columns_of(inner, (*path, key))
    else:
        _refuse(path, value)


def _refuse(path: Path, value: Any) -> NoReturn:
    raise ValueError(
        f"field {'/'.join(path)!r} is {value!r:.200}: expected torchreplay.Field(shape, dtype), "
        f"torchreplay.Ragged(dtype), or a dict of them"
        f"{_advice(value)}"
    )


def _advice(value: Any) -> str:
    """Returns what to do with an environment, or one of Gymnasium's spaces, in a spec; "" for anything else."""
    if hasattr(value, "observation_space") and hasattr(value, "action_space"):
        return "; tr.spec_from_env(env) makes the spec of an environment"
    if hasattr(value, "sample") and hasattr(value, "contains"):  # a Dict space is a Mapping, too
        return "; tr.spec_from_space(space) makes a space into that, and tr.spec_from_env(env) makes the whole spec"
    return ""


def nest(values: Mapping[Path, Any]) -> dict[str, Any]:
    """Returns the nested dict whose leaves are `values`: the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        level = tree
        for name in path[:-1]:
            level = level.setdefault(name, {})
        level[path[-1]] = value
    return tree


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Returns what `change` makes of a value, or of each in a nested dict."""
    if isinstance(value, Mapping):
        return {name: mapped(change, inner) for name, inner in value.items()}
    return change(value)


def spec_like(rows: Mapping[str, Any], leading: int = 1) -> dict[str, Any]:
    """Returns the spec of rows like these nested arrays or tensors, which have so many leading dimensions.

    Raises:
        ValueError: A row cannot hold values of one's dtype.
    """
    spec: dict[str, Any] = mapped(lambda values: Field(tuple(values.shape[leading:]), values.dtype), rows)
    return spec


def to_native(fields: Mapping[Path, Column]) -> list[tuple[Any, ...]]:
    """Returns the form in which the native core and the segment's description take fields.

    A ragged one has a fourth part: the position of the field whose length it has, which may be its own.
    """
    paths = list(fields)

    def native(path: Path, field: Column) -> tuple[Any, ...]:
        fixed = path, ELEMENTS.index(field.dtype), field.shape
        if isinstance(field, Field):
            return fixed
        return *fixed, paths.index(path if field.like is None else tuple(field.like.split("/")))

    return [native(path, field) for path, field in fields.items()]


def from_native(fields: list[Any]) -> dict[Path, Column]:
    """Returns fields by path from the form that `to_native` gives, also after a turn through JSON.

    Raises:
        ValueError, TypeError, IndexError: They are no fields of a spec.
    """
    paths = [tuple(path) for path, *_ in fields]

    def column(place: int, element: Any, shape: Any, of: int | None = None) -> Column:
        dtype = ELEMENTS[int(element)]
        if of is None:
            return Field(tuple(shape), dtype)
        return Ragged(dtype, tuple(shape), None if of == place else "/".join(paths[of]))

    found = {paths[place]: column(place, *parts) for place, (_, *parts) in enumerate(fields)}
    if len(found) != len(fields) or flatten(nest(found)) != found:
        raise ValueError(f"{fields!r:.200} are no fields of a spec")
    return found

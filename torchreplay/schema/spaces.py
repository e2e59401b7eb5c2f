"""Specs from Gymnasium's spaces. Gymnasium is imported when it is asked for, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchreplay.schema.spec import Column, Field, Ragged

if TYPE_CHECKING:
    from gymnasium import Space


def spec_from_space(space: Space[Any]) -> Column | dict[str, Any]:
    """Returns what holds the values of a Gymnasium space.

    `Box`, `MultiDiscrete` and `MultiBinary` become a `Field` of the space's shape and dtype. `Discrete` is an int64
    scalar, since torch takes indices so. `Dict` becomes a dict in the space's order, and `Tuple` one with the names
    `"0"`, `"1"` and so on. Writers take a `Tuple` space's values as they are.

    What has another length in each step becomes a `Ragged`. A `Text` is one of uint8, whose values are written as
    `text.encode()`; a `Sequence` is one of its arrays or numbers. A `Graph` becomes a dict of `nodes`, and where it has
    them `edges` and `edge_links`: writers take a `GraphInstance`. A buffer of such a spec needs `ragged_bytes`.

    Args:
        space: A space, nested at will.

    Raises:
        ValueError: A space whose values are of several kinds (`OneOf`) or many dicts (`Sequence` of a `Dict`), a name
            that is empty or has a '/', an empty space, or a dtype that rows cannot hold. The text names the place.
        TypeError: It is no Gymnasium space.

    Example:
        >>> from gymnasium.spaces import Box, Discrete
        >>> spec = {"obs": tr.spec_from_space(Box(-1, 1, (3,))), "action": tr.spec_from_space(Discrete(2))}
        >>> spec["action"]
        Field((), torch.int64)
        >>> from gymnasium.spaces import Text
        >>> tr.spec_from_space(Text(100))
        Ragged(torch.uint8)
    """
    return _spec_of(space, ())


def spec_from_env(env: Any, next_obs: bool = False) -> dict[str, Any]:
    """Returns a spec for what a Gymnasium environment's loop produces.

    `obs` and `action` by `spec_from_space`, `reward` float32, `terminated` and `truncated` bool. It is a dict, whose
    values are `Field`, `Ragged` or such dicts. Change it before it is used: `spec["obs"] = tr.Field(17)` stores the
    float64 observations of MuJoCo as float32.

    Args:
        env: An environment, or a vector environment, whose single spaces count.
        next_obs: Whether to add `next_obs`, which the view `Rows()` needs; linked views store each observation once.

    Raises:
        ValueError: As `spec_from_space`.
        TypeError: The environment has no Gymnasium spaces.

    Example:
        >>> import gymnasium
        >>> tr.spec_from_env(gymnasium.make("CartPole-v1"))["obs"]
        Field((4,), torch.float32)
    """
    observation_space, action_space = single_spaces(env)
    spec = {
        "obs": _spec_of(observation_space, ("obs",)),
        "action": _spec_of(action_space, ("action",)),
        "reward": Field(),
        "terminated": Field((), bool),
        "truncated": Field((), bool),
    }
    if next_obs:
        spec["next_obs"] = _spec_of(observation_space, ("next_obs",))
    return spec


def single_spaces(env: Any) -> tuple[Any, Any]:
    """Returns the observation and the action space of an environment, or of one of a vector environment.

    Raises:
        TypeError: It has none.
    """
    prefix = "single_" if hasattr(env, "single_observation_space") else ""
    try:
        return getattr(env, f"{prefix}observation_space"), getattr(env, f"{prefix}action_space")
    except AttributeError:
        raise TypeError(f"the environment is {env!r}: expected a gymnasium.Env or gymnasium.vector.VectorEnv") from None


def _spec_of(space: Any, path: tuple[str, ...]) -> Column | dict[str, Any]:
    from gymnasium import Space, spaces

    place = f"the space of {'/'.join(path)!r}" if path else "the space"
    if isinstance(space, spaces.Dict):
        return _nested(space.spaces, path, place)
    if isinstance(space, spaces.Tuple):
        return _nested({str(i): inner for i, inner in enumerate(space.spaces)}, path, place)
    if isinstance(space, spaces.Text):
        return Ragged("uint8")
    if isinstance(space, spaces.Graph):
        return _graph(space, path, place)
    if not isinstance(space, Space):
        raise TypeError(f"{place} is {space!r}: expected a gymnasium.Space")
    field = _array(space.feature_space if isinstance(space, spaces.Sequence) else space, place)
    if field is None:
        raise ValueError(f"{place} is {space}: its values are no arrays, {_advice(space)}")
    return Ragged(field.dtype, field.shape) if isinstance(space, spaces.Sequence) else field


def _array(space: Any, place: str) -> Field | None:
    """Returns what holds a value of a space of arrays or numbers; None for any other space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Field((), "int64")
    if not isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return None
    try:
        return Field(space.shape, space.dtype)
    except ValueError as error:
        raise ValueError(f"{place} is {space}: {error}") from None


def _graph(space: Any, path: tuple[str, ...], place: str) -> dict[str, Any]:
    """Returns what holds a graph: each node, each edge, and the two nodes that each edge joins."""
    parts = {"nodes": space.node_space} | ({} if space.edge_space is None else {"edges": space.edge_space})
    fields = {name: _array(part, place) for name, part in parts.items()}
    found: dict[str, Any] = {name: Ragged(field.dtype, field.shape) for name, field in fields.items() if field}
    if "edges" in found:
        found["edge_links"] = Ragged("int32", (2,), like="/".join((*path, "edges")))
    return found


def _nested(inner: dict[Any, Any], path: tuple[str, ...], place: str) -> dict[str, Any]:
    if not inner:
        raise ValueError(f"{place} is empty: expected at least one space in it, since a row needs a field")
    for name in inner:
        if not isinstance(name, str) or not name or "/" in name or "\0" in name:
            raise ValueError(f"{place} has the key {name!r}: expected a name without '/'; rename it in a wrapper")
    return {name: _spec_of(space, (*path, name)) for name, space in inner.items()}


def _advice(space: Space[Any]) -> str:
    if space.is_np_flattenable:
        return (
            "which fields need. Flatten it to a Box: gymnasium.spaces.flatten_space(space) and "
            "gymnasium.spaces.flatten(space, value), or gymnasium.wrappers.FlattenObservation"
        )
    return (
        "which fields need, nor are they when flattened. Make arrays of them in a wrapper, such as "
        "gymnasium.wrappers.TransformObservation"
    )

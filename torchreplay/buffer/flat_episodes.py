"""Episodes of flat data: arrays in which one step follows the other, as D4RL, RL Unplugged and CORL have them."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.schema.spec import mapped
from torchreplay.segment.waits import logger
from torchreplay.validation import checked_choice, checked_instance

NAMES: Final[Mapping[str, str]] = {
    "obs": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminals",
    "truncated": "timeouts",
}
"""Fields of a buffer, and what flat data calls them."""
COMPARED_BYTES: Final = 4 << 20
"""Bytes of observations that are looked at together: data in a file may be larger than memory."""
UNKNOWN: Final = ("drop", "repeat")
NEEDED: Final = ("observations", "terminals", "timeouts")
OF_STEPS: Final = ("actions", "rewards")

Flags = NDArray[np.bool_]


class FlatEpisodes:
    """The episodes of flat data, one after the other, as `ReplayBuffer.extend(**episode)` takes them.

    It can be iterated several times. `len` is the number of episodes, `str` says what was made of the data.

    Attributes:
        steps: Steps of all episodes.
        rows: Rows that a buffer needs for them: an episode has one more than steps.
        dropped: Steps that are left out, because the observation after them is unknown.

    Example:
        >>> steps = {"observations": torch.arange(6.0), "next_observations": torch.arange(6.0) + 1}
        >>> flat = tr.episodes_from_flat(
        ...     steps, actions=torch.zeros(6), rewards=torch.ones(6), terminals=torch.tensor([0, 0, 1, 0, 0, 1])
        ... )
        >>> len(flat), flat.steps, flat.rows, flat.is_lossy
        (2, 6, 8, False)
        >>> flag = tr.Field((), torch.bool)
        >>> spec = {name: tr.Field() for name in ("obs", "action", "reward")} | {"terminated": flag, "truncated": flag}
        >>> buffer = tr.ReplayBuffer(spec, flat.rows, view=tr.Transitions())
        >>> for episode in flat:
        ...     keys = buffer.extend(**episode)
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        observations: tuple[str, Any, Any],
        flags: tuple[tuple[str, Flags], tuple[str, Flags]],
        repeats: bool,
    ) -> None:
        self._parts, self._observations, self._flags = parts, observations, flags
        (_, terminals), (_, timeouts) = flags
        _, values, following = observations
        flagged = terminals | timeouts
        ends = flagged.copy()
        ends[-1] = True
        self._given, self._gaps, self._shifted = len(ends), 0, False
        if following is not None:
            follows = np.append(_follow(values, following, len(ends)), True)
            self._gaps = int(np.count_nonzero(~follows & ~flagged))
            inner = np.flatnonzero(flagged[:-1])
            self._shifted = len(inner) > 1 and bool(follows[inner].all())
            ends |= ~follows
        stops = np.flatnonzero(ends) + 1
        starts = np.concatenate(([0], stops[:-1]))
        # The steps of each episode that have an observation after them.
        unknown = np.zeros(len(stops), bool) if following is not None else ~(terminals[stops - 1] & repeats)
        kept = stops - unknown
        self._spans = [(int(a), int(b)) for a, b in zip(starts, kept, strict=True) if b > a]
        self._found = len(stops)
        self._repeated = 0 if following is not None else int(np.count_nonzero(~unknown))
        self.dropped = int(np.count_nonzero(unknown))
        self.steps = self._given - self.dropped
        self.rows = self.steps + len(self._spans)

    @property
    def is_lossy(self) -> bool:
        """Whether steps were dropped, or final observations look wrong."""
        return self.dropped > 0 or self._shifted

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for start, stop in self._spans:
            yield self._episode(start, stop)

    def __str__(self) -> str:
        said = [f"{self._given:,} steps", f"{self._found:,} episodes"]
        if self._gaps:
            said.append(f"{self._gaps:,} ended only by an observation that does not follow")
        if self.dropped:
            said.append(f"{self.dropped:,} without a final observation: last step dropped")
        if self._found > len(self):
            said.append(f"{self._found - len(self):,} of them had no other step")
        if self._repeated:
            said.append(f"{self._repeated:,} terminated without a final observation: the one before repeated")
        if self._shifted:
            said.append("at every flagged end next_observations is the next episode's first observation")
        return ", ".join(said)

    def __repr__(self) -> str:
        return f"FlatEpisodes({self})"

    def _episode(self, start: int, stop: int) -> dict[str, Any]:
        name, values, following = self._observations
        if following is not None:
            obs = _paired(lambda a, b: _joined(a[start:stop], b[stop - 1 : stop]), values, following)
        elif not self._flags[0][1][stop - 1]:
            obs = mapped(lambda leaf: leaf[start : stop + 1], values)  # up to the dropped step's
        else:
            obs = mapped(lambda leaf: _joined(leaf[start:stop], leaf[stop - 1 : stop]), values)
        others = {part: mapped(lambda leaf: leaf[start:stop], value) for part, value in self._parts.items()}
        (terminated, terminals), (truncated, timeouts) = self._flags
        cut = timeouts[start:stop].copy()
        cut[-1] |= not terminals[stop - 1]  # it ends here
        return {name: obs} | others | {terminated: terminals[start:stop].copy(), truncated: cut}


def episodes_from_flat(
    data: Mapping[str, Any] | None = None,
    /,
    *,
    observations: Any = None,
    next_observations: Any = None,
    actions: Any = None,
    rewards: Any = None,
    terminals: Any = None,
    timeouts: Any = None,
    unknown_final: Literal["drop", "repeat"] | None = None,
    names: Mapping[str, str] = NAMES,
    **fields: Any,
) -> FlatEpisodes:
    """Splits flat data into episodes: N steps, of one episode after the other.

    An episode ends where `terminals` or `timeouts` say so, where `next_observations[t]` is not `observations[t + 1]`,
    and at the end of the data. What ends without a flag counts as truncated. NaN equals NaN. Its final observation is
    `next_observations` of its last step, a true one.

    Without `next_observations` the final observation of an episode is unknown, and none is made up. The last step of a
    truncated episode is dropped: the observation before it ends the rest, which is truncated there. For a terminated
    episode neither way is right for all, so `unknown_final` chooses one.

    Values are slices of what is given. Nothing is copied but the observations of the episode in hand. Those of an
    `h5py` file are read piece by piece.

    Args:
        data: A dict of arrays, or an open `h5py.File`, as D4RL lays it out. What is not given by a keyword is taken
            from there: `data["observations"]` and so on, `timeouts` and `next_observations` if they are there.
        observations: `[N, ...]`, or a dict of such, nested as in the spec. NumPy arrays, torch tensors on the CPU, or
            datasets of `h5py`, as all arrays here.
        next_observations: Of the same form, shapes and dtypes; None: they are unknown.
        actions: `[N, ...]`, or a dict of such.
        rewards: `[N]`.
        terminals: `[N]`, bool or 0 and 1: whether the environment ended with the step.
        timeouts: `[N]`, bool or 0 and 1: whether the episode was cut after the step. None, where `next_observations`
            are there: they show where an episode was cut.
        unknown_final: What becomes of a terminated episode's last step without `next_observations`. `"repeat"`: the
            observation before it is stored once more in the place of the final one. It is never used by a learner that
            multiplies the next value by `discount`, 0 there, and is wrong for one that predicts observations. `"drop"`:
            the step goes, and the learner never sees that the environment ends. None: a `ValueError`.
        names: The fields of an episode, and which of the arguments above each is. What it leaves out is not needed.
        **fields: Further fields of each step, `[N, ...]` or a dict of such.

    Returns:
        The episodes, with how many they are, and how many rows they need. What had to be dropped is logged.

    Raises:
        TypeError: Something is no array, or not of numbers.
        ValueError: Something is missing, of another length or shape, or a flag is neither 0 nor 1. Or a choice is to be
            made: see `timeouts` and `unknown_final`.

    Example:
        >>> import numpy as np
        >>> flat = tr.episodes_from_flat(
        ...     observations=np.float32([0, 1, 10, 11, 12]),
        ...     next_observations=np.float32([1, 2, 11, 12, 13]),
        ...     actions=np.arange(5),
        ...     rewards=np.ones(5, np.float32),
        ...     terminals=np.array([False, True, False, False, False]),
        ... )
        >>> print(flat)
        5 steps, 2 episodes
        >>> [episode["obs"].tolist() for episode in flat]
        [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0, 13.0]]
    """
    arguments = {
        "observations": observations,
        "next_observations": next_observations,
        "actions": actions,
        "rewards": rewards,
        "terminals": terminals,
        "timeouts": timeouts,
    }
    given = arguments if data is None else _filled_from(data, arguments)
    field_of = _field_of(names, fields)
    _choice("unknown_final", unknown_final)
    _require_all(given, field_of)
    steps = _length("terminals", given["terminals"])
    ended, cut = (_flags(name, given[name], steps) for name in ("terminals", "timeouts"))
    parts = {field: _checked(name, given[name], steps) for name, field in field_of.items() if name in OF_STEPS}
    parts |= {field: _checked(field, value, steps) for field, value in fields.items()}
    if "rewards" in field_of:
        _require_column("rewards", given["rewards"], steps)
    observed, following = _checked("observations", given["observations"], steps), given["next_observations"]
    if following is not None:
        following = _checked("next_observations", following, steps)
        _require_alike("observations", observed, following)
    elif given["timeouts"] is None:
        raise ValueError(
            "timeouts and next_observations are both missing, so that nothing says where an episode was cut: give one "
            "of them; where every episode ends with a terminal, timeouts=np.zeros(len(terminals), bool)"
        )
    elif unknown_final is None and ended.any():
        raise ValueError(
            f"next_observations is missing, so that nothing says what {np.count_nonzero(ended):,} terminated episodes "
            f'ended with: give next_observations; or unknown_final="repeat" for a learner that multiplies the next '
            f'value by `discount`, 0 there, or unknown_final="drop" to leave out the last steps'
        )
    flat = FlatEpisodes(
        parts,
        (field_of["observations"], observed, following),
        ((field_of["terminals"], ended), (field_of["timeouts"], cut)),
        unknown_final == "repeat",
    )
    logger.log(logging.WARNING if flat.is_lossy else logging.INFO, "flat data: %s", flat)
    return flat


def _choice(name: str, value: Any) -> None:
    if value is not None:
        checked_choice(name, value, UNKNOWN)


def _filled_from(data: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments, and for None what `data` has."""
    if isinstance(data, str | os.PathLike):
        raise TypeError(f"data is the path {data!r}: open it, with h5py.File(path) as file, and give the file")
    checked_instance("data", data, Mapping, "a dict of arrays, or an open h5py.File")
    return {name: data.get(name) if value is None else value for name, value in arguments.items()}


def _field_of(names: Any, fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the name of the field that each argument becomes."""
    checked_instance("names", names, Mapping, f"a dict of fields and arguments, such as {dict(NAMES)}")
    field_of: dict[str, str] = {}
    for field, argument in names.items():
        checked_instance("a field in names", field, str, "a name, such as 'obs'")
        checked_choice(f"names[{field!r}]", argument, tuple(NAMES.values()))
        if argument in field_of:
            raise ValueError(
                f"names has {argument!r} twice, as {field_of[argument]!r} and {field!r}: expected one field"
            )
        field_of[argument] = field
    if missing := [argument for argument in NEEDED if argument not in field_of]:
        raise ValueError(f"names lacks {missing[0]!r}: a buffer of episodes needs a field for it")
    if twice := sorted(set(fields) & set(names)):
        field, argument = twice[0], names[twice[0]]
        raise ValueError(f"field {field!r} is made of {argument}: give {argument}=, or another name to a further field")
    return field_of


def _require_all(given: Mapping[str, Any], field_of: Mapping[str, str]) -> None:
    for name in field_of:
        if given[name] is None and name != "timeouts":
            left_out = "" if name in NEEDED else f", or leave {field_of[name]!r} out of names="
            raise ValueError(f"{name} is missing: give {name}=, an array with a value for each step{left_out}")


def _paired(change: Callable[[Any, Any], Any], one: Any, other: Any) -> Any:
    """Returns what `change` makes of the arrays of two dicts that are nested alike."""
    if isinstance(one, Mapping):
        return {name: _paired(change, inner, other[name]) for name, inner in one.items()}
    return change(one, other)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields each array of a nested dict, with its name for messages."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}[{key!r}]", inner)
    else:
        yield name, value


def _checked(name: str, value: Any, steps: int) -> Any:
    """Returns a dict of arrays, or an array, that has as many values as there are steps.

    Raises:
        TypeError: It is none.
        ValueError: It has another length.
    """
    leaves = list(_leaves(name, value))
    if not leaves:
        raise ValueError(f"{name} is an empty dict: expected arrays")
    for place, leaf in leaves:
        length = _length(place, leaf)
        if length != steps:
            raise ValueError(f"{place} has {length:,} values and terminals {steps:,}: expected one for each step")
    return value


def _length(name: str, value: Any) -> int:
    """Returns how many values an array has.

    Raises:
        TypeError: It is no array of numbers on the CPU.
        ValueError: It has none.
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None or not hasattr(value, "__getitem__"):
        raise TypeError(
            f"{name} is a {type(value).__name__}: expected an array with a value for each step, such as "
            f"np.asarray({name}), a torch tensor or a dataset of h5py"
        )
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise TypeError(f"{name} is on {value.device}: expected {name}.cpu()")
    elif np.dtype(dtype).kind not in "biuf":
        raise TypeError(f"{name} has dtype {dtype}: expected numbers or bools")
    elif np.ma.is_masked(value):
        raise ValueError(f"{name} has masked values, which are no numbers: fill them, or leave these steps out")
    if len(shape) == 0 or shape[0] == 0:
        raise ValueError(f"{name} has shape {tuple(shape)}: expected a value for each of at least one step")
    return int(shape[0])


def _require_column(name: str, value: Any, steps: int) -> None:
    shape = tuple(value.shape)
    if shape != (steps,):
        hint = f": write {name}[:, 0]" if shape == (steps, 1) else ""
        raise ValueError(f"{name} has shape {shape}, expected ({steps},){hint}")


def _flags(name: str, value: Any, steps: int) -> Flags:
    """Returns flags as bools; None: all False."""
    if value is None:
        return np.zeros(steps, bool)
    if isinstance(value, Mapping):
        raise TypeError(f"{name} is a dict: expected an array with a flag for each step")
    _require_column(name, _checked(name, value, steps), steps)
    if isinstance(value, torch.Tensor) and value.is_floating_point():  # numpy has no bfloat16
        value = value.detach().double()
    flags = np.asarray(value[:])
    wrong = (flags != 0) & (flags != 1)
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(f"{name}[{first}] is {flags[first]}: expected True and False, or 1 and 0")
    bools: Flags = flags != 0
    return bools


def _require_alike(name: str, one: Any, other: Any) -> None:
    """Raises ValueError unless what is called `next_` and a name has the structure, shapes and dtypes of the other."""
    if isinstance(one, Mapping) or isinstance(other, Mapping):
        keys = [sorted(value) if isinstance(value, Mapping) else "no dict" for value in (one, other)]
        if keys[0] != keys[1]:
            raise ValueError(f"next_{name} has {keys[1]} and {name} has {keys[0]}: expected the same")
        for key, inner in one.items():
            _require_alike(f"{name}[{key!r}]", inner, other[key])
        return
    found = [f"shape {tuple(value.shape)} and dtype {value.dtype}" for value in (one, other)]
    if found[0] != found[1]:
        raise ValueError(f"next_{name} has {found[1]}, and {name} {found[0]}: expected the same")


def _follow(values: Any, following: Any, steps: int) -> Flags:
    """Returns whether what came after each step but the last is what the next one begins with, bool `[steps - 1]`."""
    follows = np.ones(steps - 1, bool)
    _paired(lambda one, other: _and_equal(follows, one, other), values, following)
    return follows


def _and_equal(follows: Flags, values: Any, following: Any) -> None:
    size = math.prod(values.shape[1:])
    piece = max(1, COMPARED_BYTES // max(1, size * values.dtype.itemsize))
    for start in range(0, len(follows), piece):
        stop = min(start + piece, len(follows))
        one, other = following[start:stop], values[start + 1 : stop + 1]
        equal = (one == other) | ((one != one) & (other != other))  # NaN is what does not equal itself
        follows[start:stop] &= np.asarray(equal.reshape(stop - start, size).all(1))


def _joined(one: Any, other: Any) -> Any:
    return torch.cat((one, other)) if isinstance(one, torch.Tensor) else np.concatenate((one, other))

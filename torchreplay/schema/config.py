"""What a buffer is made of, and the text in which a segment describes itself to those who attach."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import numpy as np

from torchreplay.schema.batch import Finish
from torchreplay.schema.batch_plan import as_path
from torchreplay.schema.hindsight import Elsewhere, Hindsight
from torchreplay.schema.limiters import LIMITERS, Admission, Limiter, MinSize
from torchreplay.schema.samplers import (
    INITIALS,
    NORMALIZATIONS,
    SAMPLERS,
    Fifo,
    LinearSchedule,
    Prioritized,
    Sampler,
    Uniform,
    keeps_epochs,
    value_of,
)
from torchreplay.schema.spec import (
    MAX_BYTES,
    VERSION,
    Column,
    Field,
    Path,
    Ragged,
    Spec,
    fixed_fields,
    flatten,
    from_native,
    has_versions,
    nest,
    ragged_fields,
    to_native,
)
from torchreplay.schema.views import VIEWS, Rows, View
from torchreplay.segment.transient import Transient
from torchreplay.segment.waits import logger
from torchreplay.validation import checked_int, checked_kind, checked_name

MAX_CAPACITY = 1 << 31
MAX_RANKED = 1 << 30
"""Rows of a buffer whose items are found by their ranks: a queue, and draws without replacement."""
MIN_RAGGED_BYTES = 1024
"""16 pages of the smallest size: fewer hold no four values of the largest one there may be."""
LARGEST_SHARE = 4
"""One value takes at most this part of `ragged_bytes`: a quarter."""
ROLES: dict[str, tuple[Any, ...]] = {
    "sampler": SAMPLERS,
    "view": VIEWS,
    "limiter": LIMITERS,
}
KINDS: dict[str, Any] = {t.__name__: t for t in (LinearSchedule, Elsewhere, *chain.from_iterable(ROLES.values()))}
KINDS["Linear"] = LinearSchedule  # its name in files of versions before 0.1
DAMAGED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading text that may say anything raises."""


@dataclass(frozen=True, slots=True)
class Config:
    """The arguments of a `ReplayBuffer`, checked and with defaults filled in.

    `ragged_bytes`: for the values of ragged fields, together; None: there are none. `lost_schedule`: beta was a
    function, and the description has only its value at the start. `name`: what people call the buffer.
    """

    capacity: int
    fields: dict[Path, Column]
    sampler: Sampler
    view: View
    limiter: Limiter
    ragged_bytes: int | None = None
    lost_schedule: bool = field(default=False, compare=False)
    name: str | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls,
        spec: Spec,
        capacity: int,
        sampler: Sampler | None,
        view: View | None,
        limiter: Limiter | None,
        name: str | None = None,
        ragged_bytes: int | None = None,
    ) -> Config:
        """Returns the arguments of a buffer, checked.

        Raises:
            ValueError: A bad spec, capacity or name; or `ragged_bytes` is missing, too small, or given in vain.
            TypeError: Something else in the place of a sampler, a view, a limiter or a name.
        """
        default_sampler: Sampler = Uniform()
        default_view: View = Rows()
        default_limiter: Limiter = MinSize()
        capacity, fields = checked_int("capacity", capacity, 1, MAX_CAPACITY), flatten(spec)
        return cls(
            capacity,
            fields,
            checked_kind("sampler", sampler, default_sampler, SAMPLERS),
            checked_kind("view", view, default_view, VIEWS),
            checked_kind("limiter", limiter, default_limiter, LIMITERS),
            checked_ragged_bytes(ragged_bytes, fields, capacity),
            name=checked_name("name", name),
        )

    def to_text(self) -> str:
        """Returns the description as JSON: data, never code."""
        return json.dumps(
            {
                "capacity": self.capacity,
                "fields": to_native(self.fields),
                "sampler": _describe(self.sampler),
                "view": _describe(self.view.as_data() if isinstance(self.view, Hindsight) else self.view),
                "limiter": _describe(self.limiter),
                "lost_schedule": self.lost_schedule or _is_code(self.sampler.beta),
                **({} if self.ragged_bytes is None else {"ragged_bytes": self.ragged_bytes}),
                **({} if self.name is None else {"name": self.name}),
            }
        )

    @classmethod
    def from_text(cls, text: str) -> Config:
        """Returns what `to_text` described, checked like the arguments of a buffer.

        Raises:
            ValueError: It is damaged.
        """
        try:
            parts = json.loads(text)
            capacity, columns = (
                checked_int("capacity", parts["capacity"], 1, MAX_CAPACITY),
                from_native(parts["fields"]),
            )
            roles: dict[str, Any] = {name: _restore(parts[name], kinds) for name, kinds in ROLES.items()}
            ragged_bytes = checked_ragged_bytes(parts.get("ragged_bytes"), columns, capacity)
            config = cls(capacity, columns, **roles, ragged_bytes=ragged_bytes)
            name = checked_name("name", parts.get("name"))
            config = replace(config, lost_schedule=parts.get("lost_schedule") is True, name=name)
            config.view.plan(config.fields)
        except DAMAGED as error:
            raise ValueError(f"the description of the buffer is damaged: {error!r:.300}") from None
        return config

    def __post_init__(self) -> None:
        rows = self.view.rows_of_an_item
        if self.capacity < rows:
            raise ValueError(f"capacity is {self.capacity}: one item of {self.view} takes {rows} rows")
        roles = self.view.roles(self.fields)
        if roles is not None:
            self._require_apart([list(self.fields)[place] for place in roles.observation])
        self._check_versions([] if roles is None else [list(self.fields)[place] for place in roles.observation])
        by_rank = keeps_epochs(self.sampler) or isinstance(self.sampler, Fifo)
        if by_rank and self.capacity > MAX_RANKED:
            what = "queues" if isinstance(self.sampler, Fifo) else "draws without replacement"
            raise ValueError(f"capacity is {self.capacity}: {what} take at most {MAX_RANKED:,}")
        if isinstance(self.sampler, Fifo) and isinstance(self.view, Hindsight):
            raise ValueError(
                f"sampler is {self.sampler} and view is {self.view}, which takes goals from rows that a queue no "
                f"longer needs; expected Rows(), Transitions(...) or Sequences(...)"
            )
        self.require_fits(self.limiter)

    @property
    def ragged(self) -> list[str]:
        """The names of the fields whose values have any length."""
        return ragged_fields(self.fields)

    def fixed_fields(self, what: str) -> dict[Path, Field]:
        """Returns the fields; raises ValueError where there are ragged ones, which `what` does not take."""
        return fixed_fields(self.fields, what)

    @property
    def has_versions(self) -> bool:
        """Whether rows say by which policy they came about."""
        return has_versions(self.fields)

    def _check_versions(self, observed: list[Path]) -> None:
        if self.sampler.max_age is not None and not self.has_versions:
            raise ValueError(
                f"max_age is {self.sampler.max_age}, and the rows do not say by which policy they came about: add "
                f"{VERSION!r}: Field((), torch.int64) to the spec, which writers fill, or leave max_age out"
            )
        if (VERSION,) in observed:
            raise ValueError(
                f"field {VERSION!r} is an observation of {self.view}, but it says by which policy a step came about: "
                f"leave it out of the view's observation"
            )

    def _require_apart(self, observed: list[Path]) -> None:
        """Raises ValueError where an observation has the length of a field of steps, or the other way round."""
        for path, column in self.fields.items():
            leader = as_path(column.like) if isinstance(column, Ragged) and column.like else path
            if (path in observed) != (leader in observed):
                name, other = "/".join(path), "/".join(leader)
                seen, step = (name, other) if path in observed else (other, name)
                raise ValueError(
                    f"field {name!r} is like {other!r}; {seen!r} is an observation of {self.view}, and {step!r} is "
                    f"of a step: a row that begins an episode has an observation and no step; leave like out"
                )

    def require_replaces(self, limiter: Limiter) -> None:
        """Raises ValueError for a limiter that cannot take the place of the buffer's own."""
        if isinstance(limiter, Admission) != isinstance(self.limiter, Admission):
            raise ValueError(
                f"limiter is {limiter}, and {self.called} was made with {self.limiter}: whether its writers have to be "
                f"admitted is decided when it is made"
            )
        self.require_fits(limiter)

    def require_fits(self, limiter: Limiter) -> None:
        """Raises ValueError for a limiter that contradicts the sampler or the view."""
        if isinstance(limiter, Admission):
            self._require_fits_admission(limiter)
            return
        if not isinstance(self.sampler, Fifo):
            return
        if not isinstance(limiter, MinSize):
            raise ValueError(
                f"limiter is {limiter} and sampler is {self.sampler}: a queue hands every item out max_draws times, "
                f"and its writers wait when it is full; leave limiter out, or give MinSize(n)"
            )
        if self.sampler.when_full == "wait" and limiter.min_size > self.capacity:
            raise ValueError(
                f"limiter is {limiter} and capacity is {self.capacity}: the queue is full before the first draw, and "
                f"its writers wait for ever; give a larger capacity, or a smaller min_size"
            )

    def _require_fits_admission(self, limiter: Admission) -> None:
        if not isinstance(self.sampler, Fifo):
            raise ValueError(
                f"limiter is {limiter} and sampler is {self.sampler}, which draws items of any age, and again: an "
                f"admission is for queues; give sampler=Fifo(), or max_age to the sampler"
            )
        if self.sampler.max_draws != 1:
            raise ValueError(
                f"limiter is {limiter} and sampler is {self.sampler}: an item that is drawn again is older then than "
                f"the admission reckons with; expected max_draws=1"
            )
        if self.sampler.max_age is not None and self.sampler.max_age < limiter.max_age:
            raise ValueError(
                f"limiter is {limiter} and sampler is {self.sampler}: items would be begun to be dropped; expected "
                f"max_age of the sampler to be None, or at least that of the admission"
            )
        if not isinstance(self.view, Rows):
            raise ValueError(
                f"limiter is {limiter} and view is {self.view}: an admission counts rows, each of which is an item; "
                f"expected Rows(), with a whole rollout in each row"
            )
        if self.sampler.when_full == "wait" and limiter.batch_size > self.capacity:
            raise ValueError(
                f"limiter is {limiter} and capacity is {self.capacity}: the queue is full before a batch is there, "
                f"and its writers wait for ever; give a larger capacity, or a smaller batch_size"
            )

    @property
    def called(self) -> str:
        """What messages call the buffer."""
        return called(self.name)

    def with_functions(self, view: View | None) -> Config:
        """Returns the configuration with the functions of `view`, which a description does not hold.

        Raises:
            ValueError: `view` is another one, or has other functions.
        """
        if view is None:
            return self
        if not isinstance(self.view, Hindsight):
            raise ValueError(f"view is {view}: expected the buffer's own, which is {self.view}")
        return replace(self, view=self.view.with_functions_of(view))

    def resized(self, capacity: int | None, ragged_bytes: int | None, view: View | None = None) -> Config:
        """Returns the configuration with other sizes, and maybe another view; None: as it is.

        Raises:
            ValueError: `capacity` or `ragged_bytes` does not fit.
        """
        most = self.capacity if capacity is None else checked_int("capacity", capacity, 1, MAX_CAPACITY)
        ragged = self.ragged_bytes if ragged_bytes is None else ragged_bytes
        ragged = checked_ragged_bytes(ragged, self.fields, most)
        return replace(self, view=view or self.view, capacity=most, ragged_bytes=ragged)

    def loaded_with(
        self, view: View | None, sampler: Sampler | None, capacity: int | None, ragged_bytes: int | None = None
    ) -> Config:
        """Returns the configuration of a buffer that takes over the rows of one with this; None: as it was.

        Raises:
            ValueError: The rows lack what `view` needs, or it has not the same functions; or `capacity` or
                `ragged_bytes` does not fit.
            TypeError: `view` is no view, or `sampler` no sampler.
        """
        config = self.resized(capacity, ragged_bytes, self._view_of_rows(view))
        if sampler is None:
            return config.with_schedule(None)
        sampler = checked_kind("sampler", sampler, self.sampler, SAMPLERS)
        return replace(config, sampler=sampler, lost_schedule=False)

    def _view_of_rows(self, view: View | None) -> View:
        view = checked_kind("view", view, self.view, VIEWS)
        if isinstance(view, Hindsight) and view.is_same_but_for_functions(self.view):
            return self.with_functions(view).view
        view.plan(self.fields)
        if reason := self.lacks(view):
            raise ValueError(f"view is {view}, and the rows were written under {self.view}: {reason}")
        return view

    def lacks(self, view: View) -> str:
        """Returns what rows that were written under this configuration's view lack for another one; "": nothing."""
        own, other = self.view.roles(self.fields), view.roles(self.fields)
        if own is None and other is None:
            return ""
        if own is None:
            return "they name no episode; expected Rows()"
        if other is None:
            return "those that begin an episode have no action and no reward; expected a view of episodes"
        if own.observation != other.observation:
            return f"a row that begins an episode has these observations only; expected {self._names(own.observation)}"
        if (own.terminated, own.truncated) != (other.terminated, other.truncated):
            return f"their ends are marked already; expected {self._names((own.terminated, own.truncated))}"
        return ""

    def _names(self, places: tuple[int, ...]) -> str:
        paths = list(self.fields)
        return ", ".join(repr("/".join(paths[place])) for place in places)

    def with_schedule(self, sampler: Sampler | None) -> Config:
        """Returns the configuration with the function that is the beta of `sampler`, which a description does not hold.

        Where it lacks one that there was, and none is given, a warning is logged.

        Raises:
            ValueError: `sampler` is another one.
        """
        if sampler is None:
            if self.lost_schedule:
                logger.warning(
                    "beta was a function, which is not saved: it stays at %s; give sampler=... with the function again",
                    self.sampler.beta,
                )
            return self
        if _describe(sampler) != _describe(self.sampler):
            raise ValueError(
                f"sampler is {sampler}: expected the buffer's own, {self.sampler}, with its function. For another "
                f"sampler save a checkpoint: ReplayBuffer.load(directory, sampler=...) takes any"
            )
        return replace(self, sampler=sampler, lost_schedule=False)

    def num_envs_of(self, values: Mapping[str, Any]) -> int | None:
        """Returns how many environments a block of `values` has; None for rows and for a single episode."""
        if isinstance(self.view, Rows):
            return None
        flags: Any = values
        for name in as_path(self.view.terminated):
            flags = flags.get(name) if isinstance(flags, Mapping) else None
        shape = tuple(np.shape(flags)) if flags is not None else ()
        return int(shape[1]) if len(shape) == 2 else None

    @property
    def finish(self) -> Finish | None:
        """What computes the rest of a batch that was drawn; None: nothing is left to compute."""
        return self.view.finish if isinstance(self.view, Hindsight) else None

    def outputs(self) -> Mapping[Path, Column]:
        """Returns what a batch consists of, by path, beside what every batch has."""
        plan = self.view.plan(self.fields)
        return self.fields if plan is None else plan.outputs

    def ragged_outputs(self) -> list[tuple[Hashable, Ragged, int]]:
        """Returns of each ragged output of a batch whose length it has, its column, and its values of an item.

        Two have the same lengths where the first of these is the same.
        """
        columns = list(self.fields.items())
        plan = self.view.plan(self.fields)
        rows = [(0, of, 0, 1) for of in range(len(columns))] if plan is None else [parts[:4] for parts in plan.native]
        found = list[tuple[Hashable, Ragged, int]]()
        for output, (kind, of, first, n) in zip(self.outputs().values(), rows, strict=True):
            path, column = columns[of]
            if isinstance(output, Ragged) and isinstance(column, Ragged):
                leader = path if column.like is None else as_path(column.like)
                found.append(((kind, first, n, leader), column, n))
        return found

    def shape(self) -> tuple[int, ...]:
        """Returns how rows become items, whether draws are counted, and the bytes for values of any length.

        Before the last one comes the place of the policy version among the fields of one shape, plus one; 0: none.
        """
        fixed = [path for path, column in self.fields.items() if isinstance(column, Field)]
        version1 = 1 + fixed.index((VERSION,)) if self.has_versions else 0
        return *self.view.native(), int(self.sampler.max_draws is not None), version1, self.ragged_bytes or 0

    def weighting(self) -> tuple[bool, int, float, float, int, float, bool, bool, bool, int, int, int]:
        """Returns what the native core has to know of the sampler.

        Returns:
            (prioritized, normalization, alpha, eps, initial, its number, epochs, queue, drop_oldest, max_draws, window
            in rows, max_age or -1).
        """
        sampler = self.sampler
        max_age = -1 if sampler.max_age is None else sampler.max_age
        if isinstance(sampler, Fifo):
            rows = 0 if sampler.window is None else max(1, int(sampler.window * self.capacity))
            queue = True, sampler.when_full == "drop_oldest", sampler.max_draws, rows, max_age
            return False, 0, 1.0, 0.0, 0, 1.0, False, *queue
        no_queue = False, False, sampler.max_draws or 0, 0, max_age
        if not isinstance(sampler, Prioritized):
            return False, 0, 1.0, 0.0, 0, 1.0, keeps_epochs(sampler), *no_queue
        named = isinstance(sampler.initial, str)
        initial = (INITIALS.index(sampler.initial), 1.0) if named else (len(INITIALS), float(sampler.initial))
        weights = NORMALIZATIONS.index(sampler.weights)
        return True, weights, float(sampler.alpha), float(sampler.eps), *initial, False, *no_queue


def checked_ragged_bytes(given: Any, fields: Mapping[Path, Column], capacity: int) -> int | None:
    """Returns the bytes for the values of ragged fields; None where there are none.

    Raises:
        ValueError: They are missing, given in vain, or too few for one element.
    """
    ragged = {name: column for name, column in _named(fields).items() if isinstance(column, Ragged)}
    names = ", ".join(map(repr, ragged))
    if not names and given is not None:
        raise ValueError(
            f"ragged_bytes is {given!r:.200}, and the spec has no Ragged field: leave it out; fields of one shape need "
            f"no bytes beside their rows"
        )
    if not names:
        return None
    if given is None:
        element = sum(column.nbytes for column in ragged.values())
        raise ValueError(
            f"ragged_bytes is missing, and the spec has ragged fields, {names}: expected bytes for all their values "
            f"together. If those of a row have 1,000 elements, {capacity:,} rows of {element:,} bytes an element need "
            f"ragged_bytes={capacity * 1000 * element:,}"
        )
    found = checked_int("ragged_bytes", given, MIN_RAGGED_BYTES, MAX_BYTES)
    for name, column in ragged.items():
        if LARGEST_SHARE * column.nbytes > found:
            raise ValueError(
                f"ragged_bytes is {found:,}, and one element of field {name!r} takes {column.nbytes:,} bytes: a value "
                f"takes at most a quarter; expected at least {LARGEST_SHARE * column.nbytes:,}"
            )
    return found


def _named(fields: Mapping[Path, Column]) -> dict[str, Column]:
    return {"/".join(path): column for path, column in fields.items()}


def _describe(value: Any) -> Any:
    if type(value).__name__ in KINDS:
        return {"kind": type(value).__name__} | {f.name: _describe(getattr(value, f.name)) for f in fields(value)}
    # A schedule that is code does not travel: other processes see its value at the start.
    return value_of(value, 0) if _is_code(value) else value


def _is_code(value: Any) -> bool:
    return callable(value) and type(value).__name__ not in KINDS


def _restore(value: Any, kinds: tuple[Any, ...]) -> Any:
    kind = KINDS[value["kind"]]
    if kind not in kinds:
        raise ValueError(f"{kind.__name__} is none of {', '.join(k.__name__ for k in kinds)}")
    return kind(**{name: _value(v) for name, v in value.items() if name != "kind"})


def _value(value: Any) -> Any:
    return _restore(value, (LinearSchedule, Elsewhere)) if isinstance(value, dict) and "kind" in value else value


def called(name: str | None, kind: str = "replay buffer") -> str:
    """Returns what messages call something: "the replay buffer", or "the replay buffer 'red team'"."""
    return f"the {kind}" if name is None else f"the {kind} {name!r}"


class Configured(Transient):
    """Something that was made of a `Config`, and says so."""

    _config: Config
    """What it was made of."""

    _rows_extended = 0
    """Rows that this object's own `extend` has written."""

    _extends_as: int | None = None
    """The policy version of rows that its own `extend` writes; None: the learner's."""

    def __bool__(self) -> bool:
        return True  # `if buffer:` asks whether there is one, not whether it holds rows

    @property
    def spec(self) -> dict[str, Any]:
        """The fields, nested as they were given."""
        return nest(self._config.fields)

    @property
    def name(self) -> str | None:
        """What people call it; None: it has no name."""
        return self._config.name

    @property
    def sampler(self) -> Sampler:
        """How items are drawn."""
        return self._config.sampler

    @property
    def view(self) -> View:
        """How rows become items."""
        return self._config.view


def rows_extended(buffer: Configured) -> int:
    """Returns how many rows the object's own `extend` has written."""
    return buffer._rows_extended


def extend_as(buffer: Configured, version: int) -> None:
    """Has rows that the object's own `extend` writes from now on be of that policy version."""
    buffer._extends_as = version

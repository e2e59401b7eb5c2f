"""What is wrong with the observations that a user's loop wrote under a view that links rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.checking.casting import cast
from torchreplay.checking.loop_recording import Write
from torchreplay.checking.pairs import Pair, Pairs
from torchreplay.schema.spec import Path, Ragged

Array: TypeAlias = NDArray[Any]

RIGHT: Final = ""
FEW: Final = 8
"""Rows, at least, from which a scaling is found, or that hold all the same."""
FIT_ROWS: Final = 64
"""Rows, at most, from which a scaling is found."""

STORED_AGAIN: Final = (
    "the observation before the step is stored again in the place of the one that the step led to. Give the "
    "observation that env.step returned"
)
NEXT_EPISODE: Final = (
    "the first observation of the next episode is stored as the last one of this episode: a time limit would bootstrap "
    "from it. Store the one that env.step returned (`infos['final_obs']` of a same-step autoreset), before env.reset"
)
OTHER_ENV: Final = (
    "the observation is that of another environment of the same step: give the values in the order of the environments"
)
OTHER_STEP: Final = (
    "the observation is that of another step. Give the one that env.step returned, and to reset() the one that "
    "env.reset returned; an environment that reuses its memory needs a copy"
)
OTHER: Final = (
    "the observation is none that the environment gave. Give the one that env.step returned, and to reset() the one "
    "that env.reset returned"
)
CUT: Final = (
    "the value is cut: it begins as the one that the environment gave, and is shorter, though others are as long. Give "
    "all of it"
)
CONSTANT: Final = (
    "every row holds the same observation, though the environment gave others. Give the one that env.step returned"
)


@dataclass(slots=True)
class Stored:
    """An observation that was written.

    Attributes:
        write: The call.
        argument: Of the call, that it came in.
        env: Index of the environment.
        written: What the row holds, by field.
        expected: What the environment gave.
        before: The observation before the step; of a row that begins an episode: none.
        following: The first observation of the next episode; where none ends: none.
        same_step: What the other environments gave in this step.
    """

    write: Write
    argument: str
    env: int
    written: dict[Path, Array | None]
    expected: dict[Path, Array]
    before: dict[Path, Array] = field(default_factory=dict)
    following: dict[Path, Array] = field(default_factory=dict)
    same_step: dict[Path, list[Array]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a loop makes of observations, element by element: `slope * x + offset`, up to `rounding` of its parts."""

    slope: Any
    offset: Any
    rounding: float

    def makes(self, found: Array, given: Array) -> bool:
        """Returns whether it makes `found` of `given`, up to what the dtype of `found` rounds."""
        if found.shape != given.shape:
            return False
        expected = self.slope * np.asarray(given, np.float64) + self.offset
        parts = np.abs(expected - self.offset) + np.abs(self.offset)
        held = np.asarray(found, np.float64)
        with np.errstate(invalid="ignore"):
            same = (np.abs(held - expected) <= self.rounding * parts + 1e-9) | (held == expected)
        same |= np.isnan(held) & np.isnan(expected)
        return bool(same.all()) or _is_rounded(found, expected)


AS_IT_IS: Final = Scaling(1.0, 0.0, 1e-6)


def _is_rounded(found: Array, expected: NDArray[np.float64]) -> bool:
    """Returns whether `found` is what a narrow float makes of it. A bfloat16 is held as float32."""
    narrow = [dtype for dtype in (torch.float16, torch.bfloat16) if found.dtype.kind == "f"]
    return any(np.array_equal(cast(expected.astype(np.float32), dtype), found, equal_nan=True) for dtype in narrow)


class ObservationFindings:
    """Compares the observations of linked rows with those that the environment gave.

    A loop may scale observations: then all must be scaled alike. Where it changes them in another way, only what shows
    all the same is said.

    Args:
        pairs: The rows and their steps.
        same_step: Whether the vector environment begins the next episode in the step that ends one.
    """

    def __init__(self, pairs: Pairs, same_step: bool) -> None:
        self._pairs, self._recording, self._same_step = pairs, pairs.recording, same_step
        self._stored = list(self._all_stored())

    def __iter__(self) -> Iterator[tuple[Write, str]]:
        """Yields the call and what is wrong, for each row and field."""
        paths = self._pairs.mapping.observed
        for path in paths:
            rows = [row for row in self._stored if row.written.get(path) is not None and path in row.expected]
            name = f"field {'/'.join(path)!r}: " if len(paths) > 1 else ""
            for write, text in self._of_field(path, rows):
                yield write, name + text

    def _of_field(self, path: Path, rows: list[Stored]) -> Iterator[tuple[Write, str]]:
        for line in _by_line(rows):
            if len(line) >= FEW and vary([row.expected[path] for row in line]) and not _varies(line, path):
                yield from ((row.write, CONSTANT) for row in line)
                rows = [row for row in rows if _line_of(row) != _line_of(line[0])]
        if isinstance(self._pairs.mapping.fields[path], Ragged) and _are_cut_alike(path, rows):
            return
        scaling = self._scaling_of(path, rows)
        if scaling is None:
            yield from self._of_changed(path, rows)
            return
        for row in rows:
            verdict = self._verdict(row, path, scaling)
            if verdict:
                yield row.write, verdict

    def _scaling_of(self, path: Path, rows: list[Stored]) -> Scaling | None:
        """Returns how the loop scales observations, to judge by what most rows hold; None: nobody knows."""
        verdicts = [self._verdict(row, path, AS_IT_IS) for row in rows]
        if 2 * _known(verdicts) >= len(rows):
            return AS_IT_IS
        scaling = _scaling([(row.expected[path], _of(row, path)) for row in rows])
        if scaling is not None and 2 * _known([self._verdict(row, path, scaling) for row in rows]) >= len(rows):
            return scaling
        right = {id(row) for row, verdict in zip(rows, verdicts, strict=True) if verdict == RIGHT}
        shares = [sum(id(row) in right for row in line) / len(line) for line in _by_line(rows) if 2 * len(line) >= FEW]
        is_told = set(shares) == {0, 1}  # one line gives what the environment gave, another never does
        return AS_IT_IS if is_told or 2 * verdicts.count(OTHER) <= len(rows) else None

    def _verdict(self, row: Stored, path: Path, scaled: Scaling) -> str:
        """Returns what is wrong with a row, if the loop makes that of the environment's observations."""
        found = _of(row, path)
        if scaled.makes(found, row.expected[path]):
            return RIGHT
        for text, other in ((STORED_AGAIN, row.before), (NEXT_EPISODE, row.following)):
            if path in other and scaled.makes(found, other[path]):
                return text
        if isinstance(self._pairs.mapping.fields[path], Ragged) and _is_cut(found, row.expected[path]):
            return CUT
        if path in row.same_step and any(scaled.makes(found, value) for value in row.same_step[path]):
            return OTHER_ENV
        return OTHER_STEP if _key(found) in self._given else OTHER

    def _of_changed(self, path: Path, rows: list[Stored]) -> Iterator[tuple[Write, str]]:
        """Yields what equal rows show, of a loop that changes observations in a way that is not known here."""
        again: list[tuple[Stored, Stored]] = []
        following: list[tuple[Stored, Stored]] = []
        last: dict[int, Stored] = {}
        for row in rows:
            before = last.get(row.env)
            last[row.env] = row
            if before is None or bool(before.before) == bool(row.before):
                continue
            if not np.array_equal(before.expected[path], row.expected[path]):
                (again if row.before else following).append((before, row))
        for text, couples, blamed in ((STORED_AGAIN, again, 1), (NEXT_EPISODE, following, 0)):
            if couples and all(np.array_equal(_of(one, path), _of(other, path)) for one, other in couples):
                yield from ((couple[blamed].write, text) for couple in couples)

    # The rows

    def _all_stored(self) -> Iterator[Stored]:
        """Yields what was written, in order."""
        by_write: dict[int, list[Pair]] = {}
        for pair in self._pairs.all:
            by_write.setdefault(id(pair.write), []).append(pair)
        pending: dict[tuple[int | None, int], Write] = {}
        for write in self._recording.writes:
            if write.call == "writer.reset":
                pending |= {(write.writer, env): write for env in self._reset_envs(write)}
            for pair in by_write.get(id(write), []):
                begun = pending.pop((write.writer, pair.env), None)
                if begun is not None:
                    yield self._begin(begun, pair)
                elif write.call in ("writer.extend", "buffer.extend") and pair.row == 0:
                    yield self._first_of_block(pair)
                yield from self._of_step(pair)

    def _reset_envs(self, write: Write) -> list[int]:
        if write.num_envs is None:
            return [self._pairs.env_of(write)]
        return [env for env in range(write.num_envs) if write.mask is None or bool(np.asarray(write.mask)[env])]

    def _begin(self, write: Write, pair: Pair) -> Stored:
        """Returns the row of a `reset`, after which the step of `pair` came."""
        written = dict[Path, Array | None]()
        for path in self._pairs.mapping.observed:
            value = self._pairs.given(write, path)
            own = value if value is None or write.num_envs is None else value[pair.env]
            written[path] = None if own is None else self._pairs.held(own, path)
        return Stored(write, "obs", pair.env, written, self._pairs.leaves(pair.step.obs, pair.env))

    def _first_of_block(self, pair: Pair) -> Stored:
        written = {path: self._first(pair, path) for path in self._pairs.mapping.observed}
        return Stored(pair.write, "obs", pair.env, written, self._pairs.leaves(pair.step.obs, pair.env))

    def _first(self, pair: Pair, path: Path) -> Array | None:
        value = self._pairs.given(pair.write, path)
        if value is None:
            return None
        return self._pairs.held(value[0][pair.env] if self._pairs.num_envs > 1 else value[0], path)

    def _of_step(self, pair: Pair) -> Iterator[Stored]:
        pairs, paths = self._pairs, self._pairs.mapping.observed
        given = {path: pairs.written(pair, path) for path in paths}
        if pair.is_reset:
            yield Stored(pair.write, "obs", pair.env, given, pairs.leaves(pair.step.next_obs, pair.env))
            return
        takes_final = pair.ends and self._autoreset(pair.write) == "same_step"
        stored = Stored(pair.write, "obs", pair.env, given, pairs.led_to(pair, self._same_step))
        stored.before = pairs.leaves(pair.step.obs, pair.env)
        if pair.ends:
            stored.following = self._following(pair)
        if pairs.num_envs > 1:
            all_envs = pairs.all_leaves(pair.step.next_obs)
            stored.same_step = {
                path: [value for env, value in enumerate(each) if env != pair.env] for path, each in all_envs.items()
            }
        yield stored
        if takes_final:
            stored.argument = "final_obs"
            stored.written = {path: pairs.final(pair, path) for path in paths}
            if stored.following:
                yield Stored(pair.write, "obs", pair.env, given, stored.following)

    def _following(self, pair: Pair) -> dict[Path, Array]:
        """Returns the observation with which the next episode begins; empty where none did."""
        if self._same_step:
            return self._pairs.leaves(pair.step.next_obs, pair.env)
        after = pair.step.number + 1
        for steps, obs in self._recording.resets:
            if steps == after:
                return self._pairs.leaves(obs, pair.env)
        begun = [step for step in self._recording.steps[after : after + 1] if step.is_reset[pair.env]]
        return self._pairs.leaves(begun[0].next_obs, pair.env) if begun else {}

    def _autoreset(self, write: Write) -> str:
        return "disabled" if write.writer is None else self._recording.writers[write.writer].autoreset

    @cached_property
    def _given(self) -> set[int]:
        """All observations that the environment gave, by what `_key` makes of each part."""
        whole = [step.next_obs for step in self._recording.steps] + [obs for _, obs in self._recording.resets]
        parts = [part for obs in whole for each in self._pairs.all_leaves(obs).values() for part in each]
        return set(map(_key, parts))


def _key(value: Any) -> int:
    return hash(np.asarray(value, np.float32).tobytes())


def _by_line(rows: list[Stored]) -> list[list[Stored]]:
    """Returns the rows of each line of the loop, those of different arguments apart."""
    lines: dict[tuple[str, str], list[Stored]] = {}
    for row in rows:
        lines.setdefault(_line_of(row), []).append(row)
    return list(lines.values())


def _line_of(row: Stored) -> tuple[str, str]:
    return row.write.site, row.argument


def _varies(rows: list[Stored], path: Path) -> bool:
    return vary([_of(row, path) for row in rows])


def _of(row: Stored, path: Path) -> Array:
    value = row.written[path]
    assert value is not None
    return value


def _is_cut(found: Array, given: Array) -> bool:
    return len(found) < len(given) and AS_IT_IS.makes(found, given[: len(found)])


def _are_cut_alike(path: Path, rows: list[Stored]) -> bool:
    """Returns whether a loop cuts values to one largest length, which is its own business."""
    longest = max((len(_of(row, path)) for row in rows), default=0)
    return all(AS_IT_IS.makes(_of(row, path), row.expected[path][:longest]) for row in rows)


def _known(verdicts: list[str]) -> int:
    """Returns how many rows are right, or wrong in a way that shows how the loop scales."""
    return sum(verdict not in (OTHER, OTHER_STEP) for verdict in verdicts)


def vary(values: list[Array]) -> bool:
    """Returns whether they are not all the same."""
    return any(not np.array_equal(value, values[0], equal_nan=value.dtype.kind == "f") for value in values[1:])


def _scaling(rows: list[tuple[Array, Array]]) -> Scaling | None:
    """Returns the scaling `a * x + b`, for each element, that most rows have; None: there is none."""
    rows = [(given, found) for given, found in rows if given.shape == found.shape]
    if len(rows) < FEW or len({given.shape for given, _ in rows}) > 1:
        return None
    chosen = [rows[i] for i in np.linspace(0, len(rows) - 1, min(len(rows), FIT_ROWS)).astype(int)]
    x, y = (np.stack([np.asarray(row[side], np.float64) for row in chosen]) for side in (0, 1))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    kept = np.arange(len(x))
    for _ in range(8):  # the rows that fit badly are left out, as they may be the wrong ones
        slope, offset = _line(x[kept], y[kept])
        misfit = np.abs(slope * x + offset - y).reshape(len(x), -1).max(1)
        kept = np.argsort(misfit, kind="stable")[: max(4, 2 * len(x) // 3)]
    if not slope.any():
        return None
    return Scaling(slope, offset, 1e-5)


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns slope and offset of least squares, for each element over the rows."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    spread = ((x - mean_x) ** 2).sum(0)
    slope = np.where(spread > 0, ((x - mean_x) * (y - mean_y)).sum(0) / np.where(spread > 0, spread, 1), 0.0)
    return slope, mean_y - slope * mean_x

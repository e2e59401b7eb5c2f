"""The rows that a user's loop wrote, each beside the step of the environment that it is of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchreplay.buffer.final_observations import FinalObservations
from torchreplay.checking.field_mapping import FieldMapping, lookup
from torchreplay.checking.loop_recording import EnvStep, LoopRecording, Write
from torchreplay.checking.ragged_values import as_array
from torchreplay.checking.rollout import of_env
from torchreplay.schema.spec import Path, Ragged


@dataclass(frozen=True, slots=True)
class Pair:
    """A row that was written, and the step that it is of.

    Attributes:
        write: The call.
        row: Of the call, where it writes several.
        step: The environment's.
        env: Index of the environment.
    """

    write: Write
    row: int
    step: EnvStep
    env: int

    @property
    def is_reset(self) -> bool:
        """Whether a next-step autoreset began an episode there: the row is no step."""
        return bool(self.step.is_reset[self.env])

    @property
    def ends(self) -> bool:
        """Whether the episode ended there."""
        return bool(self.step.terminated[self.env]) or bool(self.step.truncated[self.env])


class Pairs:
    """Finds the step of each row that a loop wrote.

    A row is of the latest step. Where several rows are written at once, as many as steps were made since the rows
    before, they are of these steps in order.

    Args:
        recording: Of the loop.
        mapping: Which field takes what.

    Attributes:
        all: Rows and steps, in the order in which they were written.
    """

    def __init__(self, recording: LoopRecording, mapping: FieldMapping) -> None:
        self.recording, self.mapping = recording, mapping
        self.num_envs = recording.num_envs or 1
        self._writers = [index for index, made in enumerate(recording.writers) if made.num_envs is None]
        self.all = list(self._paired())

    def env_of(self, write: Write, count: int = 0) -> int:
        """Returns the environment of a writer that writes for one: with a writer each, they are in order."""
        if len(self._writers) == self.num_envs and write.writer in self._writers:
            return self._writers.index(write.writer)
        return count % self.num_envs

    def written(self, pair: Pair, path: Path) -> NDArray[Any] | None:
        """Returns what a row holds at `path`; None where the call did not give it."""
        write, value = pair.write, self.given(pair.write, path)
        if value is None:
            return None
        if write.call == "writer.append" or (write.call == "writer.step" and write.num_envs is None):
            return self.held(value, path)
        if write.call == "writer.step" or not self.mapping.linked:
            return self.held(value[pair.row], path)
        # An episode has an observation more than steps.
        row = value[pair.row + (path in self.mapping.observed)]
        return self.held(row[pair.env] if self.num_envs > 1 else row, path)

    def given(self, write: Write, path: Path) -> Any:
        """Returns what a call was given at `path`: an array, or where values have any length what it was."""
        value, column = given_at(write.values, path), self.mapping.fields.get(path)
        if value is None or not isinstance(column, Ragged):
            return None if value is None else np.asarray(value)
        lengths = given_at(write.values, ("lengths", *path))
        if lengths is None and column.like is not None:
            lengths = given_at(write.values, ("lengths", *column.like.split("/")))
        if lengths is None and write.call.endswith("extend") and _is_packed(value):
            value, lengths = value
        return value if lengths is None else unpacked(np.asarray(value), np.asarray(lengths))

    def held(self, value: Any, path: Path) -> NDArray[Any]:
        """Returns one row's value as an array."""
        column = self.mapping.fields.get(path)
        return np.asarray(value) if column is None else as_array(value, column)

    def final(self, pair: Pair, path: Path) -> NDArray[Any] | None:
        """Returns what a row at an episode's end holds at `path`, where the writer took `final_obs`."""
        given = pair.write.final_obs
        if given is None:
            return None
        ended = (pair.step.terminated | pair.step.truncated).tolist()
        names = ["/".join(name) for name in self.mapping.named]
        with suppress(ValueError, KeyError, IndexError, TypeError):
            values = FinalObservations(self.mapping.fields, ended).by_name(given, names)
            return self.held(lookup(values, path)[pair.env], path)
        return None

    def leaves(self, obs: Any, env: int) -> dict[Path, NDArray[Any]]:
        """Returns the parts of one environment's observation by the fields that hold them."""
        return {path: each[env] for path, each in self.all_leaves(obs).items()}

    def all_leaves(self, obs: Any) -> dict[Path, Sequence[NDArray[Any]]]:
        """Returns the parts of an observation by the fields that hold them: for each environment one."""
        named, found = self.mapping.observation(obs), dict[Path, Sequence[NDArray[Any]]]()
        for path in self.mapping.observed:
            value, column = given_at(named, path), self.mapping.fields[path]
            if value is not None and isinstance(column, Ragged):
                found[path] = [as_array(part, column) for part in value]
            elif value is not None and not isinstance(value, Mapping | tuple):
                found[path] = list(np.asarray(value))
        return found

    def led_to(self, pair: Pair, same_step: bool) -> dict[Path, NDArray[Any]]:
        """Returns the observation that the step led to, by field; empty where the environment did not give it."""
        if not (same_step and pair.ends):
            return self.leaves(pair.step.next_obs, pair.env)
        final = pair.step.final_obs
        return {} if final is None else self.leaves_of_one(final, pair.env)

    def leaves_of_one(self, obs: Any, env: int) -> dict[Path, NDArray[Any]]:
        """Returns the same, where the environments may each have an observation of their own."""
        own, found = self.mapping.observation(of_env(obs, env, self.recording.space)), dict[Path, NDArray[Any]]()
        for path in self.mapping.observed:
            value, column = given_at(own, path), self.mapping.fields[path]
            if value is not None and (isinstance(column, Ragged) or not isinstance(value, Mapping | tuple)):
                found[path] = as_array(value, column)
        return found

    def _paired(self) -> Iterator[Pair]:
        cursor = 0
        since: Counter[int] = Counter()  # rows written one by one since a step
        for burst in self._bursts():
            if burst[0].call in ("writer.step", "writer.append"):
                yield from self._single_rows(burst, cursor, since)
            else:
                yield from self._block(burst[0], cursor)
            cursor = burst[0].steps

    def _bursts(self) -> Iterator[list[Write]]:
        """Yields the calls that write a row each between two steps together, and each other call by itself."""
        bursts: dict[tuple[str, int, int | None], list[Write]] = {}
        for number, write in enumerate(self.recording.writes):
            if not write.steps or write.call == "writer.reset":
                continue
            alone = write.call in ("writer.extend", "buffer.extend")
            one_of_many = write.num_envs is None and self.num_envs > 1
            bursts.setdefault((write.call, write.steps, number if alone or one_of_many else None), []).append(write)
        yield from bursts.values()

    def _single_rows(self, burst: list[Write], cursor: int, since: Counter[int]) -> Iterator[Pair]:
        latest = burst[0].steps - 1
        in_order = len(burst) == burst[0].steps - cursor
        for index, write in enumerate(burst):
            number = cursor + index if in_order else latest
            if write.num_envs is None and self.num_envs > 1:
                yield self._pair(write, 0, number, self.env_of(write, since[latest]))
                since[latest] += 1
            else:
                for env in range(write.num_envs or 1):
                    yield self._pair(write, env, number, env)

    def _block(self, write: Write, cursor: int) -> Iterator[Pair]:
        """Pairs the rows of an `extend`: those of all environments, or the steps since the call before."""
        shape = np.shape(given_at(write.values, self.mapping.reward))
        if not shape:
            return
        steps, envs = shape[0], shape[1] if len(shape) > 1 else 1
        if not self.mapping.linked and steps == self.num_envs and write.steps - cursor == 1:
            for env in range(steps):
                yield self._pair(write, env, write.steps - 1, env)
        elif steps == write.steps - cursor and envs == self.num_envs:
            for row in range(steps):
                for env in range(envs):
                    yield self._pair(write, row, cursor + row, env)

    def _pair(self, write: Write, row: int, number: int, env: int) -> Pair:
        return Pair(write, row, self.recording.steps[number], env)


def given_at(values: Mapping[str, Any], path: Path) -> Any:
    """Returns what a call was given at `path`; None where it was not."""
    try:
        return lookup(values, path)
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _is_packed(value: Any) -> bool:
    """Returns whether it is all elements and the lengths of values, and not two values."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    elements, lengths = map(np.asarray, value)
    return lengths.ndim == 1 and lengths.dtype.kind in "iu" and int(lengths.sum()) == len(elements)


def unpacked(values: NDArray[Any], lengths: NDArray[Any]) -> list[Any]:
    """Returns values that lie one after the other as a list of as many as there are lengths, nested as these are."""
    parts: list[Any] = np.split(values, np.cumsum(lengths.reshape(-1))[:-1])
    for size in reversed(lengths.shape[1:]):
        parts = [parts[first : first + size] for first in range(0, len(parts), size)]
    return parts

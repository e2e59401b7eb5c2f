"""What is wrong with a user's writing loop: the rows that it wrote, beside the steps that the environment made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.checking.casting import as_numpy
from torchreplay.checking.field_mapping import FieldMapping, lookup
from torchreplay.checking.recording import EnvStep, Recording, Write
from torchreplay.schema.samplers import Prioritized
from torchreplay.schema.spec import Path

OTHER_SCALE: Final = 10.0
"""Factor between the usual sizes of rewards from which on they are of another scale."""
ENOUGH: Final = 10
"""Values that differ from zero, at least, for a usual size."""
CONSTANT: Final = 8
"""Values, at least, that must all be the same to be called constant."""

RESET_WRITTEN: Final = (
    "the first observation of an episode is written as a step from the last one of the episode before: a next-step "
    "autoreset ignores the action there. Leave these rows out"
)
CUT_UNTOLD: Final = (
    "{!r} is False where a time limit cut the episode: its last items wait for an end that never comes. Give it the "
    "environment's `truncated`"
)
CUT_IS_END: Final = (
    "{!r} is True where a time limit cut the episode: a target would take the state there for worth nothing. Give it "
    "the environment's `terminated`, and do not bootstrap there only if that is set"
)
END_UNTOLD: Final = (
    "{!r} is False where the episode ended for good: a target would bootstrap beyond the end. Give it the "
    "environment's `terminated`"
)
STORED_AGAIN: Final = (
    "the observation before the step is stored again in the place of the one that the step led to. Give the "
    "observation that env.step returned"
)
NEXT_TWICE: Final = (
    "the observation after the step is stored twice, as the one before it as well. Write the row before the loop sets "
    "`obs = next_obs`; an environment that reuses its memory needs a copy"
)
OBS_TWICE: Final = "the observation before the step is stored twice, as the one after it as well. Give `next_obs`"
NEXT_EPISODE: Final = (
    "the first observation of the next episode is stored as the last one of this episode: a time limit would bootstrap "
    "from it. Store the final observation (`infos['final_obs']` of a vector environment)"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a loop, or most likely is.

    Attributes:
        where: File and line of the user's code.
        what: What is wrong, and what to change.
        rows: In how many rows, or calls, it was seen.
    """

    where: str
    what: str
    rows: int

    def __str__(self) -> str:
        return f"{self.where}: {self.what} ({self.rows:,} times)"


@dataclass(frozen=True, slots=True)
class Pair:
    """A row that was written, and the step that it is of.

    Attributes:
        write: The call.
        row: Of the call, where it writes several.
        values: Of this row.
        step: The environment's.
        env: Index of the environment.
    """

    write: Write
    row: int
    values: Mapping[str, Any]
    step: EnvStep
    env: int


class LoopCheck:
    """Compares what a loop wrote with what the environment gave.

    Args:
        recording: Of the loop.
        buffer: The user's, which may hold rows already.
        mapping: Which field takes what.
        same_step: Whether the vector environment begins the next episode in the step that ends one.
    """

    def __init__(self, recording: Recording, buffer: ReplayBuffer, mapping: FieldMapping, same_step: bool) -> None:
        self._recording, self._buffer, self._mapping = recording, buffer, mapping
        self._same_step = same_step
        self.pairs = list(self._paired())
        self._found: dict[tuple[str, str], int] = {}

    def findings(self) -> tuple[Finding, ...]:
        """Returns what is wrong, in the order of the loop's lines."""
        if not self._recording.writes:
            self._note(
                self._recording.step_site or "the loop", "nothing was written to the buffer that the loop was given"
            )
        for pair in self.pairs:
            self._look_at_flags(pair)
            self._look_at_observations(pair)
        self._look_at_counts()
        self._look_at_actions()
        self._look_at_rewards()
        self._look_at_priorities()
        return tuple(Finding(where, what, rows) for (where, what), rows in self._found.items())

    def _note(self, where: str, what: str, rows: int = 1) -> None:
        self._found[where, what] = self._found.get((where, what), 0) + rows

    # Rows and their steps

    def _paired(self) -> Iterator[Pair]:
        cursor = 0
        since: Counter[int] = Counter()  # rows appended one by one since a step
        for write in self._recording.writes:
            if not write.steps:
                continue
            latest = write.steps - 1
            if write.call == "writer.append":
                yield self._pair(write, 0, latest, since[latest] % self._num_envs)
                since[latest] += 1
            elif write.call == "writer.step":
                for env in range(write.num_envs or 1):
                    yield self._pair(write, env, latest, env)
            else:
                yield from self._block(write, cursor)
            cursor = write.steps

    @property
    def _num_envs(self) -> int:
        return self._recording.num_envs or 1

    def _block(self, write: Write, cursor: int) -> Iterator[Pair]:
        """Pairs the rows of an `extend`: those of all environments, or the steps since the call before."""
        shape = np.shape(self._given(write.values, self._mapping.reward))
        if not shape:
            return
        steps, envs = shape[0], shape[1] if len(shape) > 1 else 1
        if not self._mapping.linked and steps == self._num_envs and write.steps - cursor == 1:
            for env in range(steps):
                yield self._pair(write, env, write.steps - 1, env)
        elif steps == write.steps - cursor and envs == self._num_envs:
            for row in range(steps):
                for env in range(envs):
                    yield self._pair(write, row, cursor + row, env)

    def _pair(self, write: Write, row: int, number: int, env: int) -> Pair:
        return Pair(write, row, write.values, self._recording.steps[number], env)

    def _given(self, values: Mapping[str, Any], path: Path) -> Any:
        try:
            return lookup(values, path)
        except (KeyError, IndexError, TypeError, ValueError):
            return None

    def _written(self, pair: Pair, path: Path, observed: bool = False) -> NDArray[Any] | None:
        """Returns what a row holds at `path`; None where the call did not give it."""
        value = self._given(pair.values, path)
        if value is None:
            return None
        array: NDArray[Any] = np.asarray(value)
        if pair.write.call == "writer.append" or (pair.write.call == "writer.step" and pair.write.num_envs is None):
            return array
        if pair.write.call == "writer.step" or not self._mapping.linked:
            return np.asarray(array[pair.row])
        row = array[pair.row + observed]  # an episode has an observation more than steps
        return np.asarray(row[pair.env] if self._num_envs > 1 else row)

    # Flags

    def _look_at_flags(self, pair: Pair) -> None:
        if pair.step.is_reset[pair.env]:
            if not self._mapping.linked:
                self._note(pair.write.site, RESET_WRITTEN)
            return
        ended, cut = bool(pair.step.terminated[pair.env]), bool(pair.step.truncated[pair.env])
        path = self._mapping.flags["truncated"]
        if self._mapping.linked and cut and not ended and self._flag(pair, path) is False:
            self._note(pair.write.site, CUT_UNTOLD.format("/".join(path)))
        for path in (self._mapping.flags["terminated"], *(() if self._mapping.linked else (("done",),))):
            told = self._flag(pair, path)
            if told is not None:
                self._look_at_end_flag(pair, "/".join(path), told, ended, cut)
                return

    def _look_at_end_flag(self, pair: Pair, name: str, told: bool, ended: bool, cut: bool) -> None:
        if told and cut and not ended:
            self._note(pair.write.site, CUT_IS_END.format(name))
        elif ended and not told:
            self._note(pair.write.site, END_UNTOLD.format(name))

    def _flag(self, pair: Pair, path: Path) -> bool | None:
        value = self._written(pair, path)
        return None if value is None or value.ndim else bool(value)

    # Observations

    def _look_at_observations(self, pair: Pair) -> None:
        if pair.step.is_reset[pair.env]:
            return
        before, after = self._leaves(pair, pair.step.obs), self._leaves(pair, pair.step.next_obs)
        if self._mapping.linked:
            if self._matches(pair, before, "") and not self._matches(pair, after, ""):
                self._note(pair.write.site, STORED_AGAIN)
            return
        is_next = self._matches(pair, after, "next_")
        if is_next and self._matches(pair, after, "") and not self._matches(pair, before, ""):
            self._note(pair.write.site, NEXT_TWICE)
        elif self._matches(pair, before, "next_") and not is_next:
            self._note(pair.write.site, OBS_TWICE)
        if self._is_of_next_episode(pair, is_next):
            self._note(pair.write.site, NEXT_EPISODE)

    def _is_of_next_episode(self, pair: Pair, is_next: bool) -> bool:
        """Returns whether the next episode's first observation is in the place of the last one."""
        if not (pair.step.terminated[pair.env] or pair.step.truncated[pair.env]):
            return False
        if self._same_step:
            return is_next
        if is_next or self._recording.num_envs is not None:
            return False
        following = [obs for steps, obs in self._recording.resets if steps == pair.step.number + 1]
        return any(self._matches(pair, self._flat(obs), "next_") for obs in following)

    def _leaves(self, pair: Pair, obs: Any) -> dict[Path, NDArray[Any]]:
        return {path: value[pair.env] for path, value in self._flat(obs).items()}

    def _flat(self, obs: Any) -> dict[Path, NDArray[Any]]:
        """Returns the parts of an environment's observation by the fields that hold them."""
        named, found = self._mapping.observation(obs), {}
        for path in self._mapping.observed:
            if path[0] in named:
                value = self._given(named, path)
                if value is not None and not isinstance(value, Mapping | tuple):
                    found[path] = np.asarray(value)
        return found

    def _matches(self, pair: Pair, leaves: Mapping[Path, NDArray[Any]], prefix: str) -> bool:
        """Returns whether the row holds this observation, in the fields with this prefix: exactly, or as float32."""
        pairs = [
            (self._written(pair, (prefix + path[0], *path[1:]), observed=True), value) for path, value in leaves.items()
        ]
        if not pairs or any(written is None or written.shape != value.shape for written, value in pairs):
            return False
        return all(np.allclose(written, value, rtol=1e-6, atol=1e-9, equal_nan=True) for written, value in pairs)  # type: ignore[arg-type]

    # The whole loop

    def _look_at_counts(self) -> None:
        times = Counter((pair.step.number, pair.env) for pair in self.pairs)
        sites = {(pair.step.number, pair.env): pair.write.site for pair in self.pairs}
        for place, count in times.items():
            if count > 1:
                self._note(sites[place], "a step is written twice: one step of the environment is one row", count - 1)
        if not times:
            return
        last = max(number for number, _ in times)
        made = [(step.number, env) for step in self._recording.steps[: last + 1] for env in range(self._num_envs)]
        resets = {(step.number, int(env)) for step in self._recording.steps for env in np.flatnonzero(step.is_reset)}
        missing = [place for place in made if place not in times and place not in resets]
        if missing:
            text = f"steps of the environment are not written, the first is step {missing[0][0]} of the loop"
            self._note(self._recording.step_site, text, len(missing))

    def _look_at_actions(self) -> None:
        """Looks for the action of the step before in the place of this step's."""
        late = same = 0
        where = ""
        for before, pair in zip(self.pairs, self.pairs[self._num_envs :], strict=False):
            written = self._written(pair, ("action",))
            if written is None or isinstance(pair.step.action, Mapping | tuple) or before.env != pair.env:
                continue
            mine, others = (np.asarray(p.step.action)[p.env] for p in (pair, before))
            if written.shape != mine.shape or np.array_equal(mine, others):
                continue
            late += bool(np.allclose(written, others))
            same += bool(np.allclose(written, mine))
            where = where or pair.write.site
        if late > same and late >= CONSTANT:
            self._note(where, "the action is that of the step before: write the one that env.step was given", late)

    def _look_at_rewards(self) -> None:
        rewards = [(pair, self._written(pair, self._mapping.reward)) for pair in self.pairs]
        values = np.array([float(value) for _, value in rewards if value is not None and not value.ndim])
        if not len(values):
            return
        where = self.pairs[0].write.site
        held, now = _usual_size(self._held_rewards()), _usual_size(values)
        if held and now and not 1 / OTHER_SCALE < now / held < OTHER_SCALE:
            text = (
                f"rewards are of another scale than those that the buffer holds: {now:.3g} beside {held:.3g} "
                f"(median of those that are not 0). Scale both alike, or clear the buffer"
            )
            self._note(where, text, len(values))
        half = len(values) // 2
        first, second = _usual_size(values[:half]), _usual_size(values[half:])
        if first and second and not 1 / OTHER_SCALE < second / first < OTHER_SCALE:
            text = (
                f"rewards change their scale on the way: {first:.3g} in the first half of the steps, {second:.3g} in "
                f"the second. A running normalisation belongs after the buffer, not before it"
            )
            self._note(where, text, len(values) - half)

    def _held_rewards(self) -> NDArray[np.float64]:
        column: Any = self._buffer.storage
        for name in self._mapping.reward:
            column = column.get(name) if isinstance(column, Mapping) else None
        if column is None or column.dim() != 1:
            return np.empty(0)
        slots = self._buffer.keys(rows=True) % self._buffer.capacity
        return as_numpy(column[slots]).astype(np.float64)

    def _look_at_priorities(self) -> None:
        writes = [write for write in self._recording.writes if write.priority is not None]
        given = [(write.site, np.abs(np.asarray(write.priority, np.float64)).reshape(-1)) for write in writes]
        kinds = {"priority that rows are written with": given, "TD error that is fed back": self._recording.updates}
        for kind, told in kinds.items():
            values = np.concatenate([np.empty(0), *(value for _, value in told)])
            if len(values) >= CONSTANT and len(told) > 1 and np.ptp(values) <= 1e-9 * max(1.0, values.max()):
                text = f"every {kind} is {values[0]:.3g}: all items are drawn alike. Give |TD error| of each item"
                self._note(told[0][0], text, len(told))
        if isinstance(self._buffer.sampler, Prioritized) and self._recording.samples and not self._recording.updates:
            text = (
                "batches are drawn by priority, and no TD error is fed back: all priorities stay what they were. Call "
                "buffer.update_priorities(batch, td_error)"
            )
            self._note(self._recording.samples[0], text, len(self._recording.samples))


def _usual_size(values: NDArray[np.float64]) -> float:
    """Returns the median size of what is not 0; 0 where that is too few."""
    sizes = np.abs(values[(values != 0) & np.isfinite(values)])
    return float(np.median(sizes)) if len(sizes) >= ENOUGH else 0.0

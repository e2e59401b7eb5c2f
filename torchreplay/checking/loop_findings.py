"""What is wrong with a user's writing loop: the rows that it wrote, beside the steps that the environment made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.buffer.writer import OwnAutoreset
from torchreplay.checking.casting import as_numpy
from torchreplay.checking.field_mapping import FieldMapping
from torchreplay.checking.loop_recording import LoopRecording
from torchreplay.checking.observation_findings import AS_IT_IS, NEXT_EPISODE, ObservationFindings, vary
from torchreplay.checking.observation_findings import CONSTANT as SAME_OBSERVATION
from torchreplay.checking.pairs import Pair, Pairs
from torchreplay.checking.value_findings import CONSTANT, action_findings, reward_findings, rewards_of
from torchreplay.schema.samplers import Prioritized, ignores_td
from torchreplay.schema.spec import Path

OTHER_SCALE: Final = 10.0
"""Factor between the usual sizes of rewards from which on they are of another scale."""
ENOUGH: Final = 10
"""Values that differ from zero, at least, for a usual size."""

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
NEXT_TWICE: Final = (
    "the observation after the step is stored twice, as the one before it as well. Write the row before the loop sets "
    "`obs = next_obs`; an environment that reuses its memory needs a copy"
)
OBS_TWICE: Final = "the observation before the step is stored twice, as the one after it as well. Give `next_obs`"
END_INVENTED: Final = (
    "{!r} is True in most steps, though the episode goes on there: nothing would be learned from what follows. Give it "
    "the environment's `terminated`"
)
BEYOND_END: Final = "env.step is called after the episode's end: call env.reset, and begin the next episode with it"
IGNORED: Final = (
    "TD errors are fed back to a buffer whose sampler ignores them, as Uniform() and Fifo() do. Give it "
    "sampler=tr.Prioritized(), or leave update_priorities out"
)
STEPS_OF_ITEMS: Final = (
    "values of steps are set by the keys of a batch's items, each one row too early: a step's lie in the row behind "
    "its observation. Give buffer.rows_of(batch)[:, 1] for the steps taken at the anchors"
)
OTHER_AUTORESET: Final = (
    "the environment's metadata['autoreset_mode'] is {env!r}, the writer's autoreset is {writer!r}: rows at "
    "episodes' ends are wrong. Make it by buffer.writer(envs), or writer(num_envs={num_envs}, autoreset={env!r})"
)
THEN: Final = {
    "same_step": "; give step() `final_obs=infos.get('final_obs')`",
    "disabled": "; give reset() the `mask` of the environments that were reset",
    "next_step": "",
}


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
        return f"{self.where}: {self.what} ({'once' if self.rows == 1 else f'{self.rows:,} times'})"


class LoopCheck:
    """Compares what a loop wrote with what the environment gave.

    Args:
        recording: Of the loop.
        buffer: The user's, which may hold rows already.
        mapping: Which field takes what.
        autoreset: What the environment does when an episode ends.
    """

    def __init__(
        self, recording: LoopRecording, buffer: ReplayBuffer, mapping: FieldMapping, autoreset: OwnAutoreset
    ) -> None:
        self._recording, self._buffer, self._mapping = recording, buffer, mapping
        self._autoreset, self._same_step = autoreset, autoreset == "same_step"
        self._of = Pairs(recording, mapping)
        self.pairs = self._of.all
        self._found: dict[tuple[str, str], int] = {}

    def findings(self) -> tuple[Finding, ...]:
        """Returns what is wrong, in the order of the loop's lines."""
        if not self._recording.writes:
            self._note(
                self._recording.step_site or "the loop", "nothing was written to the buffer that the loop was given"
            )
        self._look_at_linked() if self._mapping.linked else self._look_at_rows()
        for pair in self.pairs:
            self._look_at_flags(pair)
        self._look_at_all_flags()
        self._look_at_counts()
        for where, what, rows in (*action_findings(self._of), *reward_findings(self._of)):
            self._note(where, what, rows)
        self._look_at_scales()
        self._look_at_priorities()
        self._look_at_rewrites()
        return tuple(Finding(where, what, rows) for (where, what), rows in self._found.items())

    def _note(self, where: str, what: str, rows: int = 1) -> None:
        self._found[where, what] = self._found.get((where, what), 0) + rows

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
        value = self._of.written(pair, path)
        return None if value is None or value.ndim else bool(value)

    def _look_at_all_flags(self) -> None:
        path = self._mapping.flags["terminated"]
        invented = [pair for pair in self.pairs if not pair.is_reset and not pair.ends and self._flag(pair, path)]
        if len(invented) >= CONSTANT and 2 * len(invented) > len(self.pairs):
            self._note(invented[0].write.site, END_INVENTED.format("/".join(path)), len(invented))
        for site in self._recording.beyond_ends:
            self._note(site, BEYOND_END)

    # Observations

    def _look_at_linked(self) -> None:
        """Looks at the observations of linked rows, and whether writer and environment agree on what an end is."""
        found = list(ObservationFindings(self._of, self._same_step))
        wrong = {write.writer for write, _ in found}
        others = {number for number in range(len(self._recording.writers)) if self._is_other(number, number in wrong)}
        for number in sorted(others):
            made = self._recording.writers[number]
            text = OTHER_AUTORESET.format(env=self._autoreset, writer=made.autoreset, num_envs=made.num_envs)
            self._note(made.site, text + THEN[self._autoreset])
        for write, text in found:
            if write.writer not in others:
                self._note(write.site, text)

    def _is_other(self, number: int, is_wrong: bool) -> bool:
        """Returns whether a writer's rows are wrong because it takes the environment to have another autoreset."""
        made, modes = self._recording.writers[number], {self._autoreset, self._recording.writers[number].autoreset}
        if made.num_envs is None or self._recording.num_envs is None or len(modes) == 1:
            return False
        if self._recording.refused is not None:
            return True
        if modes == {"same_step", "disabled"}:  # a loop may make the one of the other
            return is_wrong
        if self._autoreset == "disabled":  # which a loop may reset as a whole
            ends = [step.terminated | step.truncated for step in self._recording.steps]
            return is_wrong or any(over.any() and not over.all() for over in ends)
        return True

    def _look_at_rows(self) -> None:
        """Looks at the observations of rows that are not linked."""
        for pair in self.pairs:
            if not pair.is_reset:
                self._look_at_row(pair)
        for path in self._of.all_leaves(self.pairs[0].step.obs) if self.pairs else ():
            for name in (path, _next(path)):
                kept = [(pair, self._of.written(pair, name)) for pair in self.pairs]
                written = [value for _, value in kept if value is not None]
                given = [self._of.leaves(pair.step.obs, pair.env)[path] for pair in self.pairs]
                if len(written) >= CONSTANT and not vary(written) and vary(given):
                    for pair, _ in kept:
                        self._note(pair.write.site, f"field {'/'.join(name)!r}: {SAME_OBSERVATION}")

    def _look_at_row(self, pair: Pair) -> None:
        before, after = (self._of.leaves(obs, pair.env) for obs in (pair.step.obs, pair.step.next_obs))
        is_next = self._matches(pair, after, _next)
        if is_next and self._matches(pair, after) and not self._matches(pair, before):
            self._note(pair.write.site, NEXT_TWICE)
        elif self._matches(pair, before, _next) and not is_next:
            self._note(pair.write.site, OBS_TWICE)
        if self._is_of_next_episode(pair, is_next):
            self._note(pair.write.site, NEXT_EPISODE)

    def _is_of_next_episode(self, pair: Pair, is_next: bool) -> bool:
        """Returns whether the next episode's first observation is in the place of the last one."""
        if not pair.ends:
            return False
        if self._same_step:
            return is_next
        if is_next or self._recording.num_envs is not None:
            return False
        following = [obs for steps, obs in self._recording.resets if steps == pair.step.number + 1]
        return any(self._matches(pair, self._of.leaves(obs, pair.env), _next) for obs in following)

    def _matches(
        self, pair: Pair, leaves: Mapping[Path, NDArray[Any]], field: Callable[[Path], Path] = lambda path: path
    ) -> bool:
        """Returns whether the row holds this observation, in the fields that `field` makes of its own."""
        pairs = [(self._of.written(pair, field(path)), value) for path, value in leaves.items()]
        return bool(pairs) and all(found is not None and AS_IT_IS.makes(found, value) for found, value in pairs)

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
        made = [(step.number, env) for step in self._recording.steps[: last + 1] for env in range(self._of.num_envs)]
        resets = {(step.number, int(env)) for step in self._recording.steps for env in np.flatnonzero(step.is_reset)}
        missing = [place for place in made if place not in times and place not in resets]
        if missing:
            text = f"steps of the environment are not written, the first is step {missing[0][0]} of the loop"
            self._note(self._recording.step_site, text, len(missing))

    def _look_at_scales(self) -> None:
        values = rewards_of(self._of)[1]
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
        if ignores_td(self._buffer.sampler) and self._recording.updates:
            self._note(self._recording.updates[0][0], IGNORED, len(self._recording.updates))
        if isinstance(self._buffer.sampler, Prioritized) and self._recording.samples and not self._recording.updates:
            text = (
                "batches are drawn by priority, and no TD error is fed back: all priorities stay what they were. Call "
                "buffer.update_priorities(batch, td_error)"
            )
            self._note(self._recording.samples[0], text, len(self._recording.samples))

    def _look_at_rewrites(self) -> None:
        calls: dict[str, list[tuple[int, bool]]] = {}
        for site, keys, wrong in self._recording.rewrites:
            calls.setdefault(site, []).append((keys, wrong))
        for site, given in calls.items():
            found = [keys for keys, wrong in given if wrong]
            # A few keys of rows may be those of items drawn by chance.
            if 2 * len(found) >= len(given) and sum(found) >= ENOUGH:
                self._note(site, STEPS_OF_ITEMS, len(found))


def _next(path: Path) -> Path:
    return (f"next_{path[0]}", *path[1:])


def _usual_size(values: NDArray[np.float64]) -> float:
    """Returns the median size of what is not 0; 0 where that is too few."""
    sizes = np.abs(values[(values != 0) & np.isfinite(values)])
    return float(np.median(sizes)) if len(sizes) >= ENOUGH else 0.0

"""An environment and a buffer that note what a user's loop does with them, and on which line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from types import FrameType
from typing import Any, Final

import numpy as np

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.buffer.rewriting import sets_steps
from torchreplay.buffer.writer import Autoreset, OwnAutoreset, Writer, checked_autoreset, streams_of
from torchreplay.checking.casting import as_numpy
from torchreplay.checking.rollout import each_part
from torchreplay.schema.spaces import single_spaces

PACKAGE: Final = str(FilePath(__file__).parents[1])


class Enough(BaseException):
    """Ends a user's loop when it has shown enough; no `except Exception` of the loop catches it."""


@dataclass(frozen=True, slots=True)
class EnvStep:
    """One call of `env.step`, with a leading dimension of environments in every array.

    Attributes:
        number: How many came before.
        obs: The observation that the action was for.
        action: The action.
        reward: float64 `[n]`.
        terminated: bool `[n]`.
        truncated: bool `[n]`.
        next_obs: What it returned.
        final_obs: What a same-step autoreset gave as `infos['final_obs']`; None: nothing.
        is_reset: bool `[n]`: where a next-step autoreset began an episode: what it returned is no step.
    """

    number: int
    obs: Any
    action: Any
    reward: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    next_obs: Any
    final_obs: Any
    is_reset: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Write:
    """One call that writes.

    Attributes:
        call: Its name, such as `writer.append`.
        site: File and line of the user's code.
        values: What it was given, by name; nested as it was.
        priority: What it was given as priority; None: nothing.
        steps: Calls of `env.step` before it.
        num_envs: Of the writer; None: one environment.
        writer: Its number, in the order in which they were made; None: it is none.
        final_obs: What it was given as `final_obs`; None: nothing.
        mask: What it was given as `mask`; None: nothing.
    """

    call: str
    site: str
    values: dict[str, Any]
    priority: Any
    steps: int
    num_envs: int | None
    writer: int | None = None
    final_obs: Any = None
    mask: Any = None


@dataclass(frozen=True, slots=True)
class MadeWriter:
    """One call of `buffer.writer`.

    Attributes:
        site: File and line of the user's code.
        num_envs: Environments that it writes for; None: one.
        autoreset: What it takes a vector environment to do when an episode ends.
    """

    site: str
    num_envs: int | None
    autoreset: OwnAutoreset


@dataclass(slots=True)
class LoopRecording:
    """What a loop did.

    Attributes:
        num_envs: Environments of a vector environment; None: it is none.
        space: Of the observations of one environment.
        steps: Calls of `env.step`.
        resets: What `env.reset` returned, and after how many steps.
        writers: Those that were made.
        writes: Calls that write.
        beyond_ends: Lines of the steps that were made after an end, without a reset.
        updates: TD errors fed back, and the line.
        samples: Batches drawn.
        rewrites: Of calls of `rewrite` with values of steps: the line, how many keys, and whether they are those of
            items of the last batch and not of their steps.
        step_site: Line of the first `env.step`.
        refused: The error of a writer's call.
    """

    num_envs: int | None = None
    space: Any = None
    steps: list[EnvStep] = field(default_factory=list)
    resets: list[tuple[int, Any]] = field(default_factory=list)
    writers: list[MadeWriter] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    beyond_ends: list[str] = field(default_factory=list)
    updates: list[tuple[str, np.ndarray[Any, Any]]] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)
    rewrites: list[tuple[str, int, bool]] = field(default_factory=list)
    step_site: str = ""
    refused: Exception | None = None
    _paused: bool = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Takes no note of writes meanwhile."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def write(self, call: str, given: dict[str, Any], num_envs: int | None, writer: int | None = None) -> None:
        """Notes a call that writes, with copies of its values."""
        if not self._paused:
            values = {name: _copied(value) for name, value in given.items() if name not in ("priority", "final_obs")}
            beside = deepcopy(given.get("final_obs")), deepcopy(given.get("mask"))
            priority = given.get("priority")
            self.writes.append(Write(call, site(), values, priority, len(self.steps), num_envs, writer, *beside))

    def has_other_autoreset(self, autoreset: OwnAutoreset) -> bool:
        """Returns whether a writer of several environments takes them to have another autoreset."""
        return any(made.num_envs is not None and made.autoreset != autoreset for made in self.writers)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Notes the error that ends a writer's call."""
        try:
            yield
        except Exception as error:
            self.refused = error
            raise

    def make(self, num_envs: int | None, autoreset: OwnAutoreset) -> int:
        """Notes a writer that is made, and returns its number."""
        if not self._paused:
            self.writers.append(MadeWriter(site(), num_envs, autoreset))
        return len(self.writers) - 1


def site() -> str:
    """Returns file and line of the call in the user's code that led here, past wrappers of Gymnasium."""
    gymnasium = sys.modules.get("gymnasium")
    others = PACKAGE if gymnasium is None else (PACKAGE, str(FilePath(str(gymnasium.__file__)).parent))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "the call"


class EnvRecorder:
    """Steps an environment, and notes what it is asked and what it answers; all else goes to the environment itself.

    `recorded_env.recorded` makes of it what Gymnasium's wrappers take.

    Args:
        env: A Gymnasium environment or vector environment.
        recording: Where to.
        episodes: After so many ends `reset`, or `step` of a vector environment, raises `Enough`.
        max_steps: After so many steps `step` raises it.

    Attributes:
        env: The environment.
        autoreset: What the environment does when an episode ends; "disabled" for one that waits for `reset`.
    """

    def __init__(self, env: Any, recording: LoopRecording, episodes: int, max_steps: int) -> None:
        self.env, self._recording = env, recording
        self._episodes, self._max_steps = episodes, max_steps
        self._ends = 0
        self._spaces = single_spaces(env)
        self._obs: Any = None
        self._over = np.zeros(recording.num_envs or 1, bool)
        self.autoreset = _autoreset(env, recording.num_envs is not None)

    def reset(self, **arguments: Any) -> Any:
        """Resets the environment, unless it has shown enough episodes."""
        if self._ends >= self._episodes:
            raise Enough
        obs, info = self.env.reset(**arguments)
        self._obs = self._of_envs(obs, self._spaces[0])
        self._over[:] = False
        self._recording.resets.append((len(self._recording.steps), self._obs))
        return obs, info

    def _of_envs(self, value: Any, space: Any) -> Any:
        """Returns a copy with a leading dimension of environments."""
        return _batched(deepcopy(value), space) if self._recording.num_envs is None else deepcopy(value)

    def step(self, action: Any) -> Any:
        """Steps the environment, unless it has shown enough."""
        if len(self._recording.steps) >= self._max_steps or self._ends >= self._episodes:
            raise Enough
        self._recording.step_site = self._recording.step_site or site()
        given = self._of_envs(action, self._spaces[1])
        answer = self.env.step(action)
        reward, terminated, truncated = deepcopy(answer[1:4])
        obs = self._of_envs(answer[0], self._spaces[0])
        single = self._recording.num_envs is None
        flags = [np.atleast_1d(np.asarray(flag, bool)) for flag in (terminated, truncated)]
        resets = self._over & (self.autoreset == "next_step")
        if self.autoreset == "disabled" and self._over.any():
            self._recording.beyond_ends.append(site())
        self._recording.steps.append(
            EnvStep(
                len(self._recording.steps),
                self._obs,
                given,
                np.atleast_1d(np.asarray(reward, np.float64)),
                flags[0],
                flags[1],
                obs,
                None if single else deepcopy(answer[4].get("final_obs")),
                resets.copy(),
            )
        )
        self._obs = obs
        self._over = (flags[0] | flags[1]) & ~resets
        self._ends += int(self._over.sum())
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


class RecordedWriter(Writer):
    """A writer that notes each call before it writes."""

    def record_to(self, recording: LoopRecording, autoreset: Autoreset) -> RecordedWriter:
        """Returns itself, from now on noting its calls there."""
        self._recording = recording
        self._number = recording.make(self._num_envs, checked_autoreset(autoreset))
        return self

    def reset(self, **given: Any) -> Any:
        """Notes the beginning of an episode, and writes it."""
        self._note("writer.reset", given)
        with self._recording.refusals():
            return super().reset(**given)

    def step(self, **given: Any) -> Any:
        """Notes a step, and writes it."""
        self._note("writer.step", given)
        with self._recording.refusals():
            return super().step(**given)

    def append(self, **given: Any) -> int:
        """Notes a row, and writes it."""
        self._note("writer.append", given)
        return super().append(**given)

    def extend(self, **given: Any) -> Any:
        """Notes several rows, and writes them."""
        self._note("writer.extend", given)
        return super().extend(**given)

    def _note(self, call: str, given: dict[str, Any]) -> None:
        self._recording.write(call, given, self._num_envs, self._number)


class RecordedBuffer(ReplayBuffer):
    """A buffer that notes what is written, drawn and fed back."""

    def record_to(self, recording: LoopRecording) -> RecordedBuffer:
        """Returns itself, from now on noting its calls there."""
        self._recording = recording
        return self

    def writer(self, envs: Any = None, autoreset: Autoreset | None = None, *, num_envs: int | None = None) -> Writer:
        """Returns a writer that notes its calls."""
        streams = streams_of(envs, num_envs, autoreset)
        return RecordedWriter(self._segment, self._config, *streams).record_to(self._recording, streams[1])

    def extend(self, /, *args: Any, priority: Any = None, casting: Any = "same_kind", **fields: Any) -> Any:
        """Notes several rows, and writes them."""
        self._recording.write("buffer.extend", {**fields, "priority": priority}, None)
        with self._recording.paused():  # the writer that it uses need not note the same again
            return super().extend(*args, priority=priority, casting=casting, **fields)

    def sample(self, *args: Any, **given: Any) -> Any:
        """Notes a draw, and draws."""
        self._recording.samples.append(site())
        self._enough = self.capacity  # nothing is to be said of a buffer that lives as long as the check
        return super().sample(*args, **given)

    def rewrite(self, keys: Any, /, **fields: Any) -> int:
        """Notes whether keys of items are given for values of steps, and rewrites."""
        last = self._sampler.last_keys
        of_items = None if last is None else last()
        if of_items is not None and sets_steps(self._config, fields):
            given, steps = _array(keys), self.rows_of(of_items)[:, 1:].numpy()
            wrong = bool(np.isin(given, of_items.numpy()).all()) and not np.isin(given, steps).all()
            self._recording.rewrites.append((site(), given.size, wrong))
        return super().rewrite(keys, **fields)

    def update_priorities(self, batch_or_keys: Any, td: Any) -> None:
        """Notes TD errors, and applies them."""
        self._recording.updates.append((site(), np.abs(_array(td)).reshape(-1).astype(np.float64)))
        self._ignores_td = False  # which is a finding
        super().update_priorities(batch_or_keys, td)


def _autoreset(env: Any, is_vector: bool) -> OwnAutoreset:
    if is_vector:
        return checked_autoreset(env.metadata.get("autoreset_mode", "next_step"))
    while type(env).__name__ != "Autoreset" and hasattr(env, "env"):
        env = env.env
    return "next_step" if type(env).__name__ == "Autoreset" else "disabled"


def _copied(value: Any) -> Any:
    # A tuple is a nested value, or an array: the field's path says which.
    return each_part(_part_copied, value)


def _part_copied(part: Any) -> Any:
    """Returns a copy of a value as an array; of values of several lengths a list, and of bytes all of them."""
    if isinstance(part, bytes | bytearray | memoryview):
        return np.frombuffer(bytes(part), np.uint8)
    if isinstance(part, list):
        try:
            array = np.array(part)
        except ValueError:  # of several lengths
            return [_copied(inner) for inner in part]
        return array if array.dtype.kind in "biufc" else [_copied(inner) for inner in part]
    return np.array(_array(part))


def _array(value: Any) -> np.ndarray[Any, Any]:
    return as_numpy(value.detach().cpu()) if hasattr(value, "detach") else np.asarray(value)


def _batched(value: Any, space: Any) -> Any:
    """Returns a value of one environment with a leading dimension of one."""

    def of_one(part: Any) -> Any:
        return [part] if isinstance(part, str | tuple) else np.asarray(part)[None]

    return each_part(of_one, value, space)

"""`check`: plays an environment's episodes through a buffer like the user's, and compares what comes back.

Given the user's own loop, it compares what that writes with what the environment gave.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torchreplay.buffer.base import Replay
from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.checking.casting import Casting
from torchreplay.checking.compare import compare
from torchreplay.checking.field_mapping import FieldMapping
from torchreplay.checking.loop_findings import Finding, LoopCheck
from torchreplay.checking.loop_recording import Enough, EnvRecorder, LoopRecording, RecordedBuffer
from torchreplay.checking.record import write_rows, write_steps
from torchreplay.checking.reference_items import items_of
from torchreplay.checking.rollout import Row, play
from torchreplay.schema.spaces import single_spaces
from torchreplay.validation import checked_instance, checked_int

__all__ = ["CheckReport", "check", "machine", "speed"]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` compared. All of it was as expected; `findings` are what it says of the user's loop.

    Attributes:
        episodes: Episodes begun.
        rows: Rows written.
        items: Items drawn and compared.
        fields: Entries of the batches compared, nested names joined by '/'.
        filled: Fields that the environment does not produce, for which random values stood in.
        rounded: Fields of a float dtype too narrow for the environment's values; a warning names the first.
        findings: What is wrong with the user's loop, each with the line to change.

    Example:
        >>> import gymnasium
        >>> env = gymnasium.make("CartPole-v1")
        >>> report = tr.check(env, tr.ReplayBuffer(tr.spec_from_env(env), capacity=1000, view=tr.Transitions()))
        >>> report.findings
        ()
    """

    episodes: int
    rows: int
    items: int
    fields: tuple[str, ...]
    filled: tuple[str, ...]
    rounded: tuple[str, ...]
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        text = f"{self.episodes} episodes, {self.rows} rows: {self.items} items came back as they were written"
        return "\n".join([text, *map(str, self.findings)])


def check(
    env: Any,
    buffer: ReplayBuffer,
    episodes: int = 3,
    seed: int = 0,
    max_steps: int = 1000,
    loop: Callable[[Any, ReplayBuffer], object] | None = None,
) -> CheckReport:
    """Plays a few episodes with random actions, and verifies that what is written comes back, item by item.

    The rows go to a buffer of the same spec and view that lives as long as the check; `buffer` itself stays as it is.
    Every item that should be drawable is drawn and compared with one computed in NumPy from the recorded episodes, and
    no other item may be drawable. Observations must lie in their space. The observation, reward and flags are written
    to the fields that the view names (with `Rows()`: `obs`, `next_obs`, `reward`, `terminated`, `truncated`, `done`),
    actions to `action`. Other fields get random values, which must come back too. Texts are written as their bytes.

    A `loop` is the user's own code: it steps `env` and writes to `buffer`, as long as it likes. It gets both in a form
    that notes what it does, and is ended after `episodes` episodes, or `max_steps` steps. What it wrote is compared
    with what the environment gave. `report.findings` says what is wrong, with file and line:

    - a time limit that is taken for an end, or an end that is bootstrapped through;
    - a writer with another autoreset than the vector environment's;
    - an observation that is stored twice, or is the next episode's; under a view that links rows, each observation that
      is not the one that `env.step` or `env.reset` returned;
    - a value of any length that is cut, unless the loop cuts all to one largest length;
    - a step that is written twice, or not at all, or with the action or the reward of another step;
    - a priority that never changes, or draws by priority without feedback;
    - `rewrite` of steps' values by the keys of items, one row too early;
    - rewards of another scale than the buffer holds, or than before in the same loop.

    The environment is reset with `seed`, so is its action space, and it is left where the last episode ended.

    Args:
        env: A Gymnasium environment, or a vector environment with any autoreset mode.
        buffer: The buffer that the environment's experience is to go to.
        episodes: Episodes to play to their end; of a vector environment all environments together.
        seed: Of the environment and the actions.
        max_steps: Steps after which an episode is broken off (of a vector environment: after which playing ends).
        loop: Called with an environment and a buffer to use in the place of `env` and `buffer`.

    Returns:
        What was compared.

    Raises:
        TypeError: `env` has no Gymnasium spaces, or `buffer` is no `ReplayBuffer`.
        ValueError: An observation is outside its space, a value does not fit its field, or a value comes back that was
            not written. The text names field, episode, step and key, the value found and the one expected.

    Warns:
        UserWarning: A field's float dtype is too narrow for an observation or an action, which it rounds.

    Example:
        >>> import gymnasium
        >>> env = gymnasium.make("CartPole-v1")
        >>> buffer = tr.ReplayBuffer(tr.spec_from_env(env), capacity=1000, view=tr.Transitions(n_step=3))
        >>> tr.check(env, buffer, episodes=2).episodes
        2
    """
    checked_instance("buffer", buffer, Replay, "a torchreplay.ReplayBuffer")
    checked_int("seed", seed, 0, (1 << 32) - 1)
    checked_int("episodes", episodes, 1, 1 << 31)
    checked_int("max_steps", max_steps, 1, 1 << 31)
    space, _ = single_spaces(env)
    filling = FieldMapping(buffer.spec, buffer.view, space, seed)
    played = play(env, episodes, max_steps, seed)
    streams = played.streams()
    _check_observations(streams, space)
    casting = Casting()
    rows = sum(map(len, streams))
    capacity, room = max(rows, buffer.view.rows_of_an_item), _ragged_bytes(buffer, filling, streams)
    with ReplayBuffer(buffer.spec, capacity, view=buffer.view, seed=seed, ragged_bytes=room) as twin:
        (write_steps if filling.linked else write_rows)(twin, played, filling, casting)
        rows = len(twin)
        items, fields = compare(twin, items_of(buffer.view, twin._config.ragged), streams)
    # Rewards are Python's floats, which are float64: that float32 rounds them is not worth a word.
    casting.rounded.pop("/".join(filling.reward), None)
    for text in casting.rounded.values():
        warnings.warn(text, stacklevel=2)
    begun = sum(row.step == 0 for stream in streams for row in stream)
    filled = tuple("/".join(path) for path in filling.own)
    findings = () if loop is None else check_loop(env, buffer, loop, episodes, max_steps)
    return CheckReport(begun, rows, items, fields, filled, tuple(casting.rounded), findings)


def check_loop(
    env: Any, buffer: ReplayBuffer, loop: Callable[[Any, ReplayBuffer], object], episodes: int, max_steps: int
) -> tuple[Finding, ...]:
    """Returns what is wrong with a loop, as `check` says."""
    from torchreplay.checking.recorded_env import recorded  # it imports Gymnasium, which not everybody has

    space, _ = single_spaces(env)
    recording = LoopRecording(env.num_envs if hasattr(env, "single_observation_space") else None, space)
    rows = 2 * (max_steps + 1) * (recording.num_envs or 1)  # each step may begin an episode
    capacity = max(min(buffer.capacity, rows), buffer.view.rows_of_an_item)
    recorder = EnvRecorder(env, recording, episodes, max_steps)
    twin = RecordedBuffer(
        buffer.spec,
        capacity,
        sampler=buffer.sampler,
        view=buffer.view,
        ragged_bytes=buffer._config.ragged_bytes,
    )
    twin.record_to(recording)
    try:
        with twin, suppress(Enough):
            loop(recorded(recorder), twin)
    except Exception as error:
        if error is not recording.refused or not recording.has_other_autoreset(recorder.autoreset):
            raise
    mapping = FieldMapping(buffer.spec, buffer.view, space, 0)
    return LoopCheck(recording, buffer, mapping, recorder.autoreset).findings()


def _ragged_bytes(buffer: ReplayBuffer, filling: FieldMapping, streams: list[list[Row]]) -> int | None:
    """Returns the bytes in which the values of any length of all rows fit, at least those of `buffer`."""
    given = buffer._config.ragged_bytes
    if given is None:
        return None
    # Rows by themselves have two observations. Each wastes a page: a sixteenth of the mean, or 64 bytes.
    each = [2 * filling.ragged_bytes(row) + 64 for stream in streams for row in stream]
    return max(given, 2 * sum(each) + 4 * max(each))


def _check_observations(streams: list[list[Row]], space: Any) -> None:
    for row in (row for stream in streams for row in stream):
        if not space.contains(row.obs):
            raise ValueError(f"the observation of {row} is {row.obs!r}: expected one of {space}")

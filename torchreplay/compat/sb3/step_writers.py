"""Two ways to write Stable-Baselines3's steps: as rows of their own, or as linked rows of episodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.compat.sb3.step_form import Flags, StepForm


class StepWriter(ABC):
    """Writes one step of all environments at a time, and refuses NaN and infinite numbers.

    Args:
        buffer: Where to.
        form: Of the steps.
    """

    linked: bool
    """Whether rows know which episode they belong to."""

    def __init__(self, buffer: ReplayBuffer, form: StepForm) -> None:
        self._form = form
        self._last: Any = None  # a snapshot of the observations that the last step led to
        self._all_run = True  # whether an episode is under way in each environment

    def write(
        self,
        obs: Any,
        next_obs: Any,
        action: Any,
        reward: Any,
        done: Any,
        infos: list[dict[str, Any]],
        reshaped: bool = False,
    ) -> None:
        """Writes a step, whose values are those of Stable-Baselines3's `add`; raises ValueError as that does."""
        form, last = self._form, self._last
        try:  # with the values as they are: the native writer looks at shapes
            continues = form.snapshot(obs) == last
            if not continues:
                form.check_observation("obs", obs)
            form.check_observation("next_obs", next_obs)
            form.check_action_and_reward(action, reward)
            terminated, truncated = form.ends(done, infos, self.linked)
            self._last = None  # until it is written
            if not (continues and self._all_run):
                self._begin(obs, last)
            self._write(obs, next_obs, action, reward, terminated, truncated)
            self._last = form.snapshot(next_obs)
            return
        except (ValueError, TypeError, AttributeError):
            if reshaped:
                raise
        self._last = last
        observations = form.observation("obs", obs), form.observation("next_obs", next_obs)
        self.write(*observations, form.action(action), form.each("reward", reward), done, infos, reshaped=True)

    @abstractmethod
    def _begin(self, obs: Any, last: Any) -> None:
        """Begins episodes where none is under way, or where `obs` is not in `last`, the snapshot after a step."""

    @abstractmethod
    def _write(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, terminated: Flags, truncated: Flags
    ) -> None: ...

    @abstractmethod
    def end_episodes(self) -> bool:
        """Ends the running episodes by truncation; returns whether there were any."""


class RowWriter(StepWriter):
    """Writes a row for each environment, with both observations, under `Rows()`."""

    linked = False

    def __init__(self, buffer: ReplayBuffer, form: StepForm) -> None:
        super().__init__(buffer, form)
        self._extend = buffer.writer().extend

    def _begin(self, obs: Any, last: Any) -> None:
        """Does nothing: rows know no episodes."""

    def _write(self, obs: Any, next_obs: Any, action: Any, reward: Any, terminated: Flags, truncated: Flags) -> None:
        self._extend(
            obs=obs, next_obs=next_obs, action=action, reward=reward, terminated=terminated, truncated=truncated
        )

    def end_episodes(self) -> bool:
        """Returns False: rows know no episodes."""
        return False


class EpisodeWriter(StepWriter):
    """Writes each observation once, under a view that links rows.

    An episode goes on where the observation is the one that the step before led to. Elsewhere, as after `env.reset()`
    in mid-episode, the episode is truncated and another one begins: no item spans both.
    """

    linked = True

    def __init__(self, buffer: ReplayBuffer, form: StepForm) -> None:
        super().__init__(buffer, form)
        self._writer = buffer.writer(num_envs=form.n_envs, autoreset="disabled")
        self._running = form.never
        self._all_run = False

    def _begin(self, obs: Any, last: Any) -> None:
        running = self._running
        if True in running.tolist():
            self._end(running if last is None else running & self._form.unlike(obs, last))
        if not self._all_run:
            self._writer.reset(obs=obs, mask=~self._running)
            self._running, self._all_run = ~self._form.never, True

    def _write(self, obs: Any, next_obs: Any, action: Any, reward: Any, terminated: Flags, truncated: Flags) -> None:
        self._writer.step(obs=next_obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
        if terminated is not self._form.never:
            self._running = ~(terminated | truncated)
            self._all_run = False not in self._running.tolist()

    def end_episodes(self) -> bool:
        """Does what `StepWriter.end_episodes` does."""
        were_running = bool(self._running.any())
        self._end(self._running)
        return were_running

    def _end(self, chosen: Flags) -> None:
        if chosen.any():
            self._writer.end_episode(mask=chosen)
            self._running, self._all_run = self._running & ~chosen, False

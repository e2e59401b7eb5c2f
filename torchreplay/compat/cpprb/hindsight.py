"""`HindsightReplayBuffer`: transitions are added again, with goals that the episode reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchreplay.compat.cpprb.buffers import Batch, PrioritizedReplayBuffer, ReplayBuffer
from torchreplay.compat.cpprb.columns import columns_of, equal_rows
from torchreplay.validation import checked_choice

STRATEGIES = ("future", "episode", "random", "final")


class HindsightReplayBuffer:
    """Hindsight experience replay as cpprb has it: at an episode's end its transitions are added with other goals, too.

    `torchreplay.Hindsight` needs no room for that: it chooses goals when it draws.

    Args:
        size: Transitions that fit, those with other goals included.
        env_dict: As for `ReplayBuffer`. `rew` and `goal` come besides.
        max_episode_len: Transitions of an episode, at most.
        reward_func: `reward_func(next_states, actions, goals)` returns the rewards; all `[n, *shape]`.
        goal_func: `goal_func(states)` returns the goals that they reached; None: the states.
        goal_shape: Of a goal; None: that of a state.
        state: Name of the states.
        action: Name of the actions.
        next_state: Name of the next states.
        strategy: Where goals come from: `"future"`, `"episode"`, `"random"` or `"final"`.
        additional_goals: How many; one for `"final"`.
        prioritized: Whether draws go by priority.
        **options: As for the buffer of the kind.

    Raises:
        ValueError: `strategy` is unknown.
    """

    def __init__(
        self,
        size: float,
        env_dict: dict[str, Any],
        max_episode_len: int,
        reward_func: Callable[..., Any],
        *,
        goal_func: Callable[[NDArray[Any]], Any] | None = None,
        goal_shape: int | Iterable[int] | None = None,
        state: str = "obs",
        action: str = "act",
        next_state: str = "next_obs",
        strategy: str = "future",
        additional_goals: int = 4,
        prioritized: bool = True,
        **options: Any,
    ) -> None:
        self.max_episode_len, self.reward_func = max_episode_len, reward_func
        self.goal_func = goal_func or (lambda states: states)
        self.state, self.action, self.next_state = state, action, next_state
        self.strategy = checked_choice("strategy", strategy, STRATEGIES)
        self.additional_goals = 1 if strategy == "final" else additional_goals
        self.prioritized = prioritized
        goal = {**env_dict[state], "shape": env_dict[state].get("shape", 1) if goal_shape is None else goal_shape}
        kind = PrioritizedReplayBuffer if prioritized else ReplayBuffer
        self.rb = kind(size, {**env_dict, "rew": {}, "goal": goal}, **options)
        self._columns = columns_of(env_dict, options.get("default_dtype"))
        self._goal_shape = tuple(int(n) for n in np.ravel(goal["shape"]))
        self._episode: list[Batch] = []
        self._length = 0
        # So that numpy.random.seed makes a program repeat itself.
        self.rng = np.random.default_rng(np.random.randint(0, 1 << 62))  # noqa: NPY002

    def add(self, **values: Any) -> None:
        """Adds transitions of the episode under way; they can be drawn after its end.

        Raises:
            KeyError: A column is missing.
            ValueError: The episode would have more than `max_episode_len` transitions.
        """
        rows = equal_rows(self._columns, values, None)
        columns = {c.name: c.shown(rows[c.name].astype(c.dtype)) for c in self._columns}
        n = len(next(iter(columns.values())))
        if self._length + n > self.max_episode_len:
            raise ValueError(
                f"the episode has {self._length} transitions, and {n} more exceed max_episode_len="
                f"{self.max_episode_len}: call on_episode_end, or allow for longer episodes"
            )
        self._episode.append(columns)
        self._length += n

    def on_episode_end(self, goal: Any) -> None:
        """Has the episode's transitions drawn from now on: with its own goal, and with goals that it reached.

        Args:
            goal: The episode's own.
        """
        n = self._length
        if not n:
            return
        episode = {c.name: np.concatenate([part[c.name] for part in self._episode]) for c in self._columns}
        self._add_with(episode, np.broadcast_to(np.asarray(goal), (n, *self._goal_shape)))
        states = episode[self.next_state]
        if self.strategy == "random":
            places = self.rng.integers(0, self.rb.get_stored_size(), (self.additional_goals, n))
            states = self.rb._encode_sample(places.ravel())[self.next_state]
            places = np.arange(places.size).reshape(places.shape)
        elif self.strategy == "final":
            places = np.full((1, n), n - 1)
        else:
            earliest = np.arange(n) if self.strategy == "future" else 0
            places = self.rng.integers(earliest, n, (self.additional_goals, n))
        for chosen in places:
            self._add_with(episode, self.goal_func(states[chosen]))
        self._forget_episode()
        self.rb.on_episode_end()

    def _add_with(self, episode: Batch, goals: Any) -> None:
        rewards = self.reward_func(episode[self.next_state], episode[self.action], goals)
        self.rb.add(**{**episode, "goal": goals, "rew": rewards})

    def _forget_episode(self) -> None:
        self._episode, self._length = [], 0

    def sample(self, batch_size: int, **options: Any) -> Batch:
        """Draws transitions, as the buffer beneath does."""
        return self.rb.sample(batch_size, **options)

    def clear(self) -> None:
        """Takes all transitions away, and those of the episode under way."""
        self.rb.clear()
        self._forget_episode()

    def get_stored_size(self) -> int:
        """Returns how many transitions can be drawn."""
        return self.rb.get_stored_size()

    def get_buffer_size(self) -> int:
        """Returns how many transitions fit."""
        return self.rb.get_buffer_size()

    def get_all_transitions(self, shuffle: bool = False) -> Batch:
        """Returns all transitions that can be drawn."""
        return self.rb.get_all_transitions(shuffle)

    def update_priorities(self, indexes: Any, priorities: Any) -> None:
        """Gives transitions new priorities.

        Raises:
            ValueError: The buffer has no priorities, or as `PrioritizedReplayBuffer.update_priorities`.
        """
        self._prioritized().update_priorities(indexes, priorities)

    def get_max_priority(self) -> float:
        """Returns the largest priority so far.

        Raises:
            ValueError: The buffer has no priorities.
        """
        return self._prioritized().get_max_priority()

    def _prioritized(self) -> PrioritizedReplayBuffer:
        if not isinstance(self.rb, PrioritizedReplayBuffer):
            raise ValueError("the buffer was made with prioritized=False: it has no priorities")
        return self.rb

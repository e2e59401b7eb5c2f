"""`SharedHerReplayBuffer`: hindsight experience replay for Stable-Baselines3."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, NoReturn

from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.her.goal_selection_strategy import KEY_TO_GOAL_STRATEGY, GoalSelectionStrategy
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer
from torch import Tensor

from torchreplay.compat.sb3.buffers import SharedReplayBuffer
from torchreplay.schema.hindsight import Hindsight
from torchreplay.schema.views import View
from torchreplay.validation import checked_int


class EnvironmentReward:
    """The reward of a goal, as the learner's environment computes it. It stays in the process of that environment."""

    def __init__(self, env: VecEnv | None) -> None:
        self.env = env

    def __call__(self, achieved: Tensor, desired: Tensor) -> Any:
        """Returns the rewards, `[B]`, for having achieved the one goal while the other was desired."""
        if self.env is None:
            raise AssertionError("the buffer has no environment to compute rewards with: call buffer.set_env(env)")
        infos: list[dict[str, Any]] = [{}] * len(achieved)
        return self.env.env_method("compute_reward", achieved.numpy(), desired.numpy(), infos, indices=[0])[0]

    def __reduce__(self) -> NoReturn:
        raise TypeError("the environment of a learner does not travel")


class SharedHerReplayBuffer(SharedReplayBuffer, HerReplayBuffer):  # type: ignore[override]
    """Stable-Baselines3's `HerReplayBuffer` over a torchreplay buffer with the view `Hindsight`.

    Each observation is stored once. The steps of an episode can be drawn when it has ended.

    Args:
        buffer_size: As for `SharedReplayBuffer`.
        observation_space: With `achieved_goal` and `desired_goal`.
        action_space: As for `SharedReplayBuffer`.
        env: Computes rewards; Stable-Baselines3 gives it by itself.
        n_sampled_goal: Virtual transitions for each real one: a draw has another goal with probability k / (k + 1).
        goal_selection_strategy: `"future"`, `"final"` or `"episode"`.
        copy_info_dict: Must be False: infos are Python objects, and do not lie in shared memory.
        **kwargs: As for `SharedReplayBuffer`.

    Raises:
        NotImplementedError: `copy_info_dict` is True.
        KeyError: The strategy is unknown.
    """

    _too_early: ClassVar[type[Exception]] = RuntimeError

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv,
        *,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        **kwargs: Any,
    ) -> None:
        if copy_info_dict:
            raise NotImplementedError(
                "copy_info_dict=True: infos are Python objects, which do not lie in shared memory. Put what "
                "compute_reward needs into the observation"
            )
        if isinstance(goal_selection_strategy, str):
            goal_selection_strategy = KEY_TO_GOAL_STRATEGY[goal_selection_strategy.lower()]
        if not isinstance(goal_selection_strategy, GoalSelectionStrategy):
            raise AssertionError(
                f"goal_selection_strategy is {goal_selection_strategy!r}: expected future, final or episode"
            )
        self.copy_info_dict = False
        self.goal_selection_strategy = goal_selection_strategy
        self.n_sampled_goal = checked_int("n_sampled_goal", n_sampled_goal, 0)
        self.her_ratio = 1 - 1 / (n_sampled_goal + 1)
        self._reward = EnvironmentReward(env)
        super().__init__(buffer_size, observation_space, action_space, **kwargs)
        if self.n_steps != 1:
            raise NotImplementedError(f"n_steps is {self.n_steps}: hindsight has one-step transitions only")

    @property
    def env(self) -> VecEnv | None:
        """The environment that computes rewards; `set_env` gives one to a buffer that was loaded."""
        return self._reward.env

    @env.setter
    def env(self, env: VecEnv | None) -> None:
        self._reward.env = env

    @property
    def _linked(self) -> bool:
        return True

    def _view(self) -> View:
        strategy = self.goal_selection_strategy.name.lower()
        return Hindsight(self._reward, strategy=strategy, share=self.her_ratio, gamma=self.gamma)

    def truncate_last_trajectory(self) -> None:
        """Ends the episodes under way, so that their steps can be drawn."""
        if self._writer is not None and self._writer.end_episodes():
            warnings.warn("The last trajectory in the replay buffer will be truncated.", stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the experience itself, without the environment."""
        state = super().__getstate__()
        del state["_reward"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reward = EnvironmentReward(None)
        super().__setstate__(state)

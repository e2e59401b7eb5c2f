"""Batches in the form that Stable-Baselines3's learners take."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from torchreplay.schema.batch import ReplayBatch


class PrioritizedSamples(NamedTuple):
    """What Stable-Baselines3's samples have, with importance weights and keys.

    Attributes:
        observations: `[B, *shape]`, or a dict of such.
        actions: `[B, action_dim]`.
        next_observations: As `observations`.
        dones: float32 `[B, 1]`: 1 where the episode terminated, 0 where it was cut short.
        rewards: float32 `[B, 1]`.
        discounts: float32 `[B, 1]` for n-step returns, else None.
        weights: float32 `[B, 1]`.
        keys: int64 `[B]`, on the CPU: which items these are.
    """

    observations: Any
    actions: Tensor
    next_observations: Any
    dones: Tensor
    rewards: Tensor
    discounts: Tensor | None
    weights: Tensor
    keys: Tensor


class SampleBuilder:
    """Makes Stable-Baselines3's samples of torchreplay's batches.

    Args:
        observation_space: Of one environment.
        n_steps: Steps of the returns.
        gamma: Discount of a step.
    """

    def __init__(self, observation_space: spaces.Space[Any], n_steps: int, gamma: float) -> None:
        parts = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {"": observation_space}
        self._columns = {name for name, part in parts.items() if not part.shape}
        self._kind = DictReplayBufferSamples if isinstance(observation_space, spaces.Dict) else ReplayBufferSamples
        self._n_step_returns = n_steps > 1
        self._largest_sum = sum(gamma**k for k in range(n_steps))

    def samples(self, batch: ReplayBatch, env: VecNormalize | None, device: torch.device) -> Any:
        """Returns the samples of a batch on `device`, normalised as `env` says."""
        return self._kind(**self._parts(batch, env, device))

    def prioritized(self, batch: ReplayBatch, env: VecNormalize | None, device: torch.device) -> PrioritizedSamples:
        """Returns the samples of a batch, with weights and keys."""
        parts = self._parts(batch, env, device)
        return PrioritizedSamples(**parts, weights=batch["weight"].to(device).unsqueeze(1), keys=batch["key"])

    def _parts(self, batch: ReplayBatch, env: VecNormalize | None, device: torch.device) -> dict[str, Any]:
        if env is not None:
            batch = batch | {name: self._normalized(batch[name], env) for name in ("obs", "next_obs")}
            batch["reward"] = self._normalized_reward(batch["reward"], env)
        if device.type != "cpu":
            batch = batch.to(device)
        action = batch["action"]
        return {
            "observations": self._observations(batch["obs"]),
            "actions": action.reshape(len(action), -1),
            "next_observations": self._observations(batch["next_obs"]),
            "dones": batch["terminated"].unsqueeze(1).to(torch.float32),
            "rewards": batch["reward"].unsqueeze(1),
            "discounts": batch["discount"].unsqueeze(1) if self._n_step_returns else None,
        }

    def _observations(self, values: Any) -> Any:
        """Returns observations, those of `Discrete` spaces as columns."""
        if isinstance(values, dict):
            return {name: v.unsqueeze(1) if name in self._columns else v for name, v in values.items()}
        return values.unsqueeze(1) if self._columns else values

    def _normalized(self, values: Any, env: VecNormalize) -> Any:
        if isinstance(values, dict):
            normal = env.normalize_obs({name: v.numpy() for name, v in values.items()})
            return {name: torch.as_tensor(v) for name, v in normal.items()}  # type: ignore[union-attr]
        return torch.as_tensor(env.normalize_obs(values.numpy()))

    def _normalized_reward(self, reward: Tensor, env: VecNormalize) -> Tensor:
        """Returns normalised returns. They are clipped where as many clipped rewards would end, one by one."""
        if not self._n_step_returns or not env.norm_reward:
            return torch.as_tensor(env.normalize_reward(reward.numpy()))
        bound = env.clip_reward * self._largest_sum
        scaled = reward.numpy() / np.sqrt(env.ret_rms.var + env.epsilon)
        return torch.as_tensor(np.clip(scaled, -bound, bound).astype(np.float32))

"""`train`: cpprb's loop of playing and learning, for Gymnasium's environments and older ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from torchreplay.compat.cpprb.buffers import PrioritizedReplayBuffer, ReplayBuffer


def train(
    buffer: ReplayBuffer,
    env: Any,
    get_action: Callable[..., Any],
    update_policy: Callable[..., Any],
    *,
    max_steps: int = 1_000_000,
    max_episodes: int | None = None,
    batch_size: int = 64,
    n_warmups: int = 0,
    after_step: Callable[..., dict[str, Any]] | None = None,
    done_check: Callable[[dict[str, Any]], Any] | None = None,
    obs_update: Callable[[dict[str, Any]], Any] | None = None,
    rew_sum: Callable[[float, dict[str, Any]], float] | None = None,
    episode_callback: Callable[[int, int, float], Any] | None = None,
    logger: logging.Logger | None = None,
) -> None:
    """Plays, adds, draws and learns, step by step.

    Args:
        buffer: Where transitions go, and batches come from.
        env: An environment; `step` may return four values or Gymnasium's five.
        get_action: `get_action(obs, step, episode, is_warmup)`.
        update_policy: `update_policy(sample, step, episode)` learns, and returns |TD|.
        max_steps: Steps, at most.
        max_episodes: Episodes, at most.
        batch_size: Of the samples.
        n_warmups: Steps before the first sample.
        after_step: `after_step(obs, action, what_step_returned, step, episode)` returns the transition; None: `obs`,
            `act`, `rew`, `next_obs` and `done`. `done` says that the episode has terminated.
        done_check: Says of a transition whether the episode ends there; None: the environment does.
        obs_update: Returns the next observation of a transition; None: its `next_obs`.
        rew_sum: Adds a transition's reward to the episode's; None: `rew` is added.
        episode_callback: `episode_callback(episode, step_in_the_episode, reward)` at each end.
        logger: For a line an episode; None: that of this module.
    """
    logger = logger or logging.getLogger(__name__)
    obs = _reset(env)
    episode = episode_step = 0
    reward, start = 0.0, time.perf_counter()
    for step in range(max_steps):
        is_warmup = step < n_warmups
        action = get_action(obs, step, episode, is_warmup)
        returned = env.step(action)
        made = after_step(obs, action, returned, step, episode) if after_step else _transition(obs, action, returned)
        buffer.add(**made)
        if buffer.get_stored_size() and not is_warmup:
            sample = buffer.sample(batch_size)
            td = update_policy(sample, step, episode)
            if isinstance(buffer, PrioritizedReplayBuffer):
                buffer.update_priorities(sample["indexes"], td)
        reward = rew_sum(reward, made) if rew_sum else reward + made["rew"]
        if done_check(made) if done_check else any(returned[2:-1]):
            rate = (episode_step + 1) / max(time.perf_counter() - start, 1e-9)
            logger.info("episode %d: %d steps, reward %.2f, %.2f steps/s", episode, episode_step + 1, reward, rate)
            if episode_callback:
                episode_callback(episode, episode_step, reward)
            buffer.on_episode_end()
            episode += 1
            if episode == max_episodes:
                return
            obs, episode_step = _reset(env), 0
            reward, start = 0.0, time.perf_counter()
        else:
            obs = obs_update(made) if obs_update else made["next_obs"]
            episode_step += 1


def _reset(env: Any) -> Any:
    found = env.reset()
    gymnasium = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)
    return found[0] if gymnasium else found


def _transition(obs: Any, action: Any, returned: tuple[Any, ...]) -> dict[str, Any]:
    return {"obs": obs, "act": action, "rew": returned[1], "next_obs": returned[0], "done": returned[2]}

"""DQN, SAC and TD3 of Stable-Baselines3 with prioritized replay (Schaul et al. 2016).

Each loss is weighted by the importance weights, and its TD errors go back to the buffer. Everything else is theirs.
"""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.utils import polyak_update
from torch import Tensor

from torchreplay.compat.sb3.buffers import PrioritizedReplayBuffer
from torchreplay.compat.sb3.samples import PrioritizedSamples

THEIRS = (ReplayBuffer, DictReplayBuffer, NStepReplayBuffer)
"""What their learners take where no `replay_buffer_class` is named."""


class _Prioritized(OffPolicyAlgorithm):
    """What the three have in common: a prioritized buffer.

    Raises:
        TypeError: `replay_buffer_class` is no `PrioritizedReplayBuffer`.
    """

    replay_buffer: PrioritizedReplayBuffer

    @classmethod
    def load(cls, path: Any, *args: Any, **kwargs: Any) -> Self:
        """Loads a model, also one that Stable-Baselines3's own learner has saved."""
        return super().load(path, *args, _is_loaded=True, **kwargs)

    def load_replay_buffer(self, path: Any, truncate_last_traj: bool = True) -> None:
        """Takes the experience of a file that `save_replay_buffer` wrote.

        Raises:
            TypeError: It holds another buffer than a `PrioritizedReplayBuffer`. The model keeps its own.
        """
        own = self.replay_buffer
        super().load_replay_buffer(path, truncate_last_traj)
        found: object = self.replay_buffer
        if not isinstance(found, PrioritizedReplayBuffer):
            self.replay_buffer = own
            raise TypeError(
                f"the file holds a {type(found).__name__}, which takes no TD errors: expected a PrioritizedReplayBuffer"
            )

    def _setup_model(self) -> None:
        if self.__dict__.pop("_is_loaded", False) and self.replay_buffer_class in THEIRS:
            self.replay_buffer_class = None  # what their learner chose where none was named
        if self.replay_buffer_class is None:
            self.replay_buffer_class = PrioritizedReplayBuffer
            self.replay_buffer_kwargs = {"n_steps": self.n_steps, "gamma": self.gamma} | self.replay_buffer_kwargs
        elif not issubclass(self.replay_buffer_class, PrioritizedReplayBuffer):
            raise TypeError(
                f"replay_buffer_class is {self.replay_buffer_class.__name__}: expected a PrioritizedReplayBuffer, "
                f"or none at all"
            )
        with warnings.catch_warnings():
            if "n_steps" in self.replay_buffer_kwargs:  # SB3 warns of buffers that are not its own
                warnings.filterwarnings("ignore", "`n_steps=")
            super()._setup_model()

    def _draw(self, batch_size: int) -> PrioritizedSamples:
        return self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)

    def _target(self, drawn: PrioritizedSamples, next_values: Tensor) -> Tensor:
        discounts = self.gamma if drawn.discounts is None else drawn.discounts
        return drawn.rewards + (1 - drawn.dones) * discounts * next_values

    def _weighted_loss(self, drawn: PrioritizedSamples, values: tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Returns the critics' squared errors, weighted; feeds back the mean size of their TD errors."""
        errors = torch.cat(values, dim=1) - target
        self.replay_buffer.update_priorities(drawn, errors.detach().abs().mean(dim=1))
        return (drawn.weights * errors.square()).mean(dim=0).sum()


class PrioritizedDQN(_Prioritized, DQN):
    """Stable-Baselines3's `DQN` with prioritized replay; the arguments are the same."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Does `gradient_steps` updates."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        losses = [self._update(self._draw(batch_size)) for _ in range(gradient_steps)]
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/loss", np.mean(losses))

    def _update(self, drawn: PrioritizedSamples) -> float:
        with torch.no_grad():
            target = self._target(drawn, self.q_net_target(drawn.next_observations).amax(dim=1, keepdim=True))
        values = self.q_net(drawn.observations).gather(1, drawn.actions.long())
        loss = (drawn.weights * F.smooth_l1_loss(values, target, reduction="none")).mean()
        self.policy.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
        self.policy.optimizer.step()
        self.replay_buffer.update_priorities(drawn, values.detach() - target)
        return loss.item()


class PrioritizedSAC(_Prioritized, SAC):
    """Stable-Baselines3's `SAC` with prioritized replay; the arguments are the same.

    An item's TD error is the mean size of the errors of the critics.
    """

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Does `gradient_steps` updates."""
        self.policy.set_training_mode(True)
        optimizers = [self.actor.optimizer, self.critic.optimizer]
        self._update_learning_rate(optimizers + [o for o in (self.ent_coef_optimizer,) if o is not None])
        logs = []
        for step in range(gradient_steps):
            logs.append(self._update(self._draw(batch_size)))
            if step % self.target_update_interval == 0:
                polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
                polyak_update(self.batch_norm_stats, self.batch_norm_stats_target, 1.0)
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name in logs[0]:
            self.logger.record(f"train/{name}", np.mean([log[name] for log in logs]))

    def _update(self, drawn: PrioritizedSamples) -> dict[str, float]:
        if self.use_sde:
            self.actor.reset_noise()
        actions, log_prob = self.actor.action_log_prob(drawn.observations)
        log_prob = log_prob.reshape(-1, 1)
        entropy, log = self._update_entropy(log_prob)
        log["critic_loss"] = self._update_critic(drawn, entropy)
        q = torch.cat(self.critic(drawn.observations, actions), dim=1).amin(dim=1, keepdim=True)
        loss = (entropy * log_prob - q).mean()
        _step(self.actor.optimizer, loss)
        return log | {"actor_loss": loss.item()}

    def _update_entropy(self, log_prob: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Returns the entropy coefficient before its update, and what to log."""
        if self.ent_coef_optimizer is None or self.log_ent_coef is None:
            return self.ent_coef_tensor, {"ent_coef": self.ent_coef_tensor.item()}
        coefficient = self.log_ent_coef.detach().exp()
        loss = -(self.log_ent_coef * (log_prob + float(self.target_entropy)).detach()).mean()
        _step(self.ent_coef_optimizer, loss)
        return coefficient, {"ent_coef": coefficient.item(), "ent_coef_loss": loss.item()}

    def _update_critic(self, drawn: PrioritizedSamples, entropy: Tensor) -> float:
        with torch.no_grad():
            actions, log_prob = self.actor.action_log_prob(drawn.next_observations)
            q = torch.cat(self.critic_target(drawn.next_observations, actions), dim=1).amin(dim=1, keepdim=True)
            target = self._target(drawn, q - entropy * log_prob.reshape(-1, 1))
        values = self.critic(drawn.observations, drawn.actions)
        loss = 0.5 * self._weighted_loss(drawn, values, target)
        _step(self.critic.optimizer, loss)
        return loss.item()


class PrioritizedTD3(_Prioritized, TD3):
    """Stable-Baselines3's `TD3` with prioritized replay; the arguments are the same.

    An item's TD error is the mean size of the errors of the critics.
    """

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Does `gradient_steps` updates."""
        self.policy.set_training_mode(True)
        self._update_learning_rate([self.actor.optimizer, self.critic.optimizer])
        critic_losses, actor_losses = [], []
        for _ in range(gradient_steps):
            self._n_updates += 1
            drawn = self._draw(batch_size)
            critic_losses.append(self._update_critic(drawn))
            if self._n_updates % self.policy_delay == 0:
                actor_losses.append(self._update_actor(drawn))
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if actor_losses:
            self.logger.record("train/actor_loss", np.mean(actor_losses))
        self.logger.record("train/critic_loss", np.mean(critic_losses))

    def _update_critic(self, drawn: PrioritizedSamples) -> float:
        with torch.no_grad():
            limit = self.target_noise_clip
            noise = torch.empty_like(drawn.actions).normal_(0, self.target_policy_noise).clamp(-limit, limit)
            actions = (self.actor_target(drawn.next_observations) + noise).clamp(-1, 1)
            q = torch.cat(self.critic_target(drawn.next_observations, actions), dim=1).amin(dim=1, keepdim=True)
            target = self._target(drawn, q)
        loss = self._weighted_loss(drawn, self.critic(drawn.observations, drawn.actions), target)
        _step(self.critic.optimizer, loss)
        return loss.item()

    def _update_actor(self, drawn: PrioritizedSamples) -> float:
        loss = -self.critic.q1_forward(drawn.observations, self.actor(drawn.observations)).mean()
        _step(self.actor.optimizer, loss)
        polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
        polyak_update(self.actor.parameters(), self.actor_target.parameters(), self.tau)
        polyak_update(self.critic_batch_norm_stats, self.critic_batch_norm_stats_target, 1.0)
        polyak_update(self.actor_batch_norm_stats, self.actor_batch_norm_stats_target, 1.0)
        return loss.item()


def _step(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()

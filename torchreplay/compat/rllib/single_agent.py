"""RLlib's episode replay buffers, uniform and prioritized, for algorithms of one agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from numpy.typing import NDArray
from ray.rllib.core import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer as RLlibEpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import (
    PrioritizedEpisodeReplayBuffer as RLlibPrioritizedEpisodeReplayBuffer,
)

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.compat.rllib.module_replay import ModuleReplay, each_of, items_of, refuse_other_samples
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.samplers import Prioritized, Sampler, Uniform
from torchreplay.schema.views import Transitions
from torchreplay.validation import checked_int


class EpisodeReplayBuffer(RLlibEpisodeReplayBuffer):
    """RLlib's `EpisodeReplayBuffer` over a torchreplay buffer, for transitions of one agent.

    Name it in DQN's config as text: `replay_buffer_config={"type": "torchreplay.compat.rllib.EpisodeReplayBuffer"}`.
    What a row consists of is learned from the first episode. Observations are stored once.

    Pickles and `get_state` carry the experience. `replay` is the memory itself, for explorers in other processes.

    Args:
        capacity: Rows that fit. An episode of T steps takes T + 1.
        batch_size_B: Transitions of a sample, where `sample` gets no other number.
        n_step: Steps of the returns: the `n_step` of the algorithm's config.
        gamma: Discount of a step, for `n_step` above 1: the `gamma` of the algorithm's config.
        seed: Of the draws; None: a random one.
        metrics_num_episodes_for_smoothing: Of RLlib's metrics.
        **ignored: As RLlib does, other entries of the config.

    Raises:
        ValueError: A number is out of range, or `n_step` is a range.
    """

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        batch_size_B: int = 16,  # noqa: N803 - RLlib's name
        n_step: int = 1,
        gamma: float = 0.99,
        seed: int | None = None,
        metrics_num_episodes_for_smoothing: int = 100,
        **ignored: Any,
    ) -> None:
        RLlibEpisodeReplayBuffer.__init__(
            self,
            checked_int("capacity", capacity, 2),
            batch_size_B=checked_int("batch_size_B", batch_size_B, 1),
            batch_length_T=1,
            metrics_num_episodes_for_smoothing=metrics_num_episodes_for_smoothing,
        )
        self._view = Transitions(n_step, gamma, observation=("obs", "t"))
        self._module = ModuleReplay(self.capacity, self._view, self._sampler(), seed)

    def _sampler(self) -> Sampler:
        return Uniform()

    @property
    def replay(self) -> ReplayBuffer | None:
        """The `torchreplay.ReplayBuffer` beneath; None before the first `add`."""
        return self._module.replay

    @property
    def gaps(self) -> int:
        """Parts that did not follow the part before of their episode, as one was lost, or came in another order."""
        return self._module.gaps

    @property
    def repeated_timesteps(self) -> int:
        """Steps that came again. They were not written again."""
        return self._module.repeated_timesteps

    def add(  # type: ignore[override]
        self, episodes: Sequence[SingleAgentEpisode] | SingleAgentEpisode, weight: float | None = None
    ) -> None:
        """Adds episodes, or further parts of episodes that were added before.

        A part goes on where the part before of the same `id_` has ended. Where it begins at another step, or with
        another observation, the episode is truncated there, and no item spans both. Steps that are there are not
        written again. Both are warned about once, and counted.

        Args:
            episodes: One, or several. Each episode has an `id_` of its own.
            weight: Raw priority of the new steps; None: the largest so far.

        Raises:
            TypeError: One is no `SingleAgentEpisode`; nothing is written.
            ValueError: A value is of another shape, or does not cast to its field. What came before it stays.
        """
        given = each_of(episodes, SingleAgentEpisode)
        module, steps = self._module, 0
        known, overwritten = module.num_episodes, module.rows_overwritten
        for episode in given:
            if len(episode):
                steps += module.write(episode, weight)
        self._num_timesteps_added += steps
        added = module.num_episodes - known
        evicted = len(module.evict())
        self._num_episodes_evicted += evicted
        self._log_added(added, steps, evicted, module.rows_overwritten - overwritten)

    def sample(  # type: ignore[override]
        self,
        num_items: int | None = None,
        *,
        batch_size_B: int | None = None,  # noqa: N803 - RLlib's names
        batch_length_T: int | None = None,  # noqa: N803
        n_step: int | tuple[int, int] | None = None,
        beta: float | None = None,
        gamma: float | None = None,
        include_infos: bool = False,
        include_extra_model_outputs: bool = False,
        sample_episodes: bool | None = True,
        to_numpy: bool = False,
        lookback: int = 0,
        min_batch_length_T: int = 0,  # noqa: N803
        **ignored: Any,
    ) -> list[SingleAgentEpisode]:
        """Draws transitions, with replacement: episodes of one step, of n-step reward and next observation.

        Args:
            num_items: Transitions.
            batch_size_B: The same.
            batch_length_T: None, 0 or 1: sequences are not drawn.
            n_step: None, or the buffer's.
            beta: Exponent of the weights; None: the buffer's.
            gamma: None, or the buffer's.
            include_infos: False: infos are not stored.
            include_extra_model_outputs: False: they are not stored.
            sample_episodes: True.
            to_numpy: Whether the episodes hold arrays instead of lists.
            lookback: 0.
            min_batch_length_T: 0 or 1.
            **ignored: As RLlib does.

        Returns:
            Episodes with `weights` and `n_step` among their extra model outputs. `n_step` is smaller where the episode
            ends before.

        Raises:
            ValueError: There is nothing to draw, or an argument asks for what the buffer does not hold.
        """
        asked = {
            "batch_length_T": batch_length_T,
            "include_infos": include_infos,
            "include_extra_model_outputs": include_extra_model_outputs,
            "sample_episodes": sample_episodes,
            "lookback": lookback,
            "min_batch_length_T": min_batch_length_T,
        }
        refuse_other_samples(self._view, n_step, gamma, asked)
        batch = self._module.draw(items_of(num_items, batch_size_B, self.batch_size_B), beta)
        self._log_sampled(batch)
        return self._module.episodes_of(batch, to_numpy)

    # Figures

    def _log_added(self, episodes: int, steps: int, evicted_episodes: int, evicted_steps: int) -> None:
        figures: dict[str, Any] = {"episodes_added": episodes, "steps_added": steps}
        figures |= {"episodes_evicted": evicted_episodes, "steps_evicted": evicted_steps}
        own: dict[str, Any] = {f"num_{name.replace('steps', 'env_steps')}": value for name, value in figures.items()}
        self._update_add_metrics(**own, **_by_agent({f"num_{name}": value for name, value in figures.items()}))

    def _log_sampled(self, batch: ReplayBatch) -> None:
        n, unique = batch.batch_size, len(batch["key"].unique())
        self.sampled_timesteps += n
        episodes, n_step = len(batch["episode"].unique()), float((batch["next_t"] - batch["t"]).float().mean())
        common: dict[str, Any] = {"num_episodes_per_sample": episodes, "sampled_n_step": n_step, "num_resamples": 0}
        each = common | {"num_steps_sampled": n, "num_steps_per_sample": unique}
        self._update_sample_metrics(
            **common, num_env_steps_sampled=n, num_env_steps_per_sample=unique, **_by_agent(each)
        )

    def get_num_episodes(self, module_id: str | None = None) -> int:
        """Returns of how many episodes rows are held."""
        return self._module.num_episodes

    def get_num_timesteps(self, module_id: str | None = None) -> int:
        """Returns how many transitions can be drawn."""
        return self._module.num_timesteps

    # State

    def get_state(self) -> dict[str, Any]:
        """Returns the experience itself, for checkpoints."""
        return {name: getattr(self, name) for name in STATE} | {"module": self._module.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes the experience of `get_state`, in memory of its own. Episodes under way go on as new ones.

        Raises:
            CheckpointError: It is damaged; what was there stays.
        """
        self._module.set_state(state["module"])
        for name in STATE:
            setattr(self, name, state[name])

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        beside, slots = state  # RLlib's class has both
        return {name: value for name, value in (beside | slots).items() if name != "metrics"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RLlibEpisodeReplayBuffer.__init__(self)  # its metrics begin anew
        for name, value in state.items():
            setattr(self, name, value)


STATE: Final = ("_num_episodes_evicted", "_num_timesteps_added", "sampled_timesteps")
"""What a state has beside the module's."""


class PrioritizedEpisodeReplayBuffer(EpisodeReplayBuffer, RLlibPrioritizedEpisodeReplayBuffer):  # type: ignore[misc]
    """RLlib's `PrioritizedEpisodeReplayBuffer` over a torchreplay buffer, for transitions of one agent.

    Args:
        capacity: As for `EpisodeReplayBuffer`.
        alpha: Exponent of the priorities.
        beta: Exponent of the weights.
        eps: What is added to each priority.
        **options: As for `EpisodeReplayBuffer`.
    """

    def __init__(
        self, capacity: int = 10_000, *, alpha: float = 1.0, beta: float = 0.4, eps: float = 1e-6, **options: Any
    ) -> None:
        self._prioritized = Prioritized(alpha, beta, eps, initial="max_seen")
        super().__init__(capacity, **options)

    def _sampler(self) -> Sampler:
        return self._prioritized

    def update_priorities(self, priorities: NDArray[Any] | torch.Tensor, module_id: str | None = None) -> None:
        """Feeds TD errors back for the last sample, and forgets it.

        Args:
            priorities: One for each of its transitions, in their order.
            module_id: Without effect: there is one module.

        Raises:
            ValueError: There was no sample, there are not as many as transitions, or some are NaN or infinite.
        """
        self._module.update_priorities(priorities)


def _by_agent(figures: dict[str, Any]) -> dict[str, Any]:
    """Returns RLlib's figures by agent and by module. There is one of each."""
    names = {"agent": DEFAULT_AGENT_ID, "module": DEFAULT_MODULE_ID}
    return {f"{kind}_to_{name}": {which: value} for kind, which in names.items() for name, value in figures.items()}

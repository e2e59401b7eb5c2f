"""RLlib's episode replay buffers, uniform and prioritized, for algorithms of several agents and modules."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from numpy.typing import NDArray
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer as RLlibEpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.multi_agent_episode_buffer import (
    MultiAgentEpisodeReplayBuffer as RLlibMultiAgentEpisodeReplayBuffer,
)
from ray.rllib.utils.replay_buffers.multi_agent_prioritized_episode_buffer import (
    MultiAgentPrioritizedEpisodeReplayBuffer as RLlibMultiAgentPrioritizedEpisodeReplayBuffer,
)

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.compat.rllib.module_replay import ModuleReplay, each_of, items_of, refuse_other_samples
from torchreplay.compat.rllib.spans import Span, joined, missing, steps_in
from torchreplay.schema.samplers import Prioritized, Sampler, Uniform
from torchreplay.schema.views import Transitions
from torchreplay.validation import checked_int, checked_number


class MultiAgentEpisodeReplayBuffer(RLlibMultiAgentEpisodeReplayBuffer):
    """RLlib's `MultiAgentEpisodeReplayBuffer` over a torchreplay buffer for each module.

    Name it in DQN's config as text:
    `replay_buffer_config={"type": "torchreplay.compat.rllib.MultiAgentEpisodeReplayBuffer"}`. What a module's row
    consists of is learned from the first episode of one of its agents. Agents that share a module share its buffer, and
    no transition spans two of them.

    Pickles and `get_state` carry the experience. `replays` are the buffers, for explorers in other processes.

    Args:
        capacity: Rows that fit into each module's buffer. An agent's episode of T steps takes T + 1.
        batch_size_B: Transitions of each module in a sample, where `sample` gets no other number.
        n_step: Steps of the returns: the `n_step` of the algorithm's config.
        gamma: Discount of a step, for `n_step` above 1: the `gamma` of the algorithm's config.
        seed: Of the draws of the first module, one more for each further one; None: random ones.
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
        self._seed = None if seed is None else checked_int("seed", seed, 0, (1 << 63) - 1)
        self._modules: dict[Any, ModuleReplay] = {}
        self._env_steps: dict[str, EnvSteps] = {}  # by the multi-agent episode
        self._num_agent_timesteps_added = 0
        self._num_module_timesteps_added = defaultdict(int)
        self._num_module_episodes_evicted = defaultdict(int)
        self.sampled_timesteps_per_module = defaultdict(int)

    def _sampler(self) -> Sampler:
        return Uniform()

    def _new_module(self, number: int) -> ModuleReplay:
        seed = None if self._seed is None else self._seed + number
        return ModuleReplay(self.capacity, self._view, self._sampler(), seed)

    @property
    def replays(self) -> dict[Any, ReplayBuffer]:
        """The `torchreplay.ReplayBuffer` of each module that has had a step."""
        return {which: module.replay for which, module in self._modules.items() if module.replay is not None}

    @property
    def gaps(self) -> int:
        """Parts of agents' episodes that did not follow the part before: one was lost, or came in another order."""
        return sum(module.gaps for module in self._modules.values())

    @property
    def repeated_timesteps(self) -> int:
        """Agents' steps that came again. They were not written again."""
        return sum(module.repeated_timesteps for module in self._modules.values())

    # Writing

    def add(  # type: ignore[override]
        self,
        episodes: Sequence[MultiAgentEpisode] | MultiAgentEpisode,
        weight: float | Mapping[Any, float] | None = None,
    ) -> None:
        """Adds episodes, or further parts of episodes that were added before: each agent's steps to its module.

        An agent's part goes on where its part before has ended, as in `EpisodeReplayBuffer.add`. An action whose next
        observation has not come yet is written with the part that has it.

        Args:
            episodes: One, or several. Each episode has an `id_` of its own.
            weight: Raw priority of the new steps, or one for each module; None: the largest of the module so far.

        Raises:
            TypeError: One is no `MultiAgentEpisode`, or a weight is no number; nothing is written.
            ValueError: A weight is negative, NaN or infinite; nothing is written. Or a value is of another shape, or
                does not cast to its field; what came before it stays.
        """
        given = each_of(episodes, MultiAgentEpisode)
        weights: dict[Any, float] = {}
        other = None
        if isinstance(weight, Mapping):
            weights = {which: checked_number("weight", value, 0) for which, value in weight.items()}
        elif weight is not None:
            other = checked_number("weight", weight, 0)
        tally = Tally()
        for episode in given:
            env_steps = self._begin(episode, tally)
            for agent_id in sorted(episode.agent_episodes, key=str):  # RLlib's order changes from run to run
                part = episode.agent_episodes[agent_id]
                if not len(part):
                    continue
                module_id = episode.module_for(agent_id)
                module = self._modules.setdefault(module_id, self._new_module(len(self._modules)))
                known, steps = module.num_episodes, 0
                try:
                    steps = module.write(part, weights.get(module_id, other))
                finally:
                    env_steps.agents += module.num_episodes - known
                self._num_agent_timesteps_added += steps
                self._num_module_timesteps_added[module_id] += steps
                tally.count("added", agent_id, module_id, module.num_episodes - known, steps)
            if episode.is_done and not env_steps.agents:  # no agent has had a step
                del self._env_steps[episode.id_]
        self._evict(tally)
        self._update_add_metrics(**tally.figures)

    def _begin(self, episode: MultiAgentEpisode, tally: Tally) -> EnvSteps:
        """Takes in which environment steps an episode brings, and returns those of it that were added so far."""
        new = episode.id_ not in self._env_steps
        held = self._env_steps.setdefault(episode.id_, EnvSteps([], 0))
        steps = missing(held.spans, (episode.env_t_started, episode.env_t))
        held.spans = joined([*held.spans, *steps])
        self._num_timesteps_added += steps_in(steps)
        tally.count_whole("added", int(new), steps_in(steps))
        return held

    def _evict(self, tally: Tally) -> None:
        """Forgets episodes that have no row left."""
        for module_id, module in self._modules.items():
            for held in module.evict():
                self._num_module_episodes_evicted[module_id] += 1
                tally.count("evicted", held.origin.agent_id, module_id, 1, steps_in(held.spans))
                env_steps = self._env_steps[held.origin.multi_agent_episode_id]
                env_steps.agents -= 1
                if not env_steps.agents:
                    del self._env_steps[held.origin.multi_agent_episode_id]
                    self._num_episodes_evicted += 1
                    tally.count_whole("evicted", 1, steps_in(env_steps.spans))

    # Drawing

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
        replay_mode: str = "independent",
        modules_to_sample: Iterable[Any] | None = None,
        sample_episodes: bool | None = True,
        to_numpy: bool = False,
        lookback: int = 0,
        min_batch_length_T: int = 0,  # noqa: N803
        **ignored: Any,
    ) -> list[SingleAgentEpisode]:
        """Draws transitions of each module, with replacement, as episodes of one step.

        A module's come in the order in which RLlib's learner makes its batch of them: those of one agent in one
        episode lie together. So its TD errors are in their order.

        Args:
            num_items: Transitions of each module.
            batch_size_B: The same.
            batch_length_T: None, 0 or 1: sequences are not drawn.
            n_step: None, or the buffer's.
            beta: Exponent of the weights; None: the buffer's.
            gamma: None, or the buffer's.
            include_infos: False: infos are not stored.
            include_extra_model_outputs: False: they are not stored.
            replay_mode: "independent": each module's transitions are drawn by themselves.
            modules_to_sample: Their names. None: all modules that have transitions.
            sample_episodes: True.
            to_numpy: Whether the episodes hold arrays instead of lists.
            lookback: 0.
            min_batch_length_T: 0 or 1.
            **ignored: As RLlib does.

        Returns:
            Episodes with `weights` and `n_step` among their extra model outputs, and with the names of agent, module
            and episodes. `n_step` is smaller where the agent's episode ends before.

        Raises:
            TypeError: `modules_to_sample` is a text.
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
        if replay_mode != "independent":
            raise ValueError(
                f"replay_mode is {replay_mode!r}: expected 'independent'; the rows of an environment step lie in one "
                f"buffer a module, and are not drawn together"
            )
        n, sample = items_of(num_items, batch_size_B, self.batch_size_B), []
        for module_id in self._modules_to_sample(modules_to_sample):
            module = self._modules[module_id]
            sample += module.episodes_of(module.draw(n, beta), to_numpy, module_id)
            self.sampled_timesteps_per_module[module_id] += n
        self.sampled_timesteps += n
        self._log_sampled(sample)
        return sample

    def _modules_to_sample(self, asked: Iterable[Any] | None) -> list[Any]:
        """Returns the modules of a sample, each once."""
        if isinstance(asked, str):
            raise TypeError(f"modules_to_sample is {asked!r}: expected a list of names, such as [{asked!r}]")
        there = [which for which, module in self._modules.items() if module.num_timesteps]
        if not there:
            raise ValueError("there is nothing to sample yet: add episodes first, of as many steps as n_step has")
        wanted = list(dict.fromkeys(asked or there))
        if lacking := [which for which in wanted if which not in there]:
            raise ValueError(
                f"modules_to_sample has {lacking[0]!r}, which has no transitions: there are those of "
                f"{', '.join(map(repr, there))}"
            )
        return wanted

    # Figures

    def _log_sampled(self, sample: list[SingleAgentEpisode]) -> None:
        groups: dict[str, Any] = {"agent": defaultdict(list), "module": defaultdict(list)}
        for episode in sample:
            groups["agent"][episode.agent_id].append(episode)
            groups["module"][episode.module_id].append(episode)
        by_name: dict[str, dict[Any, Any]] = defaultdict(dict)
        for kind, group in groups.items():
            for which, episodes in group.items():
                for name, value in _figures_of(episodes).items():
                    by_name[f"{kind}_to_{name}"][which] = value
        whole = _figures_of(sample)
        self._update_sample_metrics(
            num_env_steps_sampled=whole["num_steps_sampled"],
            num_env_steps_per_sample=whole["num_steps_per_sample"],
            num_episodes_per_sample=len({episode.multi_agent_episode_id for episode in sample}),
            sampled_n_step=whole["sampled_n_step"],
            num_resamples=0,
            **by_name,
        )

    def get_module_ids(self) -> list[Any]:
        """Returns the names of the modules that have had a step."""
        return list(self._modules)

    def get_num_episodes(self, module_id: Any = None) -> int:
        """Returns of how many multi-agent episodes rows are held, or of how many agents' episodes of a module."""
        if module_id is None:
            return len(self._env_steps)
        return self._modules[module_id].num_episodes if module_id in self._modules else 0

    def get_num_timesteps(self, module_id: Any = None) -> int:
        """Returns how many environment steps the episodes have that have rows here.

        Or, for a module, how many of its transitions can be drawn.
        """
        if module_id is None:
            return sum(steps_in(held.spans) for held in self._env_steps.values())
        return self._modules[module_id].num_timesteps if module_id in self._modules else 0

    def get_num_agent_timesteps(self) -> int:
        """Returns how many transitions can be drawn, of all modules."""
        return sum(module.num_timesteps for module in self._modules.values())

    # State

    def get_state(self) -> dict[str, Any]:
        """Returns the experience itself, for checkpoints."""
        state = {name: copy.deepcopy(getattr(self, name)) for name in STATE}
        return state | {"modules": [(which, module.get_state()) for which, module in self._modules.items()]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes the experience of `get_state`, in memory of its own. Episodes under way go on as new ones.

        Raises:
            CheckpointError: It is damaged; what was there stays.
        """
        loaded: dict[Any, ModuleReplay] = {}
        for which, saved in state["modules"]:
            loaded[which] = self._new_module(len(loaded))
            loaded[which].set_state(saved)
        for module in self._modules.values():
            module.close()
        self._modules = loaded
        for name in STATE:
            setattr(self, name, copy.deepcopy(state[name]))

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        beside, slots = state  # RLlib's class has both
        return {name: value for name, value in (beside | slots).items() if name != "metrics"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RLlibEpisodeReplayBuffer.__init__(self)  # its metrics begin anew
        for name, value in state.items():
            setattr(self, name, value)


STATE: Final = (
    "_num_episodes_evicted",
    "_num_timesteps_added",
    "sampled_timesteps",
    "_num_agent_timesteps_added",
    "_num_module_timesteps_added",
    "_num_module_episodes_evicted",
    "sampled_timesteps_per_module",
    "_env_steps",
)
"""What a state has beside the modules'."""


class MultiAgentPrioritizedEpisodeReplayBuffer(  # type: ignore[misc]
    MultiAgentEpisodeReplayBuffer, RLlibMultiAgentPrioritizedEpisodeReplayBuffer
):
    """RLlib's `MultiAgentPrioritizedEpisodeReplayBuffer` over a torchreplay buffer for each module.

    Args:
        capacity: As for `MultiAgentEpisodeReplayBuffer`.
        alpha: Exponent of the priorities.
        beta: Exponent of the weights.
        eps: What is added to each priority.
        **options: As for `MultiAgentEpisodeReplayBuffer`.
    """

    def __init__(
        self, capacity: int = 10_000, *, alpha: float = 1.0, beta: float = 0.4, eps: float = 1e-6, **options: Any
    ) -> None:
        self._prioritized = Prioritized(alpha, beta, eps, initial="max_seen")
        super().__init__(capacity, **options)

    def _sampler(self) -> Sampler:
        return self._prioritized

    def update_priorities(  # type: ignore[override]
        self, priorities: NDArray[Any] | torch.Tensor, module_id: Any
    ) -> None:
        """Feeds a module's TD errors back for the last sample, and forgets which transitions of the module it had.

        Args:
            priorities: One for each of the module's transitions in that sample, in their order.
            module_id: The module's name.

        Raises:
            ValueError: The module was not sampled, there are not as many as transitions, or some are NaN or infinite.
        """
        if module_id not in self._modules:
            there = ", ".join(map(repr, self._modules)) or "none yet"
            raise ValueError(f"module_id is {module_id!r}: expected a module that has transitions: {there}")
        self._modules[module_id].update_priorities(priorities)


@dataclass(slots=True)
class EnvSteps:
    """What was added of a multi-agent episode."""

    spans: list[Span]
    """Of the environment's steps."""
    agents: int
    """Agents' episodes of which rows are held."""


class Tally:
    """What an `add` does, as RLlib's metrics name it: of the environment, and by agent and by module.

    Attributes:
        figures: By the names of RLlib's arguments.
    """

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        for done in ("added", "evicted"):
            self.figures |= {f"num_episodes_{done}": 0, f"num_env_steps_{done}": 0}
            for what in ("episodes", "steps"):
                self.figures |= {f"{kind}_to_num_{what}_{done}": defaultdict(int) for kind in ("agent", "module")}

    def count_whole(self, done: str, episodes: int, env_steps: int) -> None:
        """Counts multi-agent episodes and environment steps."""
        self.figures[f"num_episodes_{done}"] += episodes
        self.figures[f"num_env_steps_{done}"] += env_steps

    def count(self, done: str, agent_id: Any, module_id: Any, episodes: int, steps: int) -> None:
        """Counts an agent's episodes and steps, also where they are 0: RLlib logs those that have both."""
        for kind, which in (("agent", agent_id), ("module", module_id)):
            self.figures[f"{kind}_to_num_episodes_{done}"][which] += episodes
            self.figures[f"{kind}_to_num_steps_{done}"][which] += steps


def _figures_of(episodes: list[SingleAgentEpisode]) -> dict[str, Any]:
    """Returns RLlib's figures of episodes of one step."""
    steps = sum(episode.get_extra_model_outputs("n_step", 0) for episode in episodes)
    return {
        "num_steps_sampled": len(episodes),
        "num_steps_per_sample": len({(episode.id_, episode.t_started) for episode in episodes}),
        "num_episodes_per_sample": len({episode.id_ for episode in episodes}),
        "sampled_n_step": steps / len(episodes),
        "num_resamples": 0,
    }

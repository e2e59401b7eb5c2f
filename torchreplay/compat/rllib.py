"""Episode replay buffers in shared memory for RLlib's current API stack: DQN, SAC and what samples as they do.

Tested with ray 2.60.0. `docs/coming_from_rllib.md` says what to change in a program, and what differs.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.core import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer as RLlibEpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import (
    PrioritizedEpisodeReplayBuffer as RLlibPrioritizedEpisodeReplayBuffer,
)

from torchreplay.buffer.replay_buffer import ReplayBuffer, draw
from torchreplay.buffer.writer import Writer
from torchreplay.errors import WouldBlockForever
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.samplers import Prioritized, Sampler, Uniform
from torchreplay.schema.spec import Field
from torchreplay.schema.views import Transitions
from torchreplay.validation import as_numbers, checked_int

MAX_RUNNING: Final = 2048
"""Episodes under way that are remembered: half of the writers that a buffer has places for."""


Span = tuple[int, int]
"""Time steps of an episode: the first one, and the one after the last."""


@dataclass(slots=True)
class Stream:
    """A part of an episode that is being written: the next one goes on at `t`, with the same observation."""

    writer: Writer
    number: int
    t: int
    observation: Any


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

    Attributes:
        replay: The `torchreplay.ReplayBuffer` beneath; None before the first `add`.
        gaps: Parts that did not follow the part before of their episode, since one was lost, or came in another order.
        repeated_timesteps: Steps that came again. They were not written again.

    Raises:
        ValueError: A number is out of range, or `n_step` is a range.
    """

    replay: ReplayBuffer | None

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
        self._seed, self._episodes_begun = seed, 0
        self._example: dict[str, Any] = {}  # an observation and an action, which say how tuples and dicts nest
        self._spaces: tuple[Any, Any] = (None, None)
        self._held: OrderedDict[str, tuple[int, list[Span]]] = OrderedDict()  # newest row and steps, oldest first
        self.gaps = self.repeated_timesteps = 0
        self._forget()
        self.replay = None

    def _forget(self) -> None:
        """Has no episode be under way in this process."""
        self._running: OrderedDict[str, Stream] = OrderedDict()
        self._idle: list[Writer] = []
        self._drawn: ReplayBatch | None = None

    def _sampler(self) -> Sampler:
        return Uniform()

    # Writing

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
            TypeError: One is no `SingleAgentEpisode`.
            ValueError: A value is of another shape, or does not cast to its field. What came before it stays.
        """
        given = [episodes] if isinstance(episodes, SingleAgentEpisode) else list(episodes)
        known, overwritten, steps = len(self._held), self._rows_overwritten, 0
        for episode in given:
            if not isinstance(episode, SingleAgentEpisode):
                raise TypeError(f"got a value of type {type(episode).__name__}: expected a SingleAgentEpisode")
            if len(episode):
                steps += self._write(episode, weight)
        self._num_timesteps_added += steps
        added = len(self._held) - known
        evicted = self._evict()
        self._log_added(added, steps, evicted, self._rows_overwritten - overwritten)

    def _write(self, episode: SingleAgentEpisode, priority: float | None) -> int:
        """Writes the steps that are not there, and returns how many."""
        if self.replay is None:
            self._open(episode)
        _, held = self._held.get(episode.id_, (0, []))
        spans = _missing(held, (episode.t_started, episode.t))
        values = episode.get_observations(), episode.get_actions(), episode.get_rewards()
        for span in spans:
            self._write_span(episode, span, values, priority)
        written = sum(stop - first for first, stop in spans)
        if written < len(episode):
            self._note_repeated(episode, len(episode) - written)
        return written

    def _write_span(self, episode: SingleAgentEpisode, span: Span, values: Any, priority: float | None) -> None:
        observations, actions, rewards = values
        first, stop = span[0] - episode.t_started, span[1] - episode.t_started
        begins, stream = self._stream_at(episode, span[0], _row(observations, first))
        key, ends = 0, True
        try:
            if begins:
                stream.writer.reset(obs=stream.observation, t=stream.t)
            for i in range(first, stop):
                last = i == len(episode) - 1
                key = stream.writer.step(
                    obs=_row(observations, i + 1),
                    t=stream.t + 1,
                    action=_row(actions, i),
                    reward=rewards[i],
                    terminated=last and episode.is_terminated,
                    truncated=last and episode.is_truncated,
                    episode=stream.number,
                    priority=priority,
                )
                stream.t += 1
            ends = span[1] == episode.t and episode.is_done
        finally:
            if stream.t > span[0]:
                self._hold(episode.id_, int(key), (span[0], stream.t))
            if ends:
                stream.writer.end_episode()
                self._idle.append(stream.writer)
            else:
                stream.observation = copy.deepcopy(_row(observations, stop))
                self._running[episode.id_] = stream

    def _stream_at(self, episode: SingleAgentEpisode, t: int, observation: Any) -> tuple[bool, Stream]:
        """Returns whether a stream begins, and the stream: the one under way where it goes on there, else another."""
        stream = self._running.pop(episode.id_, None)
        if stream is not None:
            if stream.t == t and _equal(stream.observation, observation):
                return False, stream
            stream.writer.end_episode()
            self._idle.append(stream.writer)
            self._note_gap(episode, t, stream.t)
        self._episodes_begun += 1
        return True, Stream(self._free_writer(), self._episodes_begun - 1, t, observation)

    def _hold(self, name: str, key: int, span: Span) -> None:
        """Remembers that steps of an episode are there, the newest of them in the row of a key."""
        self._held[name] = key, _joined([*self._held.get(name, (0, []))[1], span])
        self._held.move_to_end(name)

    def _note_gap(self, episode: SingleAgentEpisode, t: int, ended: int) -> None:
        self.gaps += 1
        if self.gaps == 1:
            warnings.warn(
                f"a part of episode {episode.id_} begins at step {t}, and does not follow the part before, which ended "
                f"at step {ended}: no transition spans both. RLlib drops parts that come after sample_timeout_s. "
                f"Further ones are counted in buffer.gaps",
                stacklevel=6,
            )

    def _note_repeated(self, episode: SingleAgentEpisode, steps: int) -> None:
        if not self.repeated_timesteps:
            warnings.warn(
                f"steps of episode {episode.id_} had come before ({steps} of {len(episode)} in this part), and are not "
                f"written again. Another episode needs another id_. Further steps are counted in "
                f"buffer.repeated_timesteps",
                stacklevel=4,
            )
        self.repeated_timesteps += steps

    def _free_writer(self) -> Writer:
        """Returns a writer of no episode; where too many are under way, that of the one longest not heard of."""
        if self._idle:
            return self._idle.pop()
        if len(self._running) >= MAX_RUNNING:
            _, oldest = self._running.popitem(last=False)
            oldest.writer.end_episode()
            return oldest.writer
        assert self.replay is not None
        return self.replay.writer()

    def _open(self, episode: SingleAgentEpisode) -> None:
        """Makes the memory for rows like those of an episode."""
        example = {"obs": episode.get_observations(0), "action": episode.get_actions(0)}
        spec = {name: _spec_of(value) for name, value in example.items()}
        spec |= {"reward": Field(), "terminated": Field((), bool), "truncated": Field((), bool)}
        spec |= {"t": Field((), "int32"), "episode": Field((), "int64")}
        self.replay = ReplayBuffer(spec, self.capacity, sampler=self._sampler(), view=self._view, seed=self._seed)
        self._example, self._spaces = example, (episode.observation_space, episode.action_space)

    @property
    def _rows_overwritten(self) -> int:
        return 0 if self.replay is None else max(0, self.replay.next_key - self.capacity)

    def _evict(self) -> int:
        """Forgets episodes without a row, and returns how many."""
        evicted = 0
        while self._held and next(iter(self._held.values()))[0] < self._rows_overwritten:
            self._held.popitem(last=False)
            evicted += 1
        self._num_episodes_evicted += evicted
        return evicted

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
        self._refuse_other_samples(batch_length_T, n_step, gamma)
        refused = {
            "include_infos": include_infos,
            "include_extra_model_outputs": include_extra_model_outputs,
            "sample_episodes=False": not sample_episodes,
            "lookback": lookback,
            "min_batch_length_T": min_batch_length_T > 1,
        }
        for name, asked in refused.items():
            if asked:
                raise ValueError(f"{name} is asked for: this buffer holds transitions, without infos or model outputs")
        if num_items is not None and batch_size_B is not None:
            raise ValueError(f"num_items is {num_items} and batch_size_B is {batch_size_B}: give one of them")
        batch = self._drawn = self._draw(num_items or batch_size_B or self.batch_size_B, beta)
        self._log_sampled(batch)
        return self._episodes_of(batch, to_numpy)

    def _refuse_other_samples(self, length: int | None, n_step: Any, gamma: float | None) -> None:
        own = self._view
        if length is not None and length > 1:
            raise ValueError(f"batch_length_T is {length}: this buffer draws transitions, for modules without state")
        if n_step not in (None, own.n_step) or (own.n_step > 1 and gamma not in (None, own.gamma)):
            raise ValueError(
                f"a sample is of n_step={n_step}, gamma={gamma}, and the buffer of n_step={own.n_step}, "
                f"gamma={own.gamma}: give the buffer the algorithm's in replay_buffer_config"
            )

    def _draw(self, n: int, beta: float | None) -> ReplayBatch:
        try:
            if self.replay is not None:
                return draw(self.replay, n, beta)
        except WouldBlockForever as error:
            raise ValueError(f"there is nothing to sample yet: {error}") from error
        raise ValueError("there is nothing to sample yet: add episodes first")

    def _episodes_of(self, batch: ReplayBatch, to_numpy: bool) -> list[SingleAgentEpisode]:
        observation, following = self._values("obs", batch["obs"]), self._values("obs", batch["next_obs"])
        action, reward = self._values("action", batch["action"]), batch["reward"].tolist()
        ends = zip(batch["terminated"].tolist(), batch["truncated"].tolist(), strict=True)
        steps = (batch["next_t"] - batch["t"]).tolist()
        figures = zip(batch["t"].tolist(), steps, batch["weight"].tolist(), ends, strict=True)
        observation_space, action_space = self._spaces
        episodes = []
        for i, (t, n_step, weight, (terminated, truncated)) in enumerate(figures):
            episode = SingleAgentEpisode(
                observations=[observation(i), following(i)],
                observation_space=observation_space,
                actions=[action(i)],
                action_space=action_space,
                rewards=[reward[i]],
                terminated=terminated,
                truncated=truncated,
                extra_model_outputs={"weights": [weight], "n_step": [n_step]},
                t_started=t,
                len_lookback_buffer=0,
            )
            episodes.append(episode.to_numpy() if to_numpy else episode)
        return episodes

    def _values(self, name: str, columns: Any) -> Callable[[int], Any]:
        return _reader(self._example[name], columns)

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
        return len(self._held)

    def get_num_timesteps(self, module_id: str | None = None) -> int:
        """Returns how many transitions can be drawn."""
        if self.replay is None:
            return 0
        len(self.replay)  # takes in what was written
        return self.replay.num_items

    # State

    def get_state(self) -> dict[str, Any]:
        """Returns the experience itself, for checkpoints."""
        state = {name: getattr(self, name) for name in STATE}
        file = io.BytesIO()
        if self.replay is not None:
            self.replay.save(file)
        return state | {"held": list(self._held.items()), "saved": file.getvalue()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes the experience of `get_state`, in memory of its own. Episodes under way go on as new ones.

        Raises:
            CheckpointError: It is damaged; what was there stays.
        """
        saved = state["saved"]
        loaded = ReplayBuffer.load(io.BytesIO(saved), self.capacity, sampler=self._sampler()) if saved else None
        if self.replay is not None:
            self.replay.close()
        self.replay = loaded
        for name in STATE:
            setattr(self, name, state[name])
        self._held = OrderedDict(state["held"])
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        beside = vars(self).keys() - {"replay", "_running", "_idle", "_drawn", "_held", "metrics"}
        return {"made": {name: vars(self)[name] for name in beside}, "state": self.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        RLlibEpisodeReplayBuffer.__init__(self)  # its metrics begin anew
        vars(self).update(state["made"], replay=None)
        self.set_state(state["state"])


STATE: Final = (
    "_num_episodes_evicted",
    "_num_timesteps_added",
    "sampled_timesteps",
    "_episodes_begun",
    "gaps",
    "repeated_timesteps",
    "_example",
    "_spaces",
)
"""What a state has beside the rows."""


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
        self._prioritized = Prioritized(alpha, beta, eps)
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
        if self._drawn is None or self.replay is None:
            raise ValueError("there is no sample to feed TD errors back for: sample() comes before each update")
        self.replay.update_priorities(self._drawn, as_numbers("priorities", priorities, "numbers").detach().reshape(-1))
        self._drawn = None


def _by_agent(figures: dict[str, Any]) -> dict[str, Any]:
    """Returns RLlib's figures by agent and by module. There is one of each."""
    names = {"agent": DEFAULT_AGENT_ID, "module": DEFAULT_MODULE_ID}
    return {f"{kind}_to_{name}": {which: value} for kind, which in names.items() for name, value in figures.items()}


def _missing(spans: list[Span], wanted: Span) -> list[Span]:
    """Returns what of a span lies in none of the others, which are in order and apart."""
    found, (first, stop) = [], wanted
    for begin, end in spans:
        if first < min(begin, stop):
            found.append((first, min(begin, stop)))
        first = max(first, end)
    return [*found, (first, stop)] if first < stop else found


def _joined(spans: list[Span]) -> list[Span]:
    """Returns spans in order, with those that touch as one."""
    found: list[Span] = []
    for first, stop in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((first, stop))
    return found


def _equal(one: Any, other: Any) -> bool:
    """Returns whether two values of `_row` are the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(part, other[name]) for name, part in one.items())
    return np.array_equal(one, other)


def _spec_of(value: Any) -> Any:
    """Returns what holds a value: a field, or dicts of them for dicts and tuples."""
    if isinstance(value, tuple):
        value = {str(i): part for i, part in enumerate(value)}
    if isinstance(value, dict):
        return {name: _spec_of(part) for name, part in value.items()}
    array = np.asarray(value)
    return Field(array.shape, array.dtype)


def _row(values: Any, i: int) -> Any:
    """Returns the value at time i of an episode's, which are a list, or nested arrays; tuples become dicts."""
    if isinstance(values, list):
        return _named(values[i])
    if isinstance(values, tuple):
        values = {str(k): part for k, part in enumerate(values)}
    return {name: _row(part, i) for name, part in values.items()} if isinstance(values, dict) else values[i]


def _named(value: Any) -> Any:
    if isinstance(value, tuple):
        value = {str(k): part for k, part in enumerate(value)}
    return {name: _named(part) for name, part in value.items()} if isinstance(value, dict) else value


def _reader(example: Any, columns: Any) -> Callable[[int], Any]:
    """Returns what returns the i-th value of the columns, nested as an example is."""
    if isinstance(example, tuple):
        parts = [_reader(part, columns[str(k)]) for k, part in enumerate(example)]
        return lambda i: tuple(part(i) for part in parts)
    if isinstance(example, dict):
        named = {name: _reader(part, columns[name]) for name, part in example.items()}
        return lambda i: {name: part(i) for name, part in named.items()}
    values: NDArray[Any] = columns.numpy()
    return values.__getitem__

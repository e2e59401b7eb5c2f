"""The transitions of one module in a torchreplay buffer: parts of episodes go in, episodes of one step come out."""

from __future__ import annotations

import copy
import io
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from numpy.typing import NDArray
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from torchreplay.buffer.replay_buffer import ReplayBuffer, draw
from torchreplay.buffer.writer import Writer
from torchreplay.compat.rllib.spans import Span, joined, missing, steps_in
from torchreplay.compat.rllib.values import equal, reader, row, spec_of
from torchreplay.errors import WouldBlockForever
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.samplers import Sampler
from torchreplay.schema.spec import Field
from torchreplay.schema.views import Transitions
from torchreplay.validation import as_numbers

MAX_RUNNING: Final = 2048
"""Episodes under way that are remembered: half of the writers that a buffer has places for."""


@dataclass(slots=True)
class Stream:
    """A part of an episode that is being written: the next one goes on at `t`, with the same observation."""

    writer: Writer
    number: int
    t: int
    observation: Any


class Origin(NamedTuple):
    """The episode that a transition is of, by RLlib's names."""

    id_: str | None
    agent_id: Any
    multi_agent_episode_id: Any


class Held(NamedTuple):
    """What is held of an episode."""

    origin: Origin
    newest: int
    """Key of its newest row."""
    spans: list[Span]
    streams: set[int]
    """Numbers of its streams."""


class ModuleReplay:
    """Episodes of one module, written as they come into a buffer that is made for the first of them.

    Args:
        capacity: Rows that fit. An episode of T steps takes T + 1.
        view: Transitions, of the field `t` beside the observation.
        sampler: Of the draws.
        seed: Of the draws; None: a random one.

    Attributes:
        replay: The buffer; None before the first episode.
        gaps: Parts that did not follow the part before of their episode.
        repeated_timesteps: Steps that came again. They were not written again.
    """

    def __init__(self, capacity: int, view: Transitions, sampler: Sampler, seed: int | None) -> None:
        self._made = capacity, view, sampler, seed
        self._episodes_begun = 0
        self._example: dict[str, Any] = {}  # an observation and an action, which say how tuples and dicts nest
        self._spaces: tuple[Any, Any] = (None, None)
        self._held: OrderedDict[str, Held] = OrderedDict()  # oldest first
        self._origins: dict[int, Origin] = {}  # by the stream's number
        self.gaps = self.repeated_timesteps = 0
        self._forget()
        self.replay: ReplayBuffer | None = None

    def _forget(self) -> None:
        """Has no episode be under way in this process."""
        self._running: OrderedDict[str, Stream] = OrderedDict()
        self._idle: list[Writer] = []
        self._drawn: torch.Tensor | None = None  # keys, in the order of the episodes handed out

    # Writing

    def write(self, episode: SingleAgentEpisode, priority: float | None) -> int:
        """Writes the steps of an episode, or a part of one, that are not there. Returns how many.

        Raises:
            ValueError: A value is of another shape, or does not cast to its field. What came before it stays.
        """
        if self.replay is None:
            self._open(episode)
        held = self._held.get(episode.id_)
        spans = missing(held.spans if held else [], (episode.t_started, episode.t))
        values = episode.get_observations(), episode.get_actions(), episode.get_rewards()
        for span in spans:
            self._write_span(episode, span, values, priority)
        written = steps_in(spans)
        if written < len(episode):
            self._note_repeated(episode, len(episode) - written)
        return written

    def _write_span(self, episode: SingleAgentEpisode, span: Span, values: Any, priority: float | None) -> None:
        observations, actions, rewards = values
        first, stop = span[0] - episode.t_started, span[1] - episode.t_started
        begins, stream = self._stream_at(episode, span[0], row(observations, first))
        key, ends = 0, True
        try:
            if begins:
                stream.writer.reset(obs=stream.observation, t=stream.t)
            for i in range(first, stop):
                last = i == len(episode) - 1
                key = stream.writer.step(
                    obs=row(observations, i + 1),
                    t=stream.t + 1,
                    action=row(actions, i),
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
                self._hold(episode, stream.number, int(key), (span[0], stream.t))
            if ends:
                stream.writer.end_episode()
                self._idle.append(stream.writer)
            else:
                stream.observation = copy.deepcopy(row(observations, stop))
                self._running[episode.id_] = stream

    def _stream_at(self, episode: SingleAgentEpisode, t: int, observation: Any) -> tuple[bool, Stream]:
        """Returns whether a stream begins, and the stream: the one under way where it goes on there, else another."""
        stream = self._running.pop(episode.id_, None)
        if stream is not None:
            if stream.t == t and equal(stream.observation, observation):
                return False, stream
            stream.writer.end_episode()
            self._idle.append(stream.writer)
            self._note_gap(episode, t, stream.t)
        self._episodes_begun += 1
        return True, Stream(self._free_writer(), self._episodes_begun - 1, t, observation)

    def _hold(self, episode: SingleAgentEpisode, stream: int, key: int, span: Span) -> None:
        """Remembers that steps of an episode are there, the newest of them in the row of a key."""
        origin = Origin(episode.id_, episode.agent_id, episode.multi_agent_episode_id)
        held = self._held.get(episode.id_, Held(origin, key, [], set()))
        self._held[episode.id_] = Held(origin, key, joined([*held.spans, span]), held.streams | {stream})
        self._held.move_to_end(episode.id_)
        self._origins[stream] = origin

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
        spec = {name: spec_of(value) for name, value in example.items()}
        spec |= {"reward": Field(), "terminated": Field((), bool), "truncated": Field((), bool)}
        spec |= {"t": Field((), "int32"), "episode": Field((), "int64")}
        capacity, view, sampler, seed = self._made
        self.replay = ReplayBuffer(spec, capacity, sampler=sampler, view=view, seed=seed)
        self._example, self._spaces = example, (episode.observation_space, episode.action_space)

    @property
    def rows_overwritten(self) -> int:
        """How many rows have made room for others."""
        return 0 if self.replay is None else max(0, self.replay.next_key - self._made[0])

    def evict(self) -> list[Held]:
        """Forgets episodes without a row, and returns what was held of them."""
        evicted: list[Held] = []
        while self._held and next(iter(self._held.values())).newest < self.rows_overwritten:
            evicted.append(self._held.popitem(last=False)[1])
            for stream in evicted[-1].streams:
                del self._origins[stream]
        return evicted

    # Drawing

    def draw(self, n: int, beta: float | None) -> ReplayBatch:
        """Draws transitions, for which `update_priorities` takes TD errors until the next draw.

        Raises:
            ValueError: There is nothing to draw, or an argument is out of range.
        """
        try:
            if self.replay is not None:
                batch = draw(self.replay, n, beta)
                self._drawn = batch["key"]
                return batch
        except WouldBlockForever as error:
            raise ValueError(f"there is nothing to sample yet: {error}") from error
        raise ValueError("there is nothing to sample yet: add episodes first")

    def episodes_of(self, batch: ReplayBatch, to_numpy: bool, module_id: Any = None) -> list[SingleAgentEpisode]:
        """Returns an episode of one step for each transition of a batch, in its order.

        With a `module_id`, they name where they are from, and those of one agent in one episode lie together. TD errors
        are then expected in that order.
        """
        observation, following = self._values("obs", batch["obs"]), self._values("obs", batch["next_obs"])
        action, reward = self._values("action", batch["action"]), batch["reward"].tolist()
        ends = zip(batch["terminated"].tolist(), batch["truncated"].tolist(), strict=True)
        steps = (batch["next_t"] - batch["t"]).tolist()
        figures = list(zip(batch["t"].tolist(), steps, batch["weight"].tolist(), ends, strict=True))
        observation_space, action_space = self._spaces
        names: list[dict[str, Any]] = [{}] * len(figures)
        order: Sequence[int] = range(len(figures))
        if module_id is not None:
            names, order = self._named(batch, module_id)
            self._drawn = batch["key"][order]
        episodes = []
        for i in order:
            t, n_step, weight, (terminated, truncated) = figures[i]
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
                **names[i],
            )
            episodes.append(episode.to_numpy() if to_numpy else episode)
        return episodes

    def _named(self, batch: ReplayBatch, module_id: Any) -> tuple[list[dict[str, Any]], list[int]]:
        """Returns the names of each transition's episode, and the transitions' order by agent and episode."""
        unknown = Origin(None, module_id, None)  # of another process's writer
        origins = [self._origins.get(stream, unknown) for stream in batch["episode"].tolist()]
        first: dict[tuple[Any, Any], int] = {}
        places = [first.setdefault((of.multi_agent_episode_id, of.agent_id), i) for i, of in enumerate(origins)]
        order = sorted(range(len(places)), key=places.__getitem__)
        return [origin._asdict() | {"module_id": module_id} for origin in origins], order

    def _values(self, name: str, columns: Any) -> Any:
        return reader(self._example[name], columns)

    def update_priorities(self, priorities: NDArray[Any] | torch.Tensor) -> None:
        """Feeds TD errors back for the last draw, and forgets it.

        Raises:
            ValueError: There was no draw, there are not as many as transitions, or some are NaN or infinite.
        """
        if self._drawn is None or self.replay is None:
            raise ValueError("there is no sample to feed TD errors back for: sample() comes before each update")
        self.replay.update_priorities(self._drawn, as_numbers("priorities", priorities, "numbers").detach().reshape(-1))
        self._drawn = None

    # Figures

    @property
    def num_episodes(self) -> int:
        """Of how many episodes rows are held."""
        return len(self._held)

    @property
    def num_timesteps(self) -> int:
        """How many transitions can be drawn."""
        if self.replay is None:
            return 0
        len(self.replay)  # takes in what was written
        return self.replay.num_items

    # State

    def get_state(self) -> dict[str, Any]:
        """Returns the experience itself, for checkpoints."""
        file = io.BytesIO()
        if self.replay is not None:
            self.replay.save(file)
        state = {name: getattr(self, name) for name in STATE}
        return state | {"held": list(self._held.items()), "saved": file.getvalue()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes the experience of `get_state`, in memory of its own. Episodes under way go on as new ones.

        Raises:
            CheckpointError: It is damaged; what was there stays.
        """
        capacity, _, sampler, _ = self._made
        saved = state["saved"]
        loaded = ReplayBuffer.load(io.BytesIO(saved), capacity, sampler=sampler) if saved else None
        self.close()
        self.replay = loaded
        for name in STATE:
            setattr(self, name, state[name])
        self._held = OrderedDict(state["held"])
        self._origins = {stream: held.origin for held in self._held.values() for stream in held.streams}
        self._forget()

    def close(self) -> None:
        """Gives the memory back."""
        if self.replay is not None:
            self.replay.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleReplay, self._made, self.get_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.set_state(state)


STATE: Final = ("_episodes_begun", "gaps", "repeated_timesteps", "_example", "_spaces")
"""What a state has beside the rows and what is held."""


def refuse_other_samples(view: Transitions, n_step: Any, gamma: float | None, asked: dict[str, Any]) -> None:
    """Refuses what a buffer of transitions does not hold.

    Args:
        view: Of the buffer.
        n_step: Of the sample; None: the buffer's.
        gamma: Of the sample; None: the buffer's.
        asked: Other arguments of the sample, by name.

    Raises:
        ValueError: One asks for it.
    """
    length = asked["batch_length_T"]
    if length is not None and length > 1:
        raise ValueError(f"batch_length_T is {length}: this buffer draws transitions, for modules without state")
    if n_step not in (None, view.n_step) or (view.n_step > 1 and gamma not in (None, view.gamma)):
        raise ValueError(
            f"a sample is of n_step={n_step}, gamma={gamma}, and the buffer of n_step={view.n_step}, "
            f"gamma={view.gamma}: give the buffer the algorithm's in replay_buffer_config"
        )
    refused = {
        "include_infos": asked["include_infos"],
        "include_extra_model_outputs": asked["include_extra_model_outputs"],
        "sample_episodes=False": not asked["sample_episodes"],
        "lookback": asked["lookback"],
        "min_batch_length_T": asked["min_batch_length_T"] > 1,
    }
    for name, wanted in refused.items():
        if wanted:
            raise ValueError(f"{name} is asked for: this buffer holds transitions, without infos or model outputs")


def items_of(num_items: int | None, batch_size: int | None, default: int) -> int:
    """Returns how many items a sample has.

    Raises:
        ValueError: Both numbers are given.
    """
    if num_items is not None and batch_size is not None:
        raise ValueError(f"num_items is {num_items} and batch_size_B is {batch_size}: give one of them")
    return num_items or batch_size or default


def each_of(episodes: Any, kind: type[Any]) -> list[Any]:
    """Returns episodes as a list, which may be one alone.

    Raises:
        TypeError: One is none of `kind`.
    """
    alone = isinstance(episodes, kind) or not isinstance(episodes, Iterable)
    given = [episodes] if alone else list(episodes)
    for episode in given:
        if not isinstance(episode, kind):
            raise TypeError(f"got a value of type {type(episode).__name__}: expected a {kind.__name__}")
    return given

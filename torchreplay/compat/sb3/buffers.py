"""Replay buffers for `replay_buffer_class=` of Stable-Baselines3's off-policy learners."""

from __future__ import annotations

import io
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer as SB3ReplayBuffer
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape
from stable_baselines3.common.utils import get_device
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from torchreplay.buffer.replay_buffer import ReplayBuffer, draw
from torchreplay.compat.sb3.samples import PrioritizedSamples, SampleBuilder
from torchreplay.compat.sb3.step_form import StepForm
from torchreplay.compat.sb3.step_writers import EpisodeWriter, RowWriter, StepWriter
from torchreplay.errors import WouldBlockForever
from torchreplay.schema.hindsight import Hindsight
from torchreplay.schema.samplers import Prioritized, Sampler, Schedule, Uniform
from torchreplay.schema.spaces import spec_from_space
from torchreplay.schema.spec import Field
from torchreplay.schema.views import Rows, Transitions, View
from torchreplay.validation import as_numbers, checked_int


class SharedReplayBuffer(SB3ReplayBuffer):
    """Stable-Baselines3's `ReplayBuffer` over a torchreplay buffer, for any observation space.

    A row has the fields `obs`, `next_obs`, `action`, `reward`, `terminated` and `truncated`. With n-step returns, and
    with `optimize_memory_usage`, rows are those of `Transitions`: each observation is stored once, and there is no
    `next_obs`. Actions are those of `add`: a `Box` action as the policy scales it, to [-1, 1].

    Pickling and copying it copies the experience. `shared` is the memory itself, for explorers in other processes.

    Args:
        buffer_size: Rows that fit, those of all environments together. A row holds a transition, or with linked rows
            also the first observation of an episode.
        observation_space: Of one environment.
        action_space: Of one environment.
        device: Where samples go.
        n_envs: Environments that `add` is given the steps of.
        optimize_memory_usage: Each observation is stored once. A row goes to the first observation of each episode.
        handle_timeout_termination: Whether `"TimeLimit.truncated"` in an info means that the episode was cut short.
        n_steps: Steps of the returns.
        gamma: Discount of a step, for n-step returns.
        seed: Of the draws; None: taken from NumPy's generator, which the learner's `seed` sets.

    Raises:
        ValueError: A space's values are no arrays of one shape, or an argument is out of range.
        MemoryError: The machine has too little memory left.
    """

    _too_early: ClassVar[type[Exception]] = ValueError

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        seed: int | None = None,
    ) -> None:
        # Not SB3's own: it would reserve the arrays that are not used here.
        self.n_envs = checked_int("n_envs", n_envs, 1)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.observation_space, self.action_space = observation_space, action_space
        self.obs_shape = get_obs_shape(observation_space)  # type: ignore[assignment]
        self.action_dim = get_action_dim(action_space)
        self.device = get_device(device)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps, self.gamma = checked_int("n_steps", n_steps, 1), gamma
        self._is_shared = False
        self._make_parts()
        self._replay = ReplayBuffer(
            self._spec(),
            self.buffer_size * n_envs,
            sampler=self._sampler(),
            view=self._view(),
            seed=int(np.random.randint(1 << 62)) if seed is None else seed,  # noqa: NPY002 - SB3 seeds this one
        )

    def _make_parts(self) -> None:
        self._form = StepForm(self.observation_space, self.action_space, self.n_envs, self.handle_timeout_termination)
        self._builder = SampleBuilder(self.observation_space, self.n_steps, self.gamma)
        self._writer: StepWriter | None = None

    @property
    def _linked(self) -> bool:
        return self.n_steps > 1 or self.optimize_memory_usage

    def _view(self) -> View:
        return Transitions(self.n_steps, self.gamma) if self._linked else Rows()

    def _sampler(self) -> Sampler:
        return Uniform()

    def _spec(self) -> dict[str, Any]:
        observation, action = spec_from_space(self.observation_space), spec_from_space(self.action_space)
        if isinstance(action, Field) and action.dtype == torch.float64:
            action = Field(action.shape, torch.float32)  # as SB3 does
        spec = {"obs": observation, "action": action, "reward": Field()}
        spec |= {"terminated": Field((), torch.bool), "truncated": Field((), torch.bool)}
        return spec if self._linked else spec | {"next_obs": observation}

    # Writing

    def add(
        self,
        obs: NDArray[Any] | dict[str, NDArray[Any]],
        next_obs: NDArray[Any] | dict[str, NDArray[Any]],
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Writes one step of all environments, as Stable-Baselines3's `add` does.

        Raises:
            ValueError: A value is of another shape, does not cast to its field, or is NaN or infinite; nothing is
                written.
        """
        if self._writer is None:
            self._writer = (EpisodeWriter if self._linked else RowWriter)(self._replay, self._form)
        self._writer.write(obs, next_obs, action, reward, done, infos)

    def reset(self) -> None:
        """Takes all rows away, for every process."""
        self._replay.clear()
        self._writer = None

    # Drawing

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draws samples, with replacement. Once the buffer is shared, it waits for rows that explorers will write.

        Args:
            batch_size: How many.
            env: Normalises observations and rewards.

        Returns:
            `ReplayBufferSamples`, or `DictReplayBufferSamples` for `Dict` observations.

        Raises:
            ValueError: There is nothing to draw, or `batch_size` is below 1.
        """
        return self._builder.samples(self._draw(batch_size), env, self.device)

    def _draw(self, batch_size: int) -> Any:
        try:
            return draw(self._replay, batch_size)
        except WouldBlockForever as error:
            raise self._too_early(
                f"there is nothing to sample yet, after {self._replay.next_key:,} rows of which {len(self._replay):,} "
                f"are held: choose a larger learning_starts. {error}"
            ) from error

    def _get_samples(self, batch_inds: NDArray[Any], env: VecNormalize | None = None) -> Any:
        """Returns the samples at positions, of environments chosen at random. For tests: it looks at all keys."""
        keys = self._replay.keys()
        places = batch_inds * self.n_envs + np.random.randint(0, self.n_envs, np.shape(batch_inds))  # noqa: NPY002
        if not self._linked and self.full:
            places = (places - self.pos * self.n_envs) % len(keys)
        if places.min() < 0 or places.max() >= len(keys):
            raise ValueError(f"index {places.max() // self.n_envs} is out of range: {len(keys):,} items can be drawn")
        return self._builder.samples(self._replay.gather(keys[places], missing="raise"), env, self.device)

    # What is in it

    @property
    def shared(self) -> ReplayBuffer:
        """The memory itself: a `torchreplay.ReplayBuffer`, which goes to other processes as an argument.

        What they write with `shared.writer()` is drawn here at once. From now on `observations` and the other arrays
        are refused: rows of others lie between those of `add`.
        """
        self._is_shared = True
        return self._replay

    def size(self) -> int:
        """Returns the number of items that can be drawn, divided by `n_envs`."""
        len(self._replay)  # takes in what was written
        return self._replay.num_items // self.n_envs

    @property
    def pos(self) -> int:  # type: ignore[override]
        """Where the next rows go, in rows of each environment."""
        return self._replay.next_key // self.n_envs % self.buffer_size

    @property
    def full(self) -> bool:  # type: ignore[override]
        """Whether the next row overwrites another one."""
        return len(self._replay) == self._replay.capacity

    @property
    def observations(self) -> Any:  # type: ignore[override]
        """The rows' observations, `[buffer_size, n_envs, *shape]`: the memory itself."""
        return self._array("obs", self.obs_shape)

    @property
    def next_observations(self) -> Any:  # type: ignore[override]
        """The observations that the rows' steps led to, `[buffer_size, n_envs, *shape]`: the memory itself."""
        return self._array("next_obs", self.obs_shape)

    @property
    def actions(self) -> Any:  # type: ignore[override]
        """The rows' actions, `[buffer_size, n_envs, action_dim]`: the memory itself."""
        return self._array("action", (self.action_dim,))

    @property
    def rewards(self) -> Any:  # type: ignore[override]
        """The rows' rewards, `[buffer_size, n_envs]`: the memory itself."""
        return self._array("reward", ())

    @property
    def dones(self) -> Any:  # type: ignore[override]
        """Whether the rows' steps ended an episode, float32 `[buffer_size, n_envs]`: a copy, which is read-only."""
        if self._linked:
            return _LastFlags(self)
        return _read_only(self._array("terminated", ()) | self._array("truncated", ()))

    @property
    def timeouts(self) -> Any:  # type: ignore[override]
        """Whether they ended by a time limit, float32 `[buffer_size, n_envs]`: a copy, which is read-only."""
        return _read_only(self._array("truncated", ()))

    def _array(self, name: str, shape: Any) -> Any:
        if self._is_shared or self._linked:
            self._refuse_arrays()

        def array(tensor: Tensor, shape: tuple[int, ...]) -> NDArray[Any]:
            return tensor.numpy().reshape(self.buffer_size, self.n_envs, *shape)

        stored = self._replay.storage[name]
        if isinstance(stored, dict):
            return {part: array(tensor, shape[part]) for part, tensor in stored.items()}
        return array(stored, shape)

    def _refuse_arrays(self) -> NoReturn:
        why = (
            "other processes write into it, and their rows lie between those of add()"
            if self._is_shared
            else "its rows are linked, and hold each observation once"
        )
        raise RuntimeError(
            f"this buffer has no arrays of [buffer_size, n_envs]: {why}. Read it with "
            f"buffer.shared.gather(buffer.shared.keys())"
        )

    # Pickling and copying

    def __getstate__(self) -> dict[str, Any]:
        """Returns the experience itself, never a handle to memory that will be gone."""
        state = self.__dict__.copy()
        for name in ("_replay", "_form", "_builder", "_writer"):
            del state[name]
        file = io.BytesIO()
        self._replay.save(file)
        return state | {"_is_shared": False, "_saved": file.getvalue()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_saved")
        self.__dict__.update(state)
        self._make_parts()
        view = self._view()
        functions = view if isinstance(view, Hindsight) else None
        self._replay = ReplayBuffer.load(io.BytesIO(saved), view=functions, sampler=self._sampler())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._replay!r})"


class _LastFlags:
    """`dones` of linked rows, where a learner may end the episodes under way, as `learn` does when it begins anew."""

    def __init__(self, buffer: SharedReplayBuffer) -> None:
        self._buffer = buffer

    def __setitem__(self, position: Any, value: Any) -> None:
        buffer = self._buffer
        if not np.all(value) or position != (buffer.pos - 1) % buffer.buffer_size:
            buffer._refuse_arrays()
        if buffer._writer is not None:
            buffer._writer.end_episodes()

    def __getattr__(self, name: str) -> NoReturn:
        self._buffer._refuse_arrays()

    def __getitem__(self, position: Any) -> NoReturn:
        self._buffer._refuse_arrays()

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._buffer._refuse_arrays()


def _read_only(flags: NDArray[Any]) -> NDArray[np.float32]:
    values = flags.astype(np.float32)
    values.flags.writeable = False
    return values


class SharedDictReplayBuffer(SharedReplayBuffer, DictReplayBuffer):  # type: ignore[override]
    """Stable-Baselines3's `DictReplayBuffer`: a `SharedReplayBuffer` that insists on a `Dict` observation space."""

    def __init__(self, buffer_size: int, observation_space: spaces.Space[Any], *args: Any, **kwargs: Any) -> None:
        if not isinstance(observation_space, spaces.Dict):
            raise AssertionError(f"SharedDictReplayBuffer got {observation_space}: expected a Dict observation space")
        super().__init__(buffer_size, observation_space, *args, **kwargs)


class SharedNStepReplayBuffer(SharedReplayBuffer):
    """Stable-Baselines3's `NStepReplayBuffer`: a `SharedReplayBuffer` whose `n_steps` is 3 unless given."""

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, n_steps=n_steps, gamma=gamma, **kwargs)


class PrioritizedReplayBuffer(SharedReplayBuffer):
    """A `SharedReplayBuffer` that draws by TD errors (Schaul et al. 2016), for the `Prioritized` learners.

    Under learners that feed no TD errors back it draws uniformly.

    Args:
        *args: As for `SharedReplayBuffer`.
        alpha: As for `torchreplay.Prioritized`.
        beta: As for `torchreplay.Prioritized`: a number, or `torchreplay.LinearSchedule(0.4, 1.0, gradient_steps)`.
        eps: As for `torchreplay.Prioritized`.
        **kwargs: As for `SharedReplayBuffer`.
    """

    def __init__(self, *args: Any, alpha: float = 0.6, beta: Schedule = 0.4, eps: float = 1e-6, **kwargs: Any) -> None:
        self.alpha, self.beta, self.eps = alpha, beta, eps
        super().__init__(*args, **kwargs)

    def _sampler(self) -> Sampler:
        return Prioritized(self.alpha, self.beta, self.eps)

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None
    ) -> PrioritizedSamples:
        """Draws samples by priority, with weights `[B, 1]` and keys; otherwise as `SharedReplayBuffer.sample`."""
        return self._builder.prioritized(self._draw(batch_size), env, self.device)

    def update_priorities(self, samples_or_keys: PrioritizedSamples | Any, td_errors: Any) -> None:
        """Feeds TD errors back.

        Args:
            samples_or_keys: What `sample` returned, or its keys.
            td_errors: `[B, 1]` or `[B]`, on any device.

        Raises:
            ValueError: There are not as many as keys, or some are NaN or infinite; nothing is applied.
        """
        keys = samples_or_keys.keys if isinstance(samples_or_keys, PrioritizedSamples) else samples_or_keys
        self._replay.update_priorities(keys, as_numbers("td_errors", td_errors, "numbers").detach().reshape(-1))

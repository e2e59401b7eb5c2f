"""What an explorer writes with."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, Literal, SupportsIndex, TypeAlias, get_args

from torchreplay import _C
from torchreplay.buffer.admitted_items import AdmittedItems
from torchreplay.buffer.final_observations import FinalObservations
from torchreplay.buffer.jams import WriterJam, why_full, why_not_admitted, writers_of_this_thread
from torchreplay.errors import ReplayTimeout, Stopped
from torchreplay.schema.batch_plan import Roles, names_of
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import Admission, from_native
from torchreplay.schema.samplers import MOST_VERSIONS, Fifo
from torchreplay.schema.spec import Path
from torchreplay.segment.closeable import Closeable
from torchreplay.segment.process_hooks import open_writers
from torchreplay.segment.waits import STALL_LIMIT, Audience, Wait
from torchreplay.validation import checked_choice, checked_int, checked_timeout

OwnAutoreset: TypeAlias = Literal["next_step", "same_step", "disabled"]
AUTORESETS: tuple[OwnAutoreset, ...] = get_args(OwnAutoreset)  # in the order of the native core's `Autoreset`
Autoreset: TypeAlias = OwnAutoreset | Literal["NextStep", "SameStep", "Disabled"] | Enum
"""What a vector environment does when an episode ends, as Gymnasium's `AutoresetMode` or its value too."""
MAX_ENVS = 1 << 20
MOST_ADMITTED = (1 << 31) - 1
"""By one call."""
MORE_TOLERANCE = "give SamplesPerInsert a tolerance with room for all rows of a call, or use MinSize"
LARGER_QUEUE = "choose a larger {}, or give Fifo when_full='drop_oldest'"
"""What to do about a wait of a writer that nobody ends."""


class Writer(_C.Writer, Closeable):
    """Writes rows of one buffer from one thread, straight into shared memory, without a lock.

    Made by `ReplayBuffer.writer()`. Cheap: one for each explorer thread. A context manager. A child process that
    inherits one by fork may go on using it; to other processes pass the buffer, and make a writer there.

    Under a view that links rows, the episodes under way belong to the thread that wrote them: `step` of another thread
    is a `ValueError`. That one may begin new episodes by `reset`.

    Example:
        >>> flag = tr.Field((), torch.bool)
        >>> spec = {"obs": tr.Field(3), "reward": tr.Field(), "terminated": flag, "truncated": flag}
        >>> buffer = tr.ReplayBuffer(spec, capacity=100, view=tr.Transitions())
        >>> writer = buffer.writer()
        >>> obs = torch.zeros(3)
        >>> first = writer.reset(obs=obs)
    """

    def __init__(
        self,
        segment: _C.Segment,
        config: Config,
        num_envs: int | None = None,
        autoreset: Autoreset = "next_step",
        first_key: int = 0,
    ) -> None:
        room = config.capacity, config.ragged_bytes or 0  # of which values of any length may take a quarter
        super().__init__(_C.Segment, segment, roles_of(config, num_envs, autoreset), first_key, room)
        self._segment = segment
        self._config = config
        self._num_envs = num_envs
        self._audience = Audience(segment)
        self._jam = WriterJam(segment, config) if isinstance(config.sampler, Fifo) else None
        self._timeout: float | None = None
        open_writers.add(self)

    @property
    def timeout(self) -> float | None:
        """Seconds that a call may wait for the limiter, or for room in a queue, at a time.

        After that it raises `ReplayTimeout`, which says what for. Then a call of one row has written none, and may be
        repeated. None, the default: as long as somebody is there to draw.

        Example:
            >>> writer.timeout = 60
            >>> writer.timeout
            60.0
        """
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._timeout = checked_timeout(seconds)

    @property
    def policy_version(self) -> int:
        """The version of the weights that its rows come from, 0 at first; set it when they change.

        Where the spec has a field of that name, rows that are given none have this one.
        `SharedWeights.pull(module, writer=writer)` and `ExplorerContext.pull_weights` set it.

        Example:
            >>> writer.policy_version = 3
            >>> writer.policy_version
            3
        """
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._policy_version = checked_int("policy_version", version, 0, MOST_VERSIONS)

    def end_episode(self, mask: Any = None) -> None:
        """Ends the running episode with the row that is there, as if its step had come with `truncated=True`.

        Items that only waited for the end can be drawn now, such as the tail of an n-step window. Where no episode
        runs, or it has no step yet, nothing happens. Call `reset` before the next `step`.

        Args:
            mask: With `num_envs`, bool `[num_envs]`: in which environments; None: in all.

        Raises:
            ValueError: The view is `Rows()`, or the mask does not fit.

        Example:
            >>> key = writer.step(obs=obs, reward=1.0, terminated=False, truncated=False)
            >>> writer.end_episode()  # the environment is broken off here
            >>> first = writer.reset(obs=obs)
        """
        self._end_episode(mask)

    def admit(self, n: int = 1, timeout: float | None = None) -> AdmittedItems:
        """Begins items that will be drawn in time: for `with`, which waits until they are admitted.

        Of a buffer with `limiter=tr.Admission(...)`. The block writes up to `n` rows, or none: what it has not written
        when it ends is given back, and so it is when its process dies. Blocks of one writer may overlap, as those of
        tasks in one thread do. A forked child begins its own.

        Args:
            n: Items that the block writes at most, such as the rollouts of a group. They are admitted together.
            timeout: Seconds to wait at most; 0: not at all. None: what the writer's `timeout` says.

        Returns:
            A context manager.

        Raises:
            ValueError: `n` is below 1, or more than are ever admitted at once.

        The `with` raises:

            - `ValueError`: The buffer has another limiter.
            - `Stopped`: The buffer was stopped, or nobody has been there to draw for some seconds.
            - `WouldBlockForever`: Nobody is there who could draw.
            - `ReplayTimeout`: The timeout has passed.

        Example:
            >>> limiter = tr.Admission(batch_size=8, max_age=1)
            >>> queue = tr.ReplayBuffer({"reward": tr.Field()}, 100, sampler=tr.Fifo(), limiter=limiter)
            >>> generator = queue.writer()
            >>> with generator.admit(4):  # a group of four
            ...     for reward in (0.0, 1.0, 0.0, 1.0):
            ...         key = generator.append(reward=reward)
            >>> generator.close()
        """
        if n.__class__ is not int or n != 1:
            n = checked_int("n", n, 1, MOST_ADMITTED)
            limiter = from_native(*self._segment.limiter)
            if isinstance(limiter, Admission) and n > (limiter.max_age + 1) * limiter.batch_size:
                raise ValueError(
                    f"n is {n}: {limiter} never admits more than {(limiter.max_age + 1) * limiter.batch_size} at once"
                )
        return AdmittedItems(self, n, None if timeout is None else checked_timeout(timeout))

    def flush(self) -> None:
        """Returns when everything written so far is in the buffer: at once, since this writer shares its memory.

        Raises:
            ValueError: The writer is closed.

        Example:
            >>> key = writer.step(obs=obs, reward=1.0, terminated=False, truncated=False)
            >>> writer.flush()
            >>> len(buffer)
            2
        """
        self._require_open()

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError("the writer is closed: make another with buffer.writer()")

    def _refuse_closed_buffer(self) -> None:
        """Called by the native core instead of writing to a buffer whose object this process has closed."""
        raise RuntimeError(f"{self._config.called} is closed, and this writer with it: attach it again to write to it")

    def close(self) -> None:
        """Gives up the writer's place; using it again is a `ValueError`. Idempotent.

        Example:
            >>> with buffer.writer() as other:  # closes it at the end
            ...     first = other.reset(obs=obs)
            >>> other.closed
            True
        """
        self._close()

    def _last_observations(self, final_obs: Any, ended: bytes) -> dict[str, Any]:
        """Called by the native core: returns `infos["final_obs"]` as values of the observation fields, by name."""
        observation = self._config.view.observation  # type: ignore[union-attr]
        return FinalObservations(self._config.fields, ended).by_name(final_obs, names_of(observation))

    def _look(self, stalled: bool, waited: float, pages: bool = False) -> None:
        """Called by the native core while a row cannot be written: when a wait begins, and once a slice of it.

        Args:
            stalled: All slots are held by others; else the limiter says that the learner has to draw first.
            waited: Seconds so far, 0 at the beginning.
            pages: It is not slots that are missing, but bytes for ragged values.

        Raises:
            Stopped: The buffer was stopped, or nobody has been there to draw for some seconds.
            WouldBlockForever: Nobody is there who could draw.
            ReplayTimeout: The timeout has passed, or every slot has been held by stopped writers for a minute.
        """
        if stalled:
            self._look_while_stalled(waited, pages)
            return
        if waited == 0:
            self._wait = Wait(self._segment, self.timeout)
        else:
            if self._jam is not None:
                self._jam.check(writers_of_this_thread(self._segment) - 1)
                advice = LARGER_QUEUE.format("ragged_bytes" if pages else "capacity")
                self._wait.check_room(self._why_full, advice, "room in the queue", lambda: f"{self._why_full()}; ")
            else:
                self._wait.check_room(
                    self._balance, MORE_TOLERANCE, "the learner to draw more, as the limiter wants it"
                )
            self._look_around()
        self._wait.look()

    def _look_before_admission(self, n: int, timeout: float | None, waited: float) -> None:
        """Called by the native core while items are not admitted: when a wait begins, and once a slice of it.

        Args:
            n: Items to be admitted.
            timeout: Seconds to wait at most; None: those of the writer.
            waited: Seconds so far, 0 at the beginning.

        Raises:
            Stopped: The buffer was stopped, or nobody has been there to draw for some seconds.
            WouldBlockForever: Nobody is there who could draw.
            ReplayTimeout: The timeout has passed.
        """
        if waited == 0:
            self._wait = Wait(self._segment, self.timeout if timeout is None else timeout)
            self._wait.look()
            if self._wait.expired:
                raise ReplayTimeout(f"admit() does not wait: {self._why_not_admitted(n)}")
        else:
            self._wait.check_room(
                lambda: self._why_not_admitted(n),
                "publish a version after each batch, or give Admission a larger max_age",
                "the learner, before an item is begun",
                lambda: f"{self._why_not_admitted(n)}; ",
                call="admit()",
            )
            self._look_around()
        self._wait.look()

    def _settle(self) -> None:
        """Called when a block of `admit` has ended, and what it has not written is given back here."""

    def _why_not_admitted(self, n: int) -> str:
        """Returns what counts as admitted, and how far it may go. It waits for no lock."""
        return why_not_admitted(self._segment, n)

    def _why_full(self) -> str:
        return why_full(self._segment, self._config)

    def _balance(self) -> str:
        """Returns what was inserted and drawn, and what the limiter makes of it, for errors."""
        stats, limiter = self._segment.stats(), from_native(*self._segment.limiter)
        return (
            f"{stats['inserted']:,} items were inserted and {stats['sampled']:,} drawn, and {limiter} says that the "
            f"learner is behind; size: {stats['size']:,} rows"
        )

    def _look_around(self) -> None:
        """Called by the native core about once a second of writing.

        Raises:
            Stopped: Nobody has been there to draw for some seconds.
        """
        self._audience.check()

    def _look_while_stalled(self, waited: float, pages: bool) -> None:
        if self._segment.stopped:
            raise Stopped(f"{self._config.called} was stopped")
        if waited > STALL_LIMIT and pages:
            raise ReplayTimeout(
                f"no run of pages came free for {STALL_LIMIT:.0f} s: stopped writers are writing values all over "
                f"the {self._config.ragged_bytes:,} ragged_bytes, and the row does not fit between them"
            )
        if waited > STALL_LIMIT:
            raise ReplayTimeout(f"no slot came free for {STALL_LIMIT:.0f} s: all are held by stopped writers")

    def __enter__(self) -> Writer:
        self._require_open()
        return self

    def __reduce__(self) -> str:
        raise TypeError("a Writer is neither pickled nor copied: pass the buffer, and call buffer.writer() there")

    def __repr__(self) -> str:
        return "Writer(closed)" if self.closed else f"Writer({self.rows:,} rows written)"


def roles_of(
    config: Config, num_envs: int | None, autoreset: Autoreset
) -> tuple[tuple[int, ...], int, int, int, int, int] | None:
    """Returns what the native core has to know of a writer's fields and streams; None where rows are not linked.

    Raises:
        ValueError: `num_envs` is out of range or asked for under `Rows()`, `autoreset` is unknown or given without it,
            or an argument of its calls has a field's name.
    """
    mode = checked_autoreset(autoreset)
    if num_envs is None and mode != "next_step":
        raise ValueError(f"autoreset is {autoreset!r}, but num_envs is missing: expected the number of environments")
    if num_envs is not None:
        num_envs = checked_int("num_envs", num_envs, 1, MAX_ENVS)
    roles = config.view.roles(config.fields)
    if roles is None:
        if num_envs is not None:
            raise ValueError("num_envs is for linked rows, but the buffer's view is Rows(): use extend()")
        return None
    if num_envs is not None:
        _refuse_fields_named_as_arguments(config, roles, mode)
    reward = -1 if roles.reward is None else roles.reward
    return roles.observation, roles.terminated, roles.truncated, reward, num_envs or 0, AUTORESETS.index(mode)


def streams_of(envs: Any, num_envs: int | None, autoreset: Autoreset | None) -> tuple[int | None, Autoreset]:
    """Returns how many environments a writer is of (None: one, without a dimension of its own), and how they reset.

    Args:
        envs: An environment, a vector environment, or a number of environments; None: what `num_envs` says.
        num_envs: As given to `writer`.
        autoreset: As given to `writer`.

    Raises:
        ValueError: `envs` is none of these, does not say how it resets, or says something else than the others.
    """
    own = None if autoreset is None else checked_autoreset(autoreset)
    given = "next_step" if autoreset is None else autoreset
    if envs is None or isinstance(envs, SupportsIndex):
        number: Any = num_envs if envs is None else envs
        _refuse_other("num_envs", num_envs, "envs", number)
        return number, given
    if not hasattr(envs, "num_envs"):
        return _single(envs, num_envs, autoreset)
    number = checked_int("envs.num_envs", envs.num_envs, 1, MAX_ENVS)
    _refuse_other("num_envs", num_envs, "envs.num_envs", number)
    says = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if says is not None:
        mode = checked_autoreset(says)
        _refuse_other("autoreset", own, 'envs.metadata["autoreset_mode"]', mode)
        return number, mode
    if own is None and not hasattr(envs, "single_observation_space"):
        raise ValueError(
            f"envs is {envs!r:.200}, no vector environment of Gymnasium's, and does not say how it resets: pass "
            f"autoreset= too ('same_step' for those of Stable-Baselines3)"
        )
    return number, given


def _single(env: Any, num_envs: int | None, autoreset: Autoreset | None) -> tuple[None, Autoreset]:
    if not (hasattr(env, "reset") and hasattr(env, "step")):
        raise ValueError(f"envs is {env!r:.200}: expected an environment, a vector environment, or their number")
    for name, value in (("num_envs", num_envs), ("autoreset", autoreset)):
        if value is not None:
            raise ValueError(
                f"{name} is {value!r}, but envs is {env!r:.200}, which has no num_envs and so is one environment: "
                f"leave one of them out"
            )
    return None, "next_step"


def _refuse_other(name: str, given: Any, source: str, expected: Any) -> None:
    if given is not None and given != expected:
        raise ValueError(f"{name} is {given!r}, but {source} is {expected!r}: leave {name} out")


def checked_autoreset(autoreset: Any) -> OwnAutoreset:
    """Returns our own name for what a vector environment does when an episode ends.

    Raises:
        ValueError: It is unknown.
    """
    value = autoreset.value if isinstance(autoreset, Enum) else autoreset
    named = {mode.title().replace("_", ""): mode for mode in AUTORESETS}  # such as NextStep
    if isinstance(value, str) and value in named:
        return named[value]
    return checked_choice("autoreset", value, AUTORESETS)


def _refuse_fields_named_as_arguments(config: Config, roles: Roles, autoreset: OwnAutoreset) -> None:
    paths = list(config.fields)
    beside: dict[str, tuple[str, str, Iterable[Path]]] = {
        "same_step": ("final_obs", "step", paths),
        "disabled": ("mask", "reset", [paths[field] for field in roles.observation]),
    }
    argument, call, given = beside.get(autoreset, ("", "", ()))
    if argument in {path[0] for path in given}:
        raise ValueError(
            f"a field is named {argument!r}, and so is an argument of {call}() with autoreset={autoreset!r}: rename it"
        )

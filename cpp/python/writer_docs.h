// What help() says of a writer's calls: the same as the docstrings in `_C.pyi`, which editors show.
#pragma once

namespace torchreplay::py::writer {

inline constexpr char kAppendDoc[] = R"doc(append(*, priority=None, **fields)
--

Writes one row, and returns its key.

Waits while the limiter says that the learner is behind.

Args:
    priority: A raw TD error, whose absolute value is taken; above 3.4e38 it counts as that. None: what the
        sampler's `initial` says.
    **fields: Those of the spec, each of exactly its shape and of a dtype that casts to its own. A nested
        field is a dict. A ragged one is an array or a list `[length, *shape]`; one of uint8 takes bytes.

Returns:
    The row's key, an int.

Raises:
    ValueError: A field is missing, unknown, of another shape or of a dtype that does not cast; or it has a
        masked value, or a number that its dtype does not hold. Of ragged fields, a value has not the length
        that it is `like`, or a row's take more than a quarter of `ragged_bytes`. Nothing is written.
    Stopped: The buffer was stopped, or nobody has been there to draw for some seconds.
    WouldBlockForever: It would wait, and there is no other thread and no other process to draw.
    ReplayTimeout: Every slot has been held by stopped writers for a minute.

Example:
    >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
    >>> with buffer.writer() as writer:
    ...     writer.append(obs=[0.0, 0.0, 1.0])
    0)doc";

inline constexpr char kExtendDoc[] = R"doc(extend(*, priority=None, lengths=None, **fields)
--

Writes rows, and returns their keys.

Under a view that links rows: one whole episode, with an observation more than steps. With `num_envs` a block
of all environments.

Args:
    priority: None, one number for all rows, or one for each. As for `append`.
    **fields: Of n rows `[n, *shape]`. Of an episode, observations `[T + 1, *shape]` and the others
        `[T, *shape]`. Of a block `[T + 1, num_envs, *shape]` and `[T, num_envs, *shape]`. Of a ragged field a
        list of n values, of a block a list of lists; or the tuple `(values, lengths)` of all elements, one
        value after the other, and the length of each.
    lengths: Instead of such tuples: a dict of ragged fields and their lengths, as `batch["lengths"]` is.

Returns:
    Keys, int64: `[n]`, `[T + 1]` or `[T + 1, num_envs]`.

Raises:
    ValueError, Stopped, WouldBlockForever, ReplayTimeout: As `append`. Rows written before a wait that fails
        stay written.

Example:
    >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
    >>> with buffer.writer() as writer:
    ...     writer.extend(obs=torch.zeros(5, 3))
    tensor([0, 1, 2, 3, 4]))doc";

inline constexpr char kResetDoc[] = R"doc(reset(*, mask=None, **observation)
--

Starts an episode with its first observation.

An episode that is cut short has no end: only its complete items can be drawn.

Args:
    mask: With `num_envs`, bool `[num_envs]`: which environments are reset; None: all. The others write nothing.
    **observation: The view's observation fields only, each of its shape; with `num_envs`
        `[num_envs, *shape]`.

Returns:
    The key of the row written, an int. With `num_envs` int64 `[num_envs]`, -1 where nothing is written.

Raises:
    ValueError: The view is `Rows()`, or a value does not fit, as for `append`. Nothing is written.
    Stopped, WouldBlockForever, ReplayTimeout: As `append`.

Example:
    >>> writer.reset(obs=obs)  # of `obs, info = env.reset()`
    1)doc";

inline constexpr char kStepDoc[] = R"doc(step(*, priority=None, final_obs=None, **fields)
--

Writes what `env.step()` returned: the new observation, and the action, reward and flags that led to it.

Waits as `append` does. After a wait that fails when the rows of some environments are written, all must be
reset.

Args:
    priority: The raw TD error of the items that this step completes, as for `append`; with `num_envs` one
        number, or one for each.
    final_obs: `infos["final_obs"]` of a vector environment that resets in the same step. It is needed where
        an episode ends.
    **fields: Those of the spec, each of its shape; with `num_envs` `[num_envs, *shape]`, and of a ragged
        field a list of `num_envs` values.

Returns:
    The key of the row written, an int; with `num_envs` int64 `[num_envs]`. With `final_obs` it is that of the
    episode's last row.

Raises:
    ValueError: The view is `Rows()`, no `reset()` came before, the episode has ended, or a value does not fit.
        Another thread is in the middle of an episode with this writer. Or, under autoreset "next_step", a
        step that begins an episode has a flag. Nothing is written.
    Stopped, WouldBlockForever, ReplayTimeout: As `append`.

Example:
    >>> reward, terminated, truncated = 1.0, True, False  # of `env.step(action)`, as `obs` is
    >>> writer.step(obs=obs, reward=reward, terminated=terminated, truncated=truncated)
    1)doc";

}  // namespace torchreplay::py::writer

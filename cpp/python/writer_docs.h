// What help() says of a writer's calls.
#pragma once

namespace torchreplay::py::writer {

inline constexpr char kAppendDoc[] = R"(append(*, priority=None, **fields)
--

Write one row and return its key (int).

The fields are those of the spec, each of exactly its shape; a nested field is a dict. `priority` is a raw TD error
(its absolute value is taken); None gives the row the largest priority seen so far. Waits while the limiter says that
the learner is behind.

Raises:
    ValueError: a field is missing, unknown, of another shape or of a dtype that does not cast; or it has a
        masked value, or a number that its dtype does not hold. Nothing is written.
    Stopped: the buffer was stopped, or nobody has been there to draw for some seconds.
    WouldBlockForever: it would wait, and there is no other thread and no other process to draw.
    ReplayTimeout: every slot has been held by stopped writers for a minute.)";

inline constexpr char kExtendDoc[] = R"(extend(*, priority=None, **fields)
--

Write n rows, whose values have a leading dimension n, and return their keys (int64 tensor of shape [n]).

Under a view that links rows: one whole episode, observation fields [T + 1, ...] and the others [T, ...], or with num_envs a
block [T + 1, num_envs, ...] and [T, num_envs, ...]; keys [T + 1] or [T + 1, num_envs].

`priority` is None, one number for all rows, or one for each. Waits and raises as `append` does; rows written before a
wait that fails stay written.)";

inline constexpr char kResetDoc[] = R"(reset(*, mask=None, **observation)
--

Start an episode with its first observation, and return the key of the row written (int; with num_envs int64 tensor [num_envs]).

Takes the view's observation fields only. With num_envs the values are [num_envs, ...], and `mask` (bool
[num_envs]) says which of them are reset; the others write nothing and get the key -1. An episode that the reset cuts short has
no end: only its complete items can be drawn.

Raises:
    ValueError: the view is Rows(), or a field is missing, unknown, of another shape or of a dtype that does not cast,
        or has a number that its dtype does not hold; nothing is written.
    Stopped, WouldBlockForever, ReplayTimeout: as `append`.)";

inline constexpr char kStepDoc[] = R"(step(*, priority=None, final_obs=None, **fields)
--

Write what env.step() returned: the new observation, and the action, reward and flags that led to it. Returns the key
of the row written (int; with num_envs int64 tensor [num_envs]).

`priority` is the raw TD error of the items that this step completes (with num_envs one number, or one for each); None
gives them the largest one seen so far. `final_obs` is infos['final_obs'] of a vector environment that resets in the
same step; it is needed where an episode ends, and the key returned is then that of the episode's last row.

Waits as `append` does. After a wait that fails when the rows of some environments are written, all must be reset.

Raises:
    ValueError: the view is Rows(), no reset() came before, the episode has ended, or a value does not fit; another
        thread is in the middle of an episode with this writer; or under autoreset 'next_step' a step that begins an
        episode has a flag. Nothing is written.
    Stopped, WouldBlockForever, ReplayTimeout: as `append`.)";

}  // namespace torchreplay::py::writer

"""What is wrong with the actions and rewards that a user's loop wrote: those of another step, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchreplay.checking.field_mapping import lookup
from torchreplay.checking.loop_recording import EnvStep
from torchreplay.checking.observation_findings import AS_IT_IS, vary
from torchreplay.checking.pairs import Pair, Pairs
from torchreplay.schema.spec import Path, Ragged

StepInEnv: TypeAlias = tuple[EnvStep | None, int]
"""A step, if there is one, and the index of an environment."""
Found: TypeAlias = tuple[str, str, int]
"""File and line, what is wrong, and in how many rows."""

CONSTANT: Final = 8
"""Values, at least, that must all be the same to be called constant, or be another step's to be called so."""

OTHER_ACTION: Final = "the action is that of {}: write the one that env.step was given"
OTHER_REWARD: Final = "the reward is {}: write the one that env.step returned"
NO_ACTION: Final = (
    "every action that is written is the same, though env.step was given others: write the one that it was given"
)
NO_REWARD: Final = (
    "every reward that is written is 0, though the environment gave others: write the one that env.step returned"
)


def action_findings(pairs: Pairs) -> Iterator[Found]:
    """Yields what is wrong with the actions, each part of a nested one by itself."""
    for path in (path for path in pairs.mapping.fields if path[0] == "action"):
        rows = [row for pair in pairs.all if not pair.is_reset and (row := _action(pairs, pair, path)) is not None]
        if len(rows) < CONSTANT:
            continue
        where = rows[0][0].write.site
        if not vary([written for _, written, _ in rows]) and vary([own for _, _, own in rows]):
            yield where, NO_ACTION, len(rows)
            continue
        for name, other in _others(pairs).items():
            wrong = _as_another(pairs, rows, other, path)
            if wrong:
                yield where, OTHER_ACTION.format(name), wrong
                break


def reward_findings(pairs: Pairs) -> Iterator[Found]:
    """Yields what is wrong with the rewards, which a loop may scale."""
    rows, written = rewards_of(pairs)
    own = np.array([pair.step.reward[pair.env] for pair in rows])
    if len(own) < CONSTANT:
        return
    where = rows[0].write.site
    if own.any() and not written.any():
        yield where, NO_REWARD, len(written)
        return
    mine = _proportional(written, own)
    for name, rewards in _other_rewards(pairs, rows).items():
        differs = np.isfinite(rewards) & (rewards != own)
        wrong = int((_proportional(written, rewards) & differs).sum())
        if _is_most(wrong, int((mine & differs).sum()), len(written)):
            yield where, OTHER_REWARD.format(name), wrong
            return


def rewards_of(pairs: Pairs) -> tuple[list[Pair], NDArray[np.float64]]:
    """Returns the rows that hold a reward, and the rewards."""
    rewards = [(pair, pairs.written(pair, pairs.mapping.reward)) for pair in pairs.all]
    known = [(pair, float(value)) for pair, value in rewards if value is not None and not value.ndim]
    return [pair for pair, _ in known], np.array([value for _, value in known])


def _is_most(wrong: int, right: int, rows: int) -> bool:
    return wrong >= CONSTANT and 2 * wrong > rows and wrong > 3 * right


def _others(pairs: Pairs) -> dict[str, Callable[[Pair], StepInEnv]]:
    """Returns whose value may be in the place of a step's own, in words, and how to find it."""
    steps, num_envs = pairs.recording.steps, pairs.num_envs

    def beside(pair: Pair, offset: int) -> StepInEnv:
        number = pair.step.number + offset
        return (steps[number] if 0 <= number < len(steps) else None), pair.env

    found: dict[str, Callable[[Pair], StepInEnv]] = {
        "the step before": lambda pair: beside(pair, -1),
        "the step after": lambda pair: beside(pair, 1),
    }
    if num_envs > 1:
        found["another environment"] = lambda pair: (pair.step, (pair.env + 1) % num_envs)
    return found


# Actions


def _action(pairs: Pairs, pair: Pair, path: Path) -> tuple[Pair, NDArray[Any], NDArray[Any]] | None:
    """Returns the action that was written and the one that was taken; None where they cannot be compared."""
    written, own = pairs.written(pair, path), _leaf(pairs, (pair.step, pair.env), path)
    if written is None or own is None:
        return None
    any_length = isinstance(pairs.mapping.fields[path], Ragged)
    is_comparable = written.shape[1:] == own.shape[1:] if any_length else written.shape == own.shape
    return (pair, written, own) if is_comparable else None


def _leaf(pairs: Pairs, at: StepInEnv, path: Path) -> NDArray[Any] | None:
    step, env = at
    try:
        return None if step is None else pairs.held(lookup(step.action, path[1:])[env], path)
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _as_another(
    pairs: Pairs, rows: list[tuple[Pair, NDArray[Any], NDArray[Any]]], other: Callable[[Pair], StepInEnv], path: Path
) -> int:
    """Returns in how many rows another's action is, if that is so in most."""
    wrong = right = 0
    for pair, written, own in rows:
        theirs = _leaf(pairs, other(pair), path)
        if theirs is not None and not np.array_equal(own, theirs):
            wrong += AS_IT_IS.makes(written, theirs)
            right += AS_IT_IS.makes(written, own)
    return wrong if _is_most(wrong, right, len(rows)) else 0


# Rewards


def _other_rewards(pairs: Pairs, rows: list[Pair]) -> dict[str, NDArray[np.float64]]:
    """Returns the rewards that may be in the place of the rows' own; NaN where there is none."""
    found = {}
    for name, other in _others(pairs).items():
        values = [np.nan if step is None else step.reward[env] for step, env in map(other, rows)]
        found[f"that of {name}"] = np.array(values)
    sums = _sums(pairs)
    found["the sum since the episode began"] = np.array([sums[pair.step.number][pair.env] for pair in rows])
    return found


def _sums(pairs: Pairs) -> list[NDArray[np.float64]]:
    """Returns the sum of rewards since the episode began, after each step, of each environment."""
    sums, running = [], np.zeros(pairs.num_envs)
    for step in pairs.recording.steps:
        running = np.where(step.is_reset, 0.0, running + step.reward)
        sums.append(running)
        running = np.where(step.terminated | step.truncated, 0.0, running)
    return sums


def _proportional(written: NDArray[np.float64], given: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns where `written` is `given` times one number, the usual one."""
    usable = np.isfinite(given) & (given != 0)
    factor = float(np.median(written[usable] / given[usable])) if usable.any() else 1.0
    return np.isclose(written, factor * given, rtol=1e-5, atol=1e-9)

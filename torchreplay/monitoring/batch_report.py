"""`explain`: what a batch is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.buffer.base import Replay
from torchreplay.buffer.episodes import episode_starts
from torchreplay.buffer.replay_buffer import ReplayBuffer, local_sampler
from torchreplay.schema.batch import keys_of, ragged_bounds
from torchreplay.schema.samplers import Fifo
from torchreplay.schema.views import Rows
from torchreplay.validation import checked_instance

MANY_DUPLICATES: Final = 0.25
"""Share of a batch from which on items that come again are worth a word."""
FEW_EFFECTIVE: Final = 0.5
"""Effective sample size, as a share of the batch, below which it is."""
ONE_SIDED: Final = 0.8
"""Share of one of several writers from which on it is."""
MANY_GONE: Final = 0.1
USED_UP: Final = 0.95
"""Share of a measure, rows or bytes, from which on it is full."""
SHOWN: Final = 5
"""Writers, episodes and values that the text names; the rest are added up."""


@dataclass(frozen=True, slots=True)
class Range:
    """How a number is spread over a batch."""

    least: float
    median: float
    largest: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Range:
        """Returns the range of `[n]` values, n > 0."""
        return cls(float(values.min()), float(np.median(values)), float(values.max()))

    def __str__(self) -> str:
        return f"{self.least:,.4g} to {self.largest:,.4g}, median {self.median:,.4g}"


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What a batch is made of.

    Attributes:
        items: Items in it.
        distinct: Different ones.
        most_often: How many times the commonest item is there.
        ages: Rows written after each item's; None: no buffer was given.
        gone: Items that the buffer no longer holds; None: no buffer was given.
        weights: Importance-sampling weights; None: the batch has none.
        effective_size: (sum w)^2 / sum w^2: as many equally weighted items say as much (Kish 1965).
        versions: Policy versions that each item was behind the learner's; None: its rows do not say.
        probabilities: Probability of each item's draw; None: the batch has none.
        lengths: Of ragged fields: elements of each item, over all its steps. Fields that are `like` another have its.
        shares: How often each value occurs, the commonest first. `"writer"` and `"episode"` are there where the buffer
            knows them, `"buffer"` in a batch of several, and each column asked for.
        remarks: What is worth a look, in words.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
        >>> keys = buffer.extend(obs=torch.zeros(5, 3))
        >>> report = tr.explain(buffer.gather([0, 1, 1, 1]), buffer)
        >>> report.items, report.distinct, report.most_often
        (4, 2, 3)
    """

    items: int
    distinct: int
    most_often: int
    ages: Range | None
    gone: int | None
    weights: Range | None
    effective_size: float | None
    versions: Range | None
    probabilities: Range | None
    lengths: dict[str, Range]
    shares: dict[str, dict[int, int]]
    remarks: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.items:,} items, {self.distinct:,} different, the commonest {self.most_often} times"]
        if self.ages is not None:
            lines.append(f"ages          {self.ages} rows written since")
        if self.versions is not None:
            lines.append(f"versions      {self.versions} behind the learner's")
        if self.gone:
            lines.append(f"overwritten   {self.gone:,} by now")
        if self.weights is not None and self.effective_size is not None:
            lines.append(f"weights       {self.weights}; effective sample size {self.effective_size:,.1f}")
        if self.probabilities is not None:
            lines.append(f"probabilities {self.probabilities}")
        lines += [f"{name:13} {of} elements" for name, of in self.lengths.items()]
        lines += [f"{name + 's':13} {_share_text(counts, self.items)}" for name, counts in self.shares.items()]
        return "\n".join([*lines, *(f"look at: {text}" for text in self.remarks)])


def explain(batch: Mapping[str, Any], buffer: Replay | None = None, *, by: Iterable[str] = ()) -> BatchReport:
    """Returns what a batch is made of: ages, duplicates, weights, and the share of each writer and episode.

    Args:
        batch: As `sample`, `gather`, a `ReplayDataset` or a `MixedDataset` returned it.
        buffer: That it was drawn from. A `ReplayBuffer` of this machine knows ages and writers. Under views that link
            rows it knows episodes, for a pass over the rows' headers. None: the batch says what it can by itself.
        by: Scalar integer columns of the batch, nested ones joined by '/', whose values are counted as well.

    Raises:
        TypeError: `batch` is no mapping, or `buffer` no buffer.
        ValueError: The batch has no keys or no items, was drawn from another buffer, or lacks a column of `by`.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3), "level": tr.Field((), torch.int64)}, capacity=100)
        >>> keys = buffer.extend(obs=torch.zeros(4, 3), level=[1, 1, 1, 2])
        >>> tr.explain(buffer.gather(keys), buffer, by=["level"]).shares["level"]
        {1: 3, 2: 1}
    """
    checked_instance("batch", batch, Mapping, "a batch, as sample() returns it")
    given = batch.get("key")
    if given is None or not len(given):
        raise ValueError("the batch has no items: expected 'key', int64 [B], as sample() returns it")
    keys = _numpy(given).astype(np.int64)
    named = keys if "buffer" not in batch else np.stack([keys, _numpy(batch["buffer"])])  # a key is one buffer's
    _, counts = np.unique(named, axis=-1, return_counts=True)
    shares = {name: _counted(_numpy(_column(batch, name))) for name in by}
    if "buffer" in batch:
        shares["buffer"] = _counted(_numpy(batch["buffer"]))
    ages = gone = None
    if buffer is not None and "buffer" not in batch:
        checked_instance("buffer", buffer, Replay, "a torchreplay.ReplayBuffer, or None")
        if isinstance(buffer, ReplayBuffer):
            ages, gone = _look_up(dict(batch) if not isinstance(batch, dict) else batch, keys, buffer, shares)
    weights, effective = _weights(batch, len(keys))
    probability = batch.get("probability")
    report = BatchReport(
        items=len(keys),
        distinct=len(counts),
        most_often=int(counts.max()),
        ages=ages,
        gone=gone,
        weights=weights,
        effective_size=effective,
        versions=None if batch.get("age") is None else Range.of(_numpy(batch["age"])),
        probabilities=None if probability is None else Range.of(_numpy(probability)),
        lengths=_lengths(batch),
        shares=shares,
        remarks=(),
    )
    return replace(report, remarks=tuple(_remarks(report, buffer)))


def _look_up(
    batch: dict[str, Any], keys: NDArray[np.int64], buffer: ReplayBuffer, shares: dict[str, dict[int, int]]
) -> tuple[Range, int]:
    """Returns ages and how many rows are gone; adds the shares of writers and episodes."""
    sampler = local_sampler(buffer)
    keys_of(batch, sampler.nonce)  # refuses a batch of another buffer
    if sampler.segment.unissued(keys) is not None:
        raise ValueError("the batch has keys that this buffer never issued: expected the buffer that it was drawn from")
    words = sampler.segment.column(-3).numpy()[keys % buffer.capacity]
    there = words >> 16 == keys + 1
    shares["writer"] = _counted((words[there] & 0xFFFF) >> 1)
    if not isinstance(buffer.view, Rows):
        episodes = episode_starts(sampler, keys)
        shares["episode"] = _counted(episodes[episodes >= 0])
    return Range.of(buffer.next_key - 1 - keys), int((~there).sum())


def _lengths(batch: Mapping[str, Any]) -> dict[str, Range]:
    """Returns how many elements items have in ragged fields, by name; of those with the same lengths the first."""
    found, seen = dict[str, Range](), set[int]()
    for name, (offsets, lengths) in ragged_bounds(batch).items():
        if id(offsets) not in seen:
            found[name] = Range.of(_numpy(lengths.reshape(len(lengths), -1).sum(1)))
        seen.add(id(offsets))
    return found


def _weights(batch: Mapping[str, Any], items: int) -> tuple[Range | None, float | None]:
    if batch.get("weight") is None:
        return None, None
    weights = _numpy(batch["weight"]).astype(np.float64)
    squares = float((weights**2).sum())
    return Range.of(weights), float(weights.sum()) ** 2 / squares if squares else 0.0


def _remarks(report: BatchReport, buffer: Replay | None) -> Iterable[str]:
    again = report.items - report.distinct
    if again > MANY_DUPLICATES * report.items:
        yield (
            f"{100 * again / report.items:.0f} % of the items come again: a few have most of the priority, or the "
            f"buffer holds hardly more than a batch. A lower alpha spreads the draws"
        )
    if report.effective_size is not None and report.effective_size < FEW_EFFECTIVE * report.items:
        yield (
            f"the weights leave {report.effective_size:.0f} of {report.items} items an effect: a few count for all. "
            f"A lower alpha, or a lower beta, evens them"
        )
    if report.gone and report.gone > MANY_GONE * report.items:
        yield (
            f"{100 * report.gone / report.items:.0f} % of the rows are overwritten already: their TD errors come too "
            f"late. Lower prefetch, or enlarge the buffer"
        )
    held = buffer.stats() if isinstance(buffer, ReplayBuffer) else None
    waits = isinstance(buffer, ReplayBuffer) and isinstance(buffer.sampler, Fifo)  # its ring is full when all is well
    if held is not None and not waits and held.ragged_fill > USED_UP and held.size < USED_UP * held.capacity:
        yield (
            f"values take all of ragged_bytes, {held.ragged_bytes:,}, with {held.size:,} of {held.capacity:,} rows: "
            f"raise ragged_bytes to hold more rows, or lower the capacity"
        )
    writers = report.shares.get("writer", {})
    alive = buffer.stats().writers if buffer is not None and writers else 0
    if alive > 1 and max(writers.values()) > ONE_SIDED * report.items:
        yield (
            f"writer {next(iter(writers))} has {100 * max(writers.values()) / report.items:.0f} % of the batch, though "
            f"{alive} are alive: the others write little, or nothing that is drawn"
        )


def _counted(values: NDArray[Any]) -> dict[int, int]:
    found, counts = np.unique(values, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {int(found[i]): int(counts[i]) for i in order}


def _share_text(counts: dict[int, int], items: int) -> str:
    shown = [f"{value}: {100 * count / items:.0f} %" for value, count in list(counts.items())[:SHOWN]]
    others = len(counts) - len(shown)
    rest = 100 * sum(list(counts.values())[SHOWN:]) / items
    return ", ".join([*shown, *([f"{others:,} others: {rest:.0f} %"] if others > 0 else [])])


def _column(batch: Mapping[str, Any], name: str) -> Any:
    found: Any = batch
    for part in name.split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    if found is None or len(np.shape(found)) != 1:
        raise ValueError(f"by names {name!r}: expected a scalar column of the batch, which has {', '.join(batch)}")
    return found


def _numpy(values: Any) -> NDArray[Any]:
    array: NDArray[Any] = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    return array

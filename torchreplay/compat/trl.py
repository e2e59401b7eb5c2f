"""A queue of torchreplay as the `rollout_buffer` of TRL's `AsyncGRPOTrainer`, instead of a `multiprocessing.Queue`.

The calls are those that TRL 1.16 makes: `get`, `put_nowait` and `qsize`, of its `RolloutWorkerProtocol`. Samples have
the attributes of its `RolloutSample`. TRL itself is neither imported nor needed: what is stored is looked up by
attribute, and what comes out is a `RolloutSample` of this module. It is tested with a double that has the names and
types of TRL 1.16, without TRL::

    queue = tr.ReplayBuffer(SPEC, 10_000, sampler=tr.Fifo(), ragged_bytes=1 << 30)
    worker = AsyncRolloutWorker(...)  # TRL's own
    worker.rollout_buffer = RolloutQueue(queue)  # before it starts
    trainer = AsyncGRPOTrainer(..., rollout_worker=worker)
"""

from __future__ import annotations

import json
import queue
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from torchreplay.buffer.base import source_of
from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.buffer.writer import Writer
from torchreplay.errors import ReplayTimeout, WouldBlockForever
from torchreplay.schema.samplers import Fifo
from torchreplay.schema.spec import Field, Ragged
from torchreplay.schema.views import Rows
from torchreplay.segment.writer_lease import WriterLease
from torchreplay.validation import checked_instance

SPEC: Final = {
    "input_ids": Ragged(torch.int32),
    "completion_mask": Ragged(torch.bool, like="input_ids"),
    "old_log_probs": Ragged(torch.float32, like="input_ids"),
    "text": Ragged(torch.uint8),  # prompt, completion and metrics, as JSON
    "advantage": Field((), torch.float64),
    "policy_version": Field((), torch.int64),  # the sample's model_version
    "group_id": Field((), torch.int64),
    "enqueued_at": Field((), torch.float64),  # NaN for None
}
"""The fields of a queue for such samples: 9 bytes a token, the messages as UTF-8, and some 60 bytes."""


@dataclass(slots=True)
class RolloutSample:
    """A scored answer, as the trainer reads it.

    Attributes:
        prompt: Messages, dicts of strings and of what else JSON has.
        completion: Likewise.
        input_ids: int64 `[T]`, prompt and completion.
        completion_mask: int64 `[T]`, 1 for the tokens that are learned from.
        old_log_probs: float32 `[T]`.
        advantage: Within its group.
        model_version: Of the policy that answered.
        group_id: Of its prompt.
        metrics: Rewards and the like, by name.
        enqueued_at: Seconds since the epoch, or None.
    """

    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]
    input_ids: np.ndarray
    completion_mask: np.ndarray
    old_log_probs: np.ndarray
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


class RolloutQueue:
    """Rollouts in shared memory, or in a file, behind the calls of a `multiprocessing.Queue`.

    It goes to other processes as a `ReplayBuffer` does. Nothing is pickled for a sample. A sample that was put
    outlives the process that put it. One that was got comes again, to another one, where the process that got it dies.
    A queue in memory ends with its program; `path=` keeps it in a file. What `get` returned is done as the queue's
    `Fifo(commit=)` says. With `commit="manual"` call `queue.commit()` when the model is saved: then a trainer that goes
    on from there gets the later ones again.

    Args:
        queue: A `ReplayBuffer` of `SPEC` with `sampler=tr.Fifo()`. With a `max_age`, set `queue.policy_version` in the
            worker's `update_model_version`.

    Raises:
        TypeError: It is no `ReplayBuffer`.
        ValueError: It is no queue, or it has other fields.

    Example:
        >>> from torchreplay.compat.trl import SPEC, RolloutQueue, RolloutSample
        >>> queue = tr.ReplayBuffer(SPEC, 1_000, sampler=tr.Fifo(), ragged_bytes=1 << 20)
        >>> rollouts = RolloutQueue(queue)  # worker.rollout_buffer = rollouts
        >>> ids, mask, log_probs = np.array([5, 7, 2]), np.array([0, 1, 1]), np.array([0.0, -0.5, -1.0])
        >>> question, answer = [{"role": "user", "content": "?"}], [{"role": "assistant", "content": "!"}]
        >>> rollouts.put_nowait(RolloutSample(question, answer, ids, mask, log_probs, 1.5, 3, 0, {"reward": 1.0}))
        >>> rollouts.qsize()
        1
        >>> sample = rollouts.get(timeout=5.0)
        >>> sample.completion, sample.input_ids.tolist(), sample.model_version
        ([{'role': 'assistant', 'content': '!'}], [5, 7, 2], 3)
    """

    def __init__(self, queue: ReplayBuffer) -> None:
        checked_instance("queue", queue, ReplayBuffer, "a ReplayBuffer of torchreplay.compat.trl.SPEC")
        if not isinstance(queue.sampler, Fifo) or not isinstance(queue.view, Rows):
            raise ValueError(
                f"the buffer has sampler={queue.sampler} and view={queue.view}: expected sampler=tr.Fifo() and the "
                "view tr.Rows(), which is the default"
            )
        own = source_of(queue).config.fields
        if wrong := [name for name, field in SPEC.items() if own.get((name,)) != field]:
            raise ValueError(
                f"the queue's fields {wrong} are missing, or others: make it of torchreplay.compat.trl.SPEC"
            )
        self.queue = queue
        self._writer: Writer | None = None
        self._lease: WriterLease | None = None

    def put_nowait(self, sample: Any) -> None:
        """Stores a sample: one of TRL's, or of this module.

        Raises:
            queue.Full: There is no room now.
            ValueError: Its arrays differ in length, or a message or the metrics have something that JSON has not, such
                as a picture, or a name that is no text.
        """
        if self._writer is None:
            self._writer = self.queue.writer()
            self._writer.timeout = 0.0
        told = [sample.prompt, sample.completion, sample.metrics]
        try:
            _require_text_names(told)
            text = json.dumps(told, ensure_ascii=False).encode()
        except TypeError as error:
            raise ValueError(
                f"the sample's messages or metrics are no JSON: {error}; store such values apart"
            ) from error
        try:
            self._writer.append(
                input_ids=sample.input_ids,
                completion_mask=np.asarray(sample.completion_mask, bool),
                old_log_probs=sample.old_log_probs,
                text=text,
                advantage=sample.advantage,
                policy_version=sample.model_version,
                group_id=sample.group_id,
                enqueued_at=np.nan if sample.enqueued_at is None else sample.enqueued_at,
            )
        except (ReplayTimeout, WouldBlockForever) as error:
            raise queue.Full(str(error)) from error

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """Takes the oldest sample.

        Args:
            block: Whether to wait for one.
            timeout: Seconds to wait at most; None: for ever.

        Raises:
            queue.Empty: None came in time.
        """
        if self._lease is None:
            self._lease = self.queue.expect_writers()  # the trainer itself looks whether its worker lives
        try:
            batch = self.queue.sample(1, timeout=timeout if block else 0.0)
        except ReplayTimeout as error:
            raise queue.Empty(str(error)) from error
        prompt, completion, metrics = json.loads(batch["text"].numpy().tobytes())
        enqueued_at = float(batch["enqueued_at"])
        return RolloutSample(
            prompt,
            completion,
            batch["input_ids"].numpy().astype(np.int64),
            batch["completion_mask"].numpy().astype(np.int64),
            batch["old_log_probs"].numpy(),
            float(batch["advantage"]),
            int(batch["policy_version"]),
            int(batch["group_id"]),
            metrics,
            None if np.isnan(enqueued_at) else enqueued_at,
        )

    def qsize(self) -> int:
        """Returns how many samples wait."""
        return self.queue.stats().drawable

    def __reduce__(self) -> tuple[Any, ...]:
        return RolloutQueue, (self.queue,)

    def __repr__(self) -> str:
        return f"RolloutQueue({self.queue!r})"


def _require_text_names(value: Any) -> None:
    """Raises TypeError where a dict has a name that JSON would silently make text of, such as a number."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise TypeError(f"the name {name!r:.200} is {type(name).__name__}, not text")
            _require_text_names(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _require_text_names(inner)

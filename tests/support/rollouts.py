"""Rollouts of any length, each the same wherever it is made: rows for tests of remote and sharded buffers."""

import numpy as np
import torch

import torchreplay as tr

ROLLOUTS = {
    "tokens": tr.Ragged(torch.int32),
    "logprob": tr.Ragged(torch.float32, like="tokens"),
    "text": tr.Ragged(torch.uint8),
    "number": tr.Field((), torch.int64),
}


def rollout(number):
    """Rollout `number`: up to a hundred tokens; every eleventh has none."""
    chance = np.random.default_rng(number)
    length = int(chance.integers(1, 100)) if number % 11 else 0
    return {
        "tokens": chance.integers(0, 2**31, length).astype(np.int32),
        "logprob": chance.random(length, np.float32),
        "text": f"the {number}th".encode(),
        "number": number,
    }


def write_rollouts(buffer, writer, first, n):
    """Writes so many rollouts, half of them by one call; returns the keys that the other calls have returned."""
    half = n // 2
    keys = [writer.append(**rollout(number)) for number in range(first, first + half)]
    rows = [rollout(number) for number in range(first + half, first + n)]
    writer.extend(**{name: [row[name] for row in rows] for name in ROLLOUTS})
    writer.flush()
    return keys


def write_rollouts_of_its_own(buffer, first, n):
    with buffer.writer() as writer:
        return write_rollouts(buffer, writer, first, n)


def assert_rollouts(batch):
    """Checks a batch beside what its rows were given; returns which rollouts they are."""
    rows = [rollout(number) for number in batch["number"].tolist()]
    assert batch.offsets("tokens") is batch.offsets("logprob")
    for name in ("tokens", "logprob", "text"):
        values = [np.frombuffer(row[name], np.uint8) if name == "text" else row[name] for row in rows]
        assert batch.lengths(name).tolist() == [len(value) for value in values]
        assert batch.offsets(name).tolist() == np.cumsum([0, *map(len, values)]).tolist()
        assert np.array_equal(batch[name].numpy(), np.concatenate([values[0][:0], *values]))
    return batch["number"].tolist()

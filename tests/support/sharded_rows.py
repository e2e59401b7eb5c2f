"""Rows that name their writer, for tests of sharded buffers; so do their keys."""

import numpy as np
import torch
from scipy import stats

import torchreplay as tr
from torchreplay.ray.sharded.shard_keys import KEY_BITS

SPEC = {"node": tr.Field((), torch.int64), "explorer": tr.Field((), torch.int64), "count": tr.Field((), torch.int64)}
SPEC["image"] = tr.Field((16, 16), torch.uint8)
FALSE_ALARM = 1e-6  # of each chi-square test


def image(node, explorer, count):
    """The picture of a row: no two rows of a node are likely to share one."""
    return np.random.default_rng([node, explorer, count]).integers(0, 256, (16, 16), dtype=np.uint8)


def rows_of(node, n):
    """`n` rows for `extend`, with black pictures."""
    where = np.full(n, node)
    return {"node": where, "explorer": where * 0, "count": np.arange(n), "image": np.zeros((n, 16, 16), np.uint8)}


def write(replay, node, explorer, n, first=0):
    """Appends `n` rows to the shard of this node; returns their keys."""
    with replay.writer() as writer:
        return [
            writer.append(node=node, explorer=explorer, count=count, image=image(node, explorer, count))
            for count in range(first, first + n)
        ]


def write_until_stopped(replay, node, explorer):
    """Appends rows for as long as it may; returns how many, and how it ended."""
    count = 0
    try:
        with replay.writer() as writer:
            while not replay.stopped:
                writer.append(node=node, explorer=explorer, count=count, image=np.zeros((16, 16), np.uint8))
                count += 1
    except Exception as error:
        return count, type(error).__name__
    return count, "stopped"


def assert_intact(batch):
    for node, explorer, count, picture in zip(*(batch[k].numpy() for k in SPEC), strict=True):
        assert (picture == image(node, explorer, count)).all(), "torn row"


def assert_follows(observed, probability):
    """Chi-square of how often each item was drawn; stratified draws vary at most as much as independent ones do."""
    due = probability * observed.sum()
    enough = due > 20
    assert enough.sum() > 20
    seen, due = (np.append(values[enough], values[~enough].sum()) for values in (observed, due))
    seen, due = seen[due > 0], due[due > 0]
    assert stats.chi2.sf(((seen - due) ** 2 / due).sum(), len(due) - 1) > FALSE_ALARM


def shards_of(batch):
    """The numbers of the shards that the items of a batch came from."""
    return set((batch["key"] >> KEY_BITS).tolist())

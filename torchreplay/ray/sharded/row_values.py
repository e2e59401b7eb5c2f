"""`values_of_rows`: values for rows of several shards, checked before any shard gets them."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.buffer.rewriting import names_field
from torchreplay.schema.config import Config
from torchreplay.schema.spec import Field, Path, nest


def values_of_rows(config: Config, n: int, fields: dict[str, Any]) -> dict[Path, torch.Tensor]:
    """Returns values for some fields of `n` rows, `[n, *shape]` by path, in the dtypes of the fields.

    Raises:
        ValueError: A field is unknown, or its values do not fit.
    """
    fixed = {path: field for path, field in config.fields.items() if isinstance(field, Field)}
    chosen = {path: field for path, field in fixed.items() if names_field(fields, path)}
    # A buffer refuses what its rows cannot hold, and says why.
    with ReplayBuffer(nest(chosen or fixed), max(1, n)) as rows:
        count = len(rows.extend(**fields))
        if count != n:
            raise ValueError(f"got {count} values, expected one for each of the {n} keys; nothing was changed")
        held: Any = rows.storage
        return {path: reduce(lambda value, name: value[name], path, held)[:n].clone() for path in chosen}

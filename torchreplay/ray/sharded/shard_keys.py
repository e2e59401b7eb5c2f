"""Keys of a union: in the high bits the number of the shard, in the low ones the shard's own key."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.validation import as_numbers

KEY_BITS = 48
"""Of a key, the low ones are the shard's own: at a million rows a second they last nine years."""

MAX_SHARDS = 1 << 15
"""Numbers of shards that fit above them in a positive int64; a shard that takes a lost one's place has a new one."""


_KEY_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32)


def as_keys(given: Any) -> NDArray[np.int64]:
    """Returns keys as users give them, integers `[n]`, as int64.

    Raises:
        ValueError: They are something else.
    """
    tensor = as_numbers("the keys", given, "int64 [n], such as batch['key']")
    if tensor.shape == (0,) or tensor.dtype in _KEY_DTYPES:  # an empty list says no dtype
        tensor = tensor.long()
    if tensor.dtype != torch.int64 or tensor.ndim != 1:
        raise ValueError(f"the keys are {tensor.dtype} {list(tensor.shape)}: expected int64 [n]")
    keys: NDArray[np.int64] = tensor.cpu().numpy()
    return keys


def pack(number: int) -> int:
    """Returns what to add to a shard's own keys to make them the union's."""
    return number << KEY_BITS


def unpack(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the shard's number and its own key for each of the union's `keys`."""
    return keys >> KEY_BITS, keys & ((1 << KEY_BITS) - 1)

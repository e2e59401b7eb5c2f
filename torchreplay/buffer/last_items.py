"""`LastItems`: which items a process was handed last, whose keys are not those of the rows to rewrite."""

from __future__ import annotations

from typing import Any
from weakref import ref

import numpy as np
import torch

from torchreplay.buffer.rewriting import sets_steps
from torchreplay.schema.batch import ReplayBatch
from torchreplay.schema.config import Config


class LastItems:
    """Which items a process was handed last, so that `rewrite` can tell their keys from those of rows.

    Attributes:
        config: What the buffer was made of.
        is_linked: Whether items have several rows, so that a batch's keys name anchors.
        last_keys: Of the batch that was handed out last, where `is_linked`, while somebody has them.
    """

    config: Config
    is_linked: bool
    last_keys: ref[torch.Tensor] | None = None

    def note_items(self, batch: ReplayBatch) -> None:
        """Keeps in mind which items are handed out, for `last_keys`."""
        self.last_keys = ref(batch["key"])

    def refuse_items(self, keys: Any, fields: dict[str, Any]) -> None:
        """Raises ValueError where values of steps are given with the tensor `last_keys`, or a part of it.

        Equal numbers are no reason: another batch may be of the items that begin where these steps end.

        Args:
            keys: What somebody gave for keys of rows.
            fields: The values.
        """
        of_items = None if self.last_keys is None else self.last_keys()
        if of_items is None or not sets_steps(self.config, fields):
            return
        is_array = isinstance(keys, np.ndarray) or (isinstance(keys, torch.Tensor) and keys.device.type == "cpu")
        if is_array and np.may_share_memory(np.asarray(keys), of_items.numpy()):
            raise ValueError(
                "rewrite() got the keys of a batch's items, and values of steps: these keys name the rows of the "
                "observations, and a step's values lie in the row behind. Give buffer.rows_of(batch)[:, 1] for the "
                "steps taken at the anchors; nothing was changed"
            )

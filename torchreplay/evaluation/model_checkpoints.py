"""Evaluated weights, kept in files."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import nn

from torchreplay.checkpoint.directory import remove_unfinished, replace_file
from torchreplay.errors import CheckpointError
from torchreplay.evaluation.evaluation_log import Evaluation
from torchreplay.explorers.named import Fillable
from torchreplay.segment.regular_file import open_regular

BEST: Final = "best.safetensors"
BUFFER: Final = "buffer"


@dataclass(frozen=True)
class ModelCheckpoints:
    """What is saved of evaluations, and where."""

    directory: Path  # of `best.safetensors`, `version-<number>.safetensors` and `buffer/`
    every: int | None  # evaluations from one numbered file to the next; None for none
    buffers: Mapping[str | None, Fillable]  # what to save beside weights, by name; one alone has the name None

    def due(self, evaluation: Evaluation, number: int) -> list[str]:
        """Returns the names of the files that are due after an evaluation, which is the one of this number."""
        names = [BEST] if evaluation.best else []
        if self.every is not None and number % self.every == 0:
            names.append(f"version-{evaluation.version:08}.safetensors")
        return names

    def write(self, names: list[str], content: bytes) -> None:
        """Saves the buffers, and the weights, as `content_of` gives them, under each of these names.

        The best come last: once they are there, nothing that may fail is left but to note them.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for pattern in (re.escape(BEST), r"version-[0-9]+\.safetensors"):
            remove_unfinished(self.directory, pattern)
        for name, buffer in self.buffers.items():
            buffer.save(self.directory / BUFFER / (name or ""))
        for file in sorted(names, key=BEST.__eq__):
            replace_file(self.directory / file, content)

    def best(self) -> tuple[int, float]:
        """Version and mean return of the weights in `best.safetensors`; -1 and minus infinity where there are none.

        Raises:
            CheckpointError: The file is no such file.
        """
        path = self.directory / BEST
        if not path.exists():
            return -1, -math.inf
        from safetensors import SafetensorError, safe_open

        try:
            os.close(open_regular(path, os.O_RDONLY))  # or a pipe would be waited for
            with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
                told = file.metadata() or {}
                return int(told["version"]), float(told["mean_return"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{path} has no weights that an Evaluator saved ({error!r}): choose another directory, or remove it"
            ) from None


def content_of(module: nn.Module, evaluation: Evaluation) -> bytes:
    """Returns a file with a module's weights, and what was found of them in its metadata."""
    from safetensors.torch import save

    # Tensors of their own: safetensors refuses those that share memory, as tied weights do.
    state = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in module.state_dict().items()}
    return save(state, {name: str(value) for name, value in evaluation.as_dict().items()})

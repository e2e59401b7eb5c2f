"""When Lightning takes batches from a stream: each for its step, none ahead."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_leaves

from torchreplay.loading.stepped_dataset import SteppedDataset, tell_loop

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def take_in_turn(trainer: Trainer, *datasets: object) -> None:
    """Has the Trainer's loop take each batch of its datasets for the step that learns from it.

    Args:
        trainer: Its own loaders are looked at, where `fit` was given any.
        datasets: Further datasets that it will iterate. Others than ours are left as they are.
    """
    source: Any = trainer.fit_loop._data_source.instance
    loop = _FitLoop(trainer)
    for dataset in (*datasets, *tree_leaves(getattr(source, "flattened", source))):
        if isinstance(dataset, SteppedDataset):
            tell_loop(dataset, loop)


class _FitLoop:
    """What a dataset knows of the loop that takes its batches.

    Of an iteration without a length Lightning pulls one batch ahead, to learn early whether it ends. A checkpoint would
    count that batch as trained on.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)  # a dataset may outlive it

    def begin(self) -> None:
        fetcher = self._fetcher
        if fetcher is not None:
            fetcher.prefetch_batches = 0

    @property
    def is_over(self) -> bool:
        fetcher = self._fetcher
        return fetcher is not None and bool(fetcher.done)

    @property
    def _fetcher(self) -> Any:
        trainer: Any = self._trainer()
        return None if trainer is None else trainer.fit_loop._data_fetcher

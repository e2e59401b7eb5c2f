"""What `torch.save` writes in place of objects that no file can keep: they end with their processes."""

from __future__ import annotations

import warnings
from typing import Any, Final, NoReturn

import torch

from torchreplay.errors import AttachError

_FILES_PROTOCOL: Final = 2
"""The pickle protocol of `torch.save`. Processes pass things on by a newer one: that of Python, or the newest."""


class NotSaved:
    """Stands in what `torch.load` returns for an object that was not saved with the rest.

    Asking for an attribute or a method, or setting one, is an `AttachError`.

    Args:
        kind: What it was, such as "ReplayBuffer".
    """

    def __init__(self, kind: str) -> None:
        self.__dict__["_kind"] = kind

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or name == "_kind":  # which Python asks every object for
            raise AttributeError(name)
        self._refuse()

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AttachError(
            f"this is no {self._kind}: that one was not saved with the file that was loaded. Give another one, as in "
            f"MyModule.load_from_checkpoint(path, buffer=buffer)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return NotSaved, (self._kind,)

    def __repr__(self) -> str:
        return f"NotSaved({self._kind!r})"


torch.serialization.add_safe_globals([NotSaved])  # so that torch.load(weights_only=True) takes it


class Transient:
    """An object that pickles for other processes while it lives, and is left out of what `torch.save` writes.

    A handle in a file could not be attached later, and a checkpoint that holds one could not be loaded at all. What is
    pickled by the protocol of `torch.save`, or an older one, is taken for a part of a file.
    """

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        if protocol > _FILES_PROTOCOL:
            return super().__reduce_ex__(protocol)
        kind = type(self).__name__
        warnings.warn(
            f"what torch.save writes has a {kind} in it, which no file can keep: it is left out. If it is among the "
            f'hyperparameters of a LightningModule, ignore that argument: save_hyperparameters(ignore=["buffer"])',
            stacklevel=2,
        )
        return NotSaved, (kind,)

"""Base classes that the trainers of both Lightning packages accept as their own.

`pytorch_lightning` and `lightning.pytorch` are two copies of one code base, and the trainer of either refuses a
callback or data module of the other. The `lightning` package brings both along, so the classes here derive from
both where both are installed.
"""

from __future__ import annotations

import sys
import types
from contextlib import suppress
from typing import TYPE_CHECKING, Any

__all__ = ["Callback", "LightningDataModule"]


def _installed_libraries() -> list[types.ModuleType]:
    """Returns the installed Lightning packages of one version, one already imported first.

    Two versions are not joined. Each trainer finds overridden hooks by comparing code, and would take every hook of the
    other version for an override.
    """
    imported, found = set(sys.modules), []
    with suppress(ImportError):
        import lightning.pytorch

        found.append(lightning.pytorch)
    with suppress(ImportError):
        import pytorch_lightning

        found.append(pytorch_lightning)
    found.sort(key=lambda library: library.__name__ not in imported)
    if not found:
        raise ImportError("torchreplay.lightning needs PyTorch Lightning: pip install pytorch-lightning")
    return [library for library in found if library.__version__ == found[0].__version__]


class _Unimplemented:
    """An evaluation hook that a data module does not have, as the library says it whose trainer asks.

    The inherited hooks only raise "not implemented". But they name their package, so their code differs, and one of the
    trainers would take them for the user's loaders.
    """

    def __init__(self, libraries: list[types.ModuleType], name: str) -> None:
        self._libraries, self._name = libraries, name

    def __get__(self, module: Any, kind: type) -> Any:
        trainer = getattr(module, "trainer", None)
        asking = [library for library in self._libraries if isinstance(trainer, library.Trainer)] or self._libraries
        hook = getattr(asking[0].LightningDataModule, self._name)
        return hook if module is None else hook.__get__(module)


def _joined(libraries: list[types.ModuleType], name: str, **namespace: Any) -> type:
    """Returns the class `name` of every library in one; `namespace` applies where there are two."""
    bases = tuple(getattr(library, name) for library in libraries)
    return bases[0] if len(bases) == 1 else type(name, bases, {"__module__": __name__, **namespace})


if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningDataModule
else:
    _libraries = _installed_libraries()
    Callback = _joined(_libraries, "Callback")
    _hooks = ("val_dataloader", "test_dataloader", "predict_dataloader")
    LightningDataModule = _joined(
        _libraries, "LightningDataModule", **{name: _Unimplemented(_libraries, name) for name in _hooks}
    )

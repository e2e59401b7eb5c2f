"""The names and places of a module's weights, without its wrappers."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchreplay.schema.spec import ELEMENT_NAMES, ELEMENTS


def module_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and buffers of the module's `state_dict()`, in its order.

    Their names are those of the module as it was built: without what `torch.compile`, `DistributedDataParallel` and
    `DataParallel` put into them.

    Raises:
        TypeError: It is no module.
        ValueError: One of them cannot be shared.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(module).__name__}")
    own: dict[str, Any] = module.state_dict()
    for name, value in own.items():
        if (unfit := _unfitness(value)) is not None:
            raise ValueError(
                f"the weight {name!r} is {unfit}: expected a dense tensor with memory, of one of {ELEMENT_NAMES}"
            )
    wrapped = _wrapped_prefixes(module)
    return {_plain(name, wrapped): value for name, value in own.items()} if wrapped else own


def load_copies(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Brings what was written into the module's state into the module, where its `state_dict()` returns copies."""
    own = {t.untyped_storage().data_ptr() for t in chain(module.parameters(), module.buffers())}
    if any(t.numel() and t.untyped_storage().data_ptr() not in own for t in state.values()):
        module.load_state_dict(dict(zip(module.state_dict(), state.values(), strict=True)))


def _unfitness(value: Any) -> str | None:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if is_lazy(value):
        return "not initialized yet, for its module has seen no input"
    if value.is_meta or value.layout != torch.strided or value.is_nested or value.dtype not in ELEMENTS:
        layout = "nested, " if value.is_nested else f"{value.layout}, " if value.layout != torch.strided else ""
        return f"{layout}{value.dtype} on {value.device}"
    return None


def _wrapped_prefixes(module: nn.Module) -> list[tuple[str, str]]:
    """Returns (prefix of names inside a wrapper, the same without the wrapper), innermost first."""
    found = []
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, nn.parallel.DataParallel | nn.parallel.DistributedDataParallel):
            attribute = "module"
        elif "_orig_mod" in part._modules:  # torch.compile's; its class takes seconds to import
            attribute = "_orig_mod"
        else:
            continue
        outside = f"{path}." if path else ""
        found.append((f"{outside}{attribute}.", outside))
    return found[::-1]


def _plain(name: str, wrapped: list[tuple[str, str]]) -> str:
    for inside, outside in wrapped:
        if name.startswith(inside):
            name = outside + name[len(inside) :]
    return name

"""Who attaches what a handle of another Ray node names: `torchreplay.ray` says so when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

Attach = TypeVar("Attach", bound=Callable[..., Any])

_attach: dict[str, Callable[..., Any]] = {}


def attaches_remote(kind: str) -> Callable[[Attach], Attach]:
    """Decorates the function or class that attaches one kind of remote object: "buffer" or "weights"."""

    def register(attach: Attach) -> Attach:
        _attach[kind] = attach
        return attach

    return register


def attach_remote(kind: str, *args: Any) -> Any:
    """Returns what stands for an object on another node. Ray is running, or its handle would not count as remote."""
    if kind not in _attach:
        import_module("torchreplay.ray")
    return _attach[kind](*args)

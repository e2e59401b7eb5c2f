"""The nodes of the Ray cluster that this process is connected to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torchreplay.ray.runtime.session import import_ray

_IMPORT_FAILURE: Final = re.compile(r"^(?:ModuleNotFoundError|ImportError): .+$", re.MULTILINE)


def living_nodes() -> dict[str, Mapping[str, float]]:
    """Returns what each node has in all, such as `{"CPU": 8.0}`, by Ray's ids of the nodes that are alive."""
    return {node["NodeID"]: node["Resources"] for node in import_ray().nodes() if node["Alive"]}


def only_on(node: str) -> Any:
    """Returns the scheduling strategy that puts an actor on this node, or nowhere."""
    return import_ray().util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)


@contextmanager
def errors_as_raised() -> Iterator[None]:
    """Raises what an actor's method has raised as if it had been called in this process."""
    try:
        yield
    except import_ray().exceptions.RayTaskError as error:
        raise error.cause from None


def import_failure(error: BaseException) -> str | None:
    """Returns the line of Ray's error that says what a node could not import to run an actor; None if it says no such.

    It may stand deep in a traceback: Ray reports the actor as dead then.
    """
    lines = _IMPORT_FAILURE.findall(str(error))
    return lines[-1] if lines else None


def reason(error: BaseException) -> str:
    """Returns in one line why an actor of Ray's does not answer, by the error that came instead."""
    failure = import_failure(error)
    if failure is not None:
        return f"its node cannot import what it needs: {failure}"
    return " ".join(str(error).split())[:300] or type(error).__name__

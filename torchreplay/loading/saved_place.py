"""`SavedPlace`: what a state says of the place in a stream of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchreplay.buffer.prefetch import DRAWN_FIELDS, DRAWS
from torchreplay.buffer.tree_summary import TreeSummary
from torchreplay.validation import as_numbers, checked_int


@dataclass(frozen=True, eq=False)
class SavedPlace:
    """What `ReplayDataset.state_dict` returned, checked.

    Attributes:
        draws: Batches made from the buffer and handed out.
        position: The place in the iteration.
        drawn: The batches drawn ahead.
        epochs_left: How many epochs the iteration had still to begin; None: there was none under way.
        held: The items of a queue that the process held; None: it is none.
        stream: The number of the stream of a worker of a `DataLoader`; None: it was not in one.
        drawn_by: What names the process and its buffer, where draws take items; else None.
    """

    draws: int
    position: int
    drawn: list[dict[str, Any]]
    epochs_left: int | None
    held: dict[str, Any] | None
    stream: int | None
    drawn_by: str | None

    @classmethod
    def of(cls, state_dict: Any, epochs: bool) -> SavedPlace:
        """Returns what `state_dict` says.

        Args:
            state_dict: What somebody gave.
            epochs: Whether the dataset has some, and its state says how many are left.

        Raises:
            ValueError: It is no such state.
        """
        names = ["draws", "position", "drawn"] + (["epochs_left"] if epochs else [])
        if not isinstance(state_dict, dict) or set(state_dict) - {"stream", "held", "drawn_by"} != set(names):
            entries = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else None
            found = f"is {state_dict!r:.200}" if entries is None else f"has the entries {entries}"
            expected = f"{', '.join(map(repr, names[:-1]))} and {names[-1]!r}"
            raise ValueError(f"state_dict {found}; a ReplayDataset's state has {expected}")
        if not isinstance(state_dict["drawn"], list | tuple):
            raise ValueError(f"drawn is {state_dict['drawn']!r:.200}: expected a list of batches drawn ahead")
        optional = {name: state_dict.get(name) for name in ("epochs_left", "stream")}
        numbers = {name: None if value is None else checked_int(name, value, 0) for name, value in optional.items()}
        held = state_dict.get("held")
        return cls(
            draws=checked_int("draws", state_dict["draws"], 0),
            position=checked_int("position", state_dict["position"], 0),
            drawn=[_require_drawn(batch) for batch in state_dict["drawn"]],
            held=None if held is None else _require_held(held),
            drawn_by=state_dict.get("drawn_by"),
            **numbers,
        )


def _require_drawn(batch: Any) -> dict[str, Any]:
    """Returns what a state says of a batch drawn ahead.

    Raises:
        ValueError: It is none.
    """
    names = {"step", *DRAWN_FIELDS}
    if not isinstance(batch, dict) or set(batch) - {"drawn_from", DRAWS} != names:
        raise ValueError(f"{batch!r} is no batch drawn ahead, which has {sorted(names)}")
    dtypes = DRAWN_FIELDS | ({DRAWS: torch.int64} if DRAWS in batch else {})
    fields = {name: as_numbers(name, batch[name], f"{dtype} [B]") for name, dtype in dtypes.items()}
    for name, values in fields.items():
        if values.dtype != dtypes[name] or values.shape != (fields["key"].numel(),):
            raise ValueError(
                f"{name!r} of a batch drawn ahead is {values.dtype} of shape {tuple(values.shape)}, expected "
                f"{dtypes[name]} of shape ({fields['key'].numel()},)"
            )
    if "drawn_from" in batch:  # which states of before it was there lack
        TreeSummary.of_state(batch["drawn_from"])
        fields["drawn_from"] = batch["drawn_from"]
    return {"step": checked_int("step", batch["step"], 0)} | fields


def _require_held(held: Any) -> dict[str, Any]:
    """Returns what a state says of items of a queue that were held.

    Raises:
        ValueError: It is none.
    """
    names = {"queue", "key", "draws"}
    if not isinstance(held, dict) or set(held) != names:
        raise ValueError(f"'held' of the state is {held!r:.200}: expected a dict with {sorted(names)}")
    key, draws = (as_numbers(name, held[name], "int64 [n]") for name in ("key", "draws"))
    if any(values.dtype != torch.int64 or values.dim() != 1 or len(values) != len(key) for values in (key, draws)):
        raise ValueError(
            f"'held' of the state has keys {key.dtype} {list(key.shape)} and draws {draws.dtype} {list(draws.shape)}: "
            f"expected int64 of the same shape [n]"
        )
    return {"queue": checked_int("queue", held["queue"], 0), "key": key, "draws": draws}

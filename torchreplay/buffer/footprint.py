"""The bytes that a buffer would take, before anything is reserved."""

from __future__ import annotations

from dataclasses import dataclass

from torchreplay import _C
from torchreplay.schema.config import Config
from torchreplay.schema.limiters import Limiter
from torchreplay.schema.samplers import Sampler
from torchreplay.schema.spec import Field, Spec, to_native
from torchreplay.schema.views import View


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of shared memory, or of the file, to the last one.

    Attributes:
        capacity: Rows that fit.
        nbytes: All of it, as `ReplayBuffer.nbytes` will say.
        fields: Of the rows' values, by field; nested names are joined by '/'.
        structures: Of everything else: `row headers`, `alignment`, `links and marks`, `priority tree`, `header`. With
            `fields` they add up to `nbytes`. With ragged fields, whose values are not in `fields`, also `pages`, which
            is their room, and `page words and marks`.

    Example:
        >>> found = tr.footprint({"obs": tr.Field(3), "reward": tr.Field()}, capacity=1000)
        >>> found.fields
        {'obs': 12000, 'reward': 4000}
        >>> found.nbytes == sum(found.fields.values()) + sum(found.structures.values())
        True
    """

    capacity: int
    nbytes: int
    fields: dict[str, int]
    structures: dict[str, int]


def footprint(
    spec: Spec,
    capacity: int,
    *,
    sampler: Sampler | None = None,
    view: View | None = None,
    limiter: Limiter | None = None,
    name: str | None = None,
    ragged_bytes: int | None = None,
) -> Footprint:
    """Returns the bytes that a `ReplayBuffer` of these arguments would take. Nothing is reserved.

    Args:
        spec: As for `ReplayBuffer`.
        capacity: As for `ReplayBuffer`.
        sampler: As for `ReplayBuffer`. It costs nothing but its own description.
        view: As for `ReplayBuffer`. One that links rows takes more for each.
        limiter: As for `ReplayBuffer`. It costs nothing but its own description.
        name: As for `ReplayBuffer`. It is part of the description.
        ragged_bytes: As for `ReplayBuffer`.

    Raises:
        ValueError: A bad spec, capacity, name or `ragged_bytes`.
        TypeError: Something else in the place of a sampler, a view, a limiter or a name.

    Example:
        >>> spec = {"obs": tr.Field((4, 84, 84), torch.uint8), "action": tr.Field((), torch.int64)}
        >>> f"{tr.footprint(spec, capacity=1_000_000).nbytes / 2**30:.1f} GiB"
        '26.3 GiB'
    """
    config = Config.of(spec, capacity, sampler, view, limiter, name, ragged_bytes)
    text = len(config.to_text().encode())
    regions = _C.segment_regions(config.capacity, to_native(config.fields), config.shape(), text)
    fixed = {path: field for path, field in config.fields.items() if isinstance(field, Field)}
    fields = {"/".join(path): config.capacity * field.nbytes for path, field in fixed.items()}
    headers = config.capacity * regions["row_header"]
    structures = {
        "row headers": headers,
        "alignment": regions["at"] - regions["records"] - headers - sum(fields.values()),
        "links and marks": regions["tree"] - regions["at"],
        "priority tree": (regions["page_words"] or regions["bytes"]) - regions["tree"],
        "header": regions["records"],
    }
    if regions["page_count"]:
        structures["pages"] = regions["bytes"] - regions["pages"]
        structures["page words and marks"] = regions["pages"] - regions["page_words"]
    return Footprint(config.capacity, regions["bytes"], fields, structures)

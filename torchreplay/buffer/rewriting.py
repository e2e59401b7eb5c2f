"""What may be rewritten and dropped: checks that are the same for a buffer and for shards."""

from __future__ import annotations

import operator
from typing import Any

from torchreplay.schema.batch import keys_of
from torchreplay.schema.config import Config
from torchreplay.schema.spec import VERSION


def rewriting(config: Config, nonce: int, keys: Any, fields: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
    """Returns the keys and values of `rewrite`, checked as far as the view goes, and whether all are of steps.

    Raises:
        ValueError: There is no field, one says where episodes end, or `keys` is a batch of items, not of rows.
    """
    roles, paths = config.view.roles(config.fields), list(config.fields)
    if not fields:
        raise ValueError("rewrite() got no field: give values by the field's name, such as reward=[0.5, 1.0]")
    for name in config.ragged:
        if names_field(fields, tuple(name.split("/"))):
            raise ValueError(
                f"field {name!r} is Ragged: a value of any length is written once, and stays; discard(keys) drops the "
                f"row, and another may be written"
            )
    if names_field(fields, (VERSION,)):
        raise ValueError(
            f"field {VERSION!r} says by which policy a row came about, which stays so: it cannot be rewritten"
        )
    if roles is not None:
        if isinstance(keys, dict):
            raise ValueError(
                f"rewrite() got a batch, whose items have several rows under {type(config.view).__name__}: give keys "
                f"of rows, such as buffer.rows_of(batch)[:, 1] for the steps taken at the anchors"
            )
        for end in (paths[roles.terminated], paths[roles.truncated]):
            if names_field(fields, end):
                raise ValueError(
                    f"field {'/'.join(end)!r} says where episodes end, and items follow from that: it cannot be "
                    f"rewritten; drop the episode with discard_episode(key), and write it again"
                )
    # Windows across episodes hold rows that begin one, and have places for their steps' values.
    across = getattr(config.view, "across_episodes", False)
    of_steps = roles is not None and not across and not any(names_field(fields, paths[at]) for at in roles.observation)
    return anchors(nonce, keys), fields, of_steps


def sets_steps(config: Config, fields: dict[str, Any]) -> bool:
    """Returns whether values of steps are given, under a view that links rows: an item's key names the row before."""
    roles, paths = config.view.roles(config.fields), list(config.fields)
    if roles is None:
        return False
    return any(names_field(fields, path) for at, path in enumerate(paths) if at not in roles.observation)


def anchors(nonce: int, batch_or_keys: Any) -> Any:
    """Returns the keys of a batch, or the keys; raises ValueError for a batch of another buffer."""
    return keys_of(batch_or_keys, nonce) if isinstance(batch_or_keys, dict) else batch_or_keys


def episode_key(config: Config, key: Any) -> int:
    """Returns the key of `discard_episode`; raises ValueError if it is none, or the view links no rows."""
    if config.view.roles(config.fields) is None:
        raise ValueError(f"the view is {config.view}: its rows belong to no episode; discard(keys) drops rows")
    try:
        number = operator.index(key)
    except TypeError:
        number = -1
    if isinstance(key, bool) or not 0 <= number < 1 << 63:
        raise ValueError(f"discard_episode() got {key!r:.200}, expected the key of one row, an integer")
    return number


def names_field(fields: Any, path: tuple[str, ...]) -> bool:
    """Returns whether nested values have one at `path`."""
    for name in path:
        if not isinstance(fields, dict) or name not in fields:
            return False
        fields = fields[name]
    return True

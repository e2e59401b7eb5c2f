"""Writes recorded episodes as a user's loop would, and notes what each row should hold, under which key."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.checking.casting import Casting, cast
from torchreplay.checking.field_mapping import FieldMapping, lookup
from torchreplay.checking.rollout import Call, Play, Row
from torchreplay.schema.spec import Path


def write_rows(buffer: ReplayBuffer, played: Play, filling: FieldMapping, casting: Casting) -> None:
    """Appends each step as a row of its own, which the record of the step's first observation then stands for."""
    with buffer.writer() as writer:
        for stream in played.streams():
            for row, reached in pairwise(stream):
                if reached.step == 0:
                    continue
                values = filling.observation(row.obs) | filling.observation(reached.obs, "next_")
                values |= filling.step(reached, filling.fill(None))
                try:
                    row.key = writer.append(**values)
                except ValueError as error:
                    raise ValueError(f"{row}: {error}") from error
                for path, field in filling.fields.items():
                    name = "/".join(path)
                    row.values[name] = casting(name, field, lookup(values, path), row)


def write_steps(buffer: ReplayBuffer, played: Play, filling: FieldMapping, casting: Casting) -> None:
    """Writes through `reset` and `step`, with all environments at once where there are several."""
    # A new buffer's only writer gets the keys 0, 1, 2, ...
    written = 0
    num_envs = played.num_envs
    with (
        buffer.writer() if num_envs is None else buffer.writer(num_envs=num_envs, autoreset=played.autoreset) as writer
    ):
        for call in played.calls:
            fill = {} if call.is_reset else filling.fill(num_envs)
            first = next(iter(call.rows.values()))
            try:
                keys = _write(writer, call, filling, fill)
            except ValueError as error:
                raise ValueError(
                    f"{first if num_envs is None else f'{first} and the other environments'}: {error}"
                ) from error
            written = _note_keys(call, {0: keys} if num_envs is None else keys, written)
            for row in (*call.rows.values(), *call.resets):
                own = fill if num_envs is None else {path: values[row.env_index] for path, values in fill.items()}
                _note_values(row, filling, own, casting)


def _write(writer: Any, call: Call, filling: FieldMapping, fill: dict[Path, Any]) -> Any:
    observation = filling.observation(call.obs)
    if call.is_reset:
        return writer.reset(**observation, **({} if call.mask is None else {"mask": call.mask}))
    last = {} if call.final_obs is None else {"final_obs": filling.final_obs(call.final_obs)}
    return writer.step(**_merged(observation, filling.step(call, fill)), **last)


def _note_keys(call: Call, keys: Any, written: int) -> int:
    for i, row in call.rows.items():
        row.key = int(keys[i])
    end = written + len(call.rows) + len(call.resets)
    others = set(range(written, end)) - {row.key for row in call.rows.values()}
    for row, key in zip(call.resets, sorted(others), strict=True):
        row.key = key
    return end


def _note_values(row: Row, filling: FieldMapping, fill: dict[Path, Any], casting: Casting) -> None:
    values = filling.observation(row.obs)
    if row.step > 0:
        values = _merged(values, filling.step(row, fill))
    for path, field in filling.fields.items():
        name = "/".join(path)
        if row.step == 0 and path not in filling.observed:
            row.values[name] = cast(np.zeros(field.shape), field.dtype)
        else:
            row.values[name] = casting(name, field, lookup(values, path), row)


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both, where they name different fields, be it within one nested dict."""
    merged = {**one, **other}
    for name in one.keys() & other.keys():
        merged[name] = _merged(one[name], other[name])
    return merged

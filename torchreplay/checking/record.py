"""Writes recorded episodes as a user's loop would, and notes what each row should hold, under which key."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torchreplay.buffer.replay_buffer import ReplayBuffer
from torchreplay.checking.casting import Casting
from torchreplay.checking.field_mapping import FieldMapping, lookup
from torchreplay.checking.ragged_values import zeros
from torchreplay.checking.rollout import Call, Play, Row
from torchreplay.schema.spec import Path


def write_rows(buffer: ReplayBuffer, played: Play, filling: FieldMapping, casting: Casting) -> None:
    """Appends each step as a row of its own, which the record of the step's first observation then stands for."""
    with buffer.writer() as writer:
        for stream in played.streams():
            for row, reached in pairwise(stream):
                if reached.step == 0:
                    continue
                values = filling.written(row.obs, False) | filling.written(reached.obs, False, "next_")
                given = values | {"action": filling.action(reached.action, False)}
                values |= filling.step(reached, filling.fill(None, given), False)
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
            lanes = num_envs is not None
            observation = filling.written(call.obs, lanes)
            fill = {}
            if not call.is_reset:
                fill = filling.fill(num_envs, observation | {"action": filling.action(call.action, lanes)})
            first = next(iter(call.rows.values()))
            try:
                keys = _write(writer, call, filling, fill, observation, lanes)
            except ValueError as error:
                raise ValueError(
                    f"{first if num_envs is None else f'{first} and the other environments'}: {error}"
                ) from error
            written = _note_keys(call, {0: keys} if num_envs is None else keys, written)
            for row in (*call.rows.values(), *call.resets):
                own = fill if num_envs is None else {path: values[row.env_index] for path, values in fill.items()}
                _note_values(row, filling, own, casting)


def _write(
    writer: Any, call: Call, filling: FieldMapping, fill: dict[Path, Any], observation: dict[str, Any], lanes: bool
) -> Any:
    if call.is_reset:
        return writer.reset(**observation, **({} if call.mask is None else {"mask": call.mask}))
    last = {} if call.final_obs is None else {"final_obs": filling.final_obs(call.final_obs)}
    return writer.step(**_merged(observation, filling.step(call, fill, lanes)), **last)


def _note_keys(call: Call, keys: Any, written: int) -> int:
    for i, row in call.rows.items():
        row.key = int(keys[i])
    end = written + len(call.rows) + len(call.resets)
    others = set(range(written, end)) - {row.key for row in call.rows.values()}
    for row, key in zip(call.resets, sorted(others), strict=True):
        row.key = key
    return end


def _note_values(row: Row, filling: FieldMapping, fill: dict[Path, Any], casting: Casting) -> None:
    values = filling.written(row.obs, False)
    if row.step > 0:
        values = _merged(values, filling.step(row, fill, False))
    for path, field in filling.fields.items():
        name = "/".join(path)
        if row.step == 0 and path not in filling.observed:
            row.values[name] = zeros(field)
        else:
            row.values[name] = casting(name, field, lookup(values, path), row)


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both, where they name different fields, be it within one nested dict."""
    merged = {**one, **other}
    for name in one.keys() & other.keys():
        merged[name] = _merged(one[name], other[name])
    return merged

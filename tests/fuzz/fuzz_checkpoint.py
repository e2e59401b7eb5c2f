"""Loading a checkpoint whose files say anything at all, with checksums that fit: a hostile one, or one gone wrong."""

import atexit
import json
import shutil
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from fuzz_attach import buffers

import torchreplay as tr
from torchreplay.schema.spec import flatten
from torchreplay.segment import reservation

SHARD = "rows-0/00000.safetensors"
SEPARATOR = b"\0\0\0\0"  # between the description, which is text, and the rows
MOST_BYTES = 64 << 20

directory = Path(tempfile.mkdtemp(prefix="torchreplay-fuzz-"))
atexit.register(shutil.rmtree, directory, ignore_errors=True)
(directory / SHARD).parent.mkdir()
reservation.available_memory = lambda: MOST_BYTES


RAGGED = {"x": tr.Ragged(torch.int32), "y": tr.Ragged(torch.bool, (2,), like="x"), "n": tr.Field()}


def seeds():
    for buffer in (*buffers(), tr.ReplayBuffer(RAGGED, 30, ragged_bytes=4096)):
        for _ in range(3):
            write(buffer)
        with tempfile.TemporaryDirectory() as saved:
            buffer.save(saved)
            body = json.loads(json.loads((Path(saved) / "checkpoint.json").read_text())["checkpoint"])
            rows = [path.read_bytes() for path in Path(saved).rglob("*.safetensors")]
        yield json.dumps(body | {"shards": []}).encode() + SEPARATOR + rows[0]


def run(data):
    text, _, rows = data.partition(SEPARATOR)
    (directory / SHARD).write_bytes(rows)
    try:
        body = json.loads(text)
        body["shards"] = [[SHARD, len(rows), zlib.crc32(rows)]]
        text = json.dumps(body).encode()
    except (ValueError, TypeError, RecursionError):
        pass
    outer = {"crc32": zlib.crc32(text), "checkpoint": text.decode("utf-8", "replace")}
    (directory / "checkpoint.json").write_text(json.dumps(outer))
    try:
        buffer = tr.ReplayBuffer.load(directory)
    except (tr.CheckpointError, MemoryError):
        return
    use(buffer)
    buffer.close()


def use(buffer):
    """Draws, feeds back and writes. Each loaded item can be drawn whole, or not at all."""
    repr(buffer)
    buffer.stats()
    for _ in range(2):
        try:
            batch = buffer.sample(8, timeout=0)
            buffer.update_priorities(batch, torch.ones(8))
        except (tr.ReplayTimeout, tr.WouldBlockForever):
            pass
        except RuntimeError as error:
            if not any(expected in str(error) for expected in ("without completing", "lacks the view's functions")):
                raise
        any_length = any(isinstance(column, tr.Ragged) for column in flatten(buffer.spec).values())
        with suppress(tr.WouldBlockForever, *[ValueError] * any_length):  # a row may be too long for its bytes
            write(buffer)


def write(buffer):
    """Writes two rows of zeros, or an episode of two steps."""
    linked = not isinstance(buffer.view, tr.Rows)
    names = buffer.view.observation if linked else ()
    observed = {names} if isinstance(names, str) else set(names)

    def zeros(field, path):
        if isinstance(field, dict):
            return {name: zeros(inner, (*path, name)) for name, inner in field.items()}
        seen = any("/".join(path[:n]) in observed for n in range(len(path) + 1))
        n = 3 if seen else 2
        if isinstance(field, tr.Ragged):
            return [torch.zeros((row % 2, *field.shape), dtype=field.dtype) for row in range(n)]
        return (
            np.zeros((n, *field.shape))
            if field.dtype.is_floating_point
            else torch.zeros((n, *field.shape), dtype=field.dtype)
        )

    buffer.extend(**{name: zeros(field, (name,)) for name, field in buffer.spec.items()})

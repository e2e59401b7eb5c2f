"""Which fields are images, and how one becomes a PNG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from torchreplay.schema.spec import Column, Ragged

SMALLEST: Final = 8
"""Pixels that an image has at least each way: smaller arrays are something else."""
COLOURS: Final = (1, 3, 4)
MAGICS: Final = {b"\xff\xd8\xff": "jpeg", b"\x89PNG\r\n\x1a\n": "png"}
"""How the bytes of compressed pictures begin."""
LONGEST_TEXT: Final = 50
"""Characters of a text that are shown."""

Png = Callable[[Path, NDArray[np.uint8]], None]


def is_image(field: Column) -> bool:
    """Returns whether a field holds an image: uint8 `[H, W]`, or that with colours or stacked frames at either end."""
    if isinstance(field, Ragged) or field.dtype != torch.uint8 or len(field.shape) not in (2, 3):
        return False
    return min(sorted(field.shape)[-2:]) >= SMALLEST and (
        len(field.shape) == 2 or _frames_first(field.shape) is not None
    )


def holds_bytes(field: Column) -> bool:
    """Returns whether the values of a field are bytes of any number: a compressed picture, or a text."""
    return isinstance(field, Ragged) and field.dtype == torch.uint8 and field.shape == ()


def picture_kind(content: bytes) -> str | None:
    """Returns how the bytes of a compressed picture are called as a file, `"jpeg"` or `"png"`; None for others."""
    return next((kind for magic, kind in MAGICS.items() if content.startswith(magic)), None)


def as_text(content: bytes) -> str | None:
    """Returns bytes that are UTF-8 as text in quotes, shortened; None where they are none, or nothing."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    printable = text and all(character.isprintable() or character in "\n\r\t" for character in text)
    if not printable:
        return None
    return repr(text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}...")


def pixels(value: torch.Tensor) -> NDArray[np.uint8]:
    """Returns uint8 `[H, W]`, `[H, W, 3]` or `[H, W, 4]` of an image's value; stacked frames side by side."""
    array = value.numpy()
    if array.ndim == 2:
        return array
    if _frames_first(array.shape):
        array = np.moveaxis(array, 0, -1)
    if array.shape[-1] == 1:
        return np.ascontiguousarray(array[..., 0])
    if array.shape[-1] == 3:
        return np.ascontiguousarray(array)
    return np.concatenate(list(np.moveaxis(array, -1, 0)), axis=1)


def png_writer() -> Png:
    """Returns what writes a PNG: Pillow's way, or else Matplotlib's.

    Raises:
        ImportError: Neither is installed.
    """
    try:
        from PIL import Image
    except ImportError:
        return _matplotlib_writer()
    return lambda path, image: Image.fromarray(image).save(path, format="PNG")


def _matplotlib_writer() -> Png:
    try:
        from matplotlib import image as writer
    except ImportError:
        raise ImportError("PNG files need Pillow or Matplotlib: pip install pillow") from None

    def write(path: Path, image: NDArray[np.uint8]) -> None:
        grey: dict[str, Any] = {"cmap": "gray", "vmin": 0, "vmax": 255} if image.ndim == 2 else {}
        writer.imsave(path, image, format="png", **grey)

    return write


def _frames_first(shape: tuple[int, ...]) -> bool | None:
    """Returns whether colours, or stacked frames, are the first axis; None: neither end is short enough for them."""
    first, *_, last = shape
    if last in COLOURS:
        return False
    if first in COLOURS or (first < SMALLEST <= min(shape[1:])):
        return True
    return False if last < SMALLEST <= min(shape[:-1]) else None

"""Numbers as people read them, and small charts of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
PARTS = " " + BLOCKS
UNITS = ((1e9, " G"), (1e6, " M"), (1e3, " k"))


def count_text(n: float) -> str:
    """Returns a number with three digits that count, such as "1.63 M"."""
    if not math.isfinite(n):
        return "-"
    for unit, name in UNITS:
        if abs(n) >= unit * 0.9995:
            return f"{_three(n / unit)}{name}"
    return f"{n:.0f}" if n >= 100 or n == int(n) else _three(n)


def _three(n: float) -> str:
    return f"{n:.0f}" if abs(n) >= 99.95 else f"{n:.1f}" if abs(n) >= 9.995 else f"{n:.2f}"


def seconds_text(seconds: float) -> str:
    """Returns a duration, such as "35 s" or "2 h 05 min"; "-" for one that is not known, below 0 or NaN."""
    if not seconds >= 0:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours < 1:
        return f"{minutes} min {seconds % 60:02.0f} s" if minutes < 10 else f"{minutes} min"
    return f"{hours} h {minutes % 60:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def percent_text(share: float) -> str:
    """Returns a share as per cent, such as "12 %" or "0.4 %"."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.1f} %"


def spark(values: Sequence[float], width: int) -> str:
    """Returns the newest `width` values as one line, from 0 to the largest of them."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    line = "".join(BLOCKS[0] if top <= 0 else BLOCKS[min(7, int(8 * max(0.0, v) / top))] for v in shown)
    return line.rjust(width)


def bar_chart(shares: Sequence[float], height: int) -> list[str]:
    """Returns bars side by side as lines, the top one first; the tallest bar is `height` lines high."""
    top = max(shares, default=0.0)
    steps = [0 if top <= 0 or share <= 0 else max(1, round(8 * height * share / top)) for share in shares]
    return ["".join(PARTS[min(8, max(0, n - 8 * level))] for n in steps) for level in reversed(range(height))]


def meter(share: float, width: int) -> str:
    """Returns a bar of `width` characters, filled to a share."""
    full = max(0, min(8 * width, round(8 * width * share)))
    eighths = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
    return ("█" * (full // 8) + eighths[full % 8]).ljust(width, "·")

"""The table on the terminal and the JSON file."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.aims import aims_of
from benchmarks.line import OURS, Line
from benchmarks.machine import describe
from benchmarks.plan import Plan

NAME_WIDTH, CELL_WIDTH = 33, 25


def section_header(title: str, columns: Sequence[str]) -> str:
    """Returns a section's title with the names of its columns."""
    cells = "".join(f"{name:>{CELL_WIDTH}}" for name in columns)
    head = f"{title:<{NAME_WIDTH}}{'':<6}{cells}  {'advantage':<24}aim"
    return f"\n{head}\n{'-' * len(head)}"


def row(line: Line, columns: Sequence[str]) -> str:
    """Returns one line of the table: medians with 10th-90th percentiles, advantages and verdicts."""
    cells = "".join(f"{_cell(line, name):>{CELL_WIDTH}}" for name in columns)
    aims = ", ".join(f"{verdict.text} {'met' if verdict.met else 'MISSED'}" for verdict in _verdicts(line))
    return f"{line.name:<{NAME_WIDTH}}{line.unit:<6}{cells}  {_advantages(line):<24}{aims}".rstrip()


def as_json(lines: Sequence[Line], plan: Plan, elapsed: float) -> dict[str, Any]:
    """Returns everything measured, ready for ``json.dump``; a value that is not finite becomes None."""
    return {
        "machine": describe(),
        "plan": vars(plan),
        "elapsed_s": round(elapsed, 1),
        "lines": [_line_as_json(line) for line in lines],
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Writes the report to a file, its directory made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def _line_as_json(line: Line) -> dict[str, Any]:
    candidates = {
        name: {
            "median": _finite(line.median(name)),
            "p10": _finite(line.spread(name)[0]),
            "p90": _finite(line.spread(name)[1]),
            "rounds": [_finite(value) for value in values],
        }
        for name, values in line.samples.items()
    }
    return {
        "section": line.section,
        "name": line.name,
        "unit": line.unit,
        "higher_is_better": line.higher_is_better,
        "candidates": candidates,
        "advantage": {name: _finite(line.advantage(name)) for name in line.rivals()} if OURS in line.samples else {},
        "aims": [{"aim": verdict.text, "met": verdict.met} for verdict in _verdicts(line)],
        "note": line.note,
    }


def _verdicts(line: Line) -> list[Any]:
    judged = (aim.judge(line) for aim in aims_of(line.section, line.name))
    return [verdict for verdict in judged if verdict is not None]


def _cell(line: Line, candidate: str) -> str:
    if candidate not in line.samples:
        return "-"
    low, high = line.spread(candidate)
    median = _figure(line.median(candidate))
    return median if len(line.samples[candidate]) == 1 else f"{median} ({_figure(low)}-{_figure(high)})"


def _advantages(line: Line) -> str:
    if OURS not in line.samples:
        return ""
    return " ".join(f"{_figure(line.advantage(name))}x" for name in line.rivals())


def _figure(value: float) -> str:
    """Returns three significant digits without an exponent."""
    if not math.isfinite(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 4)}f}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

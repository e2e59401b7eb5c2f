"""Command line: ``python -m benchmarks [--quick] [--json PATH] [NAME ...]``, or ``python -m benchmarks learning``."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.cases import CASES, LONG_CASES
from benchmarks.chart import draw
from benchmarks.line import Line
from benchmarks.machine import describe
from benchmarks.plan import FULL, QUICK
from benchmarks.report import as_json, row, section_header, write_json


def learning(arguments: Sequence[str]) -> int:
    """Does what `python -m benchmarks.learning` does, which imports Stable-Baselines3."""
    from benchmarks.learning.__main__ import main as play

    return play(arguments)


ALL = {**CASES, **LONG_CASES}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen cases, prints the table as it grows and writes the JSON file."""
    given = sys.argv[1:] if arguments is None else arguments
    if list(given[:1]) == ["learning"]:
        return learning(given[1:])
    options = _parser().parse_args(given)
    plan = QUICK if options.quick else FULL
    print(", ".join(f"{key} {value}" for key, value in describe().items()))
    print("medians with 10th-90th percentiles over interleaved rounds; advantage: torchreplay over each other column")
    start = time.perf_counter()
    lines = [line for name in options.names or CASES for line in _printed(ALL[name](plan))]
    elapsed = time.perf_counter() - start
    write_json(options.json, as_json(lines, plan, elapsed))
    print(f"\n{elapsed:.0f} s; every round is in {options.json}")
    if pictures := draw(lines, options.json.with_suffix(".png")):
        print("three figures of it as a picture: " + ", ".join(map(str, pictures)))
    return 0


def _printed(lines: Iterator[Line]) -> Iterator[Line]:
    """Passes lines on, printing each as soon as it is there."""
    columns: list[str] = []
    for line in lines:
        if not columns or any(name not in columns for name in line.samples):
            columns = list(line.samples)
            print(section_header(line.section, columns))
        print(row(line, columns), flush=True)
        if line.note:
            print(f"  {line.note}")
        yield line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="smaller buffers and short rounds: a check, not a measurement"
    )
    parser.add_argument(
        "names",
        nargs="*",
        type=_case,
        metavar="NAME",
        help=f"of {', '.join(ALL)}; if none, all but {', '.join(LONG_CASES)}",
    )
    parser.add_argument(
        "--json", type=Path, default=Path("build/benchmarks.json"), help="where the figures go (default: %(default)s)"
    )
    return parser


def _case(name: str) -> str:
    if name not in ALL:
        raise argparse.ArgumentTypeError(f"there is no benchmark {name!r}: expected some of {', '.join(ALL)}")
    return name


if __name__ == "__main__":
    raise SystemExit(main())

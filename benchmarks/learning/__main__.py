"""Command line: ``python -m benchmarks learning [QUESTION ...]``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning.plots import draw
from benchmarks.learning.questions import QUESTIONS
from benchmarks.learning.results import collect, write
from benchmarks.learning.runner import play_missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Plays what was not played yet; writes one CSV file, and one picture a question."""
    options = _parser().parse_args(arguments)
    questions = [QUESTIONS[name] for name in options.names or QUESTIONS]
    seeds = range(options.seeds)
    if not options.plot:
        play_missing(
            [cell for question in questions for cell in question.cells(seeds)], options.directory, options.jobs
        )
    for question in questions:
        results = collect(question.cells(seeds), options.directory)
        if results:
            write(options.directory / f"{question.name}.csv", results)
            draw(question, results, options.directory / f"{question.name}.png")
            print(f"{options.directory / question.name}.csv and .png: {len(results)} lines")
    return 0


def _question(name: str) -> str:
    if name not in QUESTIONS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(QUESTIONS)}")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks learning", description=__doc__)
    parser.add_argument("names", nargs="*", type=_question, metavar="QUESTION", help=", ".join(QUESTIONS))
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to n - 1 (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side; one core each (default: %(default)s)")
    parser.add_argument("--plot", action="store_true", help="plays nothing: draws what was played")
    parser.add_argument("--directory", type=Path, default=Path("build/learning"), help="where results go (%(default)s)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

"""What is played: a cell is one run of one agent on one task with one seed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Point(NamedTuple):
    """What a run shows at one place.

    Attributes:
        x: Where, such as environment steps.
        y: What was measured there, such as the mean return.
        seconds: Since the run began, without evaluations.
    """

    x: float
    y: float
    seconds: float


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        question: That it helps to answer.
        task: What is learned.
        variant: Who learns it, or with which setting.
        seed: Of everything in it.
        play: Called with the seed; yields what it shows. A function of a module, so that processes can get it.
    """

    question: str
    task: str
    variant: str
    seed: int
    play: Callable[[int], Iterable[Point]]

    @property
    def name(self) -> str:
        """A name for a file, which no other cell has."""
        return "-".join((self.question, self.task, self.variant.replace(" ", "_"), str(self.seed)))


@dataclass(frozen=True)
class Question:
    """What several cells answer together, and how that is drawn.

    Attributes:
        name: On the command line and in file names.
        title: A sentence for the picture.
        x: Label of the axis, with the unit.
        y: Label of the other axis, with the unit.
        tasks: By name: what each variant plays.
        log_x: Whether the first axis is logarithmic.
        log_y: Whether the second one is.
    """

    name: str
    title: str
    x: str
    y: str
    tasks: Mapping[str, Mapping[str, Callable[[int], Iterable[Point]]]]
    log_x: bool = False
    log_y: bool = False

    def cells(self, seeds: Sequence[int]) -> list[Cell]:
        """Returns its cells; those that are to be compared follow each other."""
        return [
            Cell(self.name, task, variant, seed, play)
            for task, variants in self.tasks.items()
            for seed in seeds
            for variant, play in variants.items()
        ]

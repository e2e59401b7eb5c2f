"""What bounds the age of rollouts of very different lengths, and what that costs: in simulated time."""

import itertools
from collections.abc import Callable, Iterator, Mapping

from benchmarks.line import OURS, Line
from benchmarks.plan import Plan
from benchmarks.staleness import Bound, Outcome, Scene, Simulation, distance

MAX_AGES = (0, 1, 2, 4)
LOADS = (1.0, 2.0)
"""Of the learner: as fast as the generators, and half as fast."""
BOUNDS: Mapping[str, Bound] = {OURS: "admission", "admission alone": "admission alone", "dropping": "dropping"}
STEPS = 200
"""Of the learner: several times as long as the longest rollout."""


def bias(outcome: Outcome) -> float:
    """Returns how far the lengths of what was learned from are from those of what was begun."""
    return distance(*outcome.early())


QUANTITIES: Mapping[str, Callable[[Scene, Outcome], float]] = {
    "learner waits, %": lambda _, out: 100 * out.learner_waited / out.time,
    "generators wait, %": lambda scene, out: 100 * out.generators_waited / out.time / scene.generators,
    "dropped, %": lambda _, out: 100 * out.expired / len(out.lengths),
    "beyond max_age, %": lambda scene, out: 100 * sum(age > scene.max_age for age in out.ages) / len(out.ages),
    "bias by length": lambda _, out: bias(out),
}


def measure_staleness_sim(_: Plan) -> Iterator[Line]:
    """Yields, for each bound and each `max_age`, who waits, what is dropped, and which lengths that favours."""
    for load, max_age in itertools.product(LOADS, MAX_AGES):
        scenes = {name: Scene(bound, max_age, STEPS, load=load) for name, bound in BOUNDS.items()}
        outcomes = {name: Simulation(scene).run() for name, scene in scenes.items()}
        for name, quantity in QUANTITIES.items():
            samples = {who: [quantity(scenes[who], outcomes[who])] for who in BOUNDS}
            yield Line("staleness_sim", f"load {load:g}, max_age {max_age}: {name}", "", samples)

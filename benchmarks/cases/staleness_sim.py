"""What bounds the age of rollouts of very different lengths, and what that costs: in simulated time."""

from collections.abc import Callable, Iterator, Mapping

from benchmarks.line import OURS, Line
from benchmarks.plan import Plan
from benchmarks.staleness import Bound, Outcome, Scene, Simulation, distance

MAX_AGES = (0, 1, 2, 4)
SEEDS = 3
BOUNDS: Mapping[str, Bound] = {OURS: "admission", "admission alone": "admission alone", "dropping": "dropping"}
STEPS = 400
"""Of the learner: several times as long as the longest rollout."""


def bias(outcome: Outcome) -> float:
    """Returns how far the lengths of what was learned from are from those of what was begun."""
    return distance(*outcome.early())


QUANTITIES: Mapping[str, Callable[[Scene, Outcome], float]] = {
    "learner idle, %": lambda _, out: 100 * out.learner_waited / out.time,
    "generators idle, %": lambda scene, out: 100 * out.generators_waited / out.time / scene.generators,
    "rollouts dropped, %": lambda _, out: 100 * out.expired / len(out.lengths),
    "beyond max_age, %": lambda scene, out: 100 * sum(age > scene.max_age for age in out.ages) / len(out.ages),
    "batches in 1,000 mean lengths": lambda scene, out: scene.steps / out.time * 1_000 * scene.step_time / scene.load,
    "bias by length (KS)": lambda _, out: bias(out),
}


def measure_staleness_sim(plan: Plan) -> Iterator[Line]:
    """Yields, for each bound and each `max_age`, who waits, what is dropped, and which lengths that favours."""
    for max_age in MAX_AGES:
        scenes = {
            name: [Scene(bound, max_age, STEPS, seed=seed) for seed in range(min(SEEDS, plan.rounds))]
            for name, bound in BOUNDS.items()
        }
        outcomes = {name: [Simulation(scene).run() for scene in of] for name, of in scenes.items()}
        for name, quantity in QUANTITIES.items():
            samples = {
                who: [quantity(scene, outcome) for scene, outcome in zip(scenes[who], outcomes[who], strict=True)]
                for who in BOUNDS
            }
            yield Line(
                "staleness_sim", f"max_age={max_age}: {name}", "", samples, higher_is_better=name.startswith("batches")
            )

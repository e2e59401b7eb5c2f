"""How long the first draw takes after a learner was killed in the middle of its work."""

from collections.abc import Iterator

from benchmarks.line import OURS, Line
from benchmarks.native import BATCH_SIZE, Mortals
from benchmarks.plan import Plan

CAPACITY = 1_000_000
MILLISECONDS = 1e3


def measure_recovery(plan: Plan) -> Iterator[Line]:
    """Yields milliseconds of a survivor's first draw, which repairs what the dead one left."""
    for view, linked in (("Rows", False), ("Transitions", True)):
        buffer = Mortals(plan.capacity(CAPACITY), linked)
        # Every round the dead one has come to another place.
        places = [1 + 37 * round_index % 150 for round_index in range(plan.rounds)]
        absorbing = [buffer.after_absorbing(place) * MILLISECONDS for place in places]
        yield Line("recovery", f"{view}, died absorbing", "ms", {OURS: absorbing})
        updating = [buffer.after_updating(place) * MILLISECONDS for place in places]
        yield Line("recovery", f"{view}, died updating {BATCH_SIZE}", "ms", {OURS: updating})
        buffer.close()

"""Parallel SAC on LunarLanderContinuous-v3 until it lands, beside Stable-Baselines3's SAC."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.child import ROOT, run_module
from benchmarks.line import Line
from benchmarks.plan import Plan

STEPS = 100_000
"""Learner steps at most, of a run that never lands."""
LIMIT = 1500.0
"""Seconds for one run."""
EXAMPLE = Path("examples/sac_continuous.py")
ENVIRONMENT = "LunarLanderContinuous-v3"
EXPLORERS = (1, 2, 4)
SB3 = "stable_baselines3"
QUANTITIES = {"seconds": ("until it lands", "s"), "rows": ("environment steps", ""), "step": ("learner steps", "")}
SOLVED = 200.0


def measure_sac(plan: Plan) -> Iterator[Line]:
    """Yields what it took until the mean return of 20 episodes was 200, and the rate of the learner."""
    runs: dict[str, dict[str, Any]] = {}
    for count in EXPLORERS:
        name = f"{count} explorer{'s' * (count > 1)}"
        options = {"env": ENVIRONMENT, "num_explorers": count, "seed": 0, "total_steps": STEPS, "eval_every": 2_000}
        options |= {"solved_at": SOLVED, "tensorboard": False}
        runs[name] = run_module(EXAMPLE.stem, options, LIMIT, {"PYTHONPATH": str(ROOT / EXAMPLE.parent)})
    runs[SB3] = run_module("benchmarks.sac", {"seed": 0, "total_steps": STEPS}, LIMIT)
    missed = [f"{name} got to {run['mean_return']:.0f}" for name, run in runs.items() if run["mean_return"] < SOLVED]
    for key, (name, unit) in QUANTITIES.items():
        samples = {candidate: [float(run[key])] for candidate, run in runs.items()}
        yield Line("sac", name, unit, samples, note="; ".join(missed))
    rates = {candidate: [run["step"] / run["seconds"]] for candidate, run in runs.items()}
    yield Line("sac", "learner steps a second", "1/s", rates, higher_is_better=True)

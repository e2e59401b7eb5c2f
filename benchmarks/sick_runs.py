"""Runs that are sick on purpose beside healthy ones, and what a monitor shows of both: the pictures of docs/metrics.md.

python -m benchmarks.sick_runs --png docs

Each takes about half a minute on two cores. The learner is a small one, or pretends: what is looked at is the replay.
"""

import argparse
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

import torchreplay as tr
from torchreplay.monitoring.metrics import Scalars
from torchreplay.plots import LIGHT, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = {"x": tr.Field((8,))}
BATCH = 256
LOOK_EVERY = 0.5
"""Seconds between two looks at the figures."""


@dataclass
class Trace:
    """A run's figures over time.

    Attributes:
        x: Seconds, or batches.
        values: By name.
    """

    x: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def note(self, x: float, values: dict[str, float]) -> None:
        self.x.append(x)
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)

    def of(self, name: str) -> tuple[list[float], list[float]]:
        """Returns x and a figure; one that began later, as rates do, has its last x."""
        ys = self.values[name]
        return self.x[-len(ys) :], ys


# Wrong alpha


def draws(alpha: float, batches: int, capacity: int = 20_000) -> Trace:
    """Draws from items whose |TD errors| are spread over four powers of ten, and feeds those back."""
    rng = np.random.default_rng(0)
    errors = torch.from_numpy(rng.lognormal(0.0, 2.0, capacity))
    trace = Trace()
    with tr.ReplayBuffer(ROW, capacity, sampler=tr.Prioritized(alpha=alpha, beta=0.4), seed=0) as buffer:
        buffer.extend(x=torch.zeros(capacity, 8))
        for step in range(batches):
            batch = buffer.sample(BATCH)
            buffer.update_priorities(batch, errors[batch["key"]])
            if step % max(1, batches // 100) == 0:
                report = tr.explain(batch, buffer)
                assert report.effective_size is not None
                trace.note(step, {"distinct": report.distinct, "effective": report.effective_size})
    return trace


# Explorers in processes of their own


def explore(buffer: tr.ReplayBuffer, rows_per_second: float, block: int = 25) -> None:
    """Writes rows at a steady rate until the buffer is stopped."""
    rows = torch.zeros(block, 8)
    due = time.monotonic()
    try:
        while not buffer.stopped:
            buffer.extend(x=rows)
            due = max(due + block / rows_per_second, time.monotonic() - 1.0)
            time.sleep(max(0.0, due - time.monotonic()))
    except tr.Stopped:
        return


@contextmanager
def explorers(buffer: tr.ReplayBuffer, count: int, rows_per_second: float) -> Iterator[list[int]]:
    """Runs explorers; yields their process ids."""
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=explore, args=(buffer, rows_per_second), daemon=True) for _ in range(count)]
    for process in started:
        process.start()
    while buffer.stats().writers < count:
        if not all(process.is_alive() for process in started):
            raise RuntimeError("an explorer ended before it wrote")
        time.sleep(0.01)
    try:
        yield [process.pid or 0 for process in started]
    finally:
        buffer.stop()
        for process in started:
            process.join()


def learn(
    buffer: tr.ReplayBuffer,
    seconds: float,
    *,
    compute: float = 0.02,
    late: float = 0.0,
    feeds_back: bool = True,
    at: tuple[float, Callable[[], None]] | None = None,
) -> Trace:
    """Draws, pretends to compute, and feeds back; returns the figures that a monitor logs.

    Args:
        buffer: Where explorers write.
        seconds: How long.
        compute: Seconds for a batch.
        late: Seconds that a batch waits between its draw and its feedback, as with a far too long prefetch.
        feeds_back: Whether it has TD errors at all.
        at: After so many seconds, something to do once.
    """
    rng, scalars, trace = np.random.default_rng(1), Scalars(), Trace()
    waiting: deque[tuple[float, tr.ReplayBatch]] = deque()
    start = time.monotonic()
    looked = -LOOK_EVERY
    while (now := time.monotonic() - start) < seconds:
        waiting.append((now, buffer.sample(BATCH, timeout=10)))
        time.sleep(compute)
        while waiting and waiting[0][0] <= now - late:
            _, batch = waiting.popleft()
            if feeds_back:
                buffer.update_priorities(batch, torch.from_numpy(rng.lognormal(0.0, 1.0, BATCH)))
        if now - looked >= LOOK_EVERY:
            looked = now
            trace.note(now, scalars.take(buffer)[1])
        if at is not None and now >= at[0]:
            at[1]()
            at = None
    return trace


def starving(rows_per_second: float, seconds: float) -> Trace:
    """A learner that may draw each item eight times, beside explorers of so many rows a second."""
    limiter = tr.SamplesPerInsert(ratio=8.0, min_size=500)
    with (
        tr.ReplayBuffer(ROW, 100_000, sampler=tr.Prioritized(), limiter=limiter, seed=0) as buffer,
        explorers(buffer, 2, rows_per_second / 2),
    ):
        return learn(buffer, seconds)


def bereft(dies: bool, seconds: float) -> Trace:
    """Three explorers. One is killed after a third of the time."""
    with (
        tr.ReplayBuffer(ROW, 100_000, sampler=tr.Prioritized(), seed=0) as buffer,
        explorers(buffer, 3, 500.0) as pids,
    ):
        kill = (seconds / 3, lambda: os.kill(pids[0], signal.SIGKILL))
        return learn(buffer, seconds, at=kill if dies else None)


def belated(late: float, seconds: float) -> Trace:
    """A small buffer that explorers fill anew each second, beside a learner whose batches wait."""
    with (
        tr.ReplayBuffer(ROW, 2_000, sampler=tr.Prioritized(), seed=0) as buffer,
        explorers(buffer, 2, 1_000.0),
    ):
        trace = learn(buffer, seconds, late=late)
    stale, applied = (np.diff(trace.values[name]) for name in ("stale_updates", "updated"))
    trace.values["late_share"] = (stale / np.maximum(stale + applied, 1)).tolist()
    return trace


# Queues


def queued(compute: float, capacity: int, dies: bool, seconds: float) -> Trace:
    """Three explorers of a queue, of which one may die after a third of the time. `compute`: seconds for a batch."""
    with (
        tr.ReplayBuffer(ROW, capacity, sampler=tr.Fifo(), seed=0) as buffer,
        explorers(buffer, 3, 500.0) as pids,
    ):
        kill = (seconds / 3, lambda: os.kill(pids[0], signal.SIGKILL))
        trace = learn(buffer, seconds, compute=compute, feeds_back=False, at=kill if dies else None)
        buffer.commit()
        return trace


# Wrong `terminated`

STATES, GAMMA, LIMIT = 20, 0.97, 25
VALUE = 1 / (1 - GAMMA)
"""Of every state: a reward of 1 at each step, for ever."""


def valued(wrong: bool, batches: int) -> tuple[Trace, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Learns the values of a walk that a time limit cuts; `wrong`: the cut is written as an end.

    Returns:
        The mean value over the batches; the priorities at last: edges and counts.
    """
    spec = {
        "obs": tr.Field((), torch.int64),
        "reward": tr.Field(),
        "terminated": tr.Field((), bool),
        "truncated": tr.Field((), bool),
    }
    rng, value, trace = np.random.default_rng(0), np.zeros(STATES), Trace()
    view = tr.Transitions(gamma=GAMMA)
    with tr.ReplayBuffer(spec, 20_000, view=view, sampler=tr.Prioritized(alpha=0.6), seed=0) as buffer:
        for _ in range(20_000 // (LIMIT + 1)):
            cut = np.arange(1, LIMIT + 1) == LIMIT
            ends = {"terminated": cut & wrong, "truncated": cut & (not wrong)}
            walk = rng.integers(0, STATES, LIMIT + 1)
            buffer.extend(obs=walk, reward=np.ones(LIMIT, np.float32), **ends)
        for step in range(batches):
            batch = buffer.sample(BATCH)
            here, there = batch["obs"].numpy(), batch["next_obs"].numpy()
            td = batch["reward"].numpy() + batch["discount"].numpy() * value[there] - value[here]
            np.add.at(value, here, 0.02 * batch["weight"].numpy() * td)
            buffer.update_priorities(batch, td)
            if step % max(1, batches // 100) == 0:
                trace.note(step, {"value": float(value.mean())})
        found = buffer.histograms(bins=40)
    return trace, (found["priority_edges"].numpy(), found["priority"].numpy())


# Pictures


def curves(axes: "Axes", healthy: Trace, sick: Trace, name: str, title: str, labels: tuple[str, str, str]) -> None:
    """Draws a figure of both runs; `labels`: of x, of y, and what the sick run has."""
    x, y, wrong = labels
    axes.plot(*healthy.of(name), color=LIGHT.main, linewidth=2, label="healthy")
    axes.plot(*sick.of(name), color=LIGHT.other, linewidth=2, label=wrong)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.set_ylim(0, 1.3 * max(*healthy.values[name], *sick.values[name]))
    if not y.startswith("share"):
        axes.locator_params(axis="y", integer=True)
    axes.yaxis.set_major_formatter("{x:,.0%}" if y.startswith("share") else "{x:,.0f}")
    axes.legend(loc="upper right", ncols=2)


def picture(path: Path, title: str, panels: Sequence[Callable[["Axes"], None]]) -> None:
    """Writes a picture of panels side by side."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(style(LIGHT)):
        figure = Figure(figsize=(9.5, 3.4), dpi=110, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        for draw, axes in zip(panels, figure.subplots(1, len(panels)), strict=True):
            draw(axes)
        figure.savefig(path)
    print(f"{path}: {title}")


def wrong_alpha(directory: Path, seconds: float) -> None:
    batches = int(120 * seconds)
    healthy, sick = draws(0.6, batches), draws(2.0, batches)
    labels = ("batches drawn", f"of {BATCH} items", "alpha = 2")
    picture(
        directory / "metrics_wrong_alpha.png",
        "Wrong alpha: a few items are all that is drawn",
        [
            lambda axes: curves(axes, healthy, sick, "distinct", "tr.explain(batch).distinct", labels),
            lambda axes: curves(axes, healthy, sick, "effective", "tr.explain(batch).effective_size", labels),
        ],
    )


def starving_learner(directory: Path, seconds: float) -> None:
    healthy, sick = starving(3_000.0, seconds), starving(250.0, seconds)
    wrong = "explorers write too little"
    picture(
        directory / "metrics_starving_learner.png",
        "Starving learner: it waits for rows",
        [
            lambda axes: curves(
                axes,
                healthy,
                sick,
                "sample_wait_share",
                "replay/sample_wait_share",
                ("seconds", "share of its time", wrong),
            ),
            lambda axes: curves(
                axes,
                healthy,
                sick,
                "sampled_per_second",
                "replay/sampled_per_second",
                ("seconds", "items a second", wrong),
            ),
        ],
    )


def dead_explorer(directory: Path, seconds: float) -> None:
    healthy, sick = bereft(False, seconds), bereft(True, seconds)
    wrong = f"one is killed after {seconds / 3:.0f} s"
    picture(
        directory / "metrics_dead_explorer.png",
        "One dead explorer: the others go on, and less comes in",
        [
            lambda axes: curves(axes, healthy, sick, "writers", "replay/writers", ("seconds", "writers alive", wrong)),
            lambda axes: curves(
                axes,
                healthy,
                sick,
                "inserted_per_second",
                "replay/inserted_per_second",
                ("seconds", "items a second", wrong),
            ),
        ],
    )


def stale_priorities(directory: Path, seconds: float) -> None:
    healthy, sick = belated(0.0, seconds), belated(0.7, seconds)
    wrong = "batches wait 0.7 s"
    title = "replay/stale_updates"
    picture(
        directory / "metrics_stale_priorities.png",
        "Stale priorities: TD errors come when their rows are gone",
        [
            lambda axes: curves(axes, healthy, sick, "late_share", title, ("seconds", "share of all TD errors", wrong)),
            lambda axes: curves(
                axes,
                healthy,
                sick,
                "updated_per_second",
                "replay/updated_per_second",
                ("seconds", "TD errors a second", wrong),
            ),
        ],
    )


def slow_learner(directory: Path, seconds: float) -> None:
    healthy, sick = queued(0.1, 4_000, False, seconds), queued(0.4, 4_000, False, seconds)
    wrong = "0.4 s a batch"
    picture(
        directory / "metrics_slow_learner.png",
        "Slow learner: the queue is full, explorers wait, and items get old",
        [
            lambda axes: curves(
                axes,
                healthy,
                sick,
                "insert_wait_share",
                "replay/insert_wait_share",
                ("seconds", "share of their time", wrong),
            ),
            lambda axes: curves(
                axes, healthy, sick, "oldest_age", "replay/oldest_age", ("seconds", "seconds since it came", wrong)
            ),
        ],
    )


def drained_queue(directory: Path, seconds: float) -> None:
    healthy, sick = queued(0.2, 1_500, False, seconds), queued(0.2, 1_500, True, seconds)
    wrong = f"one is killed after {seconds / 3:.0f} s"
    picture(
        directory / "metrics_drained_queue.png",
        "Dead explorer of a queue: what is there runs out, then the learner slows down",
        [
            lambda axes: curves(axes, healthy, sick, "drawable", "replay/drawable", ("seconds", "items", wrong)),
            lambda axes: curves(
                axes,
                healthy,
                sick,
                "sampled_per_second",
                "replay/sampled_per_second",
                ("seconds", "items a second", wrong),
            ),
        ],
    )


def wrong_terminated(directory: Path, seconds: float) -> None:
    batches = int(130 * seconds)
    (healthy, right), (sick, wrong) = valued(False, batches), valued(True, batches)

    def values(axes: "Axes") -> None:
        labels = ("batches drawn", "mean value of a state", "a time limit is written as an end")
        curves(axes, healthy, sick, "value", "Learned value", labels)
        axes.axhline(VALUE, color=LIGHT.muted, linestyle="--", linewidth=1.2, label="true value")
        axes.legend(loc="center right")

    def priorities(axes: "Axes") -> None:
        for (edges, counts), colour, label in (
            (right, LIGHT.main, "healthy"),
            (wrong, LIGHT.other, "written as an end"),
        ):
            axes.stairs(counts / counts.sum(), edges, color=colour, linewidth=2, label=label)
        axes.set(title="replay/priority", xlabel="|TD error|", ylabel="share of the items", xscale="log")
        axes.margins(y=0.25)
        axes.legend(loc="upper right", ncols=2)

    title = "Wrong terminated: values stay too low, and the rows at the cut never come to rest"
    picture(directory / "metrics_wrong_terminated.png", title, [values, priorities])


RUNS = {
    "wrong_alpha": wrong_alpha,
    "starving_learner": starving_learner,
    "dead_explorer": dead_explorer,
    "stale_priorities": stale_priorities,
    "slow_learner": slow_learner,
    "drained_queue": drained_queue,
    "wrong_terminated": wrong_terminated,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sick_runs", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}; all by default")
    parser.add_argument("--png", type=Path, default=Path("docs"), help="directory for the pictures")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    options = parser.parse_args()
    for name in options.names or RUNS:
        RUNS[name](options.png, options.seconds)


if __name__ == "__main__":
    main()

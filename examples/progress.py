"""What a run shows of itself: a live panel on a terminal, JSON lines elsewhere, a summary and a picture at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

import torchreplay as tr
from torchreplay.plots import ReplayHistory, replay_health

AGES_EVERY = 10  # learner steps: a tenth of the draws shows their ages as well as all of them


class Progress:
    """Shows a run while it lasts, as a context manager, and sums it up after.

    On a terminal a panel is redrawn four times a second by a thread of its own, also while the learner waits for the
    first rows. Elsewhere each evaluation prints one line of JSON, and only those go to standard output.

    Args:
        title: What runs.
        buffer: The buffer to watch.
        total_steps: Learner steps at most.
        solved: The mean return at which the run has reached its goal.
        explorer_returns: Returns each explorer's recent mean return.
    """

    def __init__(
        self,
        title: str,
        buffer: tr.ReplayBuffer,
        total_steps: int,
        solved: float,
        explorer_returns: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self.title, self.buffer, self.total_steps, self.solved = title, buffer, total_steps, solved
        self.explorer_returns = explorer_returns
        self.history = ReplayHistory(buffer)
        self.step = 0
        self._began = self._created = time.monotonic()  # learning; this object
        self._rows_before = 0  # learning
        self.live = sys.stdout.isatty()
        self._console = Console(stderr=not self.live)
        self._clock, self._counts, self._rates = time.monotonic(), np.zeros(2), np.zeros(2)
        self._display = Live(get_renderable=self._panel, refresh_per_second=4, console=self._console, transient=True)

    def __enter__(self) -> Progress:
        if self.live:
            self._display.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.stop()

    def learned(self, step: int, batch: tr.ReplayBatch) -> None:
        """Notes that the learner has made its `step`-th step, from `batch`."""
        if self.step == 0:
            self._began, self._rows_before = time.monotonic(), self.buffer.stats().inserted
        self.step = step
        if step % AGES_EVERY == 0:
            self.history.observe(batch)

    def evaluated(self, step: int, mean_return: float) -> bool:
        """Notes the mean return of the policy after `step` steps; returns whether it reaches the goal."""
        moment = self.history.record(step, float(mean_return), self.explorer_returns())
        if not self.live:
            line = {
                "step": step,
                "mean_return": moment.mean_return,
                "rows": moment.stats.inserted,
                "samples_per_insert": round(moment.stats.samples_per_insert, 2),
                "seconds": round(moment.seconds, 1),
            }
            print(json.dumps(line), flush=True)
        return bool(mean_return >= self.solved)

    def summarize(self, plot: str) -> None:
        """Prints the summary; draws the picture into the file `plot`, unless that is empty or nothing was evaluated."""
        self._console.print(self._summary())
        if plot and self.history.moments:
            Path(plot).parent.mkdir(parents=True, exist_ok=True)
            replay_health(self.history, plot, self.title, self.solved)
            self._console.print(f"[dim]picture:[/] {Path(plot).resolve()}")

    def _panel(self) -> Panel:
        stats = self.buffer.stats()
        self._measure_rates(stats)
        rows, batches = self._rates
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(style="dim", width=18)
        grid.add_column(width=26)
        grid.add_column()
        for name, value, total in (
            ("buffer", stats.size, stats.capacity),
            ("learner steps", self.step, self.total_steps),
        ):
            grid.add_row(name, f"{value:,} of {total:,}", ProgressBar(total, value))
        grid.add_row("explorers", f"{rows:,.0f} rows/s", f"{stats.inserted:,} rows from {stats.writers} writers")
        grid.add_row("learner", f"{batches:,.0f} batches/s", f"{stats.draws:,} batches")
        grid.add_row("samples per insert", f"{stats.samples_per_insert:.2f}", f"target {self.history.target_ratio:g}")
        grid.add_row("explorers' returns", _joined(self.explorer_returns()), "")
        evaluations = [moment.mean_return for moment in self.history.moments[-5:]]
        grid.add_row("greedy return", _joined(evaluations), f"goal {self.solved:g}")
        return Panel(grid, title=f"[bold]{self.title}", title_align="left", border_style="blue", padding=(1, 2))

    def _measure_rates(self, stats: tr.Stats) -> None:
        now, counts = time.monotonic(), np.array([stats.inserted, stats.draws], float)
        if now - self._clock >= 1.0:
            self._rates = (counts - self._counts) / (now - self._clock)
            self._clock, self._counts = now, counts

    def _summary(self) -> Group | Table:
        table = Table(title=self.title, title_justify="left", title_style="bold", show_header=False, min_width=60)
        table.add_column(style="dim")
        table.add_column(justify="right")
        if not self.history.moments:
            table.add_row("result", f"no evaluation in {self.step:,} steps")
            return table
        last = self.history.moments[-1]
        stats, warm_up = last.stats, self._began - self._created
        seconds = last.seconds - warm_up
        outcome = "[green]solved[/]" if last.mean_return >= self.solved else "[yellow]not solved[/]"
        table.add_row("result", f"{outcome}: greedy mean return {last.mean_return:.1f}, goal {self.solved:g}")
        table.add_row("time", f"{last.seconds:.1f} s, of which {warm_up:.1f} s until the first batch")
        table.add_row("learner", f"{last.step:,} steps, {last.step / seconds:,.0f} a second")
        rate = (stats.inserted - self._rows_before) / seconds  # since learning began, as that of the learner's steps
        table.add_row("explorers", f"{stats.inserted:,} rows, {rate:,.0f} a second")
        table.add_row("samples per insert", f"{stats.samples_per_insert:.2f} (target {self.history.target_ratio:g})")
        table.add_row("waits", f"learner {stats.sample_wait:.1f} s, explorers together {stats.insert_wait:.1f} s")
        table.add_row("priorities", f"{stats.updated:,} updated, {stats.stale_updates:,} too late for their row")
        table.add_row("buffer", f"{stats.size:,} of {stats.capacity:,} rows, {stats.nbytes / 2**20:.1f} MiB shared")
        return table


def _joined(numbers: Sequence[float]) -> str:
    return "  ".join("-" if np.isnan(number) else f"{number:.0f}" for number in numbers) or "none yet"

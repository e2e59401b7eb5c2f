"""`Monitor`: a buffer's figures in the logger of any training loop."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchreplay.buffer.base import Replay
from torchreplay.monitoring.metrics import FINE, HISTOGRAMS, Scalars, named, prometheus_text, tensorboard_histogram
from torchreplay.segment.closeable import Closeable
from torchreplay.segment.waits import logger
from torchreplay.validation import checked_instance, checked_int, checked_number

if TYPE_CHECKING:
    import torch

WRITERS = "a SummaryWriter, an object with log(dict, step=) or log_metrics(dict, step=), or a function (dict, step)"


class Monitor(Closeable):
    """Logs every scalar of `buffer.stats()`, rates and histograms, from a training loop or from a thread of its own.

    The names and values are those of Lightning's `ReplayMonitor`: `replay/size`, `replay/samples_per_insert`, ..., and
    `replay/inserted_per_second`, `replay/sampled_per_second`, `replay/updated_per_second`. docs/metrics.md says what
    each means, and what healthy and sick look like.

    A loop calls `step`. Inside `with` a thread logs by itself.

    Args:
        buffer: A `ReplayBuffer`, a `ShardedReplay`.
        writer: TensorBoard's `SummaryWriter`; an object with `log(dict, step=)`, as W&B's run, or `log_metrics(dict,
            step=)`, as MLflow and Lightning's loggers; or a function of a dict and a step. None: nothing is written,
            and `prometheus` has all.
        interval_s: Seconds between two logs. 0: `step` logs each time.
        histogram_every: Logs between two sets of histograms (priority, age of rows), for TensorBoard. Each costs a pass
            over the buffer.

    Raises:
        TypeError: `buffer` is no buffer, or `writer` nothing that can be written to.
        ValueError: `interval_s` is negative, or `histogram_every` no positive integer.

    Example:
        >>> buffer = tr.ReplayBuffer({"obs": tr.Field(3)}, capacity=100)
        >>> keys = buffer.extend(obs=torch.zeros(5, 3))
        >>> logged = []
        >>> def log(values, step):  # or a SummaryWriter, a run of W&B, a logger of Lightning's
        ...     logged.append((step, values))
        >>> monitor = tr.Monitor(buffer, log, interval_s=0)
    """

    def __init__(
        self, buffer: Replay, writer: Any = None, *, interval_s: float = 10.0, histogram_every: int = 10
    ) -> None:
        self._buffer = checked_instance("buffer", buffer, Replay, "a torchreplay.ReplayBuffer")
        self._writer = writer
        self._write = _writing(writer)
        self._interval = checked_number("interval_s", interval_s, 0.0)
        self._histogram_every = checked_int("histogram_every", histogram_every, 1)
        self._scalars, self._told = Scalars(), Scalars()
        self._last = -1.0
        self._logs = 0
        self._step: int | None = None
        self._lock, self._told_lock = threading.Lock(), threading.Lock()  # a logger may hang, and scrapes go on
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._server: http.server.ThreadingHTTPServer | None = None
        self._warned = False

    def step(self, step: int) -> None:
        """Notes the learner's step, and logs if `interval_s` is over. Beside its own thread it only notes the step.

        Args:
            step: Of the learner: what other metrics of the loop are logged at.

        Example:
            >>> for step in range(3):
            ...     monitor.step(step)
            >>> [step for step, _ in logged]
            [0, 1, 2]
        """
        self._step = step
        if self._thread is None and (self._last < 0 or time.monotonic() - self._last >= self._interval):
            self.log(step)

    def log(self, step: int | None = None) -> dict[str, float]:
        """Logs now.

        Args:
            step: Of the learner; None: that of the last `step`, or else the number of batches drawn.

        Returns:
            What was logged, by name.

        Example:
            >>> monitor.log(1000)["replay/size"]
            5.0
        """
        with self._lock:
            self._last = time.monotonic()
            stats, values = self._scalars.take(self._buffer)
            if step is None:
                step = stats.draws if self._step is None else self._step
            logged = named(values)
            self._write(logged, step)
            if hasattr(self._writer, "add_histogram_raw") and self._logs % self._histogram_every == 0:
                self._log_histograms(self._buffer.histograms(), step)
            self._logs += 1
        return logged

    def _log_histograms(self, found: dict[str, torch.Tensor], step: int) -> None:
        for name in HISTOGRAMS:
            summary = tensorboard_histogram(found[name], found[f"{name}_edges"])
            self._writer.add_histogram_raw(f"replay/{name}", **summary, global_step=step)

    # Prometheus

    def prometheus(self, quantiles: bool = False) -> str:
        """Returns the figures in Prometheus' text format: `replay_size`, `replay_inserted_per_second`, ...

        Rates are those since the call before. A buffer with a name has it as the label `buffer`.

        Args:
            quantiles: Whether to add those of priorities and ages, as gauges. They cost a pass over the buffer.

        Example:
            >>> "replay_size 5" in monitor.prometheus()
            True
        """
        with self._told_lock:
            _, values = self._told.take(self._buffer)
        name = getattr(self._buffer, "name", None)
        found = self._buffer.histograms(FINE) if quantiles else {}
        return prometheus_text(values, found, {} if name is None else {"buffer": name})

    def serve(self, port: int, address: str = "127.0.0.1") -> int:
        """Serves `prometheus` over HTTP, at any path, until `close`.

        Args:
            port: To listen at; 0: any that is free.
            address: To listen at. All who reach it can read the figures, and nothing else.

        Returns:
            The port.

        Raises:
            OSError: The port is taken.
            RuntimeError: It is serving already.

        Example:
            >>> port = monitor.serve(0)
            >>> from urllib.request import urlopen
            >>> b"replay_size 5" in urlopen(f"http://127.0.0.1:{port}/metrics").read()
            True
            >>> monitor.close()
        """
        if self._server is not None:
            raise RuntimeError(f"the monitor serves port {self._server.server_port} already")
        self._server = http.server.ThreadingHTTPServer((address, port), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="torchreplay-metrics", daemon=True).start()
        return self._server.server_port

    # The thread

    def __enter__(self) -> Monitor:
        """Starts a thread that logs every `interval_s` seconds, and at the end.

        Raises:
            ValueError: `interval_s` is 0.
            RuntimeError: It runs already.
        """
        if not self._interval:
            raise ValueError("interval_s is 0: a thread needs seconds between two logs, such as interval_s=10")
        if self._thread is not None:
            raise RuntimeError("the monitor's thread runs already")
        self._end.clear()
        self._thread = threading.Thread(target=self._run, name="torchreplay-monitor", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread, after a last log, and the server. The writer stays open. Idempotent.

        Example:
            >>> with tr.Monitor(buffer, log, interval_s=10):  # closes it at the end
            ...     pass  # train
        """
        thread, self._thread = self._thread, None
        self._end.set()
        if thread is not None:
            thread.join()
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _run(self) -> None:
        over = False
        while not over:
            self._log_or_warn()
            over = self._end.wait(self._interval)
        self._log_or_warn()

    def _log_or_warn(self) -> None:
        """Logs; a logger that fails, or a buffer that was closed, is a warning and not the end of the run."""
        try:
            self.log()
        except Exception as error:  # of a user's logger: any
            if not self._warned:
                self._warned = True
                logger.warning("the monitor could not log, and goes on trying without another word: %r", error)


def _writing(writer: Any) -> Callable[[dict[str, float], int], object]:
    """Returns what writes a dict of values at a step.

    Raises:
        TypeError: `writer` is nothing that can be written to.
    """
    if writer is None:
        return lambda values, step: None
    if hasattr(writer, "add_scalar"):

        def add(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        return add
    for method in ("log_metrics", "log"):
        if callable(found := getattr(writer, method, None)):
            return lambda values, step: found(values, step=step)
    checked: Any = checked_instance("writer", writer, Callable, WRITERS)  # type: ignore[arg-type]
    return lambda values, step: checked(values, step)


def _handler(monitor: Monitor) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                status, body = 200, monitor.prometheus().encode()
            except RuntimeError as error:  # such as that of a closed buffer
                status, body = 503, f"# {error}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing: each scrape would be a line."""

    return Handler

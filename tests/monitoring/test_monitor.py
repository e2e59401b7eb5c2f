"""`Monitor` logs the same names and values to every kind of logger, from a loop, a thread or over HTTP."""

import dataclasses
import re
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from forked import eventually

import torchreplay as tr
from torchreplay.monitoring.metrics import COUNTERS, GAUGES

ROWS, BATCH = 40, 8


@pytest.fixture
def buffer():
    with tr.ReplayBuffer({"x": tr.Field()}, 64, sampler=tr.Prioritized(), seed=0) as made:
        made.extend(x=torch.arange(float(ROWS)), priority=torch.linspace(0.1, 2.0, ROWS))
        yield made


class Recorder:
    """Notes what is logged, in the form of W&B: `log(dict, step=)`."""

    def __init__(self):
        self.logged = []

    def log(self, values, step=None):
        self.logged.append((step, values))

    @property
    def steps(self):
        return [step for step, _ in self.logged]


def every_scalar(buffer):
    ages = ("last_write_age", "oldest_age")
    told = {name: value for name, value in dataclasses.asdict(buffer.stats()).items() if name not in ages}
    return {f"replay/{name}": float(value) for name, value in told.items()}


# What is logged


def test_every_figure_of_stats_is_logged_by_its_name(buffer):
    logged = tr.Monitor(buffer).log()
    assert logged.pop("replay/last_write_age") >= 0
    expected = every_scalar(buffer)
    waits = {name for name in expected if "wait" in name}
    assert logged.keys() == expected.keys()
    assert {name: logged[name] for name in logged.keys() - waits} == {n: expected[n] for n in expected.keys() - waits}


def test_every_figure_of_stats_has_its_words():
    assert set(COUNTERS) | set(GAUGES) == {field.name for field in dataclasses.fields(tr.Stats)}
    assert not set(COUNTERS) & set(GAUGES)


def test_rates_come_with_the_second_look_and_count_what_came_between(buffer, monkeypatch):
    clock = iter([10.0, 10.0, 14.0, 14.0])
    monkeypatch.setattr("torchreplay.monitoring.metrics.time.monotonic", lambda: next(clock))
    monitor = tr.Monitor(buffer)
    assert not [name for name in monitor.log() if name.endswith("_per_second")]
    buffer.sample(BATCH)
    buffer.extend(x=torch.zeros(12))
    buffer.num_items  # noqa: B018  # absorbs them
    logged = monitor.log()
    assert logged["replay/sampled_per_second"] == BATCH / 4
    assert logged["replay/inserted_per_second"] == 12 / 4
    assert logged["replay/updated_per_second"] == 0


def test_the_age_of_the_last_write_is_left_out_before_there_is_one():
    with tr.ReplayBuffer({"x": tr.Field()}, 8) as empty:
        assert "replay/last_write_age" not in tr.Monitor(empty).log()


# Where to


def test_tensorboard_reads_back_the_scalars_and_both_histograms(buffer, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        logged = tr.Monitor(buffer, writer).log(7)
    found = accumulators.EventAccumulator(str(tmp_path), {"histograms": 0, "scalars": 0}).Reload()
    for name, value in logged.items():
        (event,) = found.Scalars(name)
        assert (event.step, event.value) == (7, pytest.approx(value, rel=1e-6))
    (priorities,) = found.Histograms("replay/priority")
    assert priorities.histogram_value.num == ROWS
    assert priorities.histogram_value.min == pytest.approx(0.1, rel=1e-3)
    assert priorities.histogram_value.max == pytest.approx(2.0, rel=1e-3)
    (ages,) = found.Histograms("replay/age")
    assert ages.histogram_value.num == ROWS


@pytest.mark.parametrize("form", ["log", "log_metrics", "function"])
def test_other_loggers_get_a_dict_and_a_step(buffer, form):
    recorder = Recorder()

    class Metrics:
        log_metrics = staticmethod(recorder.log)

    writer = {"log": recorder, "log_metrics": Metrics(), "function": recorder.log}[form]
    logged = tr.Monitor(buffer, writer).log(3)
    assert recorder.logged == [(3, logged)]


@pytest.mark.parametrize("writer", [1, "runs", object()])
def test_what_cannot_be_written_to_is_refused(buffer, writer):
    with pytest.raises(TypeError, match="expected a SummaryWriter"):
        tr.Monitor(buffer, writer)


@pytest.mark.slow
def test_lightning_logs_the_same_names(buffer):
    pytest.importorskip("pytorch_lightning")
    from torchreplay.lightning import monitor as lightning_monitor
    from torchreplay.monitoring import metrics

    for name in ("Scalars", "named", "tensorboard_histogram"):
        assert getattr(lightning_monitor, name) is getattr(metrics, name)


# When


def test_a_loop_logs_at_its_first_step_and_then_once_in_an_interval(buffer, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("torchreplay.monitoring.monitor.time.monotonic", lambda: now[0])
    recorder = Recorder()
    monitor = tr.Monitor(buffer, recorder, interval_s=10)
    for step in range(50):
        now[0] = float(step)
        monitor.step(step)
    assert recorder.steps == [0, 10, 20, 30, 40]


def test_an_interval_of_0_logs_each_step(buffer):
    recorder = Recorder()
    monitor = tr.Monitor(buffer, recorder, interval_s=0)
    for step in (4, 5, 6):
        monitor.step(step)
    assert recorder.steps == [4, 5, 6]


def test_histograms_come_once_in_so_many_logs(buffer):
    class Board(Recorder):
        histograms = ()

        def add_scalar(self, name, value, step):
            self.log(name, step)

        def add_histogram_raw(self, tag, global_step, **summary):
            self.histograms += ((tag, global_step),)

    board = Board()
    monitor = tr.Monitor(buffer, board, interval_s=0, histogram_every=3)
    for step in range(7):
        monitor.step(step)
    assert board.histograms == tuple((f"replay/{name}", step) for step in (0, 3, 6) for name in ("priority", "age"))


def test_a_thread_logs_by_itself_at_the_last_step_that_it_was_told_and_at_the_end(buffer):
    recorder = Recorder()
    with tr.Monitor(buffer, recorder, interval_s=0.001) as monitor:
        monitor.step(17)
        eventually(lambda: recorder.steps.count(17) >= 3)
        monitor.step(18)
    assert recorder.steps[-1] == 18
    assert not [thread for thread in threading.enumerate() if thread.name == "torchreplay-monitor"]


def test_a_thread_without_a_step_logs_at_the_number_of_batches(buffer):
    for _ in range(5):
        buffer.sample(BATCH)
    recorder = Recorder()
    with tr.Monitor(buffer, recorder, interval_s=60):
        eventually(lambda: recorder.logged)
    assert recorder.steps == [5, 5]


def test_a_logger_that_fails_in_the_thread_is_one_warning_and_the_run_goes_on(buffer, caplog):
    calls = []

    def broken(values, step):
        calls.append(step)
        raise ConnectionError("the server is gone")

    with tr.Monitor(buffer, broken, interval_s=0.001):
        eventually(lambda: len(calls) > 3)
    assert len([record for record in caplog.records if "the server is gone" in record.message]) == 1


def test_a_thread_without_an_interval_and_a_second_thread_are_refused(buffer):
    with pytest.raises(ValueError, match="interval_s is 0"), tr.Monitor(buffer, interval_s=0):
        pass
    with tr.Monitor(buffer) as monitor, pytest.raises(RuntimeError, match="runs already"):
        monitor.__enter__()


# Prometheus

LINE = re.compile(r"([a-z_]+)(?:\{(.*)\})? (\S+)")


def parsed(text):
    """Returns {name: {labels: value}} of the lines that are no comments: the text format, version 0.0.4."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = LINE.fullmatch(line).groups()
            found.setdefault(name, {})[labels or ""] = float(value)
    return found


def test_prometheus_gets_the_same_figures_with_type_and_help(buffer):
    text = tr.Monitor(buffer).prometheus()
    found = parsed(text)
    assert found["replay_size"] == {"": ROWS}
    assert found["replay_priority_max"][""] == pytest.approx(2.0)
    assert "# TYPE replay_sampled counter" in text
    assert "# TYPE replay_size gauge" in text
    assert text.endswith("\n")
    helped = re.findall(r"^# HELP (\w+) (.+)$", text, re.MULTILINE)
    assert {name for name, _ in helped} == found.keys()


def test_prometheus_gets_quantiles_of_priorities_and_ages_under_the_same_labels_at_each_look(buffer):
    monitor = tr.Monitor(buffer)
    found = parsed(monitor.prometheus(quantiles=True))
    for name, given in (("priority", np.linspace(0.1, 2.0, ROWS)), ("age", np.arange(1, ROWS + 1))):
        told = {float(label.split('"')[1]): value for label, value in found[f"replay_{name}_quantile"].items()}
        assert list(told) == [0.05, 0.25, 0.5, 0.75, 0.95]
        for quantile, value in told.items():
            # Of so few rows a quantile lies between two neighbours; a bin is 1/1024 of the range.
            near = np.quantile(given, quantile, method="inverted_cdf")
            assert value == pytest.approx(near, abs=2 * np.diff(given).max() + np.ptp(given) / 1024)
    buffer.extend(**{field: value[:3] for field, value in buffer.storage.items()})
    again = parsed(monitor.prometheus(quantiles=True))
    assert {name: set(labels) for name, labels in again.items() if "per_second" not in name} == {
        name: set(labels) for name, labels in found.items()
    }


def test_http_says_that_the_buffer_is_closed():
    with tr.ReplayBuffer({"x": tr.Field()}, 10) as closed:
        monitor = tr.Monitor(closed)
        port = monitor.serve(0)
    with pytest.raises(urllib.error.HTTPError, match="503") as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
    assert b"closed" in refused.value.read()
    monitor.close()


def test_a_logger_that_hangs_does_not_hold_up_prometheus(buffer):
    logs, go_on = threading.Event(), threading.Event()

    def hang(values, step):
        logs.set()
        go_on.wait(60)

    monitor = tr.Monitor(buffer, hang)
    thread = threading.Thread(target=monitor.log)
    thread.start()
    assert logs.wait(60)
    assert "replay_size" in monitor.prometheus()
    go_on.set()
    thread.join()


def test_a_label_with_quotes_and_newlines_is_escaped():
    from torchreplay.monitoring.metrics import prometheus_text

    line = prometheus_text({"size": 1.0}, {}, {"buffer": 'red "team"\\\n'}).splitlines()[-1]
    assert line == r'replay_size{buffer="red \"team\"\\\n"} 1.0'


def test_http_serves_the_text_until_close(buffer):
    monitor = tr.Monitor(buffer)
    port = monitor.serve(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert parsed(answer.read().decode())["replay_size"] == {"": ROWS}
    with pytest.raises(RuntimeError, match=f"serves port {port}"):
        monitor.serve(0)
    monitor.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
    monitor.close()

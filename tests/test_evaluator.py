"""Evaluations of published weights: which are made, what they say, what is saved, what outlives a worker's death."""

import contextlib
import logging
import os
import random
import shutil
import signal
import statistics
import threading
import time

import numpy as np
import pytest
import torch
from forked import eventually
from numbered_rows import is_running, make_buffer, row
from safetensors import safe_open
from safetensors.torch import load_file
from scripted_workers import ScriptedActors

import torchreplay as tr
from torchreplay.config import Configured
from torchreplay.ray import Evaluation, Evaluator, EvaluatorFailed, ShardedReplay
from torchreplay.ray.board import Board
from torchreplay.ray.hosting import Hosting
from torchreplay.ray.scores import Scores
from torchreplay.ray.worker import Launch

STARTUP = 150.0  # seconds: a process that imports torch on a machine that is busy with other things
SPREAD = [-2.0, 0.0, 1.0]  # of three episodes' returns around the policy's number


class Policy(torch.nn.Module):
    """A policy whose episodes return its number, more or less."""

    def __init__(self, number=0.0):
        super().__init__()
        self.number = torch.nn.Parameter(torch.tensor(float(number)))


def evaluate(policy, seed):
    assert not policy.training
    assert not torch.is_grad_enabled()
    return [policy.number.item() + spread for spread in SPREAD]


def evaluate_with_luck(policy, seed):
    draws = (random.random, np.random.random, lambda: torch.rand(()).item())
    return [policy.number.item() + seed + sum(draw() for draw in draws) for _ in range(5)]


class Loop:
    """The evaluator's worker, in a thread of this process."""

    def __init__(self, evaluator):
        self.evaluator, self.board = evaluator, Board(1)
        run = evaluator._make_work().run(Launch(0, 1, 0, 0), self.board)
        self.thread = threading.Thread(target=run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.board.stopped = True
        self.thread.join()

    def look_around(self):
        """Returns when the worker has looked for something to do, after this call."""
        for _ in range(2):
            before = self.board.entries[0]["heartbeat"]
            eventually(lambda before=before: self.board.entries[0]["heartbeat"] > before)

    def versions(self):
        self.look_around()
        return [evaluation.version for evaluation in self.evaluator.evaluations]


def publish(weights, *numbers):
    for number in numbers:
        weights.publish(Policy(number))


# --- which weights are evaluated, and what comes of it ---


def test_the_first_weights_and_then_every_third_version_are_evaluated():
    weights = tr.SharedWeights(Policy())
    evaluator = Evaluator(evaluate, weights, Policy, every=3)
    with Loop(evaluator) as loop:
        assert loop.versions() == [0]
        publish(weights, 1, 2)
        assert loop.versions() == [0]
        publish(weights, 3)
        assert loop.versions() == [0, 3]
        publish(weights, 4, 5)
        assert loop.versions() == [0, 3]
        publish(weights, 6)
        assert loop.versions() == [0, 3, 6]


def test_newer_weights_are_evaluated_when_so_many_seconds_are_over():
    weights = tr.SharedWeights(Policy())
    evaluator = Evaluator(evaluate, weights, Policy, every_seconds=0.2)
    with Loop(evaluator) as loop:
        assert loop.versions() == [0]
        began = time.monotonic()
        while time.monotonic() - began < 0.5:  # nothing is newer
            assert loop.versions() == [0]
        publish(weights, 1)
        assert loop.versions() == [0, 1]
        publish(weights, 2)
        eventually(lambda: loop.versions() == [0, 1, 2])


def test_an_evaluation_tells_mean_and_spread_of_the_returns(caplog):
    caplog.set_level(logging.INFO, "torchreplay.ray")
    weights = tr.SharedWeights(Policy(7))
    evaluator = Evaluator(evaluate, weights, Policy(), every=1)
    with Loop(evaluator) as loop:
        loop.look_around()
    (evaluation,) = evaluator.evaluations
    assert evaluation == evaluator.latest == evaluator.best
    returns = [7 + spread for spread in SPREAD]
    assert (evaluation.version, evaluation.episodes, evaluation.best) == (0, 3, True)
    assert evaluation.mean_return == pytest.approx(statistics.fmean(returns))
    assert evaluation.std_return == pytest.approx(statistics.pstdev(returns))
    assert (evaluation.min_return, evaluation.max_return) == (5.0, 8.0)
    assert evaluation.seconds >= 0
    assert str(evaluation) in caplog.text
    assert "version 0: mean return 6.667 +- 1.25 over 3 episodes, 5 to 8, the best so far" in caplog.text


def test_evaluations_are_collected_from_a_ring_that_turns():
    evaluator = Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1)
    chance, added = random.Random(0), []
    while len(added) < 1000:
        for _ in range(chance.randrange(100)):
            found = Evaluation(len(added), 3, chance.random(), 0.1, 0.0, 1.0, 0.5, best=chance.random() < 0.1)
            evaluator._scores.add(found)
            added.append(found)
        assert list(evaluator.evaluations) == added
    assert evaluator.best.mean_return == max(found.mean_return for found in added)


@pytest.mark.parametrize("given", [[], [1.0, float("nan")], "many"])
def test_what_is_no_return_is_refused(given):
    weights = tr.SharedWeights(Policy())
    evaluator = Evaluator(lambda policy, seed: given, weights, Policy, every=1)
    with pytest.raises(ValueError, match=r"returned .*: expected the returns"):
        evaluator._make_work().run(Launch(0, 1, 0, 0), Board(1))()


# --- saving ---


def test_the_best_weights_are_kept_and_those_at_intervals_with_the_buffer(tmp_path):
    weights, buffer = tr.SharedWeights(Policy(1)), make_buffer()
    buffer.extend(**{name: torch.as_tensor(np.asarray([value])) for name, value in row(0, 0, 0).items()})
    directory = tmp_path / "run"
    evaluator = Evaluator(evaluate, weights, Policy, every=1, directory=directory, save_every=2, buffer=buffer)
    with Loop(evaluator) as loop:
        loop.look_around()
        for number in (5, 4, 3):
            publish(weights, number)
            loop.look_around()
    assert [evaluation.best for evaluation in evaluator.evaluations] == [True, True, False, False]
    assert load_file(directory / "best.safetensors")["number"].item() == 5.0
    with safe_open(directory / "best.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["version"] == "1"
    assert float(metadata["mean_return"]) == evaluator.best.mean_return
    names = ["best.safetensors", "buffer", "version-00000001.safetensors", "version-00000003.safetensors"]
    assert sorted(path.name for path in directory.iterdir()) == names
    assert load_file(directory / names[-1])["number"].item() == 3.0
    assert len(tr.ReplayBuffer.load(directory / "buffer")) == 1


def test_several_buffers_are_saved_by_name(tmp_path):
    buffers = {"red": make_buffer(), "blue": make_buffer()}
    for name, buffer in buffers.items():
        rows = len(name)
        buffer.extend(**{field: torch.zeros(rows, *of.shape, dtype=of.dtype) for field, of in buffer.spec.items()})
    weights = tr.SharedWeights(Policy())
    run_once(Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path, buffer=buffers))
    for name in buffers:
        with tr.ReplayBuffer.load(tmp_path / "buffer" / name) as loaded:
            assert len(loaded) == len(name)
    for name in ("../red", ".", "a/b"):
        with pytest.raises(ValueError, match="directory of that name"):
            Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path, buffer={name: buffers["red"]})


def test_what_its_worker_could_not_save_is_refused(tmp_path):
    class Remote(Configured):
        """Such as a buffer becomes on another node."""

    weights = tr.SharedWeights(Policy())
    with pytest.raises(TypeError, match="a buffer of this node"):
        Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path, buffer=Remote())
    sharded = ShardedReplay.__new__(ShardedReplay)
    with pytest.raises(ValueError, match="backend='process': the shards"):
        Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path, buffer=sharded, backend="process")


def test_the_best_of_an_earlier_run_is_only_replaced_by_a_better_one(tmp_path):
    def learn(*numbers):
        weights = tr.SharedWeights(Policy(numbers[0]))
        evaluator = Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path)
        with Loop(evaluator) as loop:
            loop.look_around()
            for number in numbers[1:]:
                publish(weights, number)
                loop.look_around()
        return load_file(tmp_path / "best.safetensors")["number"].item()

    assert learn(5) == 5.0
    assert learn(3, 4) == 5.0
    assert learn(4, 6) == 6.0


def run_once(evaluator):
    """A worker that ends with its first evaluation, by whatever error comes up in it."""
    board = Board(1)
    add = evaluator._scores.add

    def add_and_stop(evaluation):
        add(evaluation)
        board.stopped = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator._scores, "add", add_and_stop)
        evaluator._make_work().run(Launch(0, 1, 0, 0), board)()


def kept(directory):
    return load_file(directory / "best.safetensors")["number"].item()


def test_worse_weights_do_not_take_the_place_of_the_best_when_the_buffer_cannot_be_saved(tmp_path):
    buffer = make_buffer()
    buffer.extend(**{name: torch.zeros(1, *field.shape, dtype=field.dtype) for name, field in buffer.spec.items()})
    weights = tr.SharedWeights(Policy(3.0))
    evaluator = Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path, buffer=buffer)
    run_once(evaluator)
    assert kept(tmp_path) == 3.0
    shutil.rmtree(tmp_path / "buffer")
    (tmp_path / "buffer").touch()
    for number in (200.0, 50.0):
        publish(weights, number)
        with pytest.raises(OSError, match="buffer"):
            run_once(evaluator)
        assert kept(tmp_path) == 3.0
        assert [evaluation.mean_return for evaluation in evaluator.evaluations] == [3.0 + statistics.mean(SPREAD)]
    (tmp_path / "buffer").unlink()
    run_once(evaluator)
    assert kept(tmp_path) == 50.0


@pytest.mark.parametrize(("newer", "best"), [([50.0, 10.0], 200.0), ([50.0, 300.0], 300.0), ([], 200.0)])
def test_a_worker_killed_before_it_notes_the_best_leaves_it_to_its_successors(newer, best, tmp_path, monkeypatch):
    weights = tr.SharedWeights(Policy(200.0))
    evaluator = Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path)

    def die(scores, evaluation):
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(Scores, "add", die)
        run = evaluator._make_work().run(Launch(0, 1, 0, 0), Board(1))
        with pytest.raises(InterruptedError):
            run()
    assert kept(tmp_path) == 200.0
    for number in newer:
        publish(weights, number)
        run_once(evaluator)
    if not newer:
        run_once(evaluator)  # the same weights again
        assert evaluator.latest.best
    assert kept(tmp_path) == best


def test_a_signals_handler_may_stop_an_evaluator_that_is_being_looked_at(monkeypatch):
    monkeypatch.setattr(Hosting, "open", lambda *_: ScriptedActors(lambda launch: None))
    evaluator = Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1)
    since, seen = evaluator._scores.since, []

    def interrupted(count):
        if threading.current_thread() is threading.main_thread() and not seen:
            seen.append(count)
            evaluator.stop(0.5)  # as a handler does that comes just here
            seen.append(evaluator.latest)
        return since(count)

    monkeypatch.setattr(evaluator._scores, "since", interrupted)
    with evaluator:
        evaluator._scores.add(Evaluation(0, 1, 1.0, 0.0, 1.0, 1.0, 0.1, best=True))
        stopping = evaluator._collecting.acquire(timeout=60)  # so that the supervising thread collects nothing
        assert stopping
        assert [evaluation.version for evaluation in evaluator.evaluations] == [0]
        evaluator._collecting.release()
    assert seen[1].version == 0
    assert [evaluation.version for evaluation in evaluator.evaluations] == [0]


def test_a_wait_that_takes_long_says_so(monkeypatch, caplog):
    monkeypatch.setattr(Hosting, "open", lambda *_: ScriptedActors(lambda launch: None))
    monkeypatch.setattr("torchreplay.ray.evaluator.LOG_EVERY", 0.1)
    caplog.set_level(logging.WARNING, "torchreplay.ray")
    with Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1) as evaluator, pytest.raises(tr.ReplayTimeout):
        evaluator.wait(timeout=0.5)
    assert "version 0 is not evaluated yet" in caplog.text
    assert "Evaluator(starting" in caplog.text


def test_the_best_is_found_again_wherever_its_worker_was_killed_while_noting_it():
    class Mortal:
        """A header that its worker changes `lives` times."""

        def __init__(self, header, lives):
            self.header, self.lives = header, lives

        def __getitem__(self, name):
            return self.header[name]

        def __setitem__(self, name, value):
            if self.lives == 0:
                raise InterruptedError
            self.lives -= 1
            self.header[name] = value

    for lives in range(4):
        scores = Scores()
        header, scores._header = scores._header, Mortal(scores._header, lives)
        with contextlib.suppress(InterruptedError):
            scores.add(Evaluation(5, 1, 3.0, 0.0, 3.0, 3.0, 0.1, best=True))
        scores._header = header
        assert scores.is_best(5, 3.0)
    assert scores.count == 1


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(fd):
        raise tr.Stopped("the pool was stopped")

    evaluator = Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1, directory=tmp_path)
    run = evaluator._make_work().run(Launch(0, 1, 0, 0), Board(1))
    monkeypatch.setattr("torchreplay.checkpoint.os.fsync", interrupt)
    with pytest.raises(tr.Stopped):
        run()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_save_has_left_is_removed_by_the_next(tmp_path):
    for name in ("best.safetensors", "version-00000007.safetensors"):
        (tmp_path / f"{name}-0123456789abcdef").touch()
    kept = tmp_path / "best.safetensors-of-last-week"
    kept.touch()
    evaluator = Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1, directory=tmp_path)
    with Loop(evaluator) as loop:
        loop.look_around()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "best.safetensors", kept]


def test_weights_that_are_tied_are_saved_too(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(2, 2)
            self.other = self.one

    evaluator = Evaluator(lambda module, seed: 1.0, tr.SharedWeights(Tied()), Tied, every=1, directory=tmp_path)
    with Loop(evaluator) as loop:
        loop.look_around()
    Tied().load_state_dict(load_file(tmp_path / "best.safetensors"))


def test_a_directory_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "best.safetensors").write_text("a diary")
    with pytest.raises(tr.CheckpointError, match=r"best\.safetensors"):
        Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1, directory=tmp_path)


# --- in a process of its own ---


def test_the_last_weights_are_evaluated_on_request_and_stop_leaves_no_process(backend):
    weights = tr.SharedWeights(Policy(1))
    with Evaluator(evaluate_with_luck, weights, Policy, every=1000, seed=3, backend=backend) as evaluator:
        assert evaluator.start() is evaluator  # again: does nothing
        publish(weights, 2)
        second = evaluator.wait(timeout=STARTUP)
        publish(weights, 4, 2)
        again = evaluator.wait(timeout=STARTUP)
        assert (second.version, again.version) == (1, 3)
        assert (second.mean_return, second.std_return) == (again.mean_return, again.std_return)
        assert 5.0 <= second.mean_return <= 8.0
        stats = evaluator.stats()
        assert (stats.state, stats.version, stats.versions_behind, stats.restarts) == ("running", 3, 0, 0)
        assert stats.best_return == evaluator.best.mean_return
    evaluator.stop()
    assert not is_running(stats.pid)
    assert evaluator.latest == again
    assert evaluator.wait(version=2) == again


def test_a_killed_worker_is_replaced_and_what_it_had_found_is_not_lost(tmp_path):
    weights = tr.SharedWeights(Policy(9))
    evaluator = Evaluator(evaluate, weights, Policy, every=1, directory=tmp_path, restart_delay=0.01, backend="process")
    with evaluator:
        first = evaluator.wait(timeout=STARTUP)
        pid = evaluator.stats().pid
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not is_running(pid))
        publish(weights, 3)
        assert evaluator.wait(timeout=STARTUP).version == 1
        stats = evaluator.stats()
    assert stats.restarts == 1
    assert stats.pid != pid
    assert evaluator.best == first
    assert [(failure.died, "signal 9" in failure.error) for failure in evaluator.errors] == [(True, True)]
    assert load_file(tmp_path / "best.safetensors")["number"].item() == 9.0


def test_a_function_that_raises_is_reported_with_its_traceback(caplog):
    def raise_always(policy, seed):
        raise KeyError("no such level")

    weights = tr.SharedWeights(Policy())
    evaluator = Evaluator(raise_always, weights, Policy, every=1, max_restarts=0, backend="process")
    with evaluator, pytest.raises(EvaluatorFailed, match="in raise_always"):
        evaluator.wait(timeout=STARTUP)
    assert "evaluator failed (dropped: max_restarts=0 is used up): KeyError: 'no such level'" in caplog.text
    assert "in raise_always" in evaluator.stats().last_traceback
    with pytest.raises(EvaluatorFailed):
        evaluator.check()


def test_waiting_for_a_function_that_only_fails_ends(monkeypatch):
    monkeypatch.setattr("torchreplay.ray.supervisor._HOPELESS_AFTER", 1)

    def raise_always(policy, seed):
        raise KeyError("no such level")

    evaluator = Evaluator(
        raise_always, tr.SharedWeights(Policy()), Policy, every=1, restart_delay=0.0, backend="process"
    )
    with evaluator, pytest.raises(EvaluatorFailed, match="again and again"):
        evaluator.wait(timeout=STARTUP)


def test_an_evaluation_under_way_is_interrupted():
    def evaluate_for_ever(policy, seed):
        time.sleep(3600)

    evaluator = Evaluator(evaluate_for_ever, tr.SharedWeights(Policy()), Policy, every=1, backend="process").start()
    eventually(lambda: evaluator.stats().state == "running", STARTUP)
    with pytest.raises(tr.ReplayTimeout, match=r"version 0 .* within 0\.1 s"):
        evaluator.wait(timeout=0.1)
    evaluator.stop()
    assert not is_running(evaluator.stats().pid)
    assert not evaluator.errors
    with pytest.raises(RuntimeError, match="start"):
        evaluator.wait()


# --- arguments ---


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every": None}, ValueError, "how often"),
        ({"every": 0}, ValueError, "every is 0"),
        ({"every_seconds": -1.0}, ValueError, "every_seconds is -1"),
        ({"save_every": 3}, ValueError, "directory"),
        ({"directory": "d", "save_every": 0}, ValueError, "save_every is 0"),
        ({"evaluate": 3}, TypeError, "evaluate is 3"),
        ({"module": 3}, TypeError, "module is 3"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"weights": Policy()}, TypeError, "weights is .*: expected torchreplay.SharedWeights"),
        ({"every_seconds": "ten"}, ValueError, "every_seconds is 'ten'"),
        ({"directory": 3}, TypeError, "directory is 3: expected a path"),
        ({"directory": "d", "buffer": "b"}, TypeError, "buffer is 'b': expected a torchreplay.ReplayBuffer"),
        ({"max_restarts": -2}, ValueError, "max_restarts .* is -2"),
        ({"backend": "threads"}, ValueError, "backend='threads'"),
    ],
)
def test_arguments_out_of_range_are_refused_with_their_name(arguments, error, message):
    given = {"evaluate": evaluate, "weights": tr.SharedWeights(Policy()), "module": Policy, "every": 1, **arguments}
    with pytest.raises(error, match=message):
        Evaluator(**given)


def test_a_version_that_was_never_published_is_not_waited_for():
    with pytest.raises(ValueError, match="version is 5"):
        Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1).wait(version=5)

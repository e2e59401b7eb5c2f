"""Evaluations of published weights: which are made, what they say, what is saved, what outlives a worker's death."""

import logging
import os
import pickle
import random
import signal
import statistics
import threading
import time

import numpy as np
import pytest
import torch
from evaluated_policies import SPREAD, Loop, Policy, evaluate, publish
from forked import Forked, eventually
from numbered_rows import is_running
from safetensors.torch import load_file
from scripted_workers import ScriptedActors

import torchreplay as tr
from torchreplay.evaluation.evaluation_log import EvaluationLog
from torchreplay.ray import Evaluation, Evaluator, EvaluatorFailed
from torchreplay.ray.workers.resources import WorkerResources
from torchreplay.workers.worker_process import Launch
from torchreplay.workers.worker_table import WorkerTable

pytestmark = pytest.mark.slow


STARTUP = 150.0  # seconds: a process that imports torch on a machine that is busy with other things


def evaluate_with_luck(policy, seed):
    draws = (random.random, np.random.random, lambda: torch.rand(()).item())
    return [policy.number.item() + seed + sum(draw() for draw in draws) for _ in range(5)]


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
    evaluator._listen()
    evaluator._listen()
    (evaluation,) = evaluator.evaluations
    assert evaluation == evaluator.latest == evaluator.best
    returns = [7 + spread for spread in SPREAD]
    assert (evaluation.version, evaluation.episodes, evaluation.best) == (0, 3, True)
    assert evaluation.mean_return == pytest.approx(statistics.fmean(returns))
    assert evaluation.std_return == pytest.approx(statistics.pstdev(returns))
    assert (evaluation.min_return, evaluation.max_return) == (5.0, 8.0)
    assert evaluation.seconds >= 0
    assert caplog.text.count(str(evaluation)) == 1
    assert "version 0: mean return 6.667 +- 1.25 over 3 episodes, 5 to 8, the best so far" in caplog.text


def found(version, mean_return=1.0, best=False):
    return Evaluation(version, 3, mean_return, 0.1, 0.0, 2.0, 0.5, best)


def test_no_evaluation_is_missed_however_many_come_between_two_looks():
    evaluator = Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1)
    chance, added = random.Random(0), []
    while len(added) < 10_000:
        for _ in range(chance.randrange(1000)):
            added.append(found(len(added), chance.random(), best=chance.random() < 0.1))
            evaluator._results.log.add(added[-1], 1.0)
        assert list(evaluator.evaluations) == added
    assert evaluator.best.mean_return == max(evaluation.mean_return for evaluation in added)


def test_what_a_process_has_reported_outlives_its_kill_and_nobody_need_have_read_it():
    log = EvaluationLog()

    def report_and_die(attached):
        for version in range(5000):
            attached.add(found(version, float(version)), float(version))
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(2):  # and its successor's
        with Forked(report_and_die, pickle.loads(pickle.dumps(log))) as child:
            assert child.wait() == -signal.SIGKILL
    assert log.since(0) == [found(version, float(version)) for version in range(5000)] * 2
    assert log.last == (4999, 4999.0)


def test_a_process_that_is_killed_while_it_reports_leaves_whole_evaluations_only():
    for delay in (0.0, 0.001, 0.003, 0.01):
        log = EvaluationLog()

        def report(log=log):
            for version in range(10**9):
                log.add(found(version, float(version)), float(version))

        with Forked(report) as child:
            eventually(lambda log=log: len(log))
            time.sleep(delay)  # when it is killed is chance
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        assert log.since(0) == [found(version, float(version)) for version in range(len(log))]
        assert os.fstat(log._fd).st_size % 64 == 0


def test_a_log_whose_owner_is_gone_cannot_be_reached():
    log = EvaluationLog()
    travelling = pickle.dumps(log)
    log.add(found(0), 1.0)
    assert pickle.loads(travelling).since(0) == [found(0)]
    del log
    with pytest.raises(tr.AttachError, match="log of evaluations"):
        len(pickle.loads(travelling))


def test_a_report_that_is_repeated_counts_once():
    evaluator = Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1)
    for version in (0, 1, 1, 0, 2):  # as calls to an actor may be that was killed before it answered
        evaluator._results.add(found(version), 1.0, [], b"")
    assert [evaluation.version for evaluation in evaluator.evaluations] == [0, 1, 2]


@pytest.mark.parametrize("given", [[], [1.0, float("nan")], "many"])
def test_what_is_no_return_is_refused(given):
    weights = tr.SharedWeights(Policy())
    evaluator = Evaluator(lambda policy, seed: given, weights, Policy, every=1)
    with pytest.raises(ValueError, match=r"returned .*: expected the returns"):
        evaluator._make_work().begin(Launch(0, 1, 0, 0), WorkerTable(1)).run()


def test_a_signals_handler_may_stop_an_evaluator_that_is_being_looked_at(monkeypatch):
    monkeypatch.setattr(WorkerResources, "open", lambda *_: ScriptedActors(lambda launch: None))
    evaluator = Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1)
    log = evaluator._results.log
    since, seen = log.since, []

    def interrupted(number):
        new = since(number)
        if threading.current_thread() is threading.main_thread() and not seen:
            seen.append(number)
            log.add(found(1), 1.0)
            evaluator.stop(0.5)  # as a handler does that comes just here
            seen.append(evaluator.latest)
        return new

    monkeypatch.setattr(log, "since", interrupted)
    with evaluator:
        log.add(found(0), 1.0)
        assert [evaluation.version for evaluation in evaluator.evaluations] == [0]
    assert seen[1].version == 1
    assert [evaluation.version for evaluation in evaluator.evaluations] == [0, 1]


def test_a_wait_that_takes_long_says_so(monkeypatch, caplog):
    monkeypatch.setattr(WorkerResources, "open", lambda *_: ScriptedActors(lambda launch: None))
    monkeypatch.setattr("torchreplay.ray.evaluation.evaluator.LOG_EVERY", 0.1)
    caplog.set_level(logging.WARNING, "torchreplay.ray")
    with Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1) as evaluator, pytest.raises(tr.ReplayTimeout):
        evaluator.wait(timeout=0.5)
    assert "version 0 is not evaluated yet" in caplog.text
    assert "Evaluator(starting" in caplog.text


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
    monkeypatch.setattr("torchreplay.workers.supervisor._HOPELESS_AFTER", 1)

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
        ({"module": torch.nn.Linear(3, 2)}, ValueError, "the module's weights differ from those shared"),
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


@pytest.mark.parametrize("timeout", ["soon", -1.0, float("nan"), [1]], ids=repr)
def test_a_bad_timeout_of_a_wait_is_refused(timeout):
    with pytest.raises((TypeError, ValueError), match="timeout is"):
        Evaluator(evaluate, tr.SharedWeights(Policy()), Policy, every=1).wait(timeout=timeout)

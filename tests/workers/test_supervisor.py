"""The supervisor of workers: restarts, delays, failures and ends, with workers that follow a script."""

import errno
import re
import time

import pytest
from forked import eventually
from scripted_workers import DIED, ENDED, RAISED, Marks, ScriptedActors, supervise

from torchreplay.workers.supervisor import Policy
from torchreplay.workers.worker_process import Outcome


def test_an_explorer_that_raises_is_reported_and_restarted_and_one_that_returns_is_not(caplog):
    actors = ScriptedActors(lambda launch: RAISED if launch.index == 0 and launch.restarts < 2 else ENDED)
    supervisor = supervise(actors, num_explorers=2)
    assert supervisor.over.wait(30)
    assert [s.state for s in supervisor.stats()] == ["finished", "finished"]
    assert [s.restarts for s in supervisor.stats()] == [2, 0]
    assert supervisor.stats()[0].last_error == "KeyError: 'boom'"
    assert [(f.index, f.restarts, f.died) for f in supervisor.failures] == [(0, 0, False), (0, 1, False)]
    first, second = [r.getMessage() for r in caplog.records if r.name == "torchreplay.ray"]
    assert first.endswith("KeyError: 'boom'\nTraceback: in explore, boom")
    assert second.endswith("KeyError: 'boom' (the same error as before, 2 times)")
    supervisor.stop(0, 0)


@pytest.mark.parametrize("outcome", [RAISED, DIED], ids=["raised", "died"])
@pytest.mark.parametrize("max_restarts", [0, 3])
def test_an_explorer_fails_for_good_after_max_restarts(outcome, max_restarts):
    marks = Marks()
    actors = ScriptedActors(lambda launch: outcome)
    supervisor = supervise(actors, max_restarts=max_restarts, marks=marks)
    assert supervisor.over.wait(30)
    assert supervisor.stats()[0].state == "failed"
    assert supervisor.stats()[0].restarts == max_restarts
    assert len(actors.runs) == max_restarts + 1
    assert marks.open == 0
    supervisor.stop(0, 0)


def test_learners_are_told_to_wait_until_the_last_explorer_has_finished():
    marks = Marks()
    actors = ScriptedActors(lambda launch: None)
    supervisor = supervise(actors, num_explorers=2, marks=marks)
    eventually(lambda: len(actors.runs) == 2)
    actors.end(actors.runs[0], ENDED)
    eventually(lambda: supervisor.stats()[0].state == "finished")
    assert marks.open == 1
    actors.end(actors.runs[1], ENDED)
    assert supervisor.over.wait(30)
    assert marks.open == 0
    supervisor.stop(0, 0)


def test_an_explorer_that_only_fails_is_not_waited_for_until_it_makes_progress():
    marks = Marks()
    actors = ScriptedActors(lambda launch: RAISED if launch.restarts < 5 else None)
    supervisor = supervise(actors, marks=marks)
    eventually(lambda: len(actors.runs) == 6)
    eventually(lambda: marks.open == 0)
    supervisor.table.entries[0]["episodes"] += 1
    eventually(lambda: marks.open == 1)
    supervisor.stop(0, 0)
    assert marks.open == 0


def test_an_explorer_runs_from_the_moment_at_which_its_process_says_so():
    actors = ScriptedActors(lambda launch: None)
    supervisor = supervise(actors)
    eventually(lambda: len(actors.runs) == 1)
    assert supervisor.stats()[0].state == "starting"
    supervisor.table.entries["pid"] = 2**22
    assert supervisor.stats()[0].alive
    actors.end(actors.runs[0], RAISED)
    eventually(lambda: len(actors.runs) == 2)
    eventually(lambda: supervisor.stats()[0].state == "starting")
    supervisor.stop(0, 0)


def test_explorers_that_do_not_return_in_time_are_killed():
    actors = ScriptedActors(lambda launch: None)
    supervisor = supervise(actors, num_explorers=2)
    eventually(lambda: len(actors.runs) == 2)
    supervisor.table.entries["pid"] = 2**22  # both are in their function
    supervisor.stop(0, 0)
    assert all(run.interrupted and run.killed for run in actors.runs)
    assert [s.state for s in supervisor.stats()] == ["stopped", "stopped"]
    assert not supervisor.failures


def test_every_run_of_every_explorer_has_its_own_reproducible_seed():
    def seeds(pool_seed):
        actors = ScriptedActors(lambda launch: RAISED)
        supervisor = supervise(actors, num_explorers=8, max_restarts=4)
        supervisor.over.wait(30)
        supervisor.stop(0, 0)
        return {(run.launch.index, run.launch.restarts): run.launch.seed for run in actors.runs}

    first = seeds(1)
    assert len(first) == len(set(first.values())) == 40
    assert all(0 <= seed < 2**32 for seed in first.values())
    assert first == seeds(1)


def test_restart_delays_double_up_to_half_a_minute():
    policy = Policy(seed=0, generation=0, max_restarts=-1, restart_delay=1.0)
    assert [policy.delay(streak) for streak in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert policy.delay(100_000) == 30


def test_a_longer_restart_delay_is_kept():
    policy = Policy(seed=0, generation=0, max_restarts=-1, restart_delay=60.0)
    assert [policy.delay(streak) for streak in (1, 2, 100)] == [60, 60, 60]


def test_one_worker_that_cannot_be_launched_is_restarted_while_the_others_go_on():
    def script(launch):
        if (launch.index, launch.restarts) == (0, 0):
            raise OSError(errno.EMFILE, "Too many open files")
        return ENDED if launch.index == 0 else None

    actors = ScriptedActors(script)
    supervisor = supervise(actors, num_explorers=2)
    eventually(lambda: supervisor.stats()[0].state == "finished")
    assert "Too many open files" in supervisor.stats()[0].last_error
    assert [(f.index, f.restarts, f.died) for f in supervisor.failures] == [(0, 0, True)]
    assert [(run.launch.index, run.killed) for run in actors.runs] == [(1, False), (0, False)]
    supervisor.stop(0, 0)


def test_one_worker_of_whose_end_nothing_can_be_learnt_is_restarted_while_the_others_go_on(caplog):
    class Reluctant(ScriptedActors):
        def outcome(self, run):
            if run.launch.restarts == 0:
                raise ValueError("no such process")
            return super().outcome(run)

        def release(self, run):
            raise ValueError("cannot close a running process")

    actors = Reluctant(lambda launch: ENDED if launch.index == 0 else None)
    supervisor = supervise(actors, num_explorers=2)
    eventually(lambda: supervisor.stats()[0].state == "finished")
    assert [(f.index, f.restarts, f.died) for f in supervisor.failures] == [(0, 0, True)]
    assert "cannot close a running process" in caplog.text
    assert not any(run.killed for run in actors.runs)
    supervisor.stop(0, 0)
    assert supervisor.stats()[1].state == "stopped"


def test_workers_that_do_not_begin_are_mentioned_in_one_line_until_they_do(caplog, monkeypatch):
    actors = ScriptedActors(lambda launch: None)
    supervisor = supervise(actors, num_explorers=5)
    eventually(lambda: len(actors.runs) == 5)
    supervisor.table.begin(0)
    monkeypatch.setattr("torchreplay.workers.supervisor.SLOW_START", 0.2)

    def lines():
        return [record.getMessage() for record in caplog.records if "not begun" in record.getMessage()]

    eventually(lambda: len(lines()) >= 3)
    assert all(line.startswith("explorer 1, explorer 2 and 2 others: not begun ") for line in lines())
    assert all(line.endswith(" s after the start (hint)") for line in lines())
    for index in (2, 3, 4):
        supervisor.table.begin(index)
    caplog.clear()
    eventually(lambda: len(lines()) >= 2)
    assert lines()[-1].startswith("explorer 1: not begun ")
    supervisor.stop(0, 0)


def test_nobody_is_interrupted_who_has_not_begun():
    class Slow(ScriptedActors):
        """Runs that take a while to end when they are killed, as a process on a busy machine does."""

        def kill(self, run):
            if run.killed:
                super().kill(run)
            run.killed = True

    actors = Slow(lambda launch: None)
    supervisor = supervise(actors)
    eventually(lambda: actors.runs)
    supervisor.stop(0, 0.2)
    (run,) = actors.runs
    assert run.killed
    assert not run.interrupted  # its pid is 0, which stands for the process group of the whole program
    assert supervisor.interrupted == 0


def test_a_mark_that_cannot_be_withdrawn_keeps_nobody_waiting():
    class Mark(Marks):
        def close(self):
            raise RuntimeError("the buffer was closed")

    supervisor = supervise(ScriptedActors(lambda launch: ENDED), marks=Mark())
    assert supervisor.over.wait(30)
    supervisor.stop(0, 0)


def test_workers_that_cannot_be_supervised_any_more_are_killed():
    class Lost(ScriptedActors):
        def wait(self, runs, timeout):
            if len(self.runs) == 2:
                raise ConnectionError("Ray was shut down")

    actors = Lost(lambda launch: None)
    supervisor = supervise(actors, num_explorers=2)
    assert supervisor.over.wait(30)
    assert [s.state for s in supervisor.stats()] == ["failed", "failed"]
    assert all(run.killed for run in actors.runs)
    assert "Ray was shut down" in supervisor.stats()[0].last_error
    supervisor.stop(0, 0)


def test_workers_that_wait_for_their_next_start_have_failed_where_none_can_be_started_any_more():
    class Lost(ScriptedActors):
        lost = False

        def wait(self, runs, timeout):
            if self.lost:
                raise ConnectionError("Ray was shut down")
            return super().wait(runs, timeout)

    actors = Lost(lambda launch: RAISED)
    supervisor = supervise(actors, restart_delay=1000.0)
    eventually(lambda: supervisor.stats()[0].state == "restarting")
    heard = []
    supervisor.listen = lambda: heard.append(supervisor.stats()[0].state)
    actors.lost = True
    assert supervisor.over.wait(30)
    assert supervisor.stats()[0].state == heard[-1] == "failed"  # who listens has heard the last word
    assert "Ray was shut down" in supervisor.stats()[0].last_error
    supervisor.stop(0, 0)


def test_a_supervisor_that_is_told_to_exit_leaves_no_worker_running():
    class Exiting(ScriptedActors):
        def wait(self, runs, timeout):
            raise SystemExit  # as calls of Ray's do when another thread shuts it down

    actors = Exiting(lambda launch: None)
    supervisor = supervise(actors)
    assert supervisor.over.wait(30)
    assert supervisor.stats()[0].state == "failed"
    assert actors.runs[0].killed
    supervisor.stop(0, 0)


def test_rows_that_complete_no_item_are_no_progress():
    marks = Marks()
    supervisor = None

    def reset_and_raise(launch):
        if supervisor is not None:
            supervisor.table.entries[0]["rows"] += 1
        return RAISED

    actors = ScriptedActors(reset_and_raise)
    supervisor = supervise(actors, marks=marks, max_restarts=20)
    assert supervisor.over.wait(30)
    assert supervisor.workers[0].streak == 21
    supervisor.stop(0, 0)


def test_items_are_progress():
    actors = ScriptedActors(lambda launch: None)
    supervisor = supervise(actors)
    eventually(lambda: len(actors.runs) == 1)
    for run in range(8):
        supervisor.table.entries[0]["items"] += 1
        actors.end(actors.runs[run], RAISED)
        eventually(lambda run=run: len(actors.runs) == run + 2)
        assert supervisor.workers[0].streak == 1
    supervisor.stop(0, 0)


def test_an_error_is_shown_once_and_then_counted_wherever_its_objects_lie(caplog):
    def fail(launch):
        what = "a rare one" if launch.restarts == 7 else "boom"
        return Outcome("raised", what, f"Traceback: {what} in <object at {id(launch):#x}>")

    supervisor = supervise(ScriptedActors(fail), num_explorers=2, max_restarts=9)
    assert supervisor.over.wait(30)
    supervisor.stop(0, 0)
    reports = [record.getMessage() for record in caplog.records if record.name == "torchreplay.ray"]
    assert len(reports) == 20  # a line each
    assert sum("Traceback: boom" in report for report in reports) == 1
    assert sum("Traceback: a rare one" in report for report in reports) == 1
    assert any(report.endswith("boom (the same error as before, 18 times)") for report in reports)


def test_a_long_error_keeps_its_head_and_its_tail():
    head, tail = "Traceback (most recent call last):\n", "ValueError: expected [4]"
    outcome = Outcome("raised", "x" * 10**6, f"{head}{'0, ' * 10**6}{tail}")
    assert outcome.traceback.startswith(head)
    assert outcome.traceback.endswith(tail)
    assert len(outcome.traceback) < 21_000
    assert len(outcome.error) < 1_100
    left_out = int(re.search(r" ([\d,]+) characters left out", outcome.traceback)[1].replace(",", ""))
    assert left_out == len(head) + 3 * 10**6 + len(tail) - 20_000
    assert Outcome("raised", "short", "short").traceback == "short"


def test_a_worker_without_a_heartbeat_is_killed_and_restarted_and_one_with_it_is_not(caplog):
    actors = ScriptedActors(lambda launch: None)
    supervisor = supervise(actors, num_explorers=3, heartbeat_timeout=0.3)
    eventually(lambda: len(actors.runs) == 3)
    supervisor.table.entries["pid"][:2] = 2**22  # the third has not begun

    def beats(index):
        supervisor.table.entries["heartbeat"][1] = time.monotonic()
        return supervisor.stats()[index].restarts

    eventually(lambda: beats(0) == 1)
    (failure,) = supervisor.failures
    assert failure.index == 0
    assert failure.died
    assert "no heartbeat for 0." in failure.error
    assert "heartbeat_timeout=0.3" in failure.error
    assert [run.killed for run in actors.runs[:3]] == [True, False, False]
    supervisor.stop(0, 0)

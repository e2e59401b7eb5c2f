"""`python -m benchmarks learning`: runs go on where they were stopped, and its statistics and tasks are the papers'."""

import math
import os
import subprocess
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice

import numpy as np
import pytest
from counted_cells import fail, played, question
from example_programs import parsed
from paths import ROOT
from scipy import stats

import torchreplay as tr
from benchmarks.learning import apex, examples
from benchmarks.learning.__main__ import main
from benchmarks.learning.apex_peers import NSteps, may_draw
from benchmarks.learning.cell import Cell, Point
from benchmarks.learning.plots import draw
from benchmarks.learning.questions import initial
from benchmarks.learning.questions.cliffwalk import QTable, memory, play
from benchmarks.learning.results import Result, collect, path_of, read, write_cell
from benchmarks.learning.runner import play_missing
from benchmarks.learning.statistics import interquartile_mean, summarize


@pytest.mark.slow
def test_the_command_plays_what_was_not_played_before_writes_one_file_and_draws(tmp_path, monkeypatch):
    asked = question(tmp_path)
    monkeypatch.setattr("benchmarks.learning.__main__.QUESTIONS", {"q": asked})
    cells = asked.cells(range(3))
    write_cell(cells[1], [Point(10, 7.0, 0.1)], tmp_path)
    assert main(["q", "--seeds", "3", "--directory", str(tmp_path)]) == 0
    assert play_missing(cells, tmp_path, jobs=1) == 0
    assert sorted(path.name for path in tmp_path.glob("played-*")) == ["played-0", "played-2"]
    results = collect(cells, tmp_path)
    assert list(read(tmp_path / "q.csv")) == results
    assert (tmp_path / "q.png").is_file()
    assert results[0][:7] == ("q", "task", "a", 0, 10.0, 10.0, 0.5)
    assert [(result.seed, result.y) for result in results] == [(0, 10), (0, 20), (1, 7), (2, 12), (2, 22)]


@pytest.mark.slow
def test_a_cell_that_fails_keeps_no_other_from_being_played_and_is_named_at_the_end(tmp_path, capsys):
    cells = question(tmp_path).cells(range(1))
    broken = Cell("q", "task", "b", 0, fail)
    with pytest.raises(RuntimeError, match=r"1 cells failed.*q-task-b-0"):
        play_missing([broken, *cells], tmp_path, jobs=1)
    assert [path_of(cell, tmp_path).exists() for cell in (broken, *cells)] == [False, True]
    assert "seed 0" in capsys.readouterr().out


def test_a_result_says_when_where_and_with_which_code_it_was_played(tmp_path):
    cell = Cell("q", "task", "a", 0, fail)
    write_cell(cell, [Point(10, 7.0, 0.1)], tmp_path)
    (result,) = collect([cell], tmp_path)
    assert datetime.now(UTC) - datetime.fromisoformat(f"{result.date}T00:00:00Z") < timedelta(days=2)
    assert result.machine.startswith(f"{len(os.sched_getaffinity(0))} x ")
    log = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    assert result.commit.removesuffix("+") == log[: len(result.commit.removesuffix("+"))]
    assert bool(result.commit) == bool(log)


def test_results_from_before_that_was_noted_are_read(tmp_path):
    (tmp_path / "q.csv").write_text("question,task,variant,seed,x,y,seconds\nq,task,a,0,10.0,7.0,0.1\n")
    assert list(read(tmp_path / "q.csv")) == [Result("q", "task", "a", 0, 10.0, 7.0, 0.1)]


def test_runs_that_never_solve_the_task_count_as_infinitely_long():
    def of(*values):
        (found,) = summarize(Result("q", "t", "v", i, 1.0, y, 0.0) for i, y in enumerate(values))
        return found

    one = of(10.0, 11.0, 12.0, 13.0, math.inf)
    assert one.mean == pytest.approx(12.0)  # of 11, 12 and 13: the interquartile mean leaves out the others
    assert one.high == math.inf
    assert of(10.0, 11.0, 12.0, math.inf, math.inf).mean == math.inf
    assert one.low < one.mean


def test_the_cliffwalk_gives_up_a_choice_that_never_solves_it(monkeypatch):
    def stubborn(transitions, seed, table):
        while True:
            yield 0

    monkeypatch.setattr("benchmarks.learning.questions.cliffwalk.MOST", 100)
    assert [point.y for point in play(0, stubborn)] == [math.inf]


def test_a_cell_that_fails_leaves_no_file(tmp_path):
    def broken():
        yield Point(1, 1, 1)
        raise RuntimeError("killed")

    cell = Cell("q", "task", "a", 0, partial(played, directory=tmp_path))
    with pytest.raises(RuntimeError, match="killed"):
        write_cell(cell, broken(), tmp_path)
    assert not path_of(cell, tmp_path).exists()


def test_the_interquartile_mean_leaves_out_the_lowest_and_the_highest_quarter():
    assert interquartile_mean(np.array([100.0, 1.0, 2.0, 3.0, -100.0])) == pytest.approx(2.0)
    assert interquartile_mean(np.arange(8.0)) == pytest.approx(np.mean([2, 3, 4, 5]))


def test_an_interval_covers_the_mean_of_the_population_about_as_often_as_it_says():
    # 20 seeds of a normal variable. A percentile interval is a little too narrow: about 0.92 instead of 0.95.
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        (found,) = summarize(Result("q", "t", "v", i, 1.0, y, 0.0) for i, y in enumerate(rng.normal(3.0, 1.0, 20)))
        covered += found.low <= 3.0 <= found.high
        assert found.low <= found.mean <= found.high
    false_alarm = 1e-6
    assert stats.binom.ppf(false_alarm, 200, 0.90) <= covered


def test_the_memory_of_the_cliffwalk_holds_every_sequence_of_actions_once():
    # Schaul et al. 2016, appendix B.1: 2^(n + 1) - 2 transitions. One of them is rewarded.
    for n in (2, 5, 9):
        transitions = memory(n, np.random.default_rng(n))
        assert len(transitions) == 2 ** (n + 1) - 2
        assert sum(t.reward for t in transitions) == 1.0
        for state in range(n):  # half of the sequences that come so far go on
            assert sum(t.state == state and t.action == 1 for t in transitions) == 2 ** (n - state - 1)


def test_the_cliffwalks_values_converge_to_powers_of_gamma():
    n = 6
    rng = np.random.default_rng(1)
    transitions, table = memory(n, rng), QTable(n, rng)
    distinct = sorted(set(transitions))
    while not table.solved:
        for transition in distinct:
            table.learn(transition)
    values = np.array(table.values[:n])
    truth = np.column_stack([np.zeros(n), (1 - 1 / n) ** np.arange(n - 1, -1, -1)])
    assert ((values - truth) ** 2).mean() == pytest.approx(table.squared / (2 * n), abs=1e-9)
    assert ((values - truth) ** 2).mean() < 1e-3


def test_a_gain_is_what_learning_takes_off_the_squared_error():
    rng = np.random.default_rng(2)
    transitions, table = memory(4, rng), QTable(4, rng)
    for i in rng.integers(len(transitions), size=200):
        before, gain = table.squared, table.gain(transitions[i])
        table.learn(transitions[i])
        assert before - table.squared == pytest.approx(gain, abs=1e-12)


def test_a_random_walk_goes_on_from_where_it_was_and_one_of_two_to_the_n_is_rewarded():
    n, walks, rewards = 6, 0, 0.0
    state = 0
    for t in islice(initial.walks(n, np.random.default_rng(3)), 40_000):
        assert t.state == state
        assert t.next_state == (n if t.action == 0 or state == n - 1 else state + 1)
        assert t.reward == (t.action == 1 and state == n - 1)
        rewards += t.reward
        walks += t.next_state == n
        state = t.next_state % n
    false_alarm = 1e-6
    low, high = stats.binom.ppf((false_alarm / 2, 1 - false_alarm / 2), walks, 2**-n)
    assert low <= rewards <= high


def test_one_item_of_one_update_gets_the_outlier_which_is_corrected_at_the_next_update(monkeypatch):
    fed, update_priorities = [], tr.ReplayBuffer.update_priorities

    def spy(buffer, batch, errors):
        fed.append((batch["key"].tolist(), errors.tolist()))
        update_priorities(buffer, batch, errors)

    monkeypatch.setattr(tr.ReplayBuffer, "update_priorities", spy)
    monkeypatch.setattr(initial, "STATES", (6,))
    (point,) = initial.cliffwalk(1, initial.MAX_HELD, outlier=True)
    outliers = [(update, key) for update, batch in enumerate(fed, 1) for key, td in zip(*batch, strict=True) if td > 2]
    ((update, key),) = outliers
    assert update == initial.OUTLIER_AT
    assert key in fed[update][0]
    assert point.x == 256
    assert 0 < point.y <= len(fed)


def test_the_cliffwalk_counts_from_the_first_reward_and_gives_up_after_most_updates(monkeypatch):
    monkeypatch.setattr(initial, "STATES", (7,))
    (point,) = initial.cliffwalk(2, tr.Uniform())
    assert next(iter(initial.cliffwalk(2, tr.Uniform())))[:2] == point[:2]
    monkeypatch.setattr(initial, "MOST", int(point.y) - 1)
    assert [late.y for late in initial.cliffwalk(2, tr.Uniform())] == [math.inf]


class Episodes:
    """An environment with Acrobot's spaces: the goal is reached after 10 steps, then not within 25, then after 20."""

    def __init__(self):
        self.ends = {10: (True, False), 35: (False, True), 55: (True, False)}
        self.taken = 0

    def reset(self, seed=None):
        return np.zeros(6, np.float32), {}

    def step(self, action):
        self.taken += 1
        return np.full(6, self.taken, np.float32), -1.0, *self.ends.get(self.taken, (False, False)), {}


def test_acrobot_counts_the_episodes_in_which_the_goal_was_reached(monkeypatch):
    for name, value in {"STEPS": 60, "LEARN_FROM": 20, "TOLD_EVERY": 20}.items():
        monkeypatch.setattr(initial, name, value)
    monkeypatch.setattr("gymnasium.make", lambda name: Episodes())
    points = list(initial.acrobot(0, initial.MAX_HELD))
    assert [point[:2] for point in points] == [(20, 1), (40, 1), (60, 2)]


def test_a_picture_is_drawn_of_what_was_played(tmp_path):
    asked = question(tmp_path)
    draw(
        asked,
        [Result("q", "task", "a", seed, x, seed * x, 0.0) for seed in range(3) for x in (1, 2)],
        tmp_path / "p.png",
    )
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


QUICK_HER = ("--total-steps", "20", "--eval-every", "10", "--eval-episodes", "2", "--learning-starts", "60")


@pytest.mark.slow
def test_an_example_is_a_cell_that_shows_what_it_prints():
    pytest.importorskip("mujoco")
    pytest.importorskip("tyro")
    points = list(examples.play(3, "her", QUICK_HER, "step", "success_rate"))
    assert [point.x for point in points] == [10, 20]
    assert all(0 <= point.y <= 1 and point.seconds > 0 for point in points)


@pytest.mark.slow
def test_an_example_that_fails_is_told_with_what_it_said():
    pytest.importorskip("tyro")
    with pytest.raises(RuntimeError, match=r"her\.py --no-such-flag ended with 2:[\s\S]*no-such-flag"):
        examples.play(0, "her", ("--no-such-flag",), "step", "success_rate")


@pytest.mark.parametrize("question", ["recurrent", "hindsight"])
def test_the_examples_know_the_flags_of_every_variant(question, monkeypatch):
    pytest.importorskip("mujoco")
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("tianshou")
    pytest.importorskip("tyro")
    from benchmarks.learning.questions import QUESTIONS

    for cell in QUESTIONS[question].cells([0]):
        name, flags = cell.play.keywords["name"], cell.play.keywords["flags"]
        assert parsed(name, monkeypatch, *flags, "--seed", "1", "--solved-at", examples.NEVER, "--no-tensorboard")


@pytest.mark.slow
def test_tianshous_dqn_is_judged_as_often_with_each_buffer(monkeypatch):
    pytest.importorskip("tianshou")
    from benchmarks.learning.questions import tianshou

    monkeypatch.setattr(tianshou, "STEPS", 64)
    monkeypatch.setattr(tianshou, "EVALUATIONS", 2)
    monkeypatch.setattr(tianshou, "EPISODES", 3)
    for cell in tianshou.TIANSHOU.cells([1]):
        points = list(cell.play(1))
        assert [point.x for point in points] == [32, 64]
        assert all(1 <= point.y <= 500 for point in points)
        assert 0 < points[0].seconds < points[1].seconds


def test_peers_draw_as_often_as_the_limiter_would_let_them():
    limiter = tr.SamplesPerInsert(apex.SAMPLES_PER_INSERT, apex.MIN_ROWS)
    assert limiter.ratio == 16
    assert not may_draw(0, apex.MIN_ROWS - 1)
    assert may_draw(0, apex.MIN_ROWS)
    assert not may_draw(128, apex.MIN_ROWS + 7)  # 128 rows drawn need 8 more rows written
    assert may_draw(128, apex.MIN_ROWS + 8)


@pytest.mark.parametrize("terminated", [False, True])
def test_peers_n_step_transitions_are_those_of_the_definition(terminated):
    rewards, gamma, n = [1.0, 2.0, 4.0, 8.0, 16.0], 0.99, 3
    steps, found = NSteps(), []
    for t, reward in enumerate(rewards):
        over = t == len(rewards) - 1
        found += steps.add(t, 10 + t, reward, t + 1, terminated and over, over)
    assert [row["obs"] for row in found] == list(range(5))
    assert [row["action"] for row in found] == [10, 11, 12, 13, 14]
    for t, row in enumerate(found):
        k = min(n, len(rewards) - t)
        assert row["reward"] == pytest.approx(sum(gamma**i * rewards[t + i] for i in range(k)))
        assert row["next_obs"] == t + k
        assert row["discount"] == pytest.approx(0.0 if terminated and t + k == len(rewards) else gamma**k)

"""Ape-X: explorers write what they played, with the first priorities they found; the learner outlives their deaths."""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from itertools import groupby

import gymnasium
import pytest
import torch
from child_processes import explorers_of
from example_programs import EXAMPLES, assert_tensorboard_says, evaluations, imported, refusal, succeed

import torchreplay as tr
from torchreplay.ray import ExplorerContext

NAMES = ["apex", "apex_cartpole"]
QUICK = "--total-steps 60 --eval-every 30 --eval-episodes 2 --learning-starts 300 --num-explorers 2 --solved-at 501"

pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture(params=NAMES)
def example(request, monkeypatch):
    if request.param == "apex_cartpole":
        pytest.importorskip("ray")
        pytest.importorskip("pytorch_lightning")
    return imported(request.param, monkeypatch)


def assert_explored(lines, steps):
    assert [line["step"] for line in lines] == steps
    assert all(8 <= line["mean_return"] <= 500 and not line["solved"] for line in lines)
    assert all(line["rows"] >= 300 and line["samples_per_insert"] > 0 for line in lines)


@pytest.mark.slow
def test_with_ray_it_prints_one_json_line_per_evaluation(tmp_path):
    pytest.importorskip("ray")
    flags = [*QUICK.split(), "--backend", "ray", "--no-tensorboard"]
    assert_explored(evaluations(succeed("apex", tmp_path, *flags, timeout=170)), [30, 60])
    assert not list(tmp_path.iterdir())


def test_an_unknown_backend_is_refused_with_those_there_are(monkeypatch, capsys):
    said = refusal("apex", monkeypatch, capsys, "--backend", "threads")
    assert "invalid choice 'threads' for argument '--backend'. Expected one of ('process', 'ray')" in said


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("backend", ["process", "ray"])
def test_it_solves_cartpole_within_five_minutes(backend, seed, tmp_path):
    done = succeed("apex", tmp_path, "--seed", str(seed), "--backend", backend, timeout=300)
    assert evaluations(done)[-1]["solved"]


@pytest.mark.slow
def test_a_killed_explorer_is_reported_and_started_again_and_the_learner_goes_on(tmp_path):
    flags = "--num-explorers 1 --total-steps 400 --eval-every 100 --eval-episodes 2 --solved-at 501"
    command = [sys.executable, str(EXAMPLES / "apex.py"), *flags.split()]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as learner:
        first = json.loads(learner.stdout.readline())
        (explorer,) = explorers_of(learner.pid)
        os.kill(explorer, signal.SIGKILL)
        output, errors = learner.communicate(timeout=150)
    lines = [first, *map(json.loads, output.splitlines())]
    assert learner.returncode == 0
    assert_explored(lines, [100, 200, 300, 400])
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert_tensorboard_says(lines, tmp_path / "runs" / "apex-seed0")
    assert lines[-1]["rows"] > lines[0]["rows"] + 1_000  # nobody but a new explorer can have written them
    assert "explorer 0 of 1 failed (restart 1 in 1 s): its process died of signal 9" in errors


class StopsAfter(ExplorerContext):
    """The context of an explorer that takes a number of steps, without a pool."""

    def __init__(self, buffer, weights, steps):
        super().__init__(buffer, weights, seed=7)
        self.looks, self.episodes = steps, []

    @property
    def stopped(self):
        self.looks -= 1
        return self.looks < 0

    def record(self, *, episode_return, episode_length):
        self.episodes.append((float(episode_return), int(episode_length)))


@pytest.fixture(params=[7, 500], ids=["episodes that a time limit ends", "episodes that terminate"])
def explored(request, example, monkeypatch):
    """The items that an explorer wrote in 300 steps or so, their priorities, and the network that played."""
    make = gymnasium.make
    monkeypatch.setattr(example.gym, "make", lambda name: make(name, max_episode_steps=request.param))
    torch.manual_seed(2)
    args, q = example.Args(gamma=0.5), example.QNetwork().requires_grad_(False)
    view = tr.Transitions(args.n_step, args.gamma)
    buffer = tr.ReplayBuffer(tr.spec_from_env(make("CartPole-v1")), 1_000, view=view, sampler=tr.Prioritized())
    context = StopsAfter(buffer, tr.SharedWeights(q), 300)
    example.explore(context, args)
    items = buffer.gather(torch.arange(buffer.stats().rows_written))
    return request.param, args, items, buffer.priorities(items["key"]), q, context.episodes


def test_a_transition_is_the_discounted_sum_of_its_rewards_scaled_by_one_minus_gamma(explored):
    limit, _, items, _, _, episodes = explored
    ended = items["terminated"] | items["truncated"]
    assert items["reward"][~ended].unique().tolist() == [0.5 * (1 + 1 / 2 + 1 / 4)]
    assert set(items["reward"][ended].tolist()) == {0.5 * (1 + 1 / 2 + 1 / 4), 0.5 * (1 + 1 / 2), 0.5}
    assert len(episodes) >= 5
    assert all(episode_return == length <= limit for episode_return, length in episodes)


def test_only_termination_ends_the_bootstrapping_and_a_time_limit_does_not(explored):
    limit, _, items, *_ = explored
    cut, fallen = items["truncated"], items["terminated"]
    assert (cut if limit == 7 else fallen).any()
    assert not (fallen if limit == 7 else cut).any()
    assert set(items["discount"][cut].tolist()) <= {0.5, 0.25, 0.125}
    assert not items["discount"][fallen].any()


def test_the_first_priority_is_the_td_error_that_the_explorer_found(explored):
    _, _, items, priorities, q, _ = explored
    value = items["reward"] + items["discount"] * q(items["next_obs"]).amax(-1)
    error = (value - q(items["obs"])[range(len(value)), items["action"]]).abs()
    ended = items["terminated"] | items["truncated"]
    torch.testing.assert_close(priorities[~ended], error[~ended], atol=1e-6, rtol=1e-5)
    for ends, run in groupby(range(len(ended)), lambda i: bool(ended[i])):
        if ends:  # one step completed all of these, and the writer takes one number for them: the largest
            run = list(run)
            torch.testing.assert_close(priorities[run], error[run].max().expand(len(run)), atol=1e-6, rtol=1e-5)


def test_the_first_priority_of_a_full_window_is_that_of_its_first_step(example):
    window = deque([(1.0, 0.25), (2.0, 7.0)])
    assert example.first_priority(window, 0.5, False, 0.5) == pytest.approx(abs(1 + 2 / 2 + 0.5**2 * 0.5 - 0.25))


def test_a_step_that_ends_the_episode_gives_its_items_the_largest_of_their_td_errors(example):
    window = deque([(2.0, 1.0), (1.0, 10.0)])
    assert example.first_priority(window, 0.0, True, 0.5) == max(abs(2 + 1 / 2 - 1), abs(1 - 10))

"""The page on a loop that resumes exactly: its program does, and environments keep their state as it says."""

import os
import pickle
import signal

import pytest
import warm_interpreter
from paths import ROOT

import torchreplay as tr

gymnasium = pytest.importorskip("gymnasium")

PAGE = (ROOT / "docs" / "resuming_a_loop.md").read_text()
PROGRAM, _, MUJOCO = (part.split("```")[0] for part in PAGE.split("```python\n")[1:])
QUEUE = next(part for part in (ROOT / "docs" / "persistence.md").read_text().split("```") if "queue_run" in part)
SIZES = "STEPS, SAVE_EVERY, BEGIN = 2_000, 500, 200 "
DEATHS = """
import itertools, os, signal
import torch

steps, plain_replace, plain_backward = itertools.count(1), os.replace, torch.Tensor.backward


def die_at(moment):
    if moment == os.environ["DIES"]:
        os.kill(os.getpid(), signal.SIGKILL)


def replace(source, target):
    die_at(f"before {target} is replaced")
    plain_replace(source, target)


def backward(loss):
    die_at(f"step {next(steps)}")
    plain_backward(loss)


os.replace, torch.Tensor.backward = replace, backward
"""


@pytest.fixture
def live(monkeypatch):
    """Runs the program in a directory, until it ends or dies; returns what it printed, and its exit status."""

    def run(directory, dies="of age"):
        directory.mkdir(exist_ok=True)
        assert SIZES in PROGRAM
        program = directory / "program.py"
        program.write_text(DEATHS + PROGRAM.replace(SIZES, "STEPS, SAVE_EVERY, BEGIN = 800, 200, 100 "))
        monkeypatch.setenv("DIES", dies)
        done = warm_interpreter.run(program, [], directory, timeout=60)
        return done.stdout.splitlines(), done.returncode

    return run


@pytest.mark.slow
def test_a_loop_that_is_killed_twice_takes_the_steps_of_one_that_never_was(live, tmp_path):
    whole, status = live(tmp_path / "whole")
    assert status == 0
    assert len({line.rpartition(" ")[2] for line in whole}) > 20  # losses, none like another
    broken = tmp_path / "broken"
    assert live(broken, "step 250")[1] == -signal.SIGKILL  # between the first save and the second
    (first,) = (name for name in os.listdir(broken / "loop") if name.startswith("replay-"))
    assert live(broken, "before loop/model.pt is replaced")[1] == -signal.SIGKILL
    assert len(os.listdir(broken / "loop")) == 4  # two buffers, the old model's file and the new one
    resumed, status = live(broken)
    assert status == 0
    assert resumed == whole[-len(resumed) :]
    assert len(resumed) < len(whole)
    before = whole[-len(resumed) - 1]
    assert before.startswith(f"step {first.removeprefix('replay-')}:")
    assert live(broken) == ([], 0)  # it was saved at its end


@pytest.mark.slow
def test_the_queue_beside_it_is_opened_again_after_a_death_and_when_all_is_learned(monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(DEATHS + QUEUE.removeprefix("python\n"))
    for dies, status in (("before queue_run/model.pt is replaced", -signal.SIGKILL), ("of age", 0), ("of age", 0)):
        monkeypatch.setenv("DIES", dies)
        done = warm_interpreter.run(program, [], tmp_path, timeout=60)
        assert done.returncode == status, done.stderr
        with tr.ReplayBuffer.open(tmp_path / "queue_run" / "queue") as queue:
            assert queue.stats().drawable == (640 if status else 0)


def taken(env, steps):
    """What some random steps say."""
    said = []
    for _ in range(steps):
        obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        said.append((obs.sum().item(), float(reward)))
        if terminated or truncated:
            env.reset()
    return said


def made(name, seed):
    """An environment in its second episode."""
    env = gymnasium.make(name)
    env.reset(seed=seed)
    env.action_space.seed(1)
    env.reset()
    return env


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "InvertedPendulum-v5", "Hopper-v5"])
def test_between_two_episodes_the_generator_is_all_that_an_environment_needs(name):
    if name.endswith("v5"):
        pytest.importorskip("mujoco")
    one, other = made(name, 3), made(name, 4)
    taken(one, 30)
    other.unwrapped.np_random.bit_generator.state = one.unwrapped.np_random.bit_generator.state
    other.action_space.np_random.bit_generator.state = one.action_space.np_random.bit_generator.state
    one.reset()
    other.reset()
    assert taken(one, 120) == taken(other, 120)


def test_in_mid_episode_a_pickle_has_the_whole_state_of_a_plain_environment_and_none_of_mujoco_s():
    cartpole = made("CartPole-v1", 3)
    taken(cartpole, 3)
    copy = pickle.loads(pickle.dumps(cartpole))
    assert taken(copy, 100) == taken(cartpole, 100)
    pytest.importorskip("mujoco")
    hopper = made("Hopper-v5", 3)
    taken(hopper, 3)
    copy = pickle.loads(pickle.dumps(hopper))
    assert copy.unwrapped.data.time == 0 < hopper.unwrapped.data.time


def test_mujoco_s_own_state_brings_back_the_middle_of_an_episode():
    pytest.importorskip("mujoco")
    page = {}
    exec(MUJOCO, page)
    one, other = made("Hopper-v5", 3), made("Hopper-v5", 4)
    taken(one, 3)
    page["go_back"](other, page["state_of"](one))
    actions = [one.action_space.sample() for _ in range(8)]
    observed = [[env.step(action)[0].tolist() for action in actions] for env in (one, other)]
    assert observed[0] == observed[1]


def test_an_atari_game_goes_on_from_its_own_state():
    pytest.importorskip("ale_py")
    one, other = made("ALE/Breakout-v5", 3), made("ALE/Breakout-v5", 4)
    taken(one, 40)
    other.unwrapped.restore_state(pickle.loads(pickle.dumps(one.unwrapped.clone_state(include_rng=True))))
    other.action_space.np_random.bit_generator.state = one.action_space.np_random.bit_generator.state
    assert taken(one, 300) == taken(other, 300)

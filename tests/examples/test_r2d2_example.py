"""The recurrent example runs, says what it promises to say, and learns what cannot be learned without memory."""

import itertools
import threading
from contextlib import suppress

import numpy as np
import pytest
import torch
from example_programs import curve, evaluations, imported, parsed, refusal, succeed

import torchreplay as tr
from torchreplay.ray import ExplorerContext

NAME = "r2d2"
QUICK = "--total-steps 40 --eval-every 20 --learning-starts 20 --batch-size 8 --solved-at 2 --seed 7"

pytest.importorskip("gymnasium")
pytest.importorskip("tyro")
pytest.importorskip("torch.utils.tensorboard")


@pytest.fixture
def example(monkeypatch):
    return imported(NAME, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("network", ["lstm", "feedforward"])
def test_the_example_prints_one_json_line_per_evaluation_and_keeps_its_curve(network, tmp_path):
    lines = evaluations(succeed(NAME, tmp_path, *QUICK.split(), "--network", network, timeout=170))
    assert [line["step"] for line in lines] == [20, 40]
    assert all(-3.5 <= line["mean_return"] <= 1 and not line["solved"] for line in lines)
    returns = {line["step"]: pytest.approx(line["mean_return"], rel=1e-6) for line in lines}
    assert curve(tmp_path / "runs" / f"r2d2-{network}-seed7") == returns


def test_an_unknown_network_is_refused_with_those_there_are(monkeypatch, capsys):
    said = refusal(NAME, monkeypatch, capsys, "--network", "transformer")
    assert "invalid choice 'transformer' for argument '--network'. Expected one of ('lstm', 'feedforward')" in said


def test_a_burn_in_may_be_nothing_but_not_less(monkeypatch, capsys):
    assert parsed(NAME, monkeypatch, "--burn-in", "0").burn_in == 0
    said = refusal(NAME, monkeypatch, capsys, "--burn-in", "-1")
    assert "burn_in=-1: expected a whole number of at least 0" in said


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(5))
def test_the_recurrent_network_solves_the_maze_within_five_minutes(seed, tmp_path):
    done = succeed(NAME, tmp_path, "--seed", str(seed), timeout=300)
    assert evaluations(done)[-1]["mean_return"] >= 0.95


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_control_without_memory_never_gets_beyond_chance(tmp_path):
    done = succeed(NAME, tmp_path, "--network", "feedforward", timeout=300)
    lines = evaluations(done)
    assert lines[-1]["step"] == 2000
    assert max(line["mean_return"] for line in lines) <= 0


def play(env, turn, act):
    """Returns the return of an episode whose right turn is `turn`; `act` gets all observations so far."""
    seen = [env.reset(seed=7, options={"turn": turn})[0]]
    total, done = 0.0, False
    while not done:
        obs, reward, terminated, truncated, _ = env.step(act(seen))
        seen.append(obs)
        total, done = total + reward, terminated or truncated
    return total


def test_no_policy_of_the_present_observation_gets_more_than_0_and_some_get_0(example):
    env = example.TMaze(corridor=6)

    def mean_return(actions):
        return np.mean(
            [play(env, turn, lambda seen: actions[seen[-1].argmax()]) for turn in (example.UP, example.DOWN)]
        )

    assert max(mean_return(actions) for actions in itertools.product(range(3), repeat=4)) == 0


def test_who_remembers_the_first_observation_gets_1(example):
    def act(seen):
        turn = example.UP if seen[0].argmax() == example.CUE_UP else example.DOWN
        return turn if seen[-1].argmax() == example.JUNCTION else example.FORWARD

    env = example.TMaze(corridor=6)
    assert [play(env, turn, act) for turn in (example.UP, example.DOWN)] == [1, 1]


def test_the_maze_is_an_environment_by_gymnasium_s_own_checks(example):
    checker = pytest.importorskip("gymnasium.utils.env_checker")
    checker.check_env(example.TMaze(corridor=6), skip_render_check=True)


def batch_of(example, begins, steps=6, size=3):
    """Returns sequences of random steps of which the last ends an episode by termination, a step before the end."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(size, steps, dtype=torch.bool)
    mask[:, -1] = False
    terminated, is_first = torch.zeros_like(mask), torch.zeros_like(mask)
    terminated[:, -2] = True
    is_first[:, 0] = torch.tensor(begins)
    return {
        "obs": torch.rand(size, steps + 1, 4, generator=generator),
        "action": torch.randint(3, (size, steps), generator=generator),
        "reward": torch.rand(size, steps, generator=generator),
        "terminated": terminated,
        "truncated": torch.zeros_like(mask),
        "mask": mask,
        "is_first": is_first,
        "state": torch.rand(size, 2, example.HIDDEN, generator=generator),
    }


def test_the_errors_are_those_of_double_q_learning_found_one_observation_at_a_time(example):
    torch.manual_seed(2)
    q, target = example.QNetwork("lstm"), example.QNetwork("lstm")
    batch = batch_of(example, [True, False, False])
    args = example.Args(burn_in=2, length=4, gamma=0.5)
    error, learned = example.td_errors(q, target, batch, args)
    assert learned.tolist() == [[True] * 5 + [False], *[[False, False, True, True, True, False]] * 2]
    for row in range(3):
        values = {net: [] for net in (q, target)}
        for net in values:
            state = batch["state"][row : row + 1]
            for obs in batch["obs"][row]:
                value, state = net(obs[None, None], state)
                values[net].append(value.flatten().detach())
        for t in learned[row].nonzero().flatten().tolist():
            bootstrap = 0.5 * values[target][t + 1][values[q][t + 1].argmax()] if t < 4 else 0.0
            goal = batch["reward"][row, t] + bootstrap
            assert error[row, t].item() == pytest.approx(
                (goal - values[q][t][batch["action"][row, t]]).item(), abs=1e-5
            )
    assert (error[~learned] == 0).all()


@pytest.mark.parametrize("kind", ["lstm", "feedforward"])
def test_sequences_without_a_burn_in_are_learned_from_as_those_that_begin_their_episodes(kind, example):
    torch.manual_seed(2)
    q, target = example.QNetwork(kind), example.QNetwork(kind)
    batch = batch_of(example, [True] * 3)
    warmed_up, _ = example.td_errors(q, target, batch, example.Args(burn_in=2, length=4))
    batch["is_first"][:] = False
    error, learned = example.td_errors(q, target, batch, example.Args(burn_in=0, length=6))
    assert torch.equal(learned, batch["mask"])
    assert torch.allclose(error, warmed_up, atol=1e-6)


def test_no_gradient_passes_through_a_burn_in_unless_the_sequence_begins_its_episode(example):
    q = example.QNetwork("lstm")
    batch = batch_of(example, [True, False, False])
    batch["obs"].requires_grad_()
    error, _ = example.td_errors(q, q, batch, example.Args(burn_in=2, length=4))
    error[:, 2:].sum().backward()
    reaches_burn_in = batch["obs"].grad[:, :2].abs().sum((1, 2)) > 0
    assert reaches_burn_in.tolist() == [True, False, False]


def test_an_explorer_stores_with_each_step_the_state_that_its_lstm_had_before_it_saw_the_observation(example):
    torch.manual_seed(3)
    q, args = example.QNetwork("lstm"), example.Args()
    view = tr.Sequences(args.length, burn_in=args.burn_in, initial=("state",))
    buffer = tr.ReplayBuffer(example.SPEC, 10_000, view=view, seed=1)
    context = ExplorerContext(buffer, tr.SharedWeights(q), seed=5)

    def explore():
        with suppress(tr.Stopped):  # as an explorer pool expects it
            example.explore(context, args)

    with buffer.expect_writers():
        explorer = threading.Thread(target=explore)
        explorer.start()
        buffer.sample(1)
        buffer.stop()
        explorer.join()
    rows, ends = buffer.storage, buffer.storage["terminated"] | buffer.storage["truncated"]
    state, compared = example.START, 0
    for row in range(1, len(buffer)):
        if row > 1 and ends[row - 1]:
            state = example.START  # a reset row, which no step led to
        else:
            assert torch.allclose(rows["state"][row], state[0], atol=1e-6)
            _, state = q.act(rows["obs"][row - 1].numpy(), state)
            compared += 1
    assert compared > args.burn_in


def test_the_control_is_blind_to_everything_but_the_present_observation(example):
    q = example.QNetwork("feedforward")
    obs = torch.rand(1, 5, 4)
    values, state = q(obs, torch.rand(1, 2, example.HIDDEN))
    alone, _ = q(obs[:, 3:4], example.START)
    assert torch.allclose(values[:, 3:4], alone)
    assert state.shape == (1, 2, example.HIDDEN)

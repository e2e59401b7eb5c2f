"""`torchreplay plan` names the bytes that a buffer then takes, to the last one."""

import json

import pytest
import torch
from click.testing import CliRunner

import torchreplay as tr
from torchreplay.cli import main


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *(str(argument) for argument in arguments)])


def planned(*arguments):
    result = run("--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_an_environment_in_frames_takes_what_the_buffer_takes():
    told = planned("--env", "CartPole-v1", "--capacity", "1e4", "--n-step", 3, "--stack", 4)
    import gymnasium

    spec = tr.spec_from_env(gymnasium.make("CartPole-v1"))
    view = tr.Transitions(n_step=3, stack={"obs": 4})
    with tr.ReplayBuffer(spec, 10_000, view=view, sampler=tr.Prioritized()) as buffer:
        assert told["footprint"]["nbytes"] == buffer.nbytes
        assert told["view"] == str(view)


def test_fields_replace_those_of_the_environment():
    told = planned("--env", "CartPole-v1", "--field", "obs:uint8:84x84", "--capacity", 1000)
    assert told["footprint"]["fields"]["obs"] == 84 * 84 * 1000
    assert told["footprint"]["fields"]["action"] == 8 * 1000


def test_rows_by_themselves_hold_whole_stacks_twice():
    told = planned(
        "--field", "obs:uint8:8x8", "--field", "action:int64", "--capacity", 500, "--stack", 4, "--view", "rows"
    )
    spec = {"obs": tr.Field((4, 8, 8), torch.uint8), "action": tr.Field((), torch.int64)}
    with tr.ReplayBuffer(spec | {"next_obs": spec["obs"]}, 500, sampler=tr.Prioritized()) as buffer:
        assert told["footprint"]["nbytes"] == buffer.nbytes


def test_the_text_has_parts_peers_and_this_machine():
    output = run("--field", "obs:uint8:84x84", "--field", "action:int64", "--capacity", "1e6", "--stack", 4).output
    assert output.startswith("6.65 GiB for 1,000,000 rows")
    for text in ("field obs", "priority tree", "row headers", "Stable-Baselines3", "This machine has"):
        assert text in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--capacity", "10"], "there is nothing to plan"),
        (["--capacity", "1.5", "--field", "x:float32"], "no whole number"),
        (["--capacity", "10", "--field", "x"], "expected NAME:DTYPE:SHAPE"),
        (["--capacity", "10", "--field", "x:complex64"], "a row cannot hold"),
        (["--capacity", "10", "--field", "x:float32"], "need a field 'obs'"),
        (["--capacity", "10", "--env", "Nothing-v9"], "cannot be made"),
        (["--capacity", "10", "--field", "obs:uint8", "--view", "sequences", "--stack", "4"], "are of transitions"),
        (["--capacity", "2e12", "--field", "obs:uint8"], "expected an int from 1 to"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(arguments, expected):
    result = run(*arguments)
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())


OF_TOKENS = ("--view", "rows", "--ragged", "tokens:int32=800,32000", "--ragged", "logprob:float32=tokens")
TOKENS = {"tokens": tr.Ragged(torch.int32), "logprob": tr.Ragged(torch.float32, like="tokens"), "reward": tr.Field()}


def test_bytes_for_values_of_any_length_follow_from_their_mean_and_their_largest_length():
    told = planned(*OF_TOKENS, "--field", "reward:float32", "--capacity", 1000)
    room = told["ragged_bytes"]
    with tr.ReplayBuffer(TOKENS, 1000, sampler=tr.Prioritized(), ragged_bytes=room) as buffer:
        assert told["footprint"]["nbytes"] == buffer.nbytes
        for length in [800] * 999 + [1000]:
            buffer.extend(tokens=[[1] * length], logprob=[[0.5] * length], reward=[1.0])
        assert len(buffer) == 1000
        buffer.extend(tokens=[[1] * 32_000], logprob=[[0.5] * 32_000], reward=[1.0])  # which fits into a quarter
    assert 1000 * 800 * 8 < room < 1.1 * 1000 * 800 * 8 + 32_000 * 8


def test_as_many_rows_as_fit_into_memory_are_found():
    told = planned(*OF_TOKENS, "--field", "reward:float32", "--memory", "64MiB")
    rows = told["footprint"]["capacity"]
    assert told["footprint"]["nbytes"] <= 64 << 20
    more = planned(*OF_TOKENS, "--field", "reward:float32", "--capacity", rows + 1)
    assert more["footprint"]["nbytes"] > 64 << 20
    fixed = planned("--view", "rows", "--field", "x:float32:100", "--memory", "1GB")["footprint"]
    assert 0.99e9 < fixed["nbytes"] <= 1e9


def test_the_text_names_the_bytes_for_values_of_any_length():
    output = run(*OF_TOKENS, "--capacity", 1000).output
    assert "for values of any length: ragged_bytes=" in output
    assert "page words and marks" in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--capacity", 10, "--ragged", "tokens:int32=800"], "expected NAME:DTYPE:SHAPE=MEAN,LARGEST"),
        (["--capacity", 10, "--ragged", "tokens:int32=80,8"], "expected a mean of 0 to the largest length"),
        (["--capacity", 10, "--ragged", "logprob:float32=tokens"], "no field of the spec"),
        (["--capacity", 10, "--memory", "1GiB", "--field", "x:float32"], "--capacity or --memory"),
        (["--field", "x:float32"], "--capacity or --memory"),
        (["--field", "x:float32", "--memory", "1KiB"], "not even the 1 rows"),
        (["--field", "x:float32", "--memory", "much"], "no size"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_lengths_and_sizes_that_cannot_be_are_refused(arguments, expected):
    result = run("--view", "rows", *arguments)
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())

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

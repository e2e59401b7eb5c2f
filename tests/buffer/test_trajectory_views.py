"""Views of trajectories that do not fit: refused when they are made, or when a buffer is made with them."""

import numpy as np
import pytest
import torch
from linked_rows import NESTED, PLAIN, spec_of

import torchreplay as tr

BAD_ARGUMENTS = [
    *((tr.Transitions, {"n_step": n}, "n_step is") for n in (0, -1, 1.5, "3", None, True, 2**40)),
    *((tr.Transitions, {"gamma": g}, "gamma") for g in (-0.1, 1.5, float("nan"), float("inf"), "x")),
    *((tr.Transitions, {"stack": {"obs": k}}, "stack") for k in (0, -1, 2.5, "4")),
    *((tr.Sequences, {"length": n}, "length is") for n in (0, -1, 1.5, None)),
    *((tr.Sequences, {"length": 2, "stride": n}, "stride is") for n in (0, -1, 1.5)),
    *((tr.Sequences, {"length": 2, "burn_in": n}, "burn_in is") for n in (-1, 1.5, None)),
    (tr.Sequences, {"length": 2**19, "burn_in": 2**19}, r"burn_in \+ length is 1,048,576: expected fewer"),
    (
        tr.Hindsight,
        {"compute_reward": None, "achieved": "obs", "desired": "obs"},
        "achieved and desired are both 'obs'",
    ),
]


@pytest.mark.parametrize(("view", "arguments", "message"), BAD_ARGUMENTS, ids=str)
def test_a_bad_argument_of_a_view_is_a_value_error_that_names_it(view, arguments, message):
    with pytest.raises(ValueError, match=message):
        view(**arguments)


@pytest.mark.parametrize("name", [None, 3, True, b"obs", {"obs": 4}, [3], object()], ids=lambda v: type(v).__name__)
def test_what_is_no_name_of_a_field_is_a_type_error_that_names_the_argument(name):
    views = {
        tr.Transitions: ("observation", "reward", "terminated", "truncated"),
        lambda **names: tr.Sequences(2, **names): ("observation", "initial", "terminated", "truncated"),
        lambda **names: tr.Hindsight(None, **names): (
            *("observation", "achieved", "desired", "reward", "terminated", "truncated"),
        ),
    }
    for view, arguments in views.items():
        for argument in arguments:
            with pytest.raises(TypeError, match=f"{argument} is .*: expected the name of a field"):
                view(**{argument: name})
    if name is not None:
        with pytest.raises(TypeError, match=r"discount is .*: expected the name of a field"):
            tr.Transitions(discount=name)
    with pytest.raises(TypeError, match=r"stack is .*: expected"):
        tr.Transitions(stack={3: 4})


@pytest.mark.parametrize("value", [None, 1, "yes", [], float("nan")], ids=repr)
def test_across_episodes_is_true_or_false(value):
    with pytest.raises(TypeError, match=r"across_episodes is .*: expected True or False"):
        tr.Sequences(2, across_episodes=value)


BAD_FITS = [
    (tr.Transitions(observation="pixels"), "observation 'pixels' is no field of the spec"),
    (tr.Transitions(observation=("obs", "pixels")), "observation 'pixels' is no field of the spec"),
    (tr.Transitions(observation="obs/image"), "observation 'obs/image' is no field of the spec"),
    (tr.Transitions(observation=()), "observation"),
    (tr.Transitions(reward="gain"), "reward='gain' is no field of the spec"),
    (tr.Transitions(reward="action"), "'action'"),
    (tr.Transitions(reward="obs"), "'obs'"),
    (tr.Transitions(discount="fade"), "discount='fade' is no field of the spec: it has 'obs'"),
    (tr.Transitions(discount="action"), r"discount='action' is .*int64.*: expected Field\(\), or another floating"),
    (
        tr.Transitions(discount="obs"),
        r"discount='obs' is .*: expected Field\(\), or another floating dtype, not observed",
    ),
    (tr.Transitions(discount="far"), r"discount='far' is Field\(\(3,\), .*: expected Field\(\)"),
    (tr.Transitions(discount="reward"), "discount='reward' is the reward: expected a field of its own"),
    (tr.Transitions(discount="terminated"), "discount='terminated' is "),
    (tr.Transitions(terminated="done"), "terminated='done' is no field of the spec"),
    (tr.Transitions(truncated="reward"), r"'reward' is .*: expected Field\(\(\), torch.bool\)"),
    (tr.Transitions(observation=("obs", "terminated")), "'terminated'"),
    (tr.Transitions(stack={"action": 4}), "stack names 'action'"),
    (tr.Transitions(stack={"pixels": 4}), "stack names 'pixels'"),
    (tr.Sequences(2, observation="pixels"), "observation 'pixels' is no field of the spec"),
    (tr.Sequences(2, initial=("state",)), "initial 'state' is no field of the spec"),
    (tr.Sequences(2, initial=("obs",)), "initial names 'obs'"),
    (tr.Sequences(2, terminated="done"), "terminated='done' is no field of the spec"),
    (
        tr.Hindsight(None, "goal", "obs"),
        r"'goal' is not an observation: name it in observation=\('obs', 'goal'\)",
    ),
    (
        tr.Hindsight(None, "goal", "far", observation=["obs"]),
        r"'goal' is not an observation: name it in observation=\('obs', 'goal', 'far'\)",
    ),
    (
        tr.Hindsight(None, "obs", "far", observation=("obs", "far")),
        r"achieved='obs' is Field\(\(2,\), .* and desired='far' is Field\(\(3,\), .*: expected fields of one type",
    ),
]


@pytest.mark.parametrize(("view", "message"), BAD_FITS, ids=[message for _, message in BAD_FITS])
def test_a_view_that_does_not_fit_the_spec_is_a_value_error_that_names_the_field(view, message):
    goals = {"goal": ((2,), np.float32), "far": ((3,), np.float32)}
    with pytest.raises(ValueError, match=message):
        tr.ReplayBuffer(spec_of(PLAIN | goals), 100, view=view)


def test_sequences_may_be_as_long_as_a_batch_may():
    view = tr.Sequences(2**19, burn_in=2**19 - 1)
    assert tr.ReplayBuffer(spec_of(PLAIN), 2**20, view=view).view.rows_of_an_item == 2**20


@pytest.mark.parametrize(
    ("view", "name"),
    [
        (tr.Transitions(), "next_obs"),
        (tr.Transitions(), "discount"),
        (tr.Sequences(2), "mask"),
        (tr.Sequences(2), "is_first"),
    ],
    ids=str,
)
def test_a_field_named_like_one_that_the_view_adds_is_refused(view, name):
    with pytest.raises(ValueError, match=f"'{name}'"):
        tr.ReplayBuffer(spec_of(PLAIN) | {name: tr.Field()}, 100, view=view)


def test_an_observation_may_be_a_part_of_a_nested_field_and_the_rest_goes_with_the_action():
    view = tr.Transitions(observation="obs/image")
    buffer = tr.ReplayBuffer(spec_of(NESTED), 100, view=view, seed=0)
    image = np.zeros((32, 36), np.uint8)
    rest = {"action": 1, "reward": np.zeros(2), "state": {"h": np.zeros(3)}, "terminated": False, "truncated": False}
    with buffer.writer() as writer:
        writer.reset(obs={"image": image})
        writer.step(obs={"image": image + 1, "goal": 5.0}, **rest)
    batch = buffer.gather(torch.tensor([0]))
    assert list(batch["next_obs"]) == ["image"]
    assert batch["obs"]["goal"].tolist() == [5.0]
    assert batch["next_obs"]["image"].eq(1).all()


@pytest.mark.parametrize(
    ("view", "rows"),
    [
        (tr.Transitions(), 2),
        (tr.Transitions(n_step=5), 6),
        (tr.Transitions(n_step=2, stack={"obs": 4}), 6),
        (tr.Sequences(4, burn_in=2), 7),
        (tr.Sequences(4, across_episodes=True), 5),
    ],
    ids=str,
)
def test_a_ring_that_cannot_hold_one_item_is_refused_with_the_numbers(view, rows):
    with pytest.raises(ValueError, match=rf"capacity is {rows - 1}: .*{rows} rows"):
        tr.ReplayBuffer(spec_of(PLAIN), rows - 1, view=view)
    assert tr.ReplayBuffer(spec_of(PLAIN), rows, view=view).capacity == rows

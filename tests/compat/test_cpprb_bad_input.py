"""What cpprb refuses is refused, and what it accepts and is poisoned by, too."""

import cpprb
import numpy as np
import pytest
from cpprb_transitions import ENV, one, same, transitions

import torchreplay as tr
from torchreplay.compat import cpprb as adapter


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_bad_priorities_are_refused_and_nothing_is_done(bad):
    buffer = adapter.PrioritizedReplayBuffer(8, ENV)
    buffer.add(**transitions(4))
    for call in (
        lambda: buffer.add(**one(4), priorities=bad),
        lambda: buffer.add(**transitions(2), priorities=[1.0, bad]),
        lambda: buffer.update_priorities([0, 1], [1.0, bad]),
        lambda: buffer.update_priorities(buffer.sample(2)["indexes"], [1.0, bad]),
    ):
        with pytest.raises(ValueError, match="priorit"):
            call()
    assert buffer.get_stored_size() == 4
    assert buffer.get_max_priority() == 1.0


@pytest.mark.parametrize("bad", [8, -1, 4, 2**40, -(2**62)])
def test_indexes_out_of_range_are_refused(bad):
    buffer = adapter.PrioritizedReplayBuffer(8, ENV)
    buffer.add(**transitions(4))
    with pytest.raises(ValueError, match=f"index {bad} is out of range"):
        buffer.update_priorities([0, bad], [9.0, 9.0])
    assert buffer.get_max_priority() == 1.0


def test_as_many_priorities_as_indexes_are_expected():
    buffer = adapter.PrioritizedReplayBuffer(8, ENV)
    buffer.add(**transitions(4))
    for indexes, priorities in ([0, 1], [1.0]), ([0], [1.0, 2.0]), ([], [1.0]):
        with pytest.raises(ValueError, match="expected one each"):
            buffer.update_priorities(indexes, priorities)
    buffer.update_priorities([], [])


@pytest.mark.parametrize("given", [(None, [1.0]), ([0], None)])
def test_none_is_refused_as_cpprb_does(given):
    for library in (adapter, cpprb):
        buffer = library.PrioritizedReplayBuffer(8, ENV)
        buffer.add(**one(0))
        with pytest.raises(TypeError):
            buffer.update_priorities(*given)


def test_a_missing_column_is_a_key_error_and_nothing_is_added(both):
    with pytest.raises(KeyError, match="done"):
        both[1].add(obs=0)
    ours = both[0]
    for name in ENV:
        with pytest.raises(KeyError, match=name):
            ours.add(**{key: value for key, value in one(0).items() if key != name})
    assert ours.get_stored_size() == 0


def test_columns_of_different_lengths_are_a_value_error_and_nothing_is_added(both):
    for buffer in both:
        with pytest.raises(ValueError):  # NumPy's, with cpprb
            buffer.add(**(transitions(3) | {"obs": np.zeros((2, 2, 3))}))
    assert both[0].get_stored_size() == 0


@pytest.mark.parametrize("options", [{}, {"next_of": "obs"}, {"Nstep": {"size": 2, "rew": "rew"}}], ids=str)
@pytest.mark.parametrize("n", [1, 4])
def test_values_whose_axes_come_in_another_order_are_refused_and_nothing_is_added(n, options):
    env = {"obs": {"shape": (2, 3)}, "next_obs": {"shape": (2, 3)}, "act": {"shape": 2}, "rew": {}, "done": {}}
    step = {"obs": np.arange(n * 6.0).reshape(n, 2, 3), "act": np.arange(n * 2.0).reshape(n, 2)}
    step |= {"next_obs": step["obs"] + 1, "rew": np.arange(n), "done": np.zeros(n)}
    buffer = adapter.ReplayBuffer(16, env, **options)
    turned = [("obs", step["obs"].swapaxes(1, 2)), ("obs", step["obs"].transpose(1, 2, 0))]
    turned += [("act", step["act"].T)] if n > 1 else [("obs", step["obs"][0].T)]
    for name, value in turned:
        if value.squeeze().shape != step[name].squeeze().shape:
            with pytest.raises(ValueError, match=rf"'{name}' has shape .* expected"):
                buffer.add(**(step | {name: value}))
    assert buffer.get_stored_size() == 0
    for name in ("obs", "next_obs", "act"):
        buffer.add(**(step | {name: step[name].reshape(n, -1)}))
        buffer.add(**(step | {name: step[name].ravel()}))
        buffer.add(**(step | {name: step[name][:, None]}))
    if not options:
        own = cpprb.ReplayBuffer(16, env)
        for _ in range(9):
            own.add(**step)
        same(buffer.get_all_transitions(), own.get_all_transitions())


def test_priorities_of_another_length_are_a_value_error_and_nothing_is_added():
    for library in (adapter, cpprb):
        buffer = library.PrioritizedReplayBuffer(8, ENV)
        with pytest.raises(ValueError, match="priorities"):
            buffer.add(**transitions(3), priorities=[1.0, 2.0])
        assert buffer.get_stored_size() == 0


def test_an_empty_buffer_has_nothing_to_draw(both):
    with pytest.raises(ValueError, match="holds no transition"):
        both[0].sample(4)
    with pytest.raises(ValueError):
        cpprb.ReplayBuffer(4, ENV).sample(4)
    assert both[0].get_all_transitions()["obs"].shape == (0, 2, 3)


def test_an_argument_that_cpprb_swallows_is_warned_about():
    with pytest.warns(UserWarning, match="no arguments \\['nstep'\\]"):
        adapter.ReplayBuffer(8, ENV, nstep={"size": 3})


@pytest.mark.parametrize("size", [0, -1])
def test_a_buffer_of_nothing_is_refused(size):
    with pytest.raises(ValueError, match="capacity"):
        adapter.ReplayBuffer(size, ENV)


@pytest.mark.parametrize("column", [tr.Ragged("int32"), {"dtype": tr.Ragged("int32")}], ids=repr)
def test_a_column_of_any_length_is_refused_with_its_name(column):
    with pytest.raises(ValueError, match=r"column 'obs' is .*: cpprb's columns have one shape; pad the values to it"):
        adapter.ReplayBuffer(10, {"obs": column})

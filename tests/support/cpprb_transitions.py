"""Transitions for tests beside cpprb: their numbers are in every column."""

import numpy as np

ENV = {
    "obs": {"shape": (2, 3)},
    "act": {"shape": 2, "dtype": np.int16},
    "rew": {"dtype": np.float64},
    "next_obs": {"shape": (2, 3)},
    "done": {},
}
SHAPES = {name: np.ravel(defs.get("shape", 1)) for name, defs in ENV.items()}


def transitions(n, start=0):
    """Returns n transitions with their numbers in every column."""
    numbers = np.arange(start, start + n)
    made = {name: np.broadcast_to(numbers.reshape(n, *[1] * len(s)), (n, *s)) for name, s in SHAPES.items()}
    return {**made, "next_obs": made["obs"] + 1, "done": (numbers % 5 == 4).astype(np.float32)}


def one(i):
    return {name: values[0] for name, values in transitions(1, i).items()}


def same(ours, theirs):
    assert list(ours) == list(theirs)
    for name, values in theirs.items():
        assert ours[name].dtype == values.dtype, name
        np.testing.assert_array_equal(ours[name], values, err_msg=name)


def sizes(buffer):
    return buffer.get_stored_size(), buffer.get_next_index(), buffer.get_buffer_size(), buffer.get_current_episode_len()

"""The adapter adds and draws as the installed cpprb does, for the same calls."""

import copy
import pickle

import cpprb
import numpy as np
import pytest
from cpprb_transitions import ENV, one, same, sizes, transitions

from torchreplay.compat import cpprb as adapter

# Adding


@pytest.mark.parametrize("counts", [[1] * 9, [1] * 30, [5, 1, 7, 2, 12, 3], [12], [20]])
def test_the_same_rows_are_held_in_the_same_order_after_the_same_adds(both, counts):
    for start, n in zip(np.cumsum([0, *counts]), counts, strict=False):
        ours, theirs = (buffer.add(**(one(start) if n == 1 else transitions(n, start))) for buffer in both)
        assert ours == theirs
        assert sizes(both[0]) == sizes(both[1])
    same(*(buffer.get_all_transitions() for buffer in both))


@pytest.mark.parametrize(
    "values",
    [
        {"done": True},
        {"done": np.bool_(True)},
        {"done": [1]},
        {"done": np.ones((1, 1), np.int8)},
        {"rew": np.float32(1.5)},
        {"rew": 2},
        {"act": [1.9, 300.7]},
        {"act": (1, 2)},
        {"act": np.array([[1, 2]])},
        {"obs": [[1, 2, 3], [4, 5, 6]]},
        {"obs": np.arange(6)},
        {"obs": np.ones((2, 3), bool)},
        {"obs": np.ones((1, 2, 3), np.float64)},
        {"more": 7},
    ],
    ids=str,
)
def test_what_numpy_casts_and_reshapes_is_taken(both, values):
    for buffer in both:
        buffer.add(**(one(3) | values))
    same(*(buffer.get_all_transitions() for buffer in both))


def test_one_row_stands_for_all_rows_of_a_call(both):
    for buffer in both:
        buffer.add(**(transitions(4) | {"obs": np.ones((1, 2, 3)), "rew": 5.0}))
    same(*(buffer.get_all_transitions() for buffer in both))


def test_what_was_added_is_a_copy():
    buffer = adapter.ReplayBuffer(4, {"obs": {"shape": 2}}, next_of="obs")
    given = np.zeros(2)
    buffer.add(obs=given, next_obs=given)
    given += 1
    assert not buffer.get_all_transitions()["next_obs"].any()


@pytest.mark.parametrize("call", ["add", "get_all_transitions", "sample"])
def test_clear_has_everything_begin_again(both, call):
    for buffer in both:
        buffer.add(**transitions(7))
        buffer.clear()
        assert sizes(buffer) == (0, 0, 12, 0)
        assert buffer.add(**one(70)) == 0
    if call == "sample":
        assert (both[0].sample(8)["rew"] == 70).all()
    same(*(buffer.get_all_transitions() for buffer in both))


def test_names_that_torchreplay_reserves_are_names_of_columns_as_others_are():
    env = {"key": {}, "weight": {"shape": 2}, "priority": {}, "buffer": {"dtype": np.int32}}
    values = {"key": 1, "weight": [2, 3], "priority": 4, "buffer": 5}
    buffers = [library.PrioritizedReplayBuffer(4, env) for library in (adapter, cpprb)]
    for buffer in buffers:
        buffer.add(**values)
    same(*(buffer.get_all_transitions() for buffer in buffers))
    assert buffers[0].sample(2)["priority"].tolist() == [[4], [4]]


def test_env_dict_stays_as_it_was_given():
    env = {"obs": {"shape": 3}}
    adapter.ReplayBuffer(4, env, next_of="obs")
    assert env == {"obs": {"shape": 3}}


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.uint64, np.int64, np.float16, np.float64])
def test_default_dtype_is_that_of_columns_which_name_none(dtype):
    env = {"a": {}, "b": {"dtype": np.int8}}
    buffers = [library.ReplayBuffer(4, env, default_dtype=dtype) for library in (adapter, cpprb)]
    for buffer in buffers:
        buffer.add(a=1, b=2)
    same(*(buffer.get_all_transitions() for buffer in buffers))


# Drawing


def test_a_batch_has_the_shapes_and_dtypes_of_cpprb(both):
    for buffer in both:
        buffer.add(**transitions(9))
    ours, theirs = (buffer.sample(5) for buffer in both)
    assert list(ours) == list(theirs)
    for name in ENV:
        assert (ours[name].shape, ours[name].dtype) == (theirs[name].shape, theirs[name].dtype)
    np.testing.assert_array_equal(ours["obs"][:, 0, 0], ours["rew"][:, 0])
    assert both[0].sample(0)["obs"].shape == both[1].sample(0)["obs"].shape == (0, 2, 3)


def test_a_batch_stays_what_it_was_when_the_next_one_is_drawn():
    buffer = adapter.PrioritizedReplayBuffer(64, ENV)
    buffer.add(**transitions(64))
    batch = buffer.sample(8)
    kept = {name: np.array(values) for name, values in batch.items()}
    for n in (8, 64, 256):
        buffer.sample(n)
    same(batch, kept)


@pytest.mark.parametrize(("alpha", "beta", "eps"), [(0.6, 0.4, 1e-4), (1, 1, 1e-3), (0.3, 0, 1e-2), (0, 0.7, 1e-4)])
def test_weights_are_those_of_cpprb(alpha, beta, eps):
    priorities = np.random.default_rng(1).exponential(size=50)
    buffers = [library.PrioritizedReplayBuffer(50, ENV, alpha=alpha, eps=eps) for library in (adapter, cpprb)]
    found = []
    for buffer in buffers:
        buffer.add(**transitions(50), priorities=priorities)
        batch = buffer.sample(2000, beta)
        weight = np.full(50, np.nan)
        weight[batch["indexes"]] = batch["weights"]
        found.append(weight)
    drawn = ~np.isnan(found).any(axis=0)
    assert drawn.sum() > 30
    np.testing.assert_allclose(found[0][drawn], found[1][drawn], rtol=1e-4)


def test_transitions_are_drawn_in_proportion_to_their_priorities():
    buffer = adapter.PrioritizedReplayBuffer(4, ENV, alpha=0.5, eps=1e-9)
    buffer.add(**transitions(4), priorities=[1, 4, 9, 0])
    n, draws = 600, 100
    counts = sum(np.bincount(buffer.sample(n)["indexes"], minlength=4) for _ in range(draws))
    expected = np.array([1, 2, 3]) / 6
    # False alarm: less than 1 in 10^8, six standard deviations of multinomial counts. Strata make them vary less.
    deviation = np.sqrt(expected * (1 - expected) / (n * draws))
    assert (abs(counts[:3] / (n * draws) - expected) < 6 * deviation).all()
    assert counts[3] <= 10


def test_the_largest_priority_is_that_of_cpprb_whatever_is_done(both):
    ours, theirs = [library.PrioritizedReplayBuffer(12, ENV) for library in (adapter, cpprb)]

    def agree():
        assert ours.get_max_priority() == pytest.approx(theirs.get_max_priority())

    agree()
    for step in (
        lambda b: b.add(**transitions(3), priorities=[0.5, 0.25, 0.125]),
        lambda b: b.add(**one(3)),
        lambda b: b.add(**one(4), priorities=7.0),
        lambda b: b.update_priorities([0, 1], [3.0, 9.0]),
        lambda b: b.update_priorities([1], [0.5]),
        lambda b: b.clear(),
    ):
        for buffer in (ours, theirs):
            step(buffer)
        agree()


def test_numpy_random_seed_makes_draws_repeat_themselves():
    def drawn():
        np.random.seed(7)  # noqa: NPY002
        buffer = adapter.PrioritizedReplayBuffer(64, ENV)
        buffer.add(**transitions(64))
        return buffer.sample(32)["rew"], buffer.sample(32)["rew"]

    np.testing.assert_array_equal(drawn(), drawn())


def test_all_transitions_are_shuffled_where_asked_for(both):
    for buffer in both:
        buffer.add(**transitions(12))
    shuffled = both[0].get_all_transitions(shuffle=True)["rew"].ravel()
    assert sorted(shuffled) == list(range(12))
    assert list(shuffled) != list(range(12))  # false alarm: 1 in 479,001,600


# Making and copying


def test_a_buffer_of_one_process_is_not_pickled_and_a_deep_copy_has_rows_of_its_own():
    buffer = adapter.PrioritizedReplayBuffer(8, ENV)
    buffer.add(**transitions(5), priorities=np.arange(5.0))
    with pytest.raises(TypeError, match="MPPrioritizedReplayBuffer"):
        pickle.dumps(buffer)
    copied = copy.deepcopy(buffer)
    copied.add(**transitions(2, 5))
    assert (buffer.get_stored_size(), copied.get_stored_size()) == (5, 7)
    assert copied.get_max_priority() == 4.0


def test_create_buffer_makes_either_kind():
    assert type(adapter.create_buffer(8, ENV)) is adapter.ReplayBuffer
    assert type(adapter.create_buffer(8, ENV, prioritized=True, alpha=0.2)) is adapter.PrioritizedReplayBuffer


def test_a_float_is_a_size():
    assert adapter.ReplayBuffer(1e3, ENV).get_buffer_size() == cpprb.ReplayBuffer(1e3, ENV).get_buffer_size() == 1000


def test_mmap_prefix_has_the_buffer_in_a_file(tmp_path):
    for _ in range(2):
        buffer = adapter.ReplayBuffer(8, ENV, mmap_prefix=str(tmp_path / "rb"))
        buffer.add(**transitions(3))
        assert buffer.replay.path == tmp_path / "rb.replay"
        assert buffer.get_stored_size() == 3


def test_the_face_has_the_names_of_cpprb():
    assert set(cpprb.__all__) <= set(adapter.__all__)
    assert {"create_env_dict", "create_before_add_func"} <= set(adapter.__all__)

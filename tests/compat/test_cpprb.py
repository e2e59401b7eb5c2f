"""The adapter does what the installed cpprb does, for the same calls."""

import copy
import pickle

import cpprb
import numpy as np
import pytest

from torchreplay.compat import cpprb as adapter

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


@pytest.fixture(params=["ReplayBuffer", "PrioritizedReplayBuffer"])
def both(request):
    return [getattr(library, request.param)(12, ENV) for library in (adapter, cpprb)]


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


# Feeding back


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float64"])
@pytest.mark.parametrize("form", [np.array, list, tuple])
def test_plain_indexes_of_any_kind_name_the_rows_that_are_there(dtype, form):
    buffers = [library.PrioritizedReplayBuffer(8, ENV, eps=1e-9) for library in (adapter, cpprb)]
    for buffer in buffers:
        buffer.add(**transitions(13))  # the ring has turned
        buffer.update_priorities(form(np.array([1, 6], dtype)), form([0.0, 100.0]))
        buffer.update_priorities(np.array([0, 2, 3, 4, 5, 7], dtype), np.zeros(6))
        assert (buffer.sample(16)["indexes"] == 6).all()
        assert buffer.sample(1)["rew"][0, 0] == 6


def test_read_only_arrays_are_taken():
    buffer = adapter.PrioritizedReplayBuffer(8, ENV)
    values = transitions(8)
    for array in values.values():
        array.flags.writeable = False
    buffer.add(**values)
    priorities = np.ones(8)
    priorities.flags.writeable = False
    batch = buffer.sample(8)
    batch["indexes"].flags.writeable = False
    buffer.update_priorities(batch["indexes"], priorities)


def test_priorities_may_come_in_a_column():
    buffer = adapter.PrioritizedReplayBuffer(8, ENV)
    buffer.add(**transitions(8), priorities=np.ones((8, 1)))
    buffer.update_priorities(buffer.sample(4)["indexes"], np.full((4, 1), 3.0))
    assert buffer.get_max_priority() == 3.0


def hot_after(feed):
    """Returns the number of rows with the priority 1000 after `feed` gave it to a batch whose rows are overwritten."""
    buffer = adapter.PrioritizedReplayBuffer(8, ENV)
    buffer.add(**transitions(8))
    batch = buffer.sample(8)
    buffer.add(**transitions(8, 8))
    buffer.sample(8)  # as with a batch drawn ahead
    feed(buffer, batch["indexes"])
    return int((buffer.replay.priorities(buffer.replay.keys()) > 999).sum()), buffer


@pytest.mark.parametrize(
    "form",
    [
        lambda i: i,
        lambda i: i[:5],
        lambda i: i[[4, 1, 2]],
        lambda i: i[np.arange(len(i)) % 2 == 0],
        lambda i: i.copy(),
        lambda i: i.astype(np.uint64),
        lambda i: i.reshape(-1, 2),
        lambda i: i.reshape(-1, 2).ravel(),
        copy.deepcopy,
        lambda i: pickle.loads(pickle.dumps(i)),
    ],
)
def test_feedback_for_rows_that_are_overwritten_is_dropped(form):
    hot, buffer = hot_after(lambda buffer, i: buffer.update_priorities(form(i), np.full(form(i).size, 1000.0)))
    assert hot == 0
    assert buffer.get_max_priority() == 1.0
    assert buffer.replay.stats().stale_updates > 0


def test_feedback_for_rows_of_before_a_clear_is_dropped():
    buffer = adapter.PrioritizedReplayBuffer(8, ENV)
    buffer.add(**transitions(8))
    batch = buffer.sample(8)
    buffer.clear()
    buffer.add(**transitions(8))
    buffer.update_priorities(batch["indexes"], np.full(8, 1000.0))
    assert buffer.get_max_priority() == 1.0


def test_feedback_reaches_the_rows_that_were_drawn():
    buffer = adapter.PrioritizedReplayBuffer(64, ENV)
    buffer.add(**transitions(64))
    for i in range(20):
        batch = buffer.sample(16)
        buffer.add(**one(64 + i), priorities=1.0)
        buffer.update_priorities(batch["indexes"][3:9], 0.1 + batch["rew"][3:9] / 1000)
    rows = buffer.replay.gather(buffer.replay.keys())
    raw = buffer.replay.priorities(rows["key"]).numpy()
    fed = raw < 0.9
    assert fed.sum() > 20
    np.testing.assert_allclose(raw[fed], 0.1 + rows["rew"].numpy()[fed] / 1000, rtol=1e-3)


def test_indexes_that_were_changed_in_place_are_plain_numbers():
    buffer = adapter.PrioritizedReplayBuffer(8, ENV, eps=1e-9)
    buffer.add(**transitions(8), priorities=np.ones(8))
    indexes = buffer.sample(1)["indexes"]
    indexes[:] = 5
    buffer.update_priorities(indexes, [1000.0])
    assert buffer.replay.priorities([5])[0] == pytest.approx(1000, rel=1e-3)


def test_check_for_update_leaves_alone_what_was_added_since_the_last_sample():
    ours, theirs = [library.PrioritizedReplayBuffer(8, ENV, check_for_update=True) for library in (adapter, cpprb)]
    for buffer in (ours, theirs):
        buffer.add(**transitions(8))
        buffer.sample(4)
        buffer.add(**transitions(3, 8))
        buffer.update_priorities([0, 1, 2], [50.0, 60.0, 70.0])
        assert buffer.get_max_priority() == 1.0
        buffer.update_priorities([2, 3], [50.0, 60.0])
        assert buffer.get_max_priority() == 60.0


# What cpprb accepts and is poisoned by


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

"""Specs from Gymnasium spaces of each kind, from environments and vector environments, and what cannot be held."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import torchreplay as tr
from torchreplay.schema.spec import Ragged, flatten


@pytest.mark.parametrize(
    ("space", "field"),
    [
        (spaces.Box(-1, 1, (3,)), tr.Field((3,), torch.float32)),
        (spaces.Box(-1, 1, (), np.float64), tr.Field((), torch.float64)),
        (spaces.Box(0, 255, (84, 84, 4), np.uint8), tr.Field((84, 84, 4), torch.uint8)),
        (spaces.Box(-5, 5, (2,), np.int16), tr.Field((2,), torch.int16)),
        (spaces.Box(0, 1, (2,), np.bool_), tr.Field((2,), torch.bool)),
        (spaces.Box(-np.inf, np.inf, (2,), np.float16), tr.Field((2,), torch.float16)),
        (spaces.Discrete(5), tr.Field((), torch.int64)),
        (spaces.Discrete(5, start=-2), tr.Field((), torch.int64)),
        (spaces.Discrete(5, dtype=np.int32), tr.Field((), torch.int64)),
        (spaces.MultiDiscrete([3, 4]), tr.Field((2,), torch.int64)),
        (spaces.MultiDiscrete([[3, 4, 5], [6, 7, 8]], dtype=np.int32), tr.Field((2, 3), torch.int32)),
        (spaces.MultiBinary(5), tr.Field((5,), torch.int8)),
        (spaces.MultiBinary((2, 3)), tr.Field((2, 3), torch.int8)),
    ],
    ids=str,
)
def test_a_space_of_arrays_becomes_a_field_of_its_shape_and_dtype(space, field):
    assert tr.spec_from_space(space) == field


def test_dict_spaces_nest_in_their_own_order():
    space = spaces.Dict(
        [
            ("b", spaces.Box(0, 1, (2,))),
            ("a", spaces.Dict([("z", spaces.Discrete(2)), ("y", spaces.MultiBinary(3))])),
        ]
    )
    spec = tr.spec_from_space(space)
    assert list(flatten({"obs": spec})) == [("obs", "b"), ("obs", "a", "z"), ("obs", "a", "y")]
    assert spec["a"] == {"z": tr.Field((), torch.int64), "y": tr.Field((3,), torch.int8)}


def test_tuple_spaces_become_dicts_of_positions():
    space = spaces.Tuple(
        (spaces.Discrete(2), spaces.Dict(x=spaces.Box(0, 1, (1,))), spaces.Tuple((spaces.Discrete(3),)))
    )
    spec = tr.spec_from_space(space)
    assert list(spec) == ["0", "1", "2"]
    assert spec == {"0": tr.Field((), torch.int64), "1": {"x": tr.Field((1,))}, "2": {"0": tr.Field((), torch.int64)}}


@pytest.mark.parametrize("seed", range(3))
def test_a_spaces_samples_can_be_written_and_come_back_as_they_were(seed):
    space = spaces.Dict(
        image=spaces.Box(0, 255, (4, 4), np.uint8),
        deep=spaces.Dict(position=spaces.Box(-1, 1, (3,), np.float64), light=spaces.MultiBinary(4)),
        choice=spaces.Discrete(7, start=-3),
        more=spaces.MultiDiscrete([5, 6]),
        scalar=spaces.Box(0, 1, ()),
    )
    space.seed(seed)
    sample = space.sample()
    buffer = tr.ReplayBuffer({"obs": tr.spec_from_space(space)}, 4)
    buffer.writer().append(obs=sample)
    back = buffer.sample(1)["obs"]
    for name in ("image", "choice", "more", "scalar"):
        assert np.array_equal(back[name][0].numpy(), sample[name])
    for name in ("position", "light"):
        assert np.array_equal(back["deep"][name][0].numpy(), sample["deep"][name])


@pytest.mark.parametrize("name", ["", "a/b", "a\0b"])
def test_a_name_that_a_spec_cannot_hold_is_refused_with_its_place(name):
    space = spaces.Dict(inner=spaces.Dict({name: spaces.Discrete(2)}))
    with pytest.raises(ValueError, match=r"the space of 'inner' has the key .*: expected a name without '/'"):
        tr.spec_from_space(space)


def test_a_name_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match="the space has the key 3"):
        tr.spec_from_space(spaces.Dict({3: spaces.Discrete(2)}))


@pytest.mark.parametrize("space", [spaces.Dict({}), spaces.Tuple(())], ids=str)
def test_a_space_that_holds_nothing_is_refused(space):
    with pytest.raises(ValueError, match="the space of 'x' is empty: expected at least one space in it"):
        tr.spec_from_space(spaces.Dict(x=space))


def test_a_dtype_that_rows_cannot_hold_is_refused_with_those_they_can():
    space = spaces.Dict(x=spaces.Box(0, 1, (2,), np.longdouble))
    with pytest.raises(ValueError, match=r"the space of 'x' is Box.*cannot hold values of dtype.*expected one of"):
        tr.spec_from_space(space)


def test_a_shape_without_values_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"the space of 'x' is Box.*a field has shape \(0,\)"):
        tr.spec_from_space(spaces.Dict(x=spaces.Box(0, 1, (0,))))


@pytest.mark.parametrize(
    ("space", "advice"),
    [
        (spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (2,))]), "FlattenObservation"),
        (spaces.Sequence(spaces.Dict(x=spaces.Discrete(2))), "TransformObservation"),
        (spaces.Sequence(spaces.Text(3)), "TransformObservation"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_space_whose_values_are_no_arrays_is_refused_with_advice(space, advice):
    with pytest.raises(ValueError, match=f"the space of 'a' is .*no arrays.*{advice}"):
        tr.spec_from_space(spaces.Dict(a=space))


@pytest.mark.parametrize(
    "space",
    [spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (2,))])],
    ids=lambda s: type(s).__name__,
)
def test_the_advice_to_flatten_works_where_it_is_given(space):
    flat = spaces.flatten_space(space)
    buffer = tr.ReplayBuffer({"x": tr.spec_from_space(flat)}, 4)
    value = spaces.flatten(space, space.sample())
    buffer.writer().append(x=value)
    assert np.array_equal(buffer.sample(1)["x"][0].numpy(), value)


@pytest.mark.parametrize(
    ("space", "field"),
    [
        (spaces.Text(5), Ragged(torch.uint8)),
        (spaces.Sequence(spaces.Discrete(3)), Ragged(torch.int64)),
        (spaces.Sequence(spaces.Box(-1, 1, (2, 3))), Ragged(torch.float32, (2, 3))),
        (spaces.Sequence(spaces.Box(-1, 1, (), np.float64), stack=True), Ragged(torch.float64)),
        (spaces.Sequence(spaces.MultiBinary(4)), Ragged(torch.int8, (4,))),
        (spaces.Graph(spaces.Box(-1, 1, (3,)), None), {"nodes": Ragged(torch.float32, (3,))}),
        (
            spaces.Graph(spaces.Discrete(4), spaces.Box(-1, 1, (2,))),
            {
                "nodes": Ragged(torch.int64),
                "edges": Ragged(torch.float32, (2,)),
                "edge_links": Ragged(torch.int32, (2,), like="edges"),
            },
        ),
    ],
    ids=str,
)
def test_a_space_whose_values_have_any_length_becomes_ragged_fields(space, field):
    assert tr.spec_from_space(space) == field


def test_a_graphs_links_have_the_length_of_its_edges_wherever_it_lies():
    graph = spaces.Graph(spaces.Discrete(4), spaces.Discrete(5))
    for spec in ({"obs": tr.spec_from_space(spaces.Dict(deep=graph))}, {"obs": {"deep": tr.spec_from_space(graph)}}):
        assert flatten(spec)["obs", "deep", "edge_links"].like == "obs/deep/edges"


SPOKEN = spaces.Dict(
    says=spaces.Text(20),
    seen=spaces.Sequence(spaces.Box(-1, 1, (2,))),
    stacked=spaces.Sequence(spaces.Discrete(9), stack=True),
    graph=spaces.Graph(spaces.Box(-1, 1, (3,)), spaces.Discrete(4)),
    bare=spaces.Graph(spaces.Discrete(4), None),
)


@pytest.mark.parametrize("seed", range(5))
def test_samples_of_any_length_can_be_written_and_come_back_as_they_were(seed):
    SPOKEN.seed(seed)
    sample = SPOKEN.sample()
    with tr.ReplayBuffer({"obs": tr.spec_from_space(SPOKEN)}, 4, ragged_bytes=1 << 16) as buffer:
        writer = buffer.writer()
        with pytest.raises(ValueError, match=r"field 'obs/says': got .*str.*: pass text.encode\(\)"):
            writer.append(obs=sample)
        writer.append(obs=dict(sample, says=sample["says"].encode()))
        batch = buffer.sample(1)
    back = batch["obs"]
    assert bytes(back["says"].tolist()).decode() == sample["says"]
    assert np.array_equal(back["seen"].numpy(), np.asarray(sample["seen"], np.float32).reshape(-1, 2))
    assert np.array_equal(back["stacked"].numpy(), sample["stacked"])
    assert np.array_equal(back["graph"]["nodes"].numpy(), sample["graph"].nodes)
    assert np.array_equal(back["bare"]["nodes"].numpy(), sample["bare"].nodes)
    for name in ("edges", "edge_links"):
        value = getattr(sample["graph"], name)
        expected = () if value is None else value.tolist()
        assert back["graph"][name].tolist() == list(expected)


@pytest.mark.parametrize("seed", range(3))
def test_graphs_of_environments_in_step_are_written_as_the_vector_environment_gives_them(seed):
    spec = {"obs": tr.spec_from_space(SPOKEN["graph"]), "reward": tr.Field()}
    spec |= {"terminated": tr.Field((), bool), "truncated": tr.Field((), bool)}
    SPOKEN.seed(seed)
    first, second = (tuple(SPOKEN["graph"].sample() for _ in range(3)) for _ in range(2))
    with tr.ReplayBuffer(spec, 20, view=tr.Transitions(), ragged_bytes=1 << 16) as buffer:
        with buffer.writer(num_envs=3) as writer:
            writer.reset(obs=first)
            with pytest.raises(ValueError, match="'obs/nodes': got 2 values, expected one for each of the 3"):
                writer.step(obs=second[:2], reward=[0] * 3, terminated=[False] * 3, truncated=[False] * 3)
            writer.step(obs=second, reward=[0, 1, 2], terminated=[True] * 3, truncated=[False] * 3)
        batch = buffer.sample(20)
        for prefix, graphs in (("obs", first), ("next_obs", second)):
            for name in ("nodes", "edges", "edge_links"):
                offsets = batch.offsets(f"{prefix}/{name}").tolist()
                for item, env in enumerate(batch["reward"].int().tolist()):
                    value = getattr(graphs[env], name)
                    found = batch[prefix][name][offsets[item] : offsets[item + 1]]
                    assert found.tolist() == ([] if value is None else value.tolist())


@pytest.mark.parametrize("thing", [None, (4,), tr.Field(), spaces.Box], ids=str)
def test_what_is_no_space_is_a_type_error(thing):
    with pytest.raises(TypeError, match=r"expected a gymnasium\.Space"):
        tr.spec_from_space(thing)


LOOP = {"reward": tr.Field(), "terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}


def test_the_spec_of_cartpole_is_that_of_its_loop():
    env = gymnasium.make("CartPole-v1")
    spec = {"obs": tr.Field((4,)), "action": tr.Field((), torch.int64), **LOOP}
    assert tr.spec_from_env(env) == spec
    assert tr.spec_from_env(env, next_obs=True) == {**spec, "next_obs": tr.Field((4,))}


def test_the_spec_of_an_environment_with_continuous_actions_keeps_their_shape():
    spec = tr.spec_from_env(gymnasium.make("Pendulum-v1"))
    assert spec == {"obs": tr.Field((3,)), "action": tr.Field((1,)), **LOOP}


def test_the_spec_of_blackjack_numbers_its_tuple():
    number = tr.Field((), torch.int64)
    spec = tr.spec_from_env(gymnasium.make("Blackjack-v1"), next_obs=True)
    assert spec["obs"] == spec["next_obs"] == {"0": number, "1": number, "2": number}


class Goals(gymnasium.Env):
    """Observations of the form that goal-conditioned environments have."""

    observation_space = spaces.Dict(
        observation=spaces.Box(-1, 1, (3,), np.float64),
        achieved_goal=spaces.Box(-1, 1, (2,)),
        desired_goal=spaces.Box(-1, 1, (2,)),
    )
    action_space = spaces.MultiDiscrete([3, 3])


GOALS = {
    "achieved_goal": tr.Field((2,)),
    "desired_goal": tr.Field((2,)),
    "observation": tr.Field((3,), torch.float64),
}


def test_the_spec_of_nested_observations_is_nested():
    assert tr.spec_from_env(Goals()) == {"obs": GOALS, "action": tr.Field((2,), torch.int64), **LOOP}


@pytest.mark.parametrize("mode", AutoresetMode)
def test_the_spec_of_a_vector_environment_is_that_of_one_lane(mode):
    envs = SyncVectorEnv([Goals, Goals, Goals], autoreset_mode=mode)
    assert tr.spec_from_env(envs, next_obs=True) == tr.spec_from_env(Goals(), next_obs=True)


@pytest.mark.parametrize("how", ["sync", "async", "vector_entry_point"])
def test_however_vector_environments_are_made_their_spec_is_that_of_one(how):
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode=how)
    try:
        wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
        assert tr.spec_from_env(envs) == tr.spec_from_env(wrapped) == tr.spec_from_env(gymnasium.make("CartPole-v1"))
    finally:
        envs.close()


def test_a_space_within_an_environment_is_named_with_its_field():
    class Speaking(Goals):
        observation_space = spaces.Dict(says=spaces.OneOf([spaces.Discrete(2)]))

    with pytest.raises(ValueError, match="the space of 'obs/says' is OneOf"):
        tr.spec_from_env(Speaking())


@pytest.mark.parametrize("thing", [None, "CartPole-v1", spaces.Discrete(2)], ids=str)
def test_what_is_no_environment_is_a_type_error(thing):
    with pytest.raises(TypeError, match=r"expected a gymnasium\.Env"):
        tr.spec_from_env(thing)


def test_a_spec_from_an_environment_may_be_changed_field_by_field():
    spec = tr.spec_from_env(Goals(), next_obs=True)
    spec["obs"]["extra"] = tr.Field()
    assert "extra" not in spec["next_obs"]

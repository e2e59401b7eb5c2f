"""`check`: passes every environment that is written and drawn rightly, and names what is wrong with any other."""

import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from ragged_model import split
from small_environments import FinalArrays, Goal, Rich, Scripted, Spoken

import torchreplay as tr


def reached(achieved, desired):
    return (achieved == desired).all(-1)


def reward_of(achieved, desired):
    return reached(achieved, desired).float() - 1


LINKED = [
    tr.Transitions(),
    tr.Transitions(n_step=3, gamma=0.9),
    tr.Transitions(n_step=20),
    tr.Transitions(n_step=3, discount="fade"),
    tr.Sequences(4),
    tr.Sequences(3, stride=2, burn_in=2),
    tr.Sequences(2, stride=1, partial=False),
    tr.Sequences(3, across_episodes=True),
]
HINDSIGHT = [
    *(tr.Hindsight(reward_of, strategy=strategy, share=0.5) for strategy in ("future", "final", "episode")),
    tr.Hindsight(reward_of, share=1.0, compute_terminated=reached),
    tr.Hindsight(reward_of, share=0.0),
]


def buffer_for(env, view, **more):
    spec = tr.spec_from_env(env, next_obs=isinstance(view, tr.Rows)) | more
    if getattr(view, "discount", None):
        spec |= {view.discount: tr.Field()}
    return tr.ReplayBuffer(spec, 32, view=view, sampler=tr.Prioritized())


def made(kind, mode):
    return kind() if mode is None else SyncVectorEnv([kind] * 3, autoreset_mode=mode)


modes = pytest.mark.parametrize("mode", [None, *AutoresetMode], ids=str)


@modes
@pytest.mark.parametrize("view", [tr.Rows(), *LINKED, tr.Transitions(2, stack={"obs/image": 3})], ids=repr)
def test_nested_observations_and_actions_come_back_in_every_view_and_autoreset_mode(view, mode):
    env = made(Rich, mode)
    report = tr.check(env, buffer_for(env, view), episodes=8)
    assert report.episodes >= 8
    assert report.rows >= report.items > 8
    assert {"obs/deep/0", "obs/deep/1", "obs/image", "action/turn", "reward"} <= set(report.fields)


OF_ANY_LENGTH = [
    tr.Rows(),
    tr.Transitions(2),
    tr.Sequences(3),
    tr.Transitions(stack={"obs/says": 2, "obs/graph/nodes": 3}),
]


def ragged_buffer_for(env, view):
    """Its own fields have the lengths of another, of an action, or of observations."""
    more = {
        "logprob": tr.Ragged(torch.float32, like="action"),
        "state": tr.Ragged(torch.bfloat16, (2,)),
        "kind": tr.Ragged("int8", like="state"),
    }
    spec = tr.spec_from_env(env, next_obs=isinstance(view, tr.Rows)) | more
    return tr.ReplayBuffer(spec, 32, view=view, sampler=tr.Prioritized(), ragged_bytes=1 << 16)


@modes
@pytest.mark.parametrize("view", OF_ANY_LENGTH, ids=repr)
def test_values_of_any_length_come_back_in_every_view_and_autoreset_mode(view, mode):
    env = made(Spoken, mode)
    report = tr.check(env, ragged_buffer_for(env, view), episodes=8)
    assert report.rows >= report.items > 8
    assert {"obs/says", "obs/graph/edge_links", "action", "logprob", "kind"} <= set(report.fields)
    assert report.filled == ("logprob", "state", "kind")


@modes
@pytest.mark.parametrize("view", HINDSIGHT, ids=lambda view: f"{view.strategy} {view.share}")
def test_goals_come_back_in_hindsight(view, mode):
    env = made(Goal, mode)
    assert tr.check(env, buffer_for(env, view), episodes=6).items > 6


@modes
@pytest.mark.parametrize("names", ["", "obs/"])
def test_observations_may_lie_in_fields_of_their_own(names, mode):
    env = made(Goal, mode)
    spec = tr.spec_from_env(env)
    parts = spec["obs"]
    view = tr.Transitions(2, observation=[names + part for part in parts])
    if not names:
        spec = parts | {name: field for name, field in spec.items() if name != "obs"}
    report = tr.check(env, tr.ReplayBuffer(spec, 16, view=view))
    assert {f"next_{names}{part}" for part in parts} <= set(report.fields)


@modes
def test_a_spec_without_a_part_of_the_observation_needs_an_environment_without_it(mode):
    def narrowed():
        return gymnasium.wrappers.FilterObservation(Goal(), ["observation"])

    env = made(narrowed, mode)
    buffer = tr.ReplayBuffer(tr.spec_from_env(env), 16, view=tr.Transitions(observation="obs/observation"))
    assert tr.check(env, buffer).items > 3
    text = refusal(made(Goal, mode), buffer)
    assert text.startswith("episode 0, step 0")
    assert "'obs/achieved_goal'" in text


@pytest.mark.parametrize("name", ["CartPole-v1", "Blackjack-v1", "FrozenLake-v1", "Pendulum-v1", "MountainCar-v0"])
@pytest.mark.parametrize("view", [tr.Rows(), *LINKED[:4]], ids=repr)
def test_gymnasiums_environments_pass(name, view):
    env = gymnasium.make(name)
    assert tr.check(env, buffer_for(env, view), max_steps=60).items > 0


@pytest.mark.parametrize("how", ["async", "vector_entry_point"])
def test_vector_environments_of_other_makes_pass(how):
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode=how)
    try:
        assert tr.check(envs, buffer_for(envs, tr.Transitions(3)), episodes=4).items > 20
    finally:
        envs.close()


def test_last_observations_of_all_lanes_together_pass():
    rich, goal = (FinalArrays(made(kind, AutoresetMode.SAME_STEP)) for kind in (Rich, Goal))
    parts = ("obs/image", "obs/deep", "obs/bits")
    for view in (tr.Transitions(3), tr.Sequences(2), tr.Transitions(observation=parts)):
        assert tr.check(rich, buffer_for(rich, view), episodes=8).items > 8
    spec = tr.spec_from_env(goal)
    apart = spec.pop("obs") | spec  # each part of the observation in a field at the top
    for names in (tuple(goal.single_observation_space), ("desired_goal",)):
        fields = {name: field for name, field in apart.items() if name in names or name in spec}
        buffer = tr.ReplayBuffer(fields, 32, view=tr.Transitions(observation=names))
        assert tr.check(goal, buffer, episodes=8).items > 8


def test_every_step_is_checked_once():
    env = Scripted()
    for view, items in ((tr.Rows(), 12), (tr.Transitions(), 12), (tr.Sequences(2), 8)):
        report = tr.check(env, buffer_for(env, view), episodes=4)
        assert (report.episodes, report.items) == (4, items)
        assert report.rows == (12 if isinstance(view, tr.Rows) else 16)


def test_an_episode_that_does_not_end_is_broken_off():
    # 5 steps of CartPole never end: each episode has 5 transitions of one step, 3 of three.
    env = gymnasium.make("CartPole-v1")
    for n_step, items in ((1, 10), (3, 6)):
        assert tr.check(env, buffer_for(env, tr.Transitions(n_step)), episodes=2, max_steps=5).items == items


def test_fields_that_no_environment_fills_get_random_values_which_come_back_too():
    own = {
        "logp": tr.Field(),
        "state": {"h": tr.Field((3,), torch.bfloat16), "c": tr.Field((2, 2), torch.float16)},
        "flags": tr.Field((4,), torch.bool),
        "number": tr.Field((), torch.uint64),
    }
    for view in (tr.Rows(), tr.Transitions(2), tr.Sequences(3, initial=("state",))):
        for env in (Goal(), SyncVectorEnv([Goal] * 2)):
            report = tr.check(env, buffer_for(env, view, **own))
            assert report.filled == ("logp", "state/h", "state/c", "flags", "number")
            assert set(report.filled) <= set(report.fields)


def test_done_stands_for_either_flag_in_rows():
    spec = {"obs": tr.Field((4,)), "next_obs": tr.Field((4,)), "done": tr.Field((), torch.bool)}
    report = tr.check(gymnasium.make("CartPole-v1"), tr.ReplayBuffer(spec, 16))
    assert (report.fields, report.filled) == (("obs", "next_obs", "done"), ())


def test_the_buffer_itself_stays_as_it_is():
    env = Scripted()
    buffer = buffer_for(env, tr.Transitions())
    with buffer.writer() as writer:
        writer.reset(obs=0.0)
        writer.step(obs=1.0, action=1, reward=2.0, terminated=True, truncated=False)
    before = buffer.stats()
    tr.check(env, buffer)
    after = buffer.stats()
    assert (after.rows_written, after.inserted, after.sampled, after.size) == (before.rows_written, 1, 0, 2)


def test_the_same_seed_plays_the_same_episodes():
    env = gymnasium.make("CartPole-v1")
    buffer = buffer_for(env, tr.Transitions())
    reports = [tr.check(env, buffer, seed=seed) for seed in (3, 3, 4)]
    assert reports[0] == reports[1] != reports[2]


def test_an_environment_that_reuses_its_observations_memory_passes():
    class Reusing(Scripted):
        memory = np.zeros((), np.float64)

        def _like(self, number):
            self.memory[...] = number
            return self.memory

    tr.check(Reusing(), buffer_for(Reusing(), tr.Transitions(2)))


# What is wrong is named


def refusal(env, buffer, **arguments):
    with pytest.raises(ValueError) as caught:
        tr.check(env, buffer, **arguments)
    return str(caught.value)


def test_an_observation_outside_its_space_is_named():
    env = Scripted(obs=np.array(7.0), space=spaces.Box(-4, 4, (), np.float64))
    text = refusal(env, buffer_for(env, tr.Transitions()))
    assert text.startswith("the observation of episode 0, step 2 is ")
    assert "expected one of Box(-4.0, 4.0, (), float64)" in text


def test_the_lane_is_named_where_there_are_lanes():
    space = spaces.Box(-4, 4, (), np.float64)
    envs = SyncVectorEnv([lambda: Scripted(space=space), lambda: Scripted(obs=np.array(7.0), space=space)])
    assert "the observation of episode 0, step 2 of environment 1" in refusal(envs, buffer_for(envs, tr.Transitions()))


@pytest.mark.parametrize("view", [tr.Rows(), tr.Transitions()], ids=repr)
def test_a_value_that_does_not_fit_its_field_is_named_with_its_place(view):
    env = Scripted(reward=np.zeros(2))
    text = refusal(env, buffer_for(env, view))
    assert text.startswith("episode 0, step ")
    assert "'reward'" in text


def test_a_field_of_another_shape_than_the_observation_is_named():
    text = refusal(gymnasium.make("CartPole-v1"), buffer_for(Scripted(), tr.Transitions()))
    assert text.startswith("episode 0, step 0: ")
    assert "'obs'" in text


def test_a_spec_without_a_place_for_the_observation_is_refused():
    buffer = tr.ReplayBuffer({"x": tr.Field((4,))}, 4)
    assert "expected the observation in a field 'obs'" in refusal(gymnasium.make("CartPole-v1"), buffer)


def test_what_is_no_environment_is_a_type_error():
    with pytest.raises(TypeError, match=r"expected a gymnasium\.Env"):
        tr.check(None, buffer_for(Scripted(), tr.Rows()))


@pytest.mark.parametrize("arguments", [{"episodes": 0}, {"max_steps": 0}], ids=str)
def test_nothing_to_play_is_refused(arguments):
    assert next(iter(arguments)) in refusal(Scripted(), buffer_for(Scripted(), tr.Rows()), **arguments)


# Values that a field cannot hold


def test_rounded_observations_are_told_once():
    env = Scripted(obs=np.array(0.1))
    buffer = buffer_for(env, tr.Transitions(), obs=tr.Field((), torch.float32))
    with pytest.warns(UserWarning, match=r"field 'obs', episode 0, step 2: .*0\.1.* of float64 .*0\.1") as told:
        report = tr.check(env, buffer, episodes=5)
    assert (len(told), report.rounded) == (1, ("obs",))
    assert told[0].filename == __file__


def test_rounding_to_bfloat16_is_told_of_float32_too():
    env = gymnasium.make("CartPole-v1")
    with pytest.warns(UserWarning, match="since the field is torch.bfloat16"):
        assert tr.check(env, buffer_for(env, tr.Sequences(3), obs=tr.Field((4,), torch.bfloat16))).rounded == ("obs",)


def test_what_fits_is_not_told_and_neither_are_rewards_which_are_seldom_float64():
    env = Scripted(obs=np.array(0.5), reward=0.1)
    buffer = buffer_for(env, tr.Transitions(), obs=tr.Field((), torch.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tr.check(env, buffer).rounded == ()


def test_nan_is_nan():
    env = Scripted(reward=float("nan"))
    tr.check(env, buffer_for(env, tr.Transitions(3)))


@pytest.mark.parametrize(
    ("obs", "space", "field", "text"),
    [
        (np.array(1e6), None, tr.Field((), torch.float16), "got 1e+06, which float16 does not hold"),
        (
            np.array(2**40),
            spaces.Box(0, 2**50, (), np.int64),
            tr.Field((), torch.int32),
            "got 1099511627776, which int32 does not hold",
        ),
    ],
    ids=["float", "int"],
)
@pytest.mark.parametrize("view", [tr.Rows(), tr.Transitions()], ids=repr)
def test_a_value_beyond_its_fields_range_is_named(obs, space, field, text, view):
    env = Scripted(obs=obs, space=space)
    more = {"obs": field, "next_obs": field} if view == tr.Rows() else {"obs": field}
    found = refusal(env, buffer_for(env, view, **more))
    assert found.startswith(("episode 0, step 2: field 'obs': ", "episode 0, step 1: field 'next_obs': "))
    assert text in found


# A buffer that gave back something else would be found out


def tampering(monkeypatch, change):
    """Lets `gather` pass its batches through `change`."""
    gather = tr.ReplayBuffer.gather
    monkeypatch.setattr(tr.ReplayBuffer, "gather", lambda self, keys: change(gather(self, keys)))


def leaves(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}/")
        elif prefix + name not in ("key", "weight", "probability"):
            yield prefix + name, value


def changed_at(batch, path, i):
    tensor = dict(leaves(batch))[path][i]
    tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)
    return batch


@pytest.mark.parametrize("kind", [Rich, Goal])
@pytest.mark.parametrize(
    "view", [tr.Rows(), *LINKED, HINDSIGHT[-1]], ids=[*map(repr, [tr.Rows(), *LINKED]), "Hindsight"]
)
def test_any_entry_that_comes_back_changed_is_named_with_its_key(kind, view, monkeypatch):
    if isinstance(view, tr.Hindsight) and kind is Rich:
        view = tr.Transitions(stack={"obs/bits": 2})
    env = kind()
    buffer = buffer_for(env, view)
    entries = tr.check(env, buffer).fields
    for path in entries:
        with monkeypatch.context() as patch:
            tampering(patch, lambda batch, path=path: changed_at(batch, path, 3))
            text = refusal(env, buffer)
        assert text.startswith(f"entry '{path}'")
        assert "of the item at key " in text
        assert "(episode " in text
        assert "expected" in text


def ragged_again(batch, path, change):
    """Returns the batch with other values in a ragged field: what `change` makes of a list of arrays."""
    values = [torch.as_tensor(value) for value in change(split(batch, path))]
    names = path.split("/")
    for of, new in (
        ("", torch.cat(values)),
        ("offsets", offsets_of(values)),
        ("lengths", lengths_of(batch, path, values)),
    ):
        level = batch[of] if of else batch
        for name in names[:-1]:
            level = level[name]
        level[names[-1]] = new
    return batch


def offsets_of(values):
    return torch.tensor([0, *np.cumsum([len(value) for value in values])], dtype=torch.int32)


def lengths_of(batch, path, values):
    return torch.tensor([len(value) for value in values]).view(batch.lengths(path).shape)


def with_the_first_of_two(change):
    """Has the first value of two elements or more be what `change` makes of it."""

    def changed(values):
        place = next(i for i, value in enumerate(values) if len(value) > 1)
        return [*values[:place], change(values[place]), *values[place + 1 :]]

    return changed


@pytest.mark.parametrize(
    ("path", "change", "text"),
    [
        ("logprob", with_the_first_of_two(lambda value: np.roll(value, 1)), "expected"),
        ("obs/says", with_the_first_of_two(lambda value: value[:-1]), "elements: expected"),
        ("obs/seen", with_the_first_of_two(lambda value: value[1:]), "elements: expected"),
        ("obs/graph/nodes", with_the_first_of_two(lambda value: value[:, ::-1].copy()), "expected"),
        ("action", lambda values: [*values[3:], *values[:3]], "expected"),
    ],
    ids=["shifted", "cut", "cut in front", "exchanged", "of others"],
)
@pytest.mark.parametrize("view", OF_ANY_LENGTH[:3], ids=repr)
def test_values_of_any_length_that_come_back_changed_are_named_with_their_key(view, path, change, text, monkeypatch):
    buffer = ragged_buffer_for(Spoken(), view)
    tampering(monkeypatch, lambda batch: ragged_again(batch, path, change))
    found = refusal(Spoken(), buffer)
    assert found.startswith(f"entry '{path}'")
    assert "of the item at key " in found
    assert text in found


def test_values_that_come_back_under_the_name_of_another_field_are_named(monkeypatch):
    def exchanged(batch):
        for of in (batch, batch["offsets"], batch["lengths"]):
            of["obs"]["says"], of["action"] = of["action"], of["obs"]["says"]
        return batch

    buffer = ragged_buffer_for(Spoken(), tr.Rows())
    tampering(monkeypatch, exchanged)
    assert refusal(Spoken(), buffer).startswith("entry 'obs/says' of the item at key 0 (episode 0, step 0)")


def test_offsets_that_are_not_those_of_the_lengths_are_named(monkeypatch):
    def with_other_lengths(batch):
        batch["lengths"]["state"] = batch["lengths"]["state"].flip(0)
        return batch

    buffer = ragged_buffer_for(Spoken(), tr.Rows())
    tampering(monkeypatch, with_other_lengths)
    assert "the offsets and the lengths of entry 'state' do not agree" in refusal(Spoken(), buffer)


@pytest.mark.parametrize(
    "name", ["obs/desired_goal", "next_obs/desired_goal", "action", "obs/observation", "truncated", "discount"]
)
def test_a_relabelled_item_is_compared_but_for_its_reward_and_its_goal_must_have_been_achieved(name, monkeypatch):
    view = tr.Hindsight(reward_of, share=1.0)
    buffer = buffer_for(Goal(), view)
    tampering(monkeypatch, lambda batch: changed_at(batch, name, 3))
    assert refusal(Goal(), buffer).startswith(f"entry '{name}'")


def test_an_item_that_is_missing_is_named(monkeypatch):
    def without_the_second(batch):
        return batch._map(lambda t: t[[0, *range(2, len(t))]]) | {
            "key": batch["key"][[0, *range(2, len(batch["key"]))]]
        }

    tampering(monkeypatch, without_the_second)
    text = refusal(Scripted(), buffer_for(Scripted(), tr.Transitions()))
    assert text.startswith("key 1 (episode 0, step 1) is not drawable: expected an item of Transitions(")


def test_an_item_that_should_not_be_there_is_named(monkeypatch):
    def with_one_more(batch):
        batch["key"] = torch.cat((batch["key"], torch.tensor([3])))
        return batch

    tampering(monkeypatch, with_one_more)
    text = refusal(Scripted(), buffer_for(Scripted(), tr.Transitions()))
    assert text.startswith("key 3 (episode 0, step 3) is drawable: expected no complete item of Transitions(")


def test_an_entry_that_is_missing_is_named(monkeypatch):
    tampering(monkeypatch, lambda batch: {name: value for name, value in batch.items() if name != "discount"})
    text = refusal(Scripted(), buffer_for(Scripted(), tr.Transitions()))
    assert text.startswith("the batch has entries ")


def test_an_entry_of_another_shape_or_dtype_is_named(monkeypatch):
    tampering(monkeypatch, lambda batch: batch | {"reward": batch["reward"].double()})
    text = refusal(Scripted(), buffer_for(Scripted(), tr.Transitions()))
    assert text == "entry 'reward' is float64(9,): expected float32(9,)"


@pytest.mark.parametrize("given", [None, 3, {"obs": tr.Field(4)}], ids=repr)
def test_what_is_no_buffer_is_a_type_error(given):
    with pytest.raises(TypeError, match=r"buffer is .*: expected a torchreplay\.ReplayBuffer"):
        tr.check(gymnasium.make("CartPole-v1"), given)

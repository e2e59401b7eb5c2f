"""`tr.episodes_from_flat` against a splitter that goes over the steps one by one."""

import logging
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

import torchreplay as tr

SPEC = {
    "obs": tr.Field((2,)),
    "action": tr.Field((), torch.int64),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}


def flat(lengths, ends, seed=0):
    """Flat data of episodes that end with "terminal", "timeout", "both" or "nothing". No two observations are equal."""
    rng = np.random.default_rng(seed)
    parts = {"observations": [], "next_observations": [], "terminals": [], "timeouts": []}
    for length, end in zip(lengths, ends, strict=True):
        obs = rng.normal(size=(length + 1, 2)).astype(np.float32)
        last = np.arange(length) == length - 1
        parts["observations"].append(obs[:-1])
        parts["next_observations"].append(obs[1:])
        parts["terminals"].append(last & (end in ("terminal", "both")))
        parts["timeouts"].append(last & (end in ("timeout", "both")))
    arrays = {name: np.concatenate(values) for name, values in parts.items()}
    n = sum(lengths)
    return arrays | {"actions": np.arange(n), "rewards": rng.normal(size=n).astype(np.float32)}


def same(one, other):
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True))


def split_naively(data, unknown_final=None):
    """The same, one step after the other, over lists."""
    data = {name: None if values is None else values.tolist() for name, values in data.items()}
    n, following = len(data["terminals"]), data.get("next_observations")
    timeouts = data.get("timeouts") or [False] * n
    episodes, steps = [], []
    for t in range(n):
        steps.append(t)
        ends = data["terminals"][t] or timeouts[t] or t == n - 1
        if not ends and following is not None:
            ends = not same(following[t], data["observations"][t + 1])
        if not ends:
            continue
        obs = [data["observations"][s] for s in steps]
        if following is not None:
            obs.append(following[t])
        elif data["terminals"][t] and unknown_final == "repeat":
            obs.append(obs[-1])
        else:
            steps.pop()
        if steps:
            terminated = [data["terminals"][s] for s in steps]
            truncated = [timeouts[s] for s in steps]
            if not terminated[-1]:
                truncated[-1] = True
            actions, rewards = ([data[name][s] for s in steps] for name in ("actions", "rewards"))
            episodes.append(
                {"obs": obs, "action": actions, "reward": rewards, "terminated": terminated, "truncated": truncated}
            )
        steps = []
    return episodes


def as_lists(episodes):
    return [{name: np.asarray(value).tolist() for name, value in episode.items()} for episode in episodes]


ENDS = st.sampled_from(["terminal", "timeout", "both", "nothing"])


@hypothesis.settings(max_examples=150)
@hypothesis.given(
    episodes=st.lists(st.tuples(st.integers(1, 6), ENDS), min_size=1, max_size=8),
    with_next=st.booleans(),
    with_timeouts=st.booleans(),
    unknown_final=st.sampled_from(["drop", "repeat"]),
    levels=st.sampled_from([None, 2]),
)
def test_the_episodes_are_those_of_a_splitter_that_goes_step_by_step(
    episodes, with_next, with_timeouts, unknown_final, levels
):
    data = flat(*zip(*episodes, strict=True))
    if levels:  # so few different observations that they are equal across ends by chance
        for name in ("observations", "next_observations"):
            data[name] = np.where(data[name] > 0, np.float32("nan"), np.float32(1))
    if not with_next:
        del data["next_observations"]
    if not with_timeouts and with_next:
        del data["timeouts"]
    found = tr.episodes_from_flat(**data, unknown_final=unknown_final)
    expected = split_naively(data, unknown_final)
    assert str(as_lists(found)) == str(expected)  # as text NaN is NaN
    assert len(found) == len(expected)
    assert found.steps == sum(len(episode["action"]) for episode in expected)
    assert found.rows == sum(len(episode["obs"]) for episode in expected)


@pytest.mark.parametrize("view", [tr.Transitions(n_step=2), tr.Sequences(3)], ids=repr)
@pytest.mark.parametrize("as_given", [np.asarray, torch.as_tensor])
def test_they_go_into_a_buffer_and_come_back(view, as_given):
    data = {name: as_given(values) for name, values in flat([3, 1, 4], ["terminal", "timeout", "nothing"]).items()}
    found = tr.episodes_from_flat(**data)
    with tr.ReplayBuffer(SPEC, found.rows, view=view) as buffer, buffer.writer() as writer:
        for k, episode in enumerate(found):
            (buffer if k % 2 else writer).extend(**episode)
        assert len(buffer) == found.rows == 11
        assert str(as_lists(buffer.episodes())) == str(as_lists(found))


def test_a_nested_spec_with_images_and_further_fields_keeps_every_value():
    n, rng = 7, np.random.default_rng(0)
    image = rng.integers(0, 255, (n + 1, 8, 8, 3), np.uint8)
    count = np.arange(n + 1)
    found = tr.episodes_from_flat(
        observations={"image": image[:-1], "inner": {"count": count[:-1]}},
        next_observations={"image": image[1:], "inner": {"count": count[1:]}},
        actions={"arm": np.ones((n, 2)), "hand": np.arange(n)},
        rewards=np.ones(n),
        terminals=np.arange(n) == 3,
        log_prob=np.arange(n) / 8,
    )
    first, second = found
    assert list(first) == ["obs", "action", "reward", "log_prob", "terminated", "truncated"]
    np.testing.assert_array_equal(first["obs"]["image"], image[:5])
    np.testing.assert_array_equal(second["obs"]["inner"]["count"], count[4:])
    np.testing.assert_array_equal(second["action"]["hand"], [4, 5, 6])
    np.testing.assert_array_equal(second["log_prob"], np.arange(4, 7) / 8)
    assert (first["obs"]["image"].dtype, first["obs"]["inner"]["count"].dtype) == (np.uint8, np.int64)


def test_one_part_of_an_observation_that_does_not_follow_ends_an_episode():
    a, b = np.arange(5.0), np.arange(5.0)
    following = b[1:].copy()
    following[1] = 9
    found = tr.episodes_from_flat(
        observations={"a": a[:-1], "b": b[:-1]},
        next_observations={"a": a[1:], "b": following},
        actions=np.zeros(4),
        rewards=np.zeros(4),
        terminals=np.zeros(4, bool),
    )
    assert [episode["obs"]["b"].tolist() for episode in found] == [[0, 1, 9], [2, 3, 4]]


def test_long_data_is_compared_to_its_end(monkeypatch):
    monkeypatch.setattr("torchreplay.buffer.flat_episodes.COMPARED_BYTES", 24)  # three rows at a time
    data = flat([5, 9, 1, 8], ["nothing"] * 4)
    assert as_lists(tr.episodes_from_flat(**data)) == split_naively(data)


def test_nothing_is_copied_but_the_observations_of_the_episode_in_hand():
    data = flat([4, 3], ["timeout", "timeout"])
    (episode, _) = tr.episodes_from_flat(**data)
    assert np.shares_memory(episode["action"], data["actions"])
    assert not np.shares_memory(episode["obs"], data["observations"])
    del data["next_observations"]
    (episode, _) = tr.episodes_from_flat(**data)
    assert np.shares_memory(episode["obs"], data["observations"])
    before = {name: values.copy() for name, values in data.items()}
    episode["truncated"][:] = True  # flags are the caller's own
    episode["terminated"][:] = True
    for name, values in before.items():
        np.testing.assert_array_equal(data[name], values)


# What it says


@pytest.mark.parametrize(
    ("lengths", "ends", "without", "said", "level"),
    [
        ([3, 2], ["timeout", "terminal"], (), "5 steps, 2 episodes", logging.INFO),
        (
            [3, 2, 2],
            ["timeout", "nothing", "nothing"],
            ("timeouts",),
            "7 steps, 3 episodes, 2 ended only by an observation that does not follow",
            logging.INFO,
        ),
        (
            [600, 600, 1],
            ["timeout", "terminal", "timeout"],
            ("next_observations",),
            "1,201 steps, 3 episodes, 2 without a final observation: last step dropped, 1 of them had no other step, 1 "
            "terminated without a final observation: the one before repeated",
            logging.WARNING,
        ),
    ],
)
def test_it_says_what_it_did(lengths, ends, without, said, level, caplog):
    data = {name: values for name, values in flat(lengths, ends).items() if name not in without}
    with caplog.at_level(logging.INFO):
        found = tr.episodes_from_flat(**data, unknown_final="repeat")
    assert str(found) == said
    assert repr(found) == f"FlatEpisodes({said})"
    assert [(record.levelno, record.message) for record in caplog.records] == [(level, f"flat data: {said}")]


def test_next_observations_that_were_made_by_shifting_are_noticed(caplog):
    data = flat([3, 3, 3], ["timeout"] * 3)
    data["next_observations"][:-1] = data["observations"][1:]
    assert len(tr.episodes_from_flat(**data)) == 3
    assert "next_observations is the next episode's first observation" in caplog.text


# Where it comes from


def test_an_hdf5_file_is_read_by_name_and_stays_where_it_is(tmp_path):
    h5py = pytest.importorskip("h5py")
    data = flat([4, 1, 3], ["timeout", "terminal", "nothing"])
    with h5py.File(tmp_path / "hopper.hdf5", "w") as file:
        for name, values in data.items():
            file[name] = values
        file["infos/qpos"] = np.arange(8)
        file["metadata/algorithm"] = "SAC"
    with h5py.File(tmp_path / "hopper.hdf5") as file:
        found = tr.episodes_from_flat(file, qpos=file["infos/qpos"], rewards=data["rewards"] / 2)
        episodes = as_lists(found)
    assert [episode.pop("qpos") for episode in episodes] == [[0, 1, 2, 3], [4], [5, 6, 7]]
    assert episodes == split_naively(data | {"rewards": data["rewards"] / 2})


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
def test_flags_may_be_numbers(dtype):
    data = flat([3, 2], ["terminal", "timeout"])
    expected = split_naively(data)
    data |= {name: data[name].astype(dtype) for name in ("terminals", "timeouts")}
    assert as_lists(tr.episodes_from_flat(**data)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flags_may_be_tensors_that_need_a_gradient(dtype):
    data = flat([3, 2], ["terminal", "timeout"])
    expected = split_naively(data)
    data |= {name: torch.tensor(data[name]).to(dtype).requires_grad_() for name in ("terminals", "timeouts")}
    assert as_lists(tr.episodes_from_flat(**data)) == expected


def test_fields_have_the_names_that_are_wanted():
    data = flat([3, 2], ["terminal", "timeout"])
    names = {"state": "observations", "end": "terminals", "cut": "timeouts", "r": "rewards"}
    (first, _) = tr.episodes_from_flat(**{k: v for k, v in data.items() if k != "actions"}, names=names)
    assert sorted(first) == ["cut", "end", "r", "state"]


# Bad input

GOOD = flat([3, 2], ["terminal", "timeout"])


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"observations": None}, ValueError, "observations is missing: give observations="),
        ({"actions": None}, ValueError, "actions is missing: .*leave 'action' out of names"),
        ({"terminals": None}, ValueError, "terminals is missing"),
        ({"observations": [[0.0, 1.0]] * 5}, TypeError, r"observations is a list: .*np\.asarray\(observations\)"),
        ({"observations": "hopper.hdf5"}, TypeError, "observations is a str"),
        ({"observations": {}}, ValueError, "observations is an empty dict"),
        (
            {"observations": {"a": GOOD["observations"]}},
            ValueError,
            "next_observations has no dict and observations has",
        ),
        ({"observations": GOOD["observations"][:4]}, ValueError, "observations has 4 values and terminals 5"),
        ({"next_observations": GOOD["observations"][:, :1]}, ValueError, r"next_observations has shape \(5, 1\)"),
        ({"next_observations": GOOD["observations"].astype(float)}, ValueError, "dtype float64, and observations"),
        ({"actions": np.array(["a"] * 5)}, TypeError, "actions has dtype <U1: expected numbers"),
        ({"actions": np.float64(1)}, ValueError, r"actions has shape \(\)"),
        ({"actions": GOOD["actions"][:3]}, ValueError, "actions has 3 values and terminals 5"),
        ({"rewards": GOOD["rewards"][:, None]}, ValueError, r"rewards has shape \(5, 1\).*write rewards\[:, 0\]"),
        ({"terminals": GOOD["terminals"][:, None]}, ValueError, r"write terminals\[:, 0\]"),
        ({"terminals": np.zeros(0, bool)}, ValueError, "at least one step"),
        ({"terminals": {"a": GOOD["terminals"]}}, TypeError, "terminals is a dict"),
        ({"terminals": np.arange(5)}, ValueError, r"terminals\[2\] is 2: expected True and False, or 1 and 0"),
        ({"terminals": np.ma.array(GOOD["terminals"], mask=[0, 1, 0, 0, 0])}, ValueError, "terminals has masked"),
        ({"observations": np.ma.array(GOOD["observations"], mask=True)}, ValueError, "observations has masked values"),
        ({"timeouts": np.full(5, math.nan)}, ValueError, r"timeouts\[0\] is nan"),
        ({"timeouts": GOOD["timeouts"][:4]}, ValueError, "timeouts has 4 values"),
        (
            {"next_observations": None, "timeouts": None},
            ValueError,
            r"both missing.*np\.zeros\(len\(terminals\), bool\)",
        ),
        ({"next_observations": None}, ValueError, 'says what 1 terminated episodes ended with.*unknown_final="repeat"'),
        ({"unknown_final": "pad"}, ValueError, "unknown_final is 'pad': expected one of 'drop', 'repeat'"),
        ({"names": "obs"}, TypeError, "names is 'obs': expected a dict"),
        ({"names": {"obs": "states"}}, ValueError, r"names\['obs'\] is 'states': expected one of 'observations'"),
        ({"names": {"obs": "observations"}}, ValueError, "names lacks 'terminals'"),
        ({"names": {3: "observations"}}, TypeError, "a field in names is 3"),
        ({"names": {"a": "observations", "b": "observations"}}, ValueError, "names has 'observations' twice"),
        ({"reward": GOOD["rewards"]}, ValueError, "field 'reward' is made of rewards: give rewards="),
        ({"log_prob": GOOD["rewards"][:2]}, ValueError, "log_prob has 2 values"),
        ({"log_prob": 0.5}, TypeError, "log_prob is a float"),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_write(change, error, said):
    with pytest.raises(error, match=said):
        tr.episodes_from_flat(**(GOOD | change))


@pytest.mark.parametrize("data", ["hopper.hdf5", 3, [1, 2]])
def test_data_that_is_no_dict_is_refused(data):
    with pytest.raises(TypeError, match=r"open it, with h5py.File\(path\)" if isinstance(data, str) else "data is"):
        tr.episodes_from_flat(data)


@pytest.mark.gpu
def test_a_tensor_on_a_device_is_refused():
    with pytest.raises(TypeError, match=r"expected actions.cpu\(\)"):
        tr.episodes_from_flat(**(GOOD | {"actions": torch.arange(5, device="cuda")}))

"""Values of any length in transitions and windows, beside plain loops over the episodes that were written."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import torchreplay as tr

FLAG = tr.Field((), torch.bool)
STEPS = {
    "obs": {"text": tr.Ragged(torch.uint8), "mask": tr.Ragged(torch.bool, like="obs/text"), "n": tr.Field()},
    "said": tr.Ragged(torch.int32),
    "score": tr.Ragged(torch.float32, (2,), like="said"),
    "reward": tr.Field(),
    "terminated": FLAG,
    "truncated": FLAG,
}
RAGGED = ("obs/text", "obs/mask", "said", "score")


def observation(random, n):
    size = int(random.integers(0, 9))
    return {"text": random.integers(0, 256, size).astype(np.uint8), "mask": random.random(size) < 0.5, "n": float(n)}


def step(random, last):
    size = int(random.integers(0, 5))
    return {
        "said": random.integers(0, 99, size).astype(np.int32),
        "score": random.random((size, 2)).astype(np.float32),
        "reward": 1.0,
        "terminated": last,
        "truncated": False,
    }


def episode(random, length):
    """Returns the observations of an episode, and its steps."""
    return [observation(random, n) for n in range(length + 1)], [step(random, n == length - 1) for n in range(length)]


def write_step_by_step(buffer, episodes):
    """Writes whole episodes; returns the key of each row."""
    keys = []
    with buffer.writer() as writer:
        for observations, steps in episodes:
            keys.append([writer.reset(obs=observations[0])])
            for obs, values in zip(observations[1:], steps, strict=True):
                keys[-1].append(writer.step(obs=obs, **values))
    return keys


def write_at_once(buffer, episodes):
    keys = []
    for observations, steps in episodes:
        obs = {name: [o[name] for o in observations] for name in ("text", "mask", "n")}
        values = {name: [s[name] for s in steps] for name in steps[0]}
        keys.append(buffer.extend(obs=obs, **values).tolist())
    return keys


def write_packed(buffer, episodes):
    keys = []
    for observations, steps in episodes:
        lengths = {
            "obs": {"text": [len(o["text"]) for o in observations]},
            "said": torch.tensor([len(s["said"]) for s in steps]),
        }
        obs = {name: np.concatenate([o[name] for o in observations]) for name in ("text", "mask")}
        obs["n"] = [o["n"] for o in observations]
        values = {name: np.concatenate([s[name] for s in steps]) for name in ("said", "score")}
        values |= {name: [s[name] for s in steps] for name in ("reward", "terminated", "truncated")}
        keys.append(buffer.extend(obs=obs, lengths=lengths, **values).tolist())
    return keys


WAYS = (write_step_by_step, write_at_once, write_packed)


def value(place, name, observations, steps):
    """Returns what the row at `place` of an episode has under the name of a field."""
    if name.startswith("obs/"):
        return observations[place][name.removeprefix("obs/")]
    return steps[place - 1][name]


def assert_values(batch, name, expected):
    for got, wanted in zip(split_of(batch, name), expected, strict=True):
        assert got.dtype == wanted.dtype
        assert np.array_equal(got, wanted)


def split_of(batch, name):
    ends = batch.offsets(name).tolist()
    values = batch
    for part in name.split("/"):
        values = values[part]
    return [values[a:b].numpy() for a, b in pairwise(ends)]


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_transition_has_the_values_of_its_first_step_and_of_the_observations_at_its_ends(write, n_step, seed):
    random = np.random.default_rng(seed)
    episodes = [episode(random, int(length)) for length in random.integers(1, 7, 5)]
    view = tr.Transitions(n_step)
    with tr.ReplayBuffer(STEPS, 100, view=view, ragged_bytes=1 << 16) as buffer:
        keys = write(buffer, episodes)
        batch = buffer.gather([key for one in keys for key in one[:-1]])
    places = [(e, at) for e, one in enumerate(keys) for at in range(len(one) - 1)]
    assert batch.batch_size == len(places)
    for name in RAGGED:
        after = 0 if name.startswith("obs/") else 1
        assert_values(batch, name, [value(at + after, name, *episodes[e]) for e, at in places])
    for name in ("obs/text", "obs/mask"):
        ends = [(e, min(at + n_step, len(keys[e]) - 1)) for e, at in places]
        assert_values(batch, f"next_{name}", [value(at, name, *episodes[e]) for e, at in ends])
        assert batch.lengths(f"next_{name}").tolist() == [len(value(at, name, *episodes[e])) for e, at in ends]
    assert batch.offsets("obs/mask") is batch.offsets("obs/text")
    assert (
        batch.to_tensordict()["next", "obs", "text"].unbind()[0].tolist()
        == split_of(batch, "next_obs/text")[0].tolist()
    )


@pytest.mark.parametrize("seed", range(3))
def test_frames_of_any_length_are_stacked_and_the_first_is_repeated(seed):
    random = np.random.default_rng(seed)
    episodes = [episode(random, int(length)) for length in random.integers(1, 7, 5)]
    view = tr.Transitions(stack={"obs/text": 3, "obs/n": 2})
    with tr.ReplayBuffer(STEPS, 100, view=view, ragged_bytes=1 << 16) as buffer:
        keys = write_step_by_step(buffer, episodes)
        batch = buffer.gather([key for one in keys for key in one[:-1]])
    places = [(e, at) for e, one in enumerate(keys) for at in range(len(one) - 1)]
    frames = [value(max(0, at + k), "obs/text", *episodes[e]) for e, at in places for k in (-2, -1, 0)]
    assert_values(batch, "obs/text", frames)
    assert batch.lengths("obs/text").shape == (len(places), 3)
    assert batch.lengths("obs/mask").shape == (len(places),)
    assert_values(batch, "obs/mask", [value(at, "obs/mask", *episodes[e]) for e, at in places])
    following = [value(max(0, at + 1 + k), "obs/text", *episodes[e]) for e, at in places for k in (-2, -1, 0)]
    assert_values(batch, "next_obs/text", following)


@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_a_window_has_the_values_of_its_steps_and_none_beyond_the_episodes_end(write, length, seed):
    random = np.random.default_rng(seed)
    episodes = [episode(random, int(size)) for size in random.integers(1, 8, 5)]
    view = tr.Sequences(length, initial="score")
    with tr.ReplayBuffer(STEPS, 100, view=view, ragged_bytes=1 << 16) as buffer:
        keys = write(buffer, episodes)
        batch = buffer.gather([key for one in keys for key in one[: len(one) - 1 : length]])
    places = [(e, at) for e, one in enumerate(keys) for at in range(0, len(one) - 1, length)]
    assert batch.batch_size == len(places)

    def window(name, first, rows):
        found = []
        for e, at in places:
            for k in range(first, first + rows):
                there = at + k < len(keys[e])
                nothing = value(1, name, *episodes[e])[:0]
                found.append(value(at + k, name, *episodes[e]) if there else nothing)
        return found

    assert_values(batch, "obs/text", window("obs/text", 0, length + 1))
    assert_values(batch, "said", window("said", 1, length))
    assert_values(batch, "score", window("score", 1, 1))
    assert batch.lengths("obs/text").shape == (len(places), length + 1)
    assert batch.lengths("said").shape == (len(places), length)
    assert batch.lengths("score").shape == (len(places),)
    assert batch.padded("said").shape[:2] == (len(places), length)


def together(parts):
    return {name: [part[name] for part in parts] for name in parts[0]}


def last_observations(lasts):
    """Returns what Gymnasium gives as `final_obs`; None where nothing ended."""
    if not any(lasts):
        return None
    given = np.full(len(lasts), None, object)
    for lane, last in enumerate(lasts):
        given[lane] = last
    return given


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_environments_in_step_have_values_of_their_own_lengths(autoreset):
    random, envs = np.random.default_rng(7), 3
    expected = []
    with tr.ReplayBuffer(STEPS, 200, view=tr.Transitions(), ragged_bytes=1 << 16) as buffer:
        writer = buffer.writer(num_envs=envs, autoreset=autoreset)
        now, ended = [observation(random, 0) for _ in range(envs)], [False] * envs
        writer.reset(obs=together(now))
        for time in range(1, 12):
            begins = ended if autoreset == "next_step" else [False] * envs
            steps = [step(random, not begun and bool(random.random() < 0.3)) for begun in begins]
            steps = [s | {"reward": 0.0} if begun else s for s, begun in zip(steps, begins, strict=True)]
            after = [observation(random, time) for _ in range(envs)]
            lasts = [observation(random, -time) if s["terminated"] else None for s in steps]
            final = last_observations(lasts) if autoreset == "same_step" else None
            writer.step(obs=together(after), **together(steps), **({} if final is None else {"final_obs": final}))
            ends = after if final is None else [last or o for last, o in zip(lasts, after, strict=True)]
            every = zip(now, steps, ends, begins, strict=True)
            expected += [(before, values, end) for before, values, end, begun in every if not begun]
            now, ended = after, [s["terminated"] for s in steps]
        batch = buffer.gather(buffer.keys())
    got = zip(split_of(batch, "obs/text"), split_of(batch, "said"), split_of(batch, "next_obs/text"), strict=True)
    wanted = [(before["text"], values["said"], end["text"]) for before, values, end in expected]
    assert sorted(tuple(v.tobytes() for v in one) for one in got) == sorted(
        tuple(v.tobytes() for v in one) for one in wanted
    )


def test_an_observation_has_no_length_in_common_with_a_step():
    spec = STEPS | {"said": tr.Ragged(torch.int32, like="obs/text"), "score": tr.Field()}
    with pytest.raises(ValueError, match=r"field 'said' is like 'obs/text'; 'obs/text' is an observation of Trans"):
        tr.ReplayBuffer(spec, 100, view=tr.Transitions(), ragged_bytes=1 << 16)
    tr.ReplayBuffer(spec, 100, ragged_bytes=1 << 16).close()


def test_rewards_flags_and_goals_are_of_one_shape():
    for name, view, message in (
        ("reward", tr.Transitions(), "reward='reward' is Ragged"),
        ("terminated", tr.Sequences(2), "field 'terminated' is Ragged"),
        ("said", tr.Transitions(discount="said"), "discount='said' is Ragged"),
    ):
        with pytest.raises(ValueError, match=message):
            tr.ReplayBuffer(STEPS | {name: tr.Ragged(torch.float32)}, 100, view=view, ragged_bytes=1 << 16)
    spec = STEPS | {"goal": tr.Ragged(torch.float32), "at": tr.Ragged(torch.float32)}
    hindsight = tr.Hindsight(lambda a, b: a, "at", "goal", observation=("obs", "at", "goal"))
    with pytest.raises(ValueError, match="achieved='at' is Ragged"):
        tr.ReplayBuffer(spec, 100, view=hindsight, ragged_bytes=1 << 16)


@pytest.mark.parametrize("way", ["lists", "packed", "pairs"])
def test_a_block_of_environments_has_values_of_their_own_lengths(way):
    random, envs, times = np.random.default_rng(3), 2, 4
    lanes = [episode(random, times) for _ in range(envs)]
    obs = {name: [[lane[0][t][name] for lane in lanes] for t in range(times + 1)] for name in ("text", "mask", "n")}
    steps = {name: [[lane[1][t][name] for lane in lanes] for t in range(times)] for name in lanes[0][1][0]}
    options = {}
    if way != "lists":
        lengths = {
            "obs/text": [[len(value) for value in row] for row in obs["text"]],
            "said": [[len(value) for value in row] for row in steps["said"]],
        }
        obs |= {name: np.concatenate([v for row in obs[name] for v in row]) for name in ("text", "mask")}
        steps |= {name: np.concatenate([v for row in steps[name] for v in row]) for name in ("said", "score")}
        if way == "packed":
            options["lengths"] = {"obs": {"text": lengths["obs/text"]}, "said": np.array(lengths["said"])}
        else:
            obs |= {name: (obs[name], lengths["obs/text"]) for name in ("text", "mask")}
            steps |= {name: (steps[name], lengths["said"]) for name in ("said", "score")}
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions(), ragged_bytes=1 << 16) as buffer:
        keys = buffer.extend(obs=obs, **steps, **options)
        assert keys.shape == (times + 1, envs)
        for lane in range(envs):
            batch = buffer.gather(keys[:-1, lane])
            assert_values(batch, "obs/mask", [o["mask"] for o in lanes[lane][0][:-1]])
            assert_values(batch, "next_obs/text", [o["text"] for o in lanes[lane][0][1:]])
            assert_values(batch, "score", [s["score"] for s in lanes[lane][1]])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([[1], [2]], "'said': got 2 values, expected one for each of the 3 environments"),
        ([[1], [2], 3], "'said': got a Python int"),
        (b"abc", "'said': got .*bytes.*expected a list of 3 values"),
        (np.zeros((2, 4), np.int32), "'said': got 2 values, expected one for each of the 3"),
        (np.zeros(3, np.int32), r"'said': got int32 of shape \(3,\), expected a list of 3 values"),
        (None, "'said': got None"),
        ([[1], [2, 3], [4]], r"'score': got 1 elements at index 1, and 'said', whose length they have, 2"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_values_that_do_not_fit_the_environments_are_refused(said, message):
    random = np.random.default_rng(0)
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions(), ragged_bytes=1 << 16) as buffer:
        writer = buffer.writer(num_envs=3)
        writer.reset(obs=together([observation(random, 0) for _ in range(3)]))
        values = together([step(random, False) for _ in range(3)]) | {"said": said, "score": [[[1, 2]]] * 3}
        with pytest.raises(ValueError, match=message):
            writer.step(obs=together([observation(random, 1) for _ in range(3)]), **values)
        assert buffer.next_key == 3
        fine = together([step(random, False) for _ in range(3)])
        writer.step(obs=together([observation(random, 1) for _ in range(3)]), **fine)
        assert buffer.num_items == 3


def test_values_may_be_arrays_of_one_length_for_all_environments():
    random = np.random.default_rng(0)
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions(), ragged_bytes=1 << 16) as buffer:
        writer = buffer.writer(num_envs=2)
        keys = writer.reset(obs=together([observation(random, 0) for _ in range(2)]))
        values = together([step(random, False) for _ in range(2)])
        values |= {"said": np.array([[1, 2], [3, 4]]), "score": torch.arange(8.0).reshape(2, 2, 2)}
        writer.step(obs=together([observation(random, 1) for _ in range(2)]), **values)
        batch = buffer.gather(keys)
        assert batch["said"].tolist() == [1, 2, 3, 4]
        assert batch["score"].tolist() == torch.arange(8.0).reshape(4, 2).tolist()


@pytest.mark.parametrize("capacity", [100, 30])
def test_whole_episodes_come_out_as_they_were_written_and_go_into_another_buffer(capacity):
    random, view = np.random.default_rng(3), tr.Transitions()
    written = [episode(random, int(random.integers(1, 9))) for _ in range(12)]
    with (
        tr.ReplayBuffer(STEPS, capacity, view=view, ragged_bytes=1 << 16) as buffer,
        tr.ReplayBuffer(STEPS, 100, view=view, ragged_bytes=1 << 16) as other,
    ):
        keys = write_at_once(buffer, written)
        there = [e for e, of_rows in zip(written, keys, strict=True) if of_rows[0] >= buffer.next_key - capacity]
        found = list(buffer.episodes())
        assert len(found) == len(there) < len(written) + (capacity == 100)
        for got, (observations, steps) in zip(found, there, strict=True):
            for name in ("text", "mask", "n"):
                assert [as_list(value) for value in got["obs"][name]] == [as_list(o[name]) for o in observations]
            for name in steps[0]:
                assert [as_list(value) for value in got[name]] == [as_list(s[name]) for s in steps]
            other.extend(**got)
        assert list(map(str, other.episodes())) == list(map(str, found))


def as_list(value):
    return np.asarray(value).tolist()

"""Sequences of trajectories: where windows start, what lies at which index, what is padding, what runs on."""

import numpy as np
import pytest
import torch
from linked_rows import STEPS, buffer_of, everything, play

import torchreplay as tr

WITH_STATE = {"obs": ((2,), np.float32), **STEPS, "memory/h": ((3,), np.float32)}


def windows(view, *episodes, capacity=100):
    """All drawable windows after episodes of (length, end); the i-th one's observations start at 100 i."""
    buffer = buffer_of(view, capacity=capacity)
    with buffer.writer() as writer:
        for i, (length, end) in enumerate(episodes):
            play(writer, length, end, start=100 * i)
        batch = everything(buffer)
    assert batch["obs"].shape[1] == batch["action"].shape[1] + 1
    return batch


def test_the_action_at_an_index_is_the_one_taken_at_the_observation_of_that_index():
    batch = windows(tr.Sequences(3), (6, "none"))
    assert batch["key"].tolist() == [0, 3]
    assert batch["obs"][..., 0].tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert batch["action"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert batch["mask"].all()
    assert batch["is_first"].tolist() == [[True, False, False], [False] * 3]
    assert (batch["mask"].dtype, batch["is_first"].dtype) == (torch.bool, torch.bool)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_what_lies_beyond_the_end_of_an_episode_is_zero_and_masked(end):
    batch = windows(tr.Sequences(4), (6, end), (3, "none"))
    assert batch["obs"][..., 0].tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 0, 0]]
    assert batch["action"].tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]
    assert batch["reward"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["mask"].tolist() == [[True] * 4, [True, True, False, False]]
    assert batch[end].tolist() == [[False] * 4, [False, True, False, False]]
    assert not batch["is_first"][1].any()


@pytest.mark.parametrize(
    ("stride", "starts"), [(None, [0, 3, 6]), (1, [0, 1, 2, 3, 4, 5, 6]), (2, [0, 2, 4, 6]), (5, [0, 5]), (9, [0])]
)
def test_windows_start_at_multiples_of_the_stride_counted_from_the_start_of_the_episode(stride, starts):
    view = tr.Sequences(3, stride=stride)
    batch = windows(view, (1, "none"), (7, "terminated"))  # the first episode has no complete window
    assert batch["key"].tolist() == [2 + start for start in starts]
    assert batch["obs"][:, 0, 0].tolist() == [100 + start for start in starts]


@pytest.mark.parametrize(
    ("burn_in", "length", "starts"),
    [(2, 1, []), (2, 2, []), (2, 3, [0]), (1, 4, [0, 2]), (1, 5, [0, 2]), (1, 6, [0, 2, 4]), (0, 5, [0, 2, 4])],
)
def test_a_window_is_drawn_only_if_a_step_follows_the_burn_in(burn_in, length, starts):
    batch = windows(tr.Sequences(2, burn_in=burn_in), (length, "terminated"))
    assert batch["key"].tolist() == starts


def test_the_burn_in_is_made_of_real_steps_too():
    batch = windows(tr.Sequences(2, burn_in=2), (3, "terminated"))
    assert batch["mask"].tolist() == [[True, True, True, False]]
    assert batch["obs"][..., 0].tolist() == [[0, 1, 2, 3, 0]]


@pytest.mark.parametrize("burn_in", [0, 1])
@pytest.mark.parametrize("stride", [None, 1, 2, 5])
def test_without_partial_windows_only_whole_ones_are_drawn(stride, burn_in):
    lengths, length = (1, 2, 3, 4, 7, 12), 3
    episodes = [(steps, "terminated") for steps in lengths]
    batch = windows(tr.Sequences(length, stride=stride, burn_in=burn_in, partial=False), *episodes)
    whole = [
        100 * i + start
        for i, steps in enumerate(lengths)
        for start in range(0, steps - burn_in - length + 1, stride or length)
    ]
    assert batch["obs"][:, 0, 0].tolist() == whole
    assert batch["mask"].all()


def test_without_partial_windows_a_buffer_of_short_episodes_says_what_a_window_takes():
    buffer = buffer_of(tr.Sequences(5, burn_in=1, partial=False))
    with buffer.writer() as writer:
        for _ in range(3):
            play(writer, 5, "terminated")
    with pytest.raises(tr.WouldBlockForever, match="a window takes 6 steps of one episode"):
        buffer.sample(2)


def test_whether_windows_are_partial_is_kept_with_the_buffer(tmp_path):
    buffer = buffer_of(tr.Sequences(3, partial=False))
    with buffer.writer() as writer:
        play(writer, 4, "terminated")
    buffer.save(tmp_path)
    with tr.ReplayBuffer.load(tmp_path) as loaded:
        assert loaded.view == tr.Sequences(3, partial=False)
        assert loaded.num_items == buffer.num_items == 1
    with buffer_of(tr.Sequences(3)) as other:
        other.restore(tmp_path)
        assert other.num_items == 2


@pytest.mark.parametrize("partial", [None, 1, "no"])
def test_partial_is_true_or_false(partial):
    with pytest.raises(TypeError, match=r"partial is .*: expected True or False"):
        tr.Sequences(3, partial=partial)


def test_fields_named_in_initial_come_back_for_the_first_step_alone():
    buffer = buffer_of(tr.Sequences(2, initial=("memory",)), WITH_STATE)
    with buffer.writer() as writer:
        writer.reset(obs=np.zeros(2))
        for t in range(3):
            h = np.full(3, 10.0 + t)  # of the network that chose action t
            flags = {"terminated": False, "truncated": t == 2}
            writer.step(obs=np.full(2, t + 1), action=t, reward=0.0, memory={"h": h}, **flags)
    batch = everything(buffer)
    assert batch["action"].tolist() == [[0, 1], [2, 0]]
    assert batch["memory"]["h"].tolist() == [[10.0] * 3, [12.0] * 3]


def test_an_episode_longer_than_the_ring_keeps_the_windows_that_lie_in_it():
    batch = windows(tr.Sequences(3), (40, "none"), capacity=9)  # keys 32 to 40 are held
    assert batch["key"].tolist() == [33, 36]
    assert batch["obs"][..., 0].tolist() == [[33, 34, 35, 36], [36, 37, 38, 39]]


def test_windows_across_episodes_start_anywhere_and_mark_first_observations():
    batch = windows(tr.Sequences(3, across_episodes=True), (2, "terminated"), (2, "none"))
    # Rows: 0 1 2 | 100 101 102.
    assert batch["obs"][..., 0].tolist() == [[0, 1, 2, 100], [1, 2, 100, 101], [2, 100, 101, 102]]
    assert batch["is_first"].tolist() == [[True, False, False], [False, False, True], [False, True, False]]
    assert batch["mask"].tolist() == [[True, True, False], [True, False, True], [False, True, True]]
    assert batch["action"].tolist() == [[0, 1, 0], [1, 0, 100], [0, 100, 101]]
    assert batch["reward"].tolist() == [[1, 1, 0], [1, 0, 1], [0, 1, 1]]
    assert batch["terminated"].tolist() == [[False, True, False], [True, False, False], [False] * 3]


def test_windows_across_episodes_run_on_after_an_episode_that_was_broken_off():
    batch = windows(tr.Sequences(2, across_episodes=True), (1, "none"), (1, "none"))
    assert batch["obs"][..., 0].tolist() == [[0, 1, 100], [1, 100, 101]]
    assert batch["is_first"].tolist() == [[True, False], [False, True]]


def test_windows_across_episodes_stay_in_their_stream():
    buffer = buffer_of(tr.Sequences(2, across_episodes=True))
    with buffer.writer() as a:
        play(a, 2, start=0)
        with buffer.writer() as b:
            play(b, 2, start=50)
        play(a, 1, start=100)
    starts = everything(buffer)["obs"][..., 0].tolist()
    assert starts == [[0, 1, 2], [1, 2, 100], [2, 100, 101], [50, 51, 52]]


def test_uniform_draws_replay_every_whole_sequence_equally_often_and_all_agents_in_lockstep():
    spec = {name: {"obs": tr.Field(), "action": tr.Field((), torch.int64)} for name in ("red", "blue")}
    flags = {end: tr.Field((), torch.bool) for end in ("terminated", "truncated")}
    view = tr.Sequences(4, observation=("red/obs", "blue/obs"))
    buffer = tr.ReplayBuffer(spec | flags, 100, sampler=tr.Uniform(), view=view, seed=5)
    steps = {0: 4, 100: 7, 200: 8}  # of three episodes, by the observation that each starts with
    for start, length in steps.items():
        obs, end = start + torch.arange(length + 1.0), torch.arange(length) == length - 1
        agents = {name: {"obs": sign * obs, "action": obs[:-1].long()} for name, sign in (("red", 1), ("blue", -1))}
        buffer.extend(**agents, terminated=end, truncated=torch.zeros_like(end))
    expected = [(0, 4), (100, 4), (104, 3), (200, 4), (204, 4)]  # first observation and real steps
    counts = dict.fromkeys(expected, 0)
    for _ in range(100):
        batch = buffer.sample(20)
        assert batch["weight"].eq(1).all()
        for i, length in enumerate(batch["mask"].sum(1).tolist()):
            start = int(batch["red"]["obs"][i, 0])
            observed = torch.zeros(5)
            observed[: length + 1] = torch.arange(start, start + length + 1.0)
            acted = torch.where(batch["mask"][i], observed[:-1], 0.0).long()
            for name, sign in (("red", 1), ("blue", -1)):
                assert batch[name]["obs"][i].equal(sign * observed)
                assert batch[name]["action"][i].equal(acted)
            counts[start, length] += 1
        buffer.update_priorities(batch, tr.sequence_priority(torch.rand(20, 4) * 100, batch["mask"]))
    # Draws are stratified: of 20, each of the five windows takes exactly its four strata.
    assert counts == dict.fromkeys(expected, 400)

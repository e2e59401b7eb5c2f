"""Calls of linked writers that fail in a wait: after any next call, no item skips a step or has one twice."""

import itertools
import threading
from contextlib import suppress

import numpy as np
import pytest
from linked_rows import buffer_of, pairs

import torchreplay as tr

MANY = 100  # environments: more than the 64 rows for which a writer looks at the limiter once
BROKEN_OFF = r"failed when some of its rows were written: call writer.reset\(obs=obs\) before the next step\(\)"


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """As in a program of one thread, also if other tests have left threads: a wait for the learner then fails."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def buffer_with_room_for(items):
    limiter = tr.SamplesPerInsert(1.0, min_size=items // 2, tolerance=1.0)
    return buffer_of(tr.Transitions(), capacity=10_000, limiter=limiter)


def observed(first, num_envs=MANY):
    """Observations of the environments: `first` in environment 0, 1000 more in each further environment."""
    return np.repeat(first + 1000 * np.arange(num_envs, dtype=np.float32)[:, None], 2, axis=1)


def step(writer, number, num_envs=MANY):
    no = np.zeros(num_envs, bool)
    others = {"action": np.zeros(num_envs, int), "reward": np.zeros(num_envs), "terminated": no, "truncated": no}
    return writer.step(obs=observed(number, num_envs), **others)


def draw_what_may_be(buffer):
    with suppress(tr.WouldBlockForever):
        while True:
            buffer.sample(10)


def assert_true(buffer):
    """Every item leads from an observation to the one that followed, and none is there twice."""
    found = pairs(buffer)
    assert {following - before for before, following in found} == {1.0}
    assert len(set(found)) == len(found)


def test_a_step_of_lanes_that_fails_half_way_is_neither_repeated_nor_passed_over():
    buffer = buffer_with_room_for(120)
    with buffer.writer(num_envs=MANY) as writer:
        writer.reset(obs=observed(0))
        step(writer, 1)
        with pytest.raises(tr.WouldBlockForever, match="the learner is behind"):
            step(writer, 2)
        written = writer.rows
        assert 2 * MANY < written < 3 * MANY
        draw_what_may_be(buffer)
        for number in (2, 3):
            with pytest.raises(ValueError, match=f"{BROKEN_OFF} in environment 0"):
                step(writer, number)
        assert writer.rows == written
        writer.reset(obs=observed(5))
        draw_what_may_be(buffer)
        step(writer, 6)
    assert_true(buffer)
    assert {(5.0, 6.0), (99_005.0, 99_006.0)} <= set(pairs(buffer))


def test_lanes_may_be_reset_one_after_the_other_after_a_step_that_failed_half_way():
    buffer = buffer_with_room_for(120)
    first = np.arange(MANY) == 0
    with buffer.writer(num_envs=MANY, autoreset="disabled") as writer:
        writer.reset(obs=observed(0))
        step(writer, 1)
        with pytest.raises(tr.WouldBlockForever):
            step(writer, 2)
        draw_what_may_be(buffer)
        writer.reset(obs=observed(5), mask=first)
        with pytest.raises(ValueError, match=f"{BROKEN_OFF} in environment 1"):
            step(writer, 6)
        writer.reset(obs=observed(5), mask=~first)
        step(writer, 6)
    assert_true(buffer)


def test_a_step_of_lanes_that_fails_before_its_first_row_may_be_made_again():
    buffer = buffer_with_room_for(200)
    with buffer.writer(num_envs=10) as writer:
        writer.reset(obs=observed(0, 10))
        for number in itertools.count(1):
            written = writer.rows
            try:
                step(writer, number, 10)
            except tr.WouldBlockForever:
                break
        assert writer.rows == written
        draw_what_may_be(buffer)
        step(writer, number, 10)
        step(writer, number + 1, 10)
    assert_true(buffer)
    assert len(pairs(buffer)) == 10 * (number + 1)


def test_an_episode_that_was_written_half_is_followed_by_a_reset_or_a_whole_one():
    buffer = buffer_with_room_for(120)
    with buffer.writer() as writer:
        no = np.zeros(500, bool)
        episode = {"action": no.astype(int), "reward": no.astype(float), "terminated": no, "truncated": no}
        with pytest.raises(tr.WouldBlockForever):
            writer.extend(obs=np.arange(501)[:, None].repeat(2, axis=1), **episode)
        draw_what_may_be(buffer)
        values = {"action": 0, "reward": 0.0, "terminated": False, "truncated": False}
        with pytest.raises(ValueError, match=BROKEN_OFF):
            writer.step(obs=np.full(2, 501.0), **values)
        whole = {name: value[:2] for name, value in episode.items()}
        writer.extend(obs=np.array([[600, 0], [601, 0], [602, 0]]), **whole)
        writer.step(obs=np.full(2, 603.0), **values)
    assert_true(buffer)
    assert pairs(buffer)[-3:] == [(600, 601), (601, 602), (602, 603)]


def write_and_draw_in_turns(tolerance):
    """As many draws as the ratio asks for, after every step but the first ones."""
    limiter = tr.SamplesPerInsert(8.0, min_size=5 * MANY, tolerance=tolerance)
    buffer = buffer_of(tr.Transitions(), capacity=10_000, limiter=limiter)
    with buffer.writer(num_envs=MANY) as writer:
        writer.reset(obs=observed(0))
        for number in range(1, 31):
            step(writer, number)
            if number > 5:
                for _ in range(8):
                    buffer.sample(MANY)


def test_a_program_of_one_thread_needs_a_tolerance_with_room_for_the_rows_of_a_call():
    with pytest.raises(tr.WouldBlockForever, match="a tolerance with room for all rows of a call"):
        write_and_draw_in_turns(tolerance=0.1)
    write_and_draw_in_turns(tolerance=0.2)

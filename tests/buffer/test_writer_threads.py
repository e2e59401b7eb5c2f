"""A writer of linked rows belongs to one thread from an episode's beginning to its end."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from linked_rows import buffer_of, observation, pairs

import torchreplay as tr

STEP = {"action": 0, "reward": 0.0, "terminated": False, "truncated": False}
END = STEP | {"truncated": True}
REFUSAL = r"another thread is in the middle of an episode .*buffer.writer\(\) in each thread, or reset\(\) here"


@pytest.fixture
def buffer():
    return buffer_of(tr.Transitions())


@pytest.fixture
def elsewhere():
    """Runs a call in another thread, always the same, and returns what it returns."""
    with ThreadPoolExecutor(1) as other:
        yield lambda call, *args, **values: other.submit(call, *args, **values).result()


def several(*numbers):
    return np.repeat(np.array(numbers, np.float32)[:, None], 2, axis=1)


def steps(*ends):
    no = np.zeros(len(ends), bool)
    return {"action": no.astype(int), "reward": no.astype(float), "terminated": np.array(ends), "truncated": no}


def test_a_step_of_another_thread_in_the_middle_of_an_episode_is_refused_and_writes_nothing(buffer, elsewhere):
    with buffer.writer() as writer:
        writer.reset(**observation(0))
        for number in (1, 2):
            with pytest.raises(ValueError, match=REFUSAL):
                elsewhere(writer.step, **observation(90), **STEP)
            writer.step(**observation(number), **STEP)
    assert pairs(buffer) == [(0, 1), (1, 2)]


def test_two_threads_that_play_an_environment_each_with_one_writer_join_none_of_their_episodes(buffer):
    writer, turns, refused = buffer.writer(), [threading.Semaphore(1), threading.Semaphore(0)], []

    def explore(number):
        for t in range(1, 50):
            turns[number].acquire()
            try:
                if t == 1:
                    writer.reset(**observation(1000 * number))
                else:
                    writer.step(**observation(1000 * number + t - 1), **STEP)
            except ValueError as error:
                refused.append((number, str(error)))
            turns[1 - number].release()

    threads = [threading.Thread(target=explore, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pairs(buffer) == [(1000 + t, 1001 + t) for t in range(48)], "of the thread that began last"
    assert {number for number, _ in refused} == {0}


def test_an_episode_may_be_handed_over_when_it_has_ended_or_by_a_reset_of_the_new_thread(buffer, elsewhere):
    with buffer.writer() as writer:
        writer.reset(**observation(0))
        writer.step(**observation(1), **END)
        elsewhere(writer.reset, **observation(10))
        elsewhere(writer.step, **observation(11), **STEP)
        with pytest.raises(ValueError, match=REFUSAL):
            writer.step(**observation(2), **STEP)
        writer.reset(**observation(20))  # which cuts the other one short
        writer.step(**observation(21), **STEP)
        elsewhere(writer.end_episode)
        elsewhere(writer.reset, **observation(30))
        elsewhere(writer.step, **observation(31), **END)
    assert pairs(buffer) == [(0, 1), (10, 11), (20, 21), (30, 31)]


def test_a_whole_episode_of_another_thread_takes_the_writer_over(buffer, elsewhere):
    episode = {name: np.array([value]) for name, value in STEP.items()} | {"obs": several(10, 11)}
    with buffer.writer() as writer:
        writer.reset(**observation(0))
        elsewhere(writer.extend, **episode)
        with pytest.raises(ValueError, match=REFUSAL):
            writer.step(**observation(1), **STEP)
        elsewhere(writer.step, **observation(12), **STEP)
    assert pairs(buffer) == [(10, 11), (11, 12)]


def test_a_refused_reset_of_another_thread_leaves_the_episode_to_the_first(buffer, elsewhere):
    with buffer.writer() as writer:
        writer.reset(**observation(0))
        with pytest.raises(ValueError, match="missing field"):
            elsewhere(writer.reset)
        writer.step(**observation(1), **STEP)
    assert pairs(buffer) == [(0, 1)]


def test_of_a_vector_environment_all_episodes_belong_to_the_thread_of_those_under_way(buffer, elsewhere):
    with buffer.writer(num_envs=2) as writer:
        writer.reset(obs=several(0, 10))
        writer.step(obs=several(1, 11), **steps(True, False))
        with pytest.raises(ValueError, match=REFUSAL):
            elsewhere(writer.step, obs=several(90, 91), **steps(False, False))
        with pytest.raises(ValueError, match=REFUSAL):
            elsewhere(writer.reset, obs=several(90, 91), mask=np.array([True, False]))
        writer.step(obs=several(20, 12), **steps(False, True))
        writer.step(obs=several(21, 30), **steps(True, False))
        elsewhere(writer.reset, obs=several(40, 50), mask=np.array([True, True]))
        elsewhere(writer.step, obs=several(41, 51), **steps(True, True))
        writer.step(obs=several(60, 70), **steps(False, False))  # in which both begin anew
        writer.step(obs=several(61, 71), **steps(False, False))
    assert pairs(buffer) == [(0, 1), (10, 11), (11, 12), (20, 21), (40, 41), (50, 51), (60, 61), (70, 71)]


def test_a_thread_that_has_ended_leaves_its_episode_to_no_other_thread(buffer):
    with buffer.writer() as writer:
        outcomes = []

        def step(number):
            try:
                outcomes.append(writer.step(**observation(number), **STEP))
            except ValueError as error:
                outcomes.append(str(error))

        calls = [lambda: writer.reset(**observation(0)), lambda: step(1), lambda: step(2)]
        for call in calls:  # each thread likely gets the memory, and so pthread's name, of the one before
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        assert len(outcomes) == 2
        assert all("another thread is in the middle" in str(outcome) for outcome in outcomes)


def test_coroutines_of_one_event_loop_write_an_episode_together(buffer):
    async def explore(writer):
        writer.reset(**observation(0))
        for t in range(1, 4):
            await asyncio.sleep(0)
            await asyncio.create_task(step(writer, t))

    async def step(writer, t):
        writer.step(**observation(t), **STEP)

    with buffer.writer() as writer:
        asyncio.run(explore(writer))
    assert pairs(buffer) == [(0, 1), (1, 2), (2, 3)]


def test_rows_that_are_not_linked_may_come_from_any_thread_in_turn(elsewhere):
    buffer = buffer_of(tr.Rows())
    with buffer.writer() as writer:
        writer.append(**observation(0), **STEP)
        assert elsewhere(writer.append, **observation(1), **STEP) == 1
        assert writer.append(**observation(2), **STEP) == 2

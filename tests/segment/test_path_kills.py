"""Buffers in files whose processes are killed: what was acknowledged is there when they are opened again."""

import logging
import random
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from file_buffers import ALPHA, SPEC, assert_priorities_add_up, image_of, make, rows
from forked import Forked, eventually, shared_counters
from kept_items import ENDS

import torchreplay as tr


def own(path, ready, view):
    buffer = make_numbered(path, view)
    ready[0] = 1
    while buffer:
        signal.pause()


def make_numbered(path, view):
    spec = {**SPEC, "obs": tr.Field(()), "reward": tr.Field(), **ENDS}
    return tr.ReplayBuffer(spec, 3000, view=view, sampler=tr.Prioritized(alpha=ALPHA), path=path, seed=5)


STEPS, EPISODE = 1000, 7
N_STEP, GAMMA = 3, 0.99


def write(path, index, acknowledged):
    """Steps of episodes whose values follow from writer and step; `acknowledged` counts those that were written."""
    buffer = tr.ReplayBuffer.open(path)
    writer, linked = buffer.writer(), not isinstance(buffer.view, tr.Rows)
    for count in range(STEPS):
        number = index * 1_000_000 + count
        values = {"number": number, "wide": {"image": image_of(torch.tensor([number]))[0]}, "reward": float(count % 11)}
        flags = {"terminated": count % EPISODE == EPISODE - 1, "truncated": False}
        if not linked:
            writer.append(**values, **flags, obs=float(count))
        else:
            if count % EPISODE == 0:
                writer.reset(obs=-1.0)
            writer.step(**values, **flags, obs=float(count))
        acknowledged[index] = count + 1
    while writer:
        signal.pause()


def td_of(keys):
    return keys % 13 + 1.0


def learn(path, acknowledged):
    buffer = tr.ReplayBuffer.open(path)
    while True:
        batch = buffer.sample(32)
        buffer.update_priorities(batch, td_of(batch["key"]))
        acknowledged[-1] = 1


def run_and_kill(path, view, chance, writers=2):
    """Starts owner, writers and a learner, kills them all at a random moment; returns what the writers heard."""
    ready, acknowledged = shared_counters(1), shared_counters(writers + 1)
    processes = []
    try:
        if path.exists():
            tr.ReplayBuffer.open(path).close()  # by a process that goes: the next to open it finds nobody
        else:
            processes.append(Forked(own, path, ready, view))
            eventually(lambda: ready[0])
        processes += [Forked(write, path, index, acknowledged) for index in range(writers)]
        processes.append(Forked(learn, path, acknowledged))
        least = chance.randrange(1, STEPS)
        eventually(lambda: all(acknowledged[index] >= least for index in range(writers)) and acknowledged[writers])
        chance.shuffle(processes)
        for process in processes:
            process.signal(signal.SIGKILL)
    finally:
        for process in processes:
            process.kill()
    return [acknowledged[index] for index in range(writers)]


def assert_items_are_whole(view, batch):
    """Every value follows from the number of the item's first step."""
    assert torch.equal(batch["wide"]["image"], image_of(batch["number"])), "torn row"
    count = batch["number"] % 1_000_000
    steps = 1 if isinstance(view, tr.Rows) else N_STEP
    taken = (EPISODE - count % EPISODE).clamp(max=steps)
    assert torch.equal(batch["terminated"], (count + taken) % EPISODE == 0)
    rewards = sum(GAMMA**k * ((count + k) % 11) * (k < taken) for k in range(steps))
    assert torch.allclose(batch["reward"], rewards.float())


def kill_everyone(rounds, view, seed):
    chance = random.Random(seed)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "replay.bin"
            told = run_and_kill(path, view, chance)
            buffer = tr.ReplayBuffer.open(path)
            stats = buffer.stats()
            assert stats.rows_written <= buffer.capacity, "the test is about a ring that never turned"
            assert stats.dropped_rows <= len(told)
            batch = buffer.gather(torch.arange(stats.rows_written))
            assert_items_are_whole(view, batch)
            for index, count in enumerate(told):
                mine = batch["number"][batch["number"] // 1_000_000 == index] - index * 1_000_000
                expect_rows_of(view, mine, count)
            assert_priorities_add_up(buffer)
            assert_leaves_are_given_or_initial(buffer, batch["key"])
            assert (stats.writers, stats.learners) == (0, 0)
            buffer.sample(16)
            buffer.close()


def expect_rows_of(view, mine, count):
    """Every acknowledged row is there, and at most the one being written besides."""
    if isinstance(view, tr.Rows):
        assert mine.tolist() in (list(range(count)), list(range(count + 1)))
        return
    # Items are anchored at the row before; number and flags are of its first step. All but the last two of a tail that
    # has no end are complete.
    episodes_done = count - count % EPISODE
    least = max(episodes_done, count - (N_STEP - 1))
    assert mine.tolist()[:least] == list(range(least))
    assert len(mine) <= count + 1


def assert_leaves_are_given_or_initial(buffer, keys):
    """A leaf is what a TD error made it or, until then, that of some largest priority: one of thirteen values and 1."""
    leaves = buffer._segment.column(-1)[keys % buffer.capacity].double()
    possible = (torch.arange(14.0, dtype=torch.float64).clamp(min=1) + 1e-6) ** ALPHA
    assert bool(((leaves[:, None] - possible).abs().min(1).values < 1e-3).all())
    own_value = (td_of(keys).double() + 1e-6) ** ALPHA
    assert bool(((leaves - own_value).abs() < 1e-3).any()), "no TD error came back"


VIEWS = [tr.Rows(), tr.Transitions(n_step=N_STEP, gamma=GAMMA)]


@pytest.mark.parametrize("view", VIEWS, ids=["rows", "transitions"])
def test_sigkill_of_every_process_loses_at_most_the_row_that_each_writer_was_writing(view):
    kill_everyone(6, view, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("view", VIEWS, ids=["rows", "transitions"])
def test_sigkill_of_every_process_300_times_loses_at_most_the_row_that_each_writer_was_writing(view):
    kill_everyone(300, view, seed=2)


def lap(path, progress):
    buffer = tr.ReplayBuffer.open(path) if path.exists() else make(path, capacity=16)
    number = 0
    while True:
        buffer.extend(**rows(number, 5))
        buffer.sample(4)
        number += 5
        progress[0] += 1


def lap_and_kill(path, rounds, seed):
    chance, progress = random.Random(seed), shared_counters(1)
    for _ in range(rounds):
        progress[0] = 0
        with Forked(lap, path, progress) as process:
            eventually(lambda: progress[0] >= chance.randrange(1, 40), interval=0)
            process.kill()
    with tr.ReplayBuffer.open(path) as buffer:
        batch = buffer.sample(200)
        assert torch.equal(batch["wide"]["image"], image_of(batch["number"])), "torn row"
        assert_priorities_add_up(buffer)
        buffer.extend(**rows(0, 16))
        assert len(buffer) == 16


def test_a_file_whose_only_process_is_killed_again_and_again_while_its_ring_turns_stays_whole(path):
    lap_and_kill(path, 15, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_file_whose_only_process_is_killed_1000_times_while_its_ring_turns_stays_whole(path):
    lap_and_kill(path, 1000, seed=2)


def append_huge_rows(path, progress):
    buffer = tr.ReplayBuffer({"x": tr.Field((1 << 22,), torch.uint8)}, 3, path=path)
    writer, value = buffer.writer(), np.full(1 << 22, 7, np.uint8)
    while True:
        writer.append(x=value)
        progress[0] += 1


def test_rows_that_were_being_written_are_dropped_counted_and_logged(path, caplog):
    progress = shared_counters(1)
    for _ in range(50):  # nearly all of the time goes into copying a row
        path.unlink(missing_ok=True)
        progress[0] = 0
        with Forked(append_huge_rows, path, progress) as writer:
            eventually(lambda: progress[0] > 5, interval=0)
            writer.kill()
        with caplog.at_level(logging.WARNING, "torchreplay"):
            buffer = tr.ReplayBuffer.open(path)
        if buffer.stats().dropped_rows:
            break
    assert buffer.stats().dropped_rows == 1
    assert "dropped 1 rows" in caplog.text
    assert len(buffer) == 2
    assert bool((buffer.sample(8)["x"] == 7).all())
    with buffer.writer() as again:
        for _ in range(3):
            again.append(x=np.zeros(1 << 22, np.uint8))
    assert len(buffer) == 3
    buffer.close()
    caplog.clear()
    assert tr.ReplayBuffer.open(path).stats().dropped_rows == 1, "a total"
    assert caplog.text == ""

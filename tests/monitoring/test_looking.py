"""Looks at a live buffer: they see what is there, change nothing, and leave nothing when they are killed."""

import contextlib
import os
import random
import signal
import time
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from small_queues import STEPS, VIEWS
from watched_buffers import after, content_of, learn_for_ever, look_at, make, write, write_for_ever

import torchreplay as tr
from torchreplay.buffer.jams import Need
from torchreplay.monitoring.advice import advise
from torchreplay.monitoring.slots import sample_slots
from torchreplay.monitoring.survey import choose, survey

SAME = (
    *("inserted", "sampled", "draws", "updated", "stale_updates", "unready_updates", "evicted_unsampled", "redraws"),
    *("drawable", "priority_max", "stopped", "samples_per_insert", "insert_wait", "sample_wait"),
)


def used(capacity=128):
    """A buffer that has seen everything: overwritten rows, late feedback, priorities."""
    buffer = make(capacity, limiter=tr.SamplesPerInsert(1.0, tolerance=1000.0))
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        write(buffer, 40)
        old = buffer.sample(16)
        buffer.update_priorities(old, torch.rand(16, generator=generator))
        write(buffer, 40)
        buffer.update_priorities(old, torch.rand(16, generator=generator) + 0.1)
    return buffer


def test_a_look_sees_the_figures_that_stats_has():
    buffer = used()
    stats = buffer.stats()
    with look_at(buffer) as live:
        now = live.snapshot()
        assert {name: getattr(now, name) for name in SAME} == {name: getattr(stats, name) for name in SAME}
        assert now.stale_updates > 0 < now.evicted_unsampled
        assert (live.fill(now), now.head) == (stats.size, stats.rows_written)
        assert now.limiter == buffer.limiter
        assert live.capacity == buffer.capacity
        assert live.config.sampler == buffer.sampler


def test_rows_that_no_learner_has_looked_at_count_as_held():
    buffer = make(100)
    with look_at(buffer) as live:
        write(buffer, 30)
        now = live.snapshot()
        assert (live.fill(now), now.unseen, now.inserted) == (30, 30, 0)
        write(buffer, 200)
        assert live.fill(live.snapshot()) == 100
        buffer.clear()
        assert live.fill(live.snapshot()) == 0


def test_a_look_sees_the_leaves_and_keys_of_all_slots():
    buffer = used()
    leaves, keys1 = buffer._segment.column(-1), buffer._segment.column(-2)
    with look_at(buffer) as live:
        seen_leaves, seen_keys = live.copy_slots(0, 1 << 40)
        assert np.frombuffer(seen_leaves, np.float32).tolist() == leaves.tolist()
        assert np.frombuffer(seen_keys, np.int64).tolist() == keys1.tolist()
        part = np.frombuffer(live.copy_slots(120, 100)[0], np.float32)
        assert part.tolist() == leaves[120:].tolist()
        assert live.copy_slots(128, 1) == (b"", b"")


def test_looks_change_no_byte_and_count_nobody():
    buffer = used()
    buffer.handle()  # which, as a fork does, notes that others may come
    before = content_of(buffer)
    with look_at(buffer) as live:
        for _ in range(100):
            now = live.snapshot()
        sample_slots(live, now.head)
        live.in_use()
        survey(0.01)
        with Forked(look_once, buffer.name) as other:
            assert other.wait() == 0
    assert content_of(buffer) == before


def look_once(name):
    with choose(name) as live:
        sample_slots(live, live.snapshot().head)


def test_the_mapping_cannot_be_written_to():
    buffer = make()
    inode = os.fstat(buffer._segment.fd).st_ino
    with look_at(buffer):
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f" {inode} " in line]
        assert sorted(line[1] for line in maps) == ["r--s", "rw-s"]  # the look's, and the buffer's own


def test_a_look_sees_who_takes_part_and_who_died():
    buffer = make(limiter=tr.SamplesPerInsert(1.0, min_size=64, tolerance=1.0))
    rows = shared_counters(1)
    with look_at(buffer) as live, Forked(write_for_ever, buffer, rows) as explorer:
        eventually(lambda: any(p.waiting for p in live.snapshot().alive("writer")))  # for a learner: nobody draws
        eventually(lambda: rows[0] > 0)
        (writer,) = live.snapshot().alive("writer")
        assert (writer.pid, writer.rows) == (explorer.pid, rows[0])
        (owner,) = live.snapshot().alive("owner")
        assert owner.pid == os.getpid()
        explorer.kill()
        dead = [p for p in live.snapshot().participants if p.pid == explorer.pid]
        assert [(p.role, p.alive) for p in dead] == [("writer", False)]
        assert live.snapshot().alive("writer") == []


@pytest.mark.parametrize("limiter", [tr.SamplesPerInsert(1.0, min_size=64, tolerance=1.0), tr.Admission(64, 0)])
def test_who_waits_is_seen_waiting_at_every_look(limiter):
    buffer = make(sampler=tr.Fifo() if isinstance(limiter, tr.Admission) else tr.Prioritized(), limiter=limiter)
    with look_at(buffer) as live, Forked(fill, buffer):
        eventually(lambda: any(p.waiting for p in live.snapshot().alive("writer")))
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            (writer,) = live.snapshot().alive("writer")
            assert writer.waiting


def fill(buffer):
    with buffer.writer() as writer:
        while True:
            with writer.admit() if isinstance(buffer.limiter, tr.Admission) else contextlib.nullcontext():
                writer.append(x=[0, 0])


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_learner_is_seen_to_work_and_to_rest(ahead):
    buffer = make()
    write(buffer, 100)
    with look_at(buffer) as live:
        for count, _ in enumerate(tr.ReplayDataset(buffer, 32, steps=3, prefetch=ahead), 1):
            (learner,) = live.snapshot().alive("learner")
            assert (learner.pid, learner.rows) == (os.getpid(), 32 * count)
            assert 0 <= learner.heartbeat < 1


def look_for_ever(name, looks):
    with choose(name) as live:
        while True:
            now = live.snapshot()
            sample_slots(live, now.head)
            live.in_use()
            looks[0] += 1


@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_look_that_is_killed_at_any_moment_leaves_nothing_and_delays_nobody(kills, tally):
    buffer = make(256)
    chance = random.Random(3)
    rows, batches, looks = shared_counters(1), shared_counters(1), shared_counters(1)
    with Forked(write_for_ever, buffer, rows), Forked(learn_for_ever, buffer, batches):
        eventually(lambda: min(rows[0], batches[0]) > 0)
        for _ in range(kills):
            looks[0] = 0
            with Forked(look_for_ever, buffer.name, looks) as watcher:
                enough = chance.randrange(1, 20)
                eventually(lambda n=enough: looks[0] >= n, interval=0)
                watcher.signal(signal.SIGSTOP)  # at any instruction
                written, drawn = rows[0], batches[0]
                eventually(lambda r=written, b=drawn: rows[0] > r and batches[0] > b, timeout=10)
            tally("looks killed", 1)
        stats = buffer.stats()
        assert (stats.writers, stats.learners) == (1, 1)
        with look_at(buffer) as live:
            assert {p.role for p in live.snapshot().participants} == {"owner", "writer", "learner"}


def test_when_all_owners_are_gone_a_look_knows():
    mine, theirs = Pipe()

    def own():
        buffer = make(name=f"mortal {os.getpid()}")
        theirs.send(buffer.name)
        signal.pause()

    with Forked(own) as owner, choose(mine.recv()) as live:
        assert live.in_use()
        owner.kill()
        assert not live.in_use()
        live.snapshot()  # what it held is still there to be read


def test_a_closed_look_refuses_to_look():
    buffer = make()
    live = look_at(buffer)
    live.close()
    live.close()
    with pytest.raises(RuntimeError, match="the reader is closed"):
        live.snapshot()


def test_a_damaged_buffer_is_refused_with_what_is_wrong():
    buffer = make()
    content = bytearray(content_of(buffer))
    at = content.index(b'"capacity"')
    content[at] = ord("x")
    fd = os.memfd_create("torchreplay-replay-buffer-damaged")
    os.write(fd, content)
    inode = os.fstat(fd).st_ino
    (one,) = [one for one in survey(0.0) if one.inode == inode]
    assert "configuration is damaged" in one.trouble
    os.close(fd)


def test_nothing_is_said_of_a_buffer_that_is_well():
    buffer = make()
    write(buffer, 500)
    with look_at(buffer) as live:

        def run():
            for _ in range(20):
                write(buffer, 4)
                buffer.update_priorities(buffer.sample(32), np.random.default_rng(1).random(32))

        assert advise(after(live, run)) == []


# Queues


def hold_for_ever(buffer, items, held):
    held[0] = len(buffer.sample(items)["x"])
    signal.pause()


def test_a_look_sees_who_holds_what_of_a_queue_and_what_keeps_writers_waiting():
    buffer, held = make(100, sampler=tr.Fifo()), shared_counters(1)
    with look_at(buffer) as live:
        now = live.snapshot()
        assert (now.queue.used, now.queue.held_items, now.queue.oldest_age, now.queue.holders) == (0, 0, -1.0, ())
        write(buffer, 60)
        with Forked(hold_for_ever, buffer, 25, held) as other:
            eventually(lambda: held[0] == 25)
            buffer.sample(10)
            stats, now = buffer.stats(), live.snapshot()
            assert (now.drawable, now.queue.held_items) == (stats.drawable, stats.held_items) == (25, 35)
            assert now.queue.oldest_age == pytest.approx(stats.oldest_age, abs=0.2)
            holders = {holder.pid: (holder.items, holder.alive) for holder in now.queue.holders}
            assert holders == {other.pid: (25, True), os.getpid(): (10, True)}
            assert (now.queue.need, now.queue.needed_pid, live.fill(now)) == (Need.NONE, 0, 60)
            write(buffer, 40)
            now = live.snapshot()
            assert (now.queue.need, now.queue.needed_pid, live.fill(now)) == (Need.HELD, other.pid, 100)
            other.kill()
            assert {holder.pid: holder.alive for holder in live.snapshot().queue.holders}[other.pid] is False
        buffer.sample(1)  # which finds the death: the oldest is back, and this process has it
        assert live.snapshot().queue.needed_pid == os.getpid()
        buffer.commit()
        now = live.snapshot()
        assert (now.queue.need, now.queue.used) == (Need.NONE, 89)


def test_a_look_sees_what_a_queue_has_dropped_and_the_age_of_the_oldest():
    buffer = make(10, sampler=tr.Fifo(when_full="drop_oldest"))
    with look_at(buffer) as live:
        write(buffer, 10)
        buffer.stats()  # a look, with which they came
        write(buffer, 7)
        stats, now = buffer.stats(), live.snapshot()
        assert now.dropped_items == stats.dropped_items == 7
        assert now.queue.oldest_age == pytest.approx(stats.oldest_age, abs=0.2)
        assert live.fill(now) == 10
        assert now.queue.need == Need.NONE


@pytest.mark.parametrize("view", [*VIEWS.values(), tr.Sequences(3, across_episodes=True), tr.Rows()], ids=str)
def test_a_look_sees_the_items_that_wait_though_no_learner_has_looked(view):
    """As many as a buffer has that keeps them all, less those drawn."""
    chance, linked = random.Random(3), not isinstance(view, tr.Rows)
    queue = tr.ReplayBuffer(STEPS, 60, view=view, sampler=tr.Fifo(), name=f"waits {os.getpid()}")
    with queue, tr.ReplayBuffer(STEPS, 5000, view=view) as everything, look_at(queue) as live:
        pairs, in_episode, drawn, unseen = [(queue.writer(), everything.writer()) for _ in range(2)], [False] * 2, 0, 0
        for _ in range(800):
            who, looks = chance.randrange(2), chance.random() < 0.04
            now = live.snapshot()
            assert now.to_draw == everything.num_items - drawn
            assert (now.queue.oldest_age >= 0) == (now.to_draw > 0)
            unseen = max(unseen, now.to_draw - now.drawable)
            if now.queue.used > 50 or (looks and now.to_draw):
                drawn += len(queue.sample(chance.randint(1, 20), at_least=1)["key"])
                queue.commit()
                continue
            ends = chance.random() < 0.1
            values = {"obs": 0, "action": 0, "reward": 0.0, "terminated": ends, "truncated": False}
            for writer in pairs[who]:
                if not linked:
                    writer.append(**values)
                elif not in_episode[who]:
                    writer.reset(obs=0)
                else:
                    writer.step(**values)
            in_episode[who] = not in_episode[who] or not ends
        assert unseen > 5
        assert drawn > 100
        assert queue.stats().drawable == live.snapshot().to_draw


@pytest.mark.parametrize("view", [tr.Rows(), tr.Transitions(n_step=2)], ids=str)
def test_the_age_of_the_oldest_counts_from_when_it_was_written_and_not_from_the_first_look(view):
    queue = tr.ReplayBuffer(STEPS, 60, view=view, sampler=tr.Fifo(), name=f"ages {os.getpid()}")
    with queue, queue.writer() as writer, look_at(queue) as live:

        def write():
            values = {"action": 0, "reward": 0.0, "truncated": False}
            if isinstance(view, tr.Rows):
                return [writer.append(obs=0, terminated=False, **values) for _ in range(3)]
            writer.reset(obs=0)
            return [writer.step(obs=0, terminated=k == 2, **values) for k in range(3)]

        def check(begin, end):
            """Written between these two, though clocks of that kind may lag by some milliseconds."""
            for age in (live.snapshot().queue.oldest_age, queue.stats().oldest_age, live.snapshot().queue.oldest_age):
                now = time.monotonic()
                assert now - end - 0.1 <= age <= now - begin + 0.1

        begin = time.monotonic()
        write()
        end = time.monotonic()
        time.sleep(0.4)  # while nobody looks
        later = time.monotonic()
        write()
        check(begin, end)
        queue.sample(3)
        check(later, time.monotonic())
        assert len(queue.sample(3)["key"]) == 3
        assert live.snapshot().queue.oldest_age == queue.stats().oldest_age == -1.0


def test_a_look_sees_ages_in_versions():
    spec = {"x": tr.Field(), "policy_version": tr.Field((), torch.int64)}
    buffer = tr.ReplayBuffer(spec, 10, sampler=tr.Fifo(max_age=3), name=f"ages {os.getpid()}")
    with look_at(buffer) as live:
        buffer.extend(x=np.zeros(6), policy_version=np.arange(6))
        buffer.policy_version = 5
        assert buffer.sample(4)["age"].tolist() == [3, 2, 1, 0]
        now = live.snapshot()
        assert (now.policy_version, now.ages, now.aged, now.age_max, now.expired_items) == (5, 6, 4, 3, 2)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_look_sees_a_learner_that_waits_for_items(prefetch):
    buffer = make(100, sampler=tr.Fifo())

    def learn():
        for _ in tr.ReplayDataset(buffer, 8, prefetch=prefetch):
            pass

    with look_at(buffer) as live, buffer.expect_writers(), Forked(learn) as learner:
        eventually(lambda: any(p.waiting and p.pid == learner.pid for p in live.snapshot().alive("learner")))
        assert buffer._segment.queue_state(False)["waiting"] == 0  # of the writers


def test_rows_in_use_are_those_that_somebody_needs_however_often_the_ring_turns():
    buffer, held = make(100, sampler=tr.Fifo()), shared_counters(1)
    with look_at(buffer) as live:
        write(buffer, 30)
        with Forked(hold_for_ever, buffer, 10, held):
            eventually(lambda: held[0] == 10)
            for _ in range(60):  # twelve turns
                buffer.sample(20)
                buffer.commit()
                write(buffer, 20)
                assert live.fill(live.snapshot()) == 10 + 20
            buffer.sample(20)
            buffer.commit()
            assert live.fill(live.snapshot()) == 10
            write(buffer, 90)
            assert live.fill(live.snapshot()) == 100


@pytest.mark.parametrize(
    ("view", "unfinished"),  # the rows of an episode of three rows that items to come need
    [
        (tr.Transitions(), 1),
        (tr.Transitions(n_step=3), 3),
        (tr.Transitions(stack={"obs": 3}), 3),
        (tr.Sequences(length=4), 3),
        (tr.Sequences(length=4, burn_in=2), 3),
        (tr.Sequences(length=4, stride=1), 3),
    ],
    ids=str,
)
def test_rows_in_use_are_those_of_items_that_are_to_be_drawn_held_or_unfinished(view, unfinished):
    flag = tr.Field((), torch.bool)
    spec = {"obs": tr.Field(), "reward": tr.Field(), "terminated": flag, "truncated": flag}
    with tr.ReplayBuffer(spec, 100, view=view, sampler=tr.Fifo(), name=f"steps {os.getpid()}") as buffer:

        def rows_in_use():
            len(buffer)  # a look, with which rows become items
            return live.fill(live.snapshot())

        def step(writer, last=False):
            writer.step(obs=0.0, reward=0.0, terminated=last, truncated=False)

        with look_at(buffer) as live, buffer.writer() as slow, buffer.writer() as fast:
            slow.reset(obs=0.0)
            step(slow)
            step(slow)
            assert rows_in_use() == 3
            if buffer.num_items:
                buffer.commit(buffer.sample(buffer.num_items))
            assert rows_in_use() == unfinished
            for _ in range(40):  # three turns
                fast.reset(obs=0.0)
                for k in range(7):
                    step(fast, k == 6)
                assert rows_in_use() == 8 + unfinished
                batch = buffer.sample(buffer.num_items)
                assert rows_in_use() == 8 + unfinished  # now they are held
                buffer.commit(batch)
                assert rows_in_use() == unfinished

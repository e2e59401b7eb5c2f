"""The queue: every item once, in order, held until its loop is done with it."""

import contextlib
import itertools
import threading
import time

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from small_queues import SPEC, STEPS, queue, values, writing
from two_learners import drawn_by_two_learners

import torchreplay as tr
from torchreplay.buffer import jams


def test_items_come_in_order_and_never_again():
    with queue(items=60) as buffer:
        batch = buffer.sample(25)
        assert values(batch) == list(range(25))
        assert (batch["weight"] == 1).all()
        assert (batch["probability"] == 1).all()
        assert values(buffer.sample(25)) == list(range(25, 50))
        assert values(buffer.sample(25, at_least=1)) == list(range(50, 60))
        assert buffer.num_items == 0


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
@pytest.mark.parametrize(("capacity", "size"), [(50, 8), (64, 64), (100, 7), (33, 1)])
def test_a_loop_gets_all_in_order_and_ends_with_a_shorter_batch(prefetch, capacity, size):
    with queue(capacity) as buffer:
        thread = writing(buffer, range(1003))
        got = [values(batch) for batch in tr.ReplayDataset(buffer, size, prefetch=prefetch)]
        thread.join()
        assert [number for batch in got for number in batch] == list(range(1003))
        assert {len(batch) for batch in got[:-1]} == {size}
        assert list(tr.ReplayDataset(buffer, size, prefetch=prefetch)) == []


@pytest.mark.parametrize("prefetch", [0, 3])
def test_what_is_drawn_ahead_and_not_asked_for_comes_first_in_the_next_loop(prefetch):
    with queue(items=60) as buffer:
        got = []
        for _ in range(7):
            for batch in tr.ReplayDataset(buffer, 5, prefetch=prefetch):
                got += values(batch)
                break
        assert got == list(range(35))
        assert buffer.stats().held_items == 0


def test_what_a_loop_holds_is_done_when_it_asks_for_more():
    with queue(items=60) as buffer:
        buffer.sample(10)
        assert (buffer.stats().held_items, buffer.num_items) == (10, 50)
        buffer.sample(20)
        assert (buffer.stats().held_items, buffer.num_items) == (20, 30)
        assert buffer.commit() == 20
        assert buffer.stats().held_items == 0


def test_loops_of_two_threads_do_not_end_each_others_batches():
    with queue(items=60) as buffer:
        buffer.sample(10)
        sampled, over = threading.Event(), threading.Event()

        def learn():
            buffer.sample(5)
            buffer.sample(5)
            sampled.set()
            over.wait()

        thread = threading.Thread(target=learn)
        thread.start()
        sampled.wait()
        assert buffer.stats().held_items == 15
        over.set()
        thread.join()
        eventually(lambda: buffer.stats().held_items == 10)  # what a thread holds goes back when it ends
        assert values(buffer.sample(7)) == [*range(15, 20), 20, 21]


@pytest.mark.parametrize("end", [tr.ReplayBuffer.release, tr.ReplayBuffer.commit])
def test_what_a_loop_has_ended_by_hand_is_the_next_ones_alone(end):
    with queue(items=20, max_draws=2) as buffer:
        assert end(buffer, buffer.sample(4)) == 4  # both times the items come again
        with contextlib.suppress(FloatingPointError), buffer.claim(4) as batch:
            assert values(batch) == [0, 1, 2, 3]
            assert values(buffer.sample(2)) == [4, 5]  # which ends what its loop had before
            assert buffer.stats().held_items == 6
            raise FloatingPointError
        assert values(buffer.sample(4)) == [0, 1, 2, 3]


def test_threads_that_give_back_what_they_draw_keep_nothing():
    with queue(items=60, max_draws=3) as buffer:

        def learn():
            for _ in range(300):
                buffer.release(buffer.sample(8))

        threads = [threading.Thread(target=learn) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (buffer.stats().held_items, buffer.num_items) == (0, 60)


@pytest.mark.parametrize("max_draws", [1, 2])
def test_loops_of_several_threads_end_and_hold_nothing(max_draws):
    with queue(256, max_draws=max_draws) as buffer:
        drawn = np.zeros(3000, int)

        def learn():
            for batch in tr.ReplayDataset(buffer, 7, prefetch=2):
                np.add.at(drawn, values(batch), 1)

        writer = writing(buffer, range(3000))
        threads = [threading.Thread(target=learn) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in (writer, *threads):
            thread.join()
        assert (drawn == max_draws).all()
        assert buffer.stats().held_items == 0


def test_a_batch_that_does_not_arrive_goes_back():
    with queue(items=20) as buffer:
        assert values(buffer.sample(4)) == [0, 1, 2, 3]
        with pytest.raises((RuntimeError, AssertionError, ValueError)):
            buffer.sample(4, device="cuda:99")
        assert values(buffer.sample(4)) == [4, 5, 6, 7]
        with pytest.raises(ValueError, match="no 'key'"):
            buffer.commit({"x": 1})


def test_an_iteration_that_cannot_go_on_says_so():
    with tr.ReplayBuffer(SPEC, 100, sampler=tr.Fifo(), limiter=tr.MinSize(10)) as buffer:
        buffer.extend(x=np.arange(5))
        for prefetch in (0, 2):
            with pytest.raises(tr.WouldBlockForever, match="5 items were inserted, 10 are needed"):
                next(iter(tr.ReplayDataset(buffer, 2, prefetch=prefetch)))


def test_by_hand_only_commit_ends_what_is_held():
    with queue(items=60, commit="manual") as buffer:
        batches = [buffer.sample(10) for _ in range(3)]
        assert buffer.stats().held_items == 30
        assert buffer.commit(batches[1]) == 10
        assert buffer.release(batches[0]["key"]) == 10
        assert values(buffer.sample(12)) == [*range(10), 30, 31]
        assert buffer.commit() == 22
        for batch in tr.ReplayDataset(buffer, 9):
            assert values(batch)[0] >= 32
        assert buffer.stats().held_items == 28
        assert buffer.release() == 28
        assert values(buffer.sample(3)) == [32, 33, 34]


@pytest.mark.parametrize("end", ["commit", "release"])
def test_a_batch_whose_items_were_overwritten_ends_without_them_though_newer_ones_are_held_in_their_slots(end):
    with queue(8, items=8, commit="manual", when_full="drop_oldest") as buffer:
        batch = buffer.sample(8)
        buffer.extend(x=np.arange(8, 14))
        newer = buffer.sample(6)  # in the slots of the first six
        assert getattr(buffer, end)(batch) == 2
        with pytest.raises(ValueError, match="key 0 at index 0 is of no item that this process holds"):
            getattr(buffer, end)(batch)
        assert getattr(buffer, end)(newer) == 6
        assert buffer.stats().held_items == 0


def fail_in_a_claim(buffer, expected):
    with buffer.claim(5) as batch:
        assert values(batch) == expected
        raise ZeroDivisionError


def test_a_claim_is_done_at_its_end_and_back_after_an_exception():
    with queue(items=20) as buffer:
        with buffer.claim(5) as batch:
            assert values(batch) == [0, 1, 2, 3, 4]
            with pytest.raises(RuntimeError, match="within another claim"), buffer.claim(1):
                pass
            assert values(buffer.sample(2)) == [5, 6]
        assert buffer.stats().held_items == 2
        with pytest.raises(ZeroDivisionError):
            fail_in_a_claim(buffer, [7, 8, 9, 10, 11])
        with buffer.claim(50, at_least=3) as batch:
            assert values(batch) == list(range(7, 20))


def test_an_item_comes_as_often_as_max_draws_says_each_time_when_it_is_done():
    with queue(items=6, max_draws=3) as buffer:
        assert [values(buffer.sample(3)) for _ in range(6)] == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
        buffer.commit()
        assert buffer.num_items == 0


def test_a_writer_waits_for_room_and_goes_on_when_there_is_some():
    with queue(10) as buffer:
        thread = writing(buffer, range(25))
        eventually(lambda: len(buffer) == 10)
        assert buffer.stats().rows_written == 10
        assert values(buffer.sample(4)) == [0, 1, 2, 3]
        assert buffer.stats().rows_written == 10  # they are held
        assert values(buffer.sample(4)) == [4, 5, 6, 7]
        eventually(lambda: buffer.stats().rows_written == 14)
        got = []
        while len(got) < 17:
            got += values(buffer.sample(5, at_least=1))
        thread.join()
        assert got == list(range(8, 25))


def test_the_oldest_are_dropped_and_counted():
    with queue(10, when_full="drop_oldest", items=10) as buffer:
        buffer.extend(x=np.arange(10, 37))
        assert values(buffer.sample(4)) == [27, 28, 29, 30]
        assert buffer.stats().dropped_items + 10 == buffer.stats().inserted
        held = buffer.sample(2)
        buffer.extend(x=np.arange(37, 60))
        assert buffer.commit(held) == 0
        assert values(buffer.sample(20, at_least=1)) == list(range(50, 60))


@pytest.mark.parametrize("capacity", [1, 2, 10, 1000])
@pytest.mark.parametrize("rows", ["one by one", "in a call", "in calls"])
def test_items_that_are_overwritten_before_anybody_looks_are_counted(capacity, rows):
    with queue(capacity, when_full="drop_oldest") as buffer:
        n = 7 * capacity // 2
        if rows == "one by one":
            with buffer.writer() as writer:
                for number in range(n):
                    writer.append(x=number)
        else:
            for part in np.array_split(np.arange(n), 1 if rows == "in a call" else 5):
                buffer.extend(x=part)
        stats = buffer.stats()
        assert (stats.inserted, stats.dropped_items, stats.drawable) == (n, n - capacity, capacity)
        assert values(buffer.sample(capacity)) == list(range(n - capacity, n))


@pytest.mark.parametrize("view", [tr.Transitions(n_step=2), tr.Sequences(3, stride=2)])
def test_items_of_several_rows_that_are_overwritten_before_anybody_looks_are_counted(view):
    steps = {"action": np.zeros(6, np.int64), "reward": np.zeros(6), "terminated": [False] * 6}
    with queue(20, spec=STEPS, view=view, when_full="drop_oldest") as buffer:
        for _ in range(30):
            buffer.extend(obs=np.zeros(7, np.int64), truncated=[False] * 5 + [True], **steps)
        items = 6 if isinstance(view, tr.Transitions) else 3  # of each episode
        assert buffer.stats().inserted == 30 * items
        assert buffer.stats().dropped_items == 30 * items - buffer.num_items


def write_until_told(buffer, told):
    with buffer.writer() as writer:
        row = np.zeros(30_000, np.int64)
        while not told[0]:
            writer.append(x=row)
            told[1] += 1


def test_items_that_are_overwritten_while_a_draw_copies_them_are_counted():
    spec = {"x": tr.Field(30_000, "int64")}
    with queue(40, spec=spec, when_full="drop_oldest") as buffer:
        told, drawn = shared_counters(2), 0
        with Forked(write_until_told, buffer, told) as writer:
            while buffer.stats().redraws < 20:
                drawn += len(buffer.sample(30)["key"])
            told[0] = 1
            writer.wait()
        while buffer.num_items:
            drawn += len(buffer.sample(30, at_least=1)["key"])
        assert buffer.stats().inserted == told[1]
        assert buffer.stats().dropped_items == told[1] - drawn


def test_rows_of_any_length_that_are_overwritten_before_anybody_looks_are_counted():
    spec, random = {"tokens": tr.Ragged(torch.int32)}, np.random.default_rng(0)
    with tr.ReplayBuffer(spec, 50, sampler=tr.Fifo(when_full="drop_oldest"), ragged_bytes=1 << 14) as buffer:
        lengths = random.integers(0, 1024, 400)  # a quarter of the bytes at the most
        buffer.extend(tokens=[np.zeros(n, np.int32) for n in lengths])
        assert buffer.stats().inserted == 400
        assert buffer.stats().dropped_items == 400 - len(buffer)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("max_draws", [1, 2])
def test_several_learners_and_writers_in_processes_get_every_item_as_often_as_it_is_to_come(
    prefetch, max_draws, monkeypatch
):
    monkeypatch.setattr("torchreplay.segment.waits.RETURN_GRACE", 0.3)  # no writer comes again
    with queue(64, max_draws=max_draws) as buffer:
        drawn = drawn_by_two_learners(buffer, 2000, lambda number: {"x": number}, values, 16, prefetch)
        assert sum(drawn) == 2000 * max_draws
        if max_draws == 1:
            assert set(drawn) == {1}


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_end_of_a_loop_waits_once_for_writers_to_come_back(prefetch, monkeypatch):
    grace = 1.0
    monkeypatch.setattr("torchreplay.segment.waits.RETURN_GRACE", grace)
    with queue(64) as buffer:
        with Forked(lambda: buffer.extend(x=list(range(5)))) as writer:
            assert writer.wait() == 0
        loop, began = iter(tr.ReplayDataset(buffer, 3, prefetch=prefetch)), time.monotonic()
        assert [values(batch) for batch in loop] == [[0, 1, 2], [3, 4]]
        assert grace <= time.monotonic() - began < 2 * grace


def test_long_items_of_several_processes_come_whole_from_and_to_odd_addresses():
    bytes_each, most, held = 143_361, 600, 500  # more than a turn of a ring that no cache holds
    pattern = np.random.default_rng(0).integers(0, 256, bytes_each + most, np.uint8)
    with queue(held, spec={"x": tr.Field((bytes_each,), torch.uint8), "number": tr.Field((), "int64")}) as buffer:

        def write(first):
            with buffer.writer() as writer:
                for number in range(first, most, 6):
                    numbers = np.arange(number, min(number + 3, most))
                    writer.extend(x=np.stack([pattern[k : k + bytes_each] for k in numbers]), number=numbers)

        lease = buffer.expect_writers()
        with Forked(write, 0) as one, Forked(write, 3) as two:
            seen = []
            while len(seen) < most:
                batch = buffer.sample(7, at_least=1)
                for item, number in zip(batch["x"].numpy(), batch["number"].tolist(), strict=True):
                    assert np.array_equal(item, pattern[number : number + bytes_each])
                    seen.append(number)
            assert one.wait() == two.wait() == 0
            lease.close()
        assert sorted(seen) == list(range(most))


def test_a_large_queue_turns_many_times_and_stays_exact():
    rng = np.random.default_rng(0)
    with queue(1000) as buffer:
        written, drawn = 0, 0
        for _ in range(3000):
            room = 1000 - (written - drawn)
            n = int(rng.integers(0, room + 1))
            if n:
                buffer.extend(x=np.arange(written, written + n))
                written += n
            if written > drawn:
                m = int(rng.integers(1, written - drawn + 1))
                assert values(buffer.sample(m)) == list(range(drawn, drawn + m))
                buffer.commit()
                drawn += m


# Waits that cannot end


def test_unfinished_episodes_that_fill_the_ring_are_named_with_a_capacity_that_does():
    with queue(12, view=tr.Sequences(length=8), spec=STEPS) as buffer:

        def write():
            writer = buffer.writer(num_envs=4)
            obs, flags = np.zeros(4, "int64"), np.zeros(4, bool)
            writer.reset(obs=obs)
            for _ in range(2):
                writer.step(obs=obs, action=obs, reward=obs, terminated=flags, truncated=flags)
            with pytest.raises(tr.WouldBlockForever, match=r"unfinished episodes of 4 environments.*at least 40"):
                writer.step(obs=obs, action=obs, reward=obs, terminated=flags, truncated=flags)

        thread = threading.Thread(target=write)
        thread.start()
        with pytest.raises(tr.WouldBlockForever):
            buffer.sample(1)
        thread.join()


def explore_by_writers_of_one_thread(buffer):
    writers = [buffer.writer() for _ in range(4)]
    for writer in writers:
        writer.timeout = 10
        writer.reset(obs=0)
    for writer in itertools.cycle(writers):
        writer.step(obs=0, action=0, reward=0.0, terminated=False, truncated=False)


@pytest.mark.parametrize("beside_a_learner", [False, True])
def test_unfinished_episodes_of_writers_of_one_thread_are_named_alike(beside_a_learner):
    with queue(12, view=tr.Sequences(length=8), spec=STEPS) as buffer:
        learner = Forked(lambda: buffer.sample(1, timeout=60)) if beside_a_learner else contextlib.nullcontext()
        said = "unfinished episodes of 4 environments fill the 12 rows.*a capacity of at least 40"
        with learner:
            eventually(lambda: buffer.stats().learners == beside_a_learner)
            with pytest.raises(tr.WouldBlockForever, match=said):
                explore_by_writers_of_one_thread(buffer)


def test_a_learner_that_has_written_itself_finds_unfinished_episodes_that_fill_the_ring(monkeypatch):
    monkeypatch.setattr(jams, "RETURN_GRACE", 0.1)
    with queue(12, view=tr.Sequences(length=8), spec=STEPS) as buffer:
        over = np.arange(8) == 7
        buffer.extend(
            obs=np.arange(9), action=np.arange(8), reward=np.zeros(8), terminated=over, truncated=np.zeros(8, bool)
        )
        buffer.sample(1)

        def write():
            obs, flags = np.zeros(4, "int64"), np.zeros(4, bool)
            with contextlib.suppress(tr.Stopped), buffer.writer(num_envs=4) as writer:
                writer.reset(obs=obs)
                while True:
                    writer.step(obs=obs, action=obs, reward=obs, terminated=flags, truncated=flags)

        thread = threading.Thread(target=write)
        thread.start()
        with pytest.raises(tr.WouldBlockForever, match="a capacity of at least 40"):
            buffer.sample(1, timeout=10)
        buffer.stop()
        thread.join()


@pytest.mark.parametrize("first", ["writer", "learner"])
@pytest.mark.parametrize(("asked", "capacity"), [(1, 4 * (9 + 1)), (6, 4 * (9 + 1) + 2 * 8)])
def test_a_jam_names_the_same_capacity_whoever_finds_it(first, asked, capacity, monkeypatch):
    # Four unfinished items of nine rows, each with one row more; of six items two take a stride of eight beside.
    monkeypatch.setattr("torchreplay.buffer.jams.IN_VAIN", 0.2 if first == "writer" else 1e9)
    monkeypatch.setattr("torchreplay.buffer.jams.RETURN_GRACE", 0.1 if first == "learner" else 1e9)
    with queue(12, view=tr.Sequences(length=8), spec=STEPS) as buffer:
        writer, said = buffer.writer(num_envs=4), []

        def write():
            eventually(lambda: buffer._segment.queue_state(False)["lacking"] == asked)
            obs, flags = np.zeros(4, "int64"), np.zeros(4, bool)
            try:
                with writer:
                    writer.reset(obs=obs)
                    for _ in range(3):
                        writer.step(obs=obs, action=obs, reward=obs, terminated=flags, truncated=flags)
            except (tr.WouldBlockForever, tr.Stopped) as error:
                said.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        with pytest.raises(tr.WouldBlockForever) as caught:
            buffer.sample(asked)
        buffer.stop()
        thread.join()
        error = said[0] if first == "writer" else caught.value
        assert f"a capacity of at least {capacity}" in str(error)


@pytest.mark.parametrize("taken", [False, True], ids=["lock is free", "lock is taken at each third look"])
def test_a_learner_that_holds_what_the_writers_need_is_told(monkeypatch, taken):
    monkeypatch.setattr(jams, "RETURN_GRACE", 0.5)
    look, looks = jams.queue_state, itertools.count()
    if taken:
        monkeypatch.setattr(jams, "queue_state", lambda *given: look(*given) if next(looks) % 3 else None)
    with queue(20, commit="manual") as buffer:
        thread = writing(buffer, range(40))
        buffer.sample(15)
        with pytest.raises(tr.WouldBlockForever, match=r"10 items are asked for, 5 can be drawn.*holds 15.*least 25"):
            buffer.sample(10, timeout=30 if taken else None)
        buffer.commit()
        buffer.sample(20)
        buffer.commit()
        buffer.sample(5)
        thread.join()


def test_the_end_says_how_many_are_left():
    with queue(items=5) as buffer:
        with pytest.raises(tr.WouldBlockForever, match="5 can be drawn"):
            buffer.sample(6)
        assert values(buffer.sample(6, at_least=1)) == [0, 1, 2, 3, 4]


# Bad input


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"max_draws": 0}, "max_draws"),
        ({"max_draws": -1}, "max_draws"),
        ({"max_draws": 1.5}, "max_draws"),
        ({"max_draws": True}, "max_draws"),
        ({"when_full": "drop"}, "when_full"),
        ({"commit": "never"}, "commit"),
        ({"window": 0}, "window"),
        ({"window": 2.0}, "window"),
    ],
)
def test_a_bad_queue_is_refused(given, match):
    with pytest.raises((ValueError, TypeError), match=match):
        tr.Fifo(**given)


def test_what_contradicts_a_queue_is_refused():
    with pytest.raises(ValueError, match="SamplesPerInsert"):
        tr.ReplayBuffer(SPEC, 100, sampler=tr.Fifo(), limiter=tr.SamplesPerInsert(1.0, 10))
    with pytest.raises(ValueError, match="full before the first draw"):
        tr.ReplayBuffer(SPEC, 100, sampler=tr.Fifo(), limiter=tr.MinSize(101))
    with queue() as buffer, pytest.raises(ValueError, match="SamplesPerInsert"):
        buffer.limiter = tr.SamplesPerInsert(1.0, 10)
    with tr.ReplayBuffer(SPEC, 100) as buffer:
        buffer.extend(x=np.arange(5))
        for call in (buffer.commit, buffer.release, lambda: buffer.sample(2, at_least=1), buffer.claim(1).__enter__):
            with pytest.raises(ValueError, match="Fifo"):
                call()


def test_what_is_not_held_is_neither_committed_nor_released():
    with queue(items=20) as buffer, queue(items=20) as other:
        batch, theirs = buffer.sample(5), other.sample(5)
        for call in (buffer.commit, buffer.release):
            with pytest.raises(ValueError, match="another buffer"):
                call(theirs)
        assert buffer.release(batch) == 5
        for call in (buffer.commit, buffer.release):
            with pytest.raises(ValueError, match="key 0 at index 0 is of no item that this process holds"):
                call(batch)
        for bad in (0, 6, -1, True, 2.5):
            with pytest.raises((ValueError, TypeError), match="at_least"):
                buffer.sample(5, at_least=bad)
        with pytest.raises(ValueError, match="batch_size is 101"):
            buffer.sample(101)


def test_td_errors_are_checked_and_ignored():
    with queue(items=20) as buffer:
        batch = buffer.sample(5)
        with pytest.warns(UserWarning, match=r"Fifo\(\), which ignores them"):
            buffer.update_priorities(batch, torch.ones(5))
        with pytest.raises(ValueError, match="NaN"):
            buffer.update_priorities(batch, torch.full((5,), float("nan")))
        assert values(buffer.sample(2)) == [5, 6]

"""Admission: no item is begun that would be too old when it is drawn, and nothing that is given up is kept from others.

What may be begun is the formula of AReaL (https://arxiv.org/abs/2505.24298, section 5.1), restated in `Model`.
"""

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading

import pytest
import torch
from forked import Forked, eventually, shared_counters

import torchreplay as tr
from torchreplay.buffer.admitted_items import AdmittedItems
from torchreplay.explorers import ExplorerContext

SPEC = {"x": tr.Field((), torch.int64), "policy_version": tr.Field((), torch.int64)}


def queue_of(batch_size, max_age, capacity=256, path=None, sampler=tr.Fifo()):  # noqa: B008  it is immutable
    limiter = tr.Admission(batch_size=batch_size, max_age=max_age)
    return tr.ReplayBuffer(SPEC, capacity, sampler=sampler, limiter=limiter, path=path)


def write(writer, n=1, x=0):
    for _ in range(n):
        with writer.admit(timeout=0):
            writer.append(x=x)


def room(queue):
    """How many items a writer of its own is admitted before it has to wait; they are given back."""
    with queue.writer() as writer:
        blocks = []
        try:
            while len(blocks) < 1000:
                block = writer.admit(timeout=0)
                block.__enter__()
                blocks.append(block)
        except tr.ReplayTimeout:
            pass
        for block in blocks:
            block.__exit__(None, None, None)
        return len(blocks)


class Model:
    """Counts items by what becomes of them, and says how many may be begun."""

    def __init__(self, batch_size, max_age):
        self.batch_size, self.max_age = batch_size, max_age
        self.version = self.begun = 0

    def room(self):
        return max(0, (self.max_age + 1 + self.version) * self.batch_size - self.begun)


@pytest.mark.parametrize("when_full", ["wait", "drop_oldest"])
@pytest.mark.parametrize(("batch_size", "max_age"), [(1, 0), (4, 0), (3, 2), (8, 1)])
def test_whatever_becomes_of_items_as_many_are_admitted_as_the_formula_says(batch_size, max_age, when_full):
    chance, model = random.Random(batch_size * 10 + max_age), Model(batch_size, max_age)
    with queue_of(batch_size, max_age, 32, sampler=tr.Fifo(when_full=when_full)) as queue, queue.writer() as writer:
        for _ in range(250):
            action = chance.choice(["write", "write", "group", "fail", "draw", "draw", "release", "discard"])
            if action == "write" and model.room():
                write(writer)
                model.begun += 1
            elif action == "group" and model.room() >= 2:
                with writer.admit(2, timeout=0):
                    writer.append(x=1)  # of two only one comes about
                model.begun += 1
            elif action == "fail" and model.room():
                with pytest.raises(KeyError), writer.admit(timeout=0):
                    raise KeyError
            elif action == "draw" and queue.num_items >= batch_size:
                ages = queue.sample(batch_size)["age"]
                assert ages.max() <= max_age
                model.version += 1
                queue.policy_version = writer.policy_version = model.version
            elif action == "release" and queue.num_items:
                with pytest.raises(KeyError), queue.claim(1):
                    raise KeyError
            elif action == "discard" and queue.num_items and chance.random() < 0.3:
                oldest = queue.keys()[:1]
                queue.discard(oldest)
                model.begun -= 1
            stats = queue.stats()
            assert stats.admitted_items == model.begun
            assert stats.admission_limit - stats.admitted_items == model.room()
            assert stats.open_admissions == 0
        assert room(queue) == model.room()
        assert model.version > 3


def test_items_that_become_too_old_are_given_back():
    with queue_of(4, 1, sampler=tr.Fifo(max_age=1)) as queue, queue.writer() as writer:
        write(writer, 8)
        queue.sample(4)
        queue.policy_version = 2  # one version was published without a batch: four items expire
        assert queue.stats().expired_items == 4
        assert queue.stats().admitted_items == 4
        assert room(queue) == 12


def test_items_that_were_overwritten_before_they_were_drawn_are_given_back():
    with queue_of(4, 9, capacity=8, sampler=tr.Fifo(when_full="drop_oldest")) as queue, queue.writer() as writer:
        write(writer, 20)
        assert queue.stats().admitted_items == 8
        assert room(queue) == 32


def test_writing_without_being_admitted_is_refused_with_the_line_that_is_missing():
    with queue_of(4, 0) as queue, queue.writer() as writer:
        with pytest.raises(RuntimeError, match=r"0 are admitted.*with writer\.admit\(\):"):
            writer.append(x=1)
        with pytest.raises(RuntimeError, match=r"writing 3 rows.*with writer\.admit\(n\):"):
            queue.extend(x=[1, 2, 3])
        with writer.admit(2):
            writer.extend(x=[1, 2])
            with pytest.raises(RuntimeError, match="0 are admitted"):
                writer.append(x=3)
        assert queue.num_items == 2


def test_blocks_of_one_writer_may_overlap_as_those_of_tasks_do():
    with queue_of(4, 0) as queue, queue.writer() as writer:
        first, second, third = writer.admit(), writer.admit(2), writer.admit()
        for block in (first, second, third):
            block.__enter__()
        writer.append(x=1)
        first.__exit__(None, None, None)
        assert queue.stats().open_admissions == 3
        third.__exit__(None, None, None)  # which failed
        assert queue.stats().open_admissions == 2
        writer.extend(x=[2, 3])
        second.__exit__(None, None, None)
        stats = queue.stats()
        assert (stats.open_admissions, stats.admitted_items) == (0, 3)


def test_a_block_that_was_not_entered_takes_nothing_of_another():
    with queue_of(4, 0) as queue, queue.writer() as writer, writer.admit(2):
        with pytest.raises(RuntimeError, match="has not been entered"):
            writer.admit().__exit__(None, None, None)
        assert queue.stats().open_admissions == 2
        block = writer.admit()
        with block, pytest.raises(RuntimeError, match="has been entered"):
            block.__enter__()
        assert queue.stats().open_admissions == 2


def test_a_block_that_a_signal_ends_before_its_exit_has_begun_is_given_back():
    with queue_of(4, 0) as queue, queue.writer() as writer:

        def interrupt(frame, event, argument):
            if event == "call" and frame.f_code is AdmittedItems.__exit__.__code__:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            sys.setprofile(interrupt)
            try:
                with writer.admit(3):
                    pass
            finally:
                sys.setprofile(None)
        assert queue.stats().open_admissions == 0
        assert room(queue) == 4


def test_async_with_is_refused_with_what_to_write():
    async def generate(writer):
        async with writer.admit():
            pass

    with queue_of(4, 0) as queue, queue.writer() as writer:
        with pytest.raises(TypeError, match=r"with writer\.admit\(timeout=0\):"):
            asyncio.run(generate(writer))
        assert queue.stats().open_admissions == 0


def test_a_writer_that_is_closed_in_its_block_gives_its_items_back():
    with queue_of(4, 0) as queue:
        writer = queue.writer()
        with writer.admit(3):
            writer.close()
            assert queue.stats().open_admissions == 0
        assert room(queue) == 4


def test_a_forked_child_has_none_of_its_parents_items():
    with queue_of(4, 0) as queue, queue.writer() as writer, writer.admit(2):
        refused = shared_counters(1)

        def child():
            with pytest.raises(RuntimeError, match="0 are admitted"):
                writer.append(x=1)
            with writer.admit():
                writer.append(x=2)
            refused[0] = 1

        with Forked(child) as process:
            assert process.wait() == 0
        assert refused[0] == 1
        writer.extend(x=[3, 4])
        assert queue.num_items == 3


@pytest.mark.parametrize("rows", [0, 2])
def test_a_killed_writer_gives_back_what_it_has_not_written(rows):
    with queue_of(4, 0) as queue:
        ready = shared_counters(1)

        def hold():
            writer = queue.writer()
            block = writer.admit(4)
            block.__enter__()
            for _ in range(rows):
                writer.append(x=1)
            ready[0] = 1
            signal.pause()

        with Forked(hold) as process, queue.writer() as writer:
            eventually(lambda: ready[0] == 1)
            with pytest.raises(tr.ReplayTimeout, match="0 items may be admitted"):
                write(writer)
            process.kill()
            with writer.admit(timeout=5):
                assert queue.stats().admitted_items == rows + 1
        eventually(lambda: room(queue) == 4 - rows)


def test_random_deaths_leak_and_double_nothing_and_no_item_is_too_old():
    batch_size, max_age = 4, 1
    with queue_of(batch_size, max_age, 64) as queue:
        chance = random.Random(5)

        def generate():
            fails = random.Random(os.getpid())
            with queue.writer() as writer:
                while True:
                    with writer.admit():
                        writer.policy_version = queue.policy_version
                        if fails.random() < 0.7:
                            writer.append(x=1)

        generators = [Forked(generate) for _ in range(3)]
        try:
            came = 0
            for _ in range(15):
                batch = queue.sample(batch_size, timeout=30)
                came += batch_size
                assert batch["age"].max() <= max_age
                queue.commit()
                queue.policy_version += 1
                index = chance.randrange(3)
                generators[index].kill()
                generators[index] = Forked(generate)
        finally:
            for generator in generators:
                generator.kill()
        eventually(lambda: queue.stats().open_admissions == 0)
        left = queue.num_items
        assert queue.stats().admitted_items == came + left
        assert room(queue) == (max_age + 1 + queue.policy_version) * batch_size - came - left


def generate_one(queue, group):
    with queue.writer() as writer, writer.admit(group):
        writer.extend(x=list(range(group)))


def test_a_spawned_process_is_admitted_too():
    with queue_of(4, 0) as queue:
        process = multiprocessing.get_context("spawn").Process(target=generate_one, args=(queue, 3))
        process.start()
        assert queue.sample(3, timeout=60)["x"].tolist() == [0, 1, 2]
        process.join()
        assert process.exitcode == 0
        assert room(queue) == 1


def test_a_publication_wakes_who_waits_and_a_stop_ends_the_wait():
    with queue_of(2, 0) as queue, queue.writer() as writer:
        write(writer, 2)
        came, ended = threading.Event(), threading.Event()

        def wait():
            with queue.writer() as other:
                with other.admit():
                    other.append(x=7)
                came.set()
                try:
                    with other.admit(2):
                        pass
                except tr.Stopped:
                    ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        queue.sample(2)
        queue.policy_version = 1
        assert came.wait(10)
        queue.stop()
        thread.join(10)
        assert ended.is_set()


def test_a_learner_and_writers_that_wait_for_each_other_are_told():
    with queue_of(8, 0) as queue:
        done = threading.Event()

        def generate(n):
            with queue.writer() as writer:
                try:
                    while not done.is_set():
                        with writer.admit(n):
                            writer.extend(x=[0] * n)
                except tr.Stopped:
                    pass

        thread = threading.Thread(target=generate, args=[1])
        thread.start()
        with pytest.raises(
            tr.WouldBlockForever,
            match=r"16 items are asked for, 8 can be drawn.*writers, of this process,.*at most batch_size",
        ):
            queue.sample(16)
        assert len(queue.sample(8)["x"]) == 8
        queue.policy_version = 1
        assert len(queue.sample(8)["x"]) == 8
        queue.stop()
        thread.join()


@pytest.mark.slow
def test_groups_that_do_not_fit_into_a_batch_are_told():
    with queue_of(8, 0) as queue:
        thread = threading.Thread(target=lambda: write_groups(queue, 3))
        thread.start()
        with pytest.raises(tr.WouldBlockForever, match=r"8 items are asked for, 6 can be drawn.*multiple"):
            queue.sample(8)
        queue.stop()
        thread.join()


def write_groups(queue, n):
    with queue.writer() as writer:
        try:
            while True:
                with writer.admit(n):
                    writer.extend(x=[0] * n)
        except tr.Stopped:
            pass


def test_unfinished_groups_that_use_up_what_is_admitted_are_named():
    spec = {**SPEC, "prompt": tr.Field((), torch.int64)}
    limiter = tr.Admission(batch_size=8, max_age=0)
    with tr.ReplayBuffer(spec, 64, sampler=tr.Fifo(), limiter=limiter) as queue:

        def generate():
            with contextlib.suppress(tr.Stopped), queue.writer() as writer:
                for prompt in (1, 1, 1, 2, 2, 2, 3, 3, 1, 2, 3, 3):
                    with writer.admit():
                        writer.append(x=0, prompt=prompt)

        thread = threading.Thread(target=generate)
        thread.start()
        with pytest.raises(tr.WouldBlockForever, match=r"3 groups have fewer than 4 members.*writer.admit\(4\)"):
            next(iter(tr.GroupDataset(queue, by="prompt", size=4, groups=1)))
        queue.stop()
        thread.join()


def test_after_a_clear_nothing_counts_not_even_what_is_held():
    with queue_of(4, 0) as queue, queue.writer() as writer:
        write(writer, 4)
        with contextlib.suppress(KeyError), queue.claim(4):
            queue.clear()
            raise KeyError
        assert room(queue) == 4
        write(writer, 4)
        learner = Forked(lambda: (queue.sample(4), signal.pause()))
        eventually(lambda: queue.stats().held_items == 4)
        learner.signal(signal.SIGKILL)
        learner.wait()
        queue.clear()
        assert room(queue) == 4


def test_a_learner_waits_on_while_another_thread_may_publish():
    with queue_of(4, 0) as queue:
        thread = threading.Thread(target=lambda: write_groups(queue, 1))
        publisher = threading.Thread(target=publish, args=[queue])
        publisher.start()
        thread.start()
        assert len(queue.sample(8, timeout=20)["x"]) == 8
        publisher.join()
        queue.stop()
        thread.join()


def test_a_learner_waits_on_while_another_process_may_come_for_a_publisher_that_died():
    got = shared_counters(1)

    def learn(queue):
        for _ in range(3):
            queue.sample(4, timeout=60)
            got[0] += 1

    def publish_once(queue):
        queue.policy_version = 1
        signal.pause()

    with queue_of(4, 0) as queue, Forked(write_groups, queue, 2), Forked(learn, queue) as learner:
        eventually(lambda: got[0] == 1)
        with Forked(publish_once, queue) as publisher:
            eventually(lambda: got[0] == 2)
            publisher.kill()
        threading.Event().wait(1.0)  # several looks
        queue.policy_version = 2
        assert learner.wait() == 0
        queue.stop()


def publish(queue):
    """The one who publishes takes its time: a learner that waits sees it alive for several looks."""
    queue.policy_version = 0
    eventually(lambda: queue.num_items == 4)
    for _ in range(30):
        eventually(lambda: queue.stats().admitted_items == 4)
        threading.Event().wait(0.03)
    queue.policy_version = 1


def test_a_program_of_one_thread_is_told_that_nobody_draws():
    with queue_of(1, 0) as queue, queue.writer() as writer:
        write(writer)
        with pytest.raises(tr.WouldBlockForever, match=r"admit\(\) would wait for ever: 0 items may be admitted"):
            writer.admit().__enter__()
        queue.sample(1)
        queue.policy_version = 1
        write(writer)


def test_what_is_in_a_file_or_a_checkpoint_counts_and_nothing_more(tmp_path):
    with queue_of(4, 1, path=tmp_path / "queue") as queue, queue.writer() as writer:
        write(writer, 8)
        queue.sample(4)
        queue.commit()
        queue.policy_version = 1000
        writer.admit().__enter__()  # never ends
        queue.save(tmp_path / "saved")
    for made in (tr.ReplayBuffer.open, lambda _: tr.ReplayBuffer.load(tmp_path / "saved")):
        with made(tmp_path / "queue") as queue:
            assert queue.limiter == tr.Admission(4, 1)
            assert queue.num_items == 4
            assert room(queue) == 4
            queue.sample(4)
            queue.policy_version = 1001
            assert room(queue) == 8


def test_versions_count_from_the_first_item_that_is_admitted():
    with queue_of(4, 0) as queue:
        queue.policy_version = 500  # of a model that goes on
        assert room(queue) == 4


def test_versions_count_from_the_first_draw_where_that_comes_before():
    """As in a run that goes on: its learner is there before the first generator."""
    with queue_of(4, 1, sampler=tr.Fifo(commit="manual")) as queue, queue.writer() as writer:
        write(writer, 8)
        copy = queue.copy()
    with copy as queue:
        for version in (1, 2):
            queue.sample(4)
            queue.policy_version = version
        assert queue.stats().held_items == 8
        assert room(queue) == 8


def learn_and_die(queue, file, batches):
    """Learns from batches of four, each with a version, saves what it has learnt, and dies before it commits."""

    def life():
        dataset = tr.ReplayDataset(queue, 4, prefetch=0)
        with queue.writer() as writer:
            for _ in zip(range(batches), dataset, strict=False):
                queue.policy_version += 1
                write(writer, 4)
        torch.save(dataset.state_dict(), file)
        os.kill(os.getpid(), signal.SIGKILL)

    with Forked(life) as learner:
        assert learner.wait() == -signal.SIGKILL


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "not saved"])
def test_batches_of_a_dead_learner_that_come_again_count_for_one_version_each_time(tmp_path, saved):
    with queue_of(4, 1, sampler=tr.Fifo(commit="manual")) as queue, queue.writer() as writer:
        write(writer, 8)
        learn_and_die(queue, tmp_path / "state", 3)
        dataset = tr.ReplayDataset(queue, 4, prefetch=0)
        if saved:
            dataset.load_state_dict(torch.load(tmp_path / "state"))
            assert queue.num_items == 8
        batches = iter(dataset)
        while ahead := queue.num_items:
            assert room(queue) == max(0, 8 - ahead)
            next(batches)
            assert room(queue) == max(0, 4 - queue.num_items)  # its version is to come
            queue.policy_version += 1
        assert room(queue) == 8


def test_what_a_resumed_learner_had_learnt_needs_no_version_though_a_generator_was_there_first(tmp_path):
    with queue_of(4, 1, path=tmp_path / "queue", sampler=tr.Fifo(commit="manual")) as queue:
        with queue.writer() as writer:
            write(writer, 8)
        learn_and_die(queue, tmp_path / "state", 3)
    with tr.ReplayBuffer.open(tmp_path / "queue") as queue:
        assert (queue.num_items, room(queue)) == (20, 0)
        dataset = tr.ReplayDataset(queue, 4, prefetch=0)
        dataset.load_state_dict(torch.load(tmp_path / "state"))
        assert (queue.num_items, room(queue)) == (8, 0)
        batches = iter(dataset)
        for left in (4, 0):
            next(batches)
            queue.policy_version += 1
            assert room(queue) == 8 - left


def test_another_admission_counts_what_is_held_only_until_its_version_comes():
    with queue_of(4, 0, sampler=tr.Fifo(commit="manual")) as queue, queue.writer() as writer:
        for _ in range(3):
            write(writer, 4)
            queue.sample(4)
            queue.policy_version += 1
        write(writer, 4)
        queue.sample(4)
        queue.limiter = tr.Admission(4, 0)
        assert room(queue) == 0
        queue.policy_version += 1
        assert room(queue) == 4


def test_another_admission_counts_from_the_moment_at_which_it_is_set():
    with queue_of(4, 0) as queue, queue.writer() as writer:
        write(writer, 4)
        queue.limiter = tr.Admission(4, 2)
        assert room(queue) == 8
        with pytest.raises(ValueError, match="decided when it is made"):
            queue.limiter = tr.MinSize(1)
        assert queue.limiter == tr.Admission(4, 2)
        with tr.ReplayBuffer(SPEC, 8, sampler=tr.Fifo()) as plain:
            with pytest.raises(ValueError, match="decided when it is made"):
                plain.limiter = tr.Admission(4, 2)
            with plain.writer() as other, pytest.raises(ValueError, match=r"admit\(\) is for buffers with"):
                other.admit().__enter__()


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "4", None, 1 << 40])
def test_a_bad_batch_size_is_refused(bad):
    with pytest.raises((TypeError, ValueError), match="batch_size"):
        tr.Admission(bad, 1)


@pytest.mark.parametrize("bad", [-1, True, 1.5, "4", None, 1 << 40])
def test_a_bad_max_age_is_refused(bad):
    with pytest.raises((TypeError, ValueError), match="max_age"):
        tr.Admission(4, bad)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"sampler": tr.Uniform()}, "an admission is for queues"),
        ({"sampler": tr.Prioritized()}, "an admission is for queues"),
        ({"sampler": tr.Fifo(max_draws=2)}, "expected max_draws=1"),
        ({"sampler": tr.Fifo(max_age=0), "limiter": tr.Admission(4, 2)}, "begun to be dropped"),
        ({"capacity": 3}, "capacity is 3: the queue is full before a batch is there"),
    ],
)
def test_what_an_admission_does_not_fit_is_refused_with_a_reason(arguments, reason):
    given = {"capacity": 8, "sampler": tr.Fifo(), "limiter": tr.Admission(4, 0), **arguments}
    with pytest.raises(ValueError, match=reason):
        tr.ReplayBuffer(SPEC, **given)


def test_a_view_of_several_rows_is_refused():
    flag = tr.Field((), torch.bool)
    steps = {"obs": tr.Field(), "reward": tr.Field(), "terminated": flag, "truncated": flag}
    with pytest.raises(ValueError, match=r"an admission counts rows.*expected Rows\(\)"):
        tr.ReplayBuffer(steps, 8, view=tr.Transitions(), sampler=tr.Fifo(), limiter=tr.Admission(4, 0))


@pytest.mark.parametrize("n", [0, -1, True, 1.5, 13])
def test_a_bad_number_of_items_is_refused(n):
    with queue_of(4, 2) as queue, queue.writer() as writer, pytest.raises((TypeError, ValueError), match="n is"):
        writer.admit(n)


def test_a_context_admits_items_of_its_only_writer():
    with queue_of(4, 0) as queue:
        ctx = ExplorerContext(queue)
        with pytest.raises(RuntimeError, match="this one has 0"):
            ctx.admit()
        with ctx.writer() as writer:
            with ctx.admit(2, timeout=0):
                writer.extend(x=[1, 2])
            ctx.writer()
            with pytest.raises(RuntimeError, match="this one has 2"):
                ctx.admit()
        ctx.close()
        assert queue.num_items == 2

"""Writers on another node that have to be admitted: no item is begun too many, whatever becomes of them. No Ray runs.

What may be begun is the formula of `tr.Admission`: `(max_age + 1 + version) * batch_size` items in all.
"""

import contextlib
import random
import signal
import threading
import time

import pytest
import torch
from forked import eventually
from local_ingest import Home, Method, ServedIngest, Unreachable, ray_of_this_process

import torchreplay as tr

pytest.importorskip("ray")
from torchreplay.explorers import ExplorerContext
from torchreplay.ray.remote import ingest_actor, row_sender
from torchreplay.ray.remote.ingest_actor import SILENCE
from torchreplay.ray.remote.remote_buffer import RemoteWriter
from torchreplay.ray.remote.row_sender import RowSender

SPEC = {"x": tr.Field((), torch.int64), "policy_version": tr.Field((), torch.int64)}


def queue_of(batch_size, max_age, capacity=256, **options):
    limiter = tr.Admission(batch_size=batch_size, max_age=max_age)
    return tr.ReplayBuffer(SPEC, capacity, sampler=tr.Fifo(), limiter=limiter, **options)


class Far:
    """A queue as another node has it: its ingest, and writers that each have a sender of their own."""

    def __init__(self, queue, monkeypatch):
        self.queue, self.served, self.senders = queue, ServedIngest(queue, monkeypatch), []
        self._rows_extended = 0

    @property
    def limiter(self):
        return self.queue.limiter

    def writer(self, *_, **__):
        self.senders.append(RowSender(Home(self.served)))
        return RemoteWriter(self.senders[-1], self.queue._config, None, "next_step")

    def restart(self):
        """Its ingest dies, and another one takes over what the log of remote writers says."""
        old = self.served.ingest
        for writer in old._writers.values():
            writer.close()
        if old._server is not None:
            old._server.close()
        self.served.start()
        for sender in self.senders:
            sender._way.close()

    def close(self):
        for sender in self.senders:
            sender.drain()
        if self.served.server is not None:
            self.served.server.close()


@pytest.fixture
def far(monkeypatch):
    """Returns what makes a queue be on another node."""
    ray_of_this_process(monkeypatch)
    made = []

    def of(queue):
        made.append(Far(queue, monkeypatch))
        return made[-1]

    yield of
    for each in made:
        each.close()
    eventually(lambda: not any(thread.name.startswith("torchreplay") for thread in threading.enumerate()))


def room(queue):
    """How many items a writer of its own is admitted before it has to wait; they are given back."""
    with queue.writer() as writer, contextlib.ExitStack() as blocks:
        n = 0
        with contextlib.suppress(tr.ReplayTimeout):
            while n < 1000:
                blocks.enter_context(writer.admit(timeout=0))
                n += 1
        return n


@pytest.mark.parametrize(("batch_size", "max_age"), [(1, 0), (4, 0), (3, 2)])
def test_whatever_becomes_of_items_as_many_are_admitted_as_the_formula_says(far, batch_size, max_age):
    chance, begun, version = random.Random(batch_size * 10 + max_age), 0, 0
    with queue_of(batch_size, max_age, 64) as queue, contextlib.ExitStack() as open_writers:
        there = far(queue)
        writers = [open_writers.enter_context(made.writer()) for made in (there, there, queue)]
        for _ in range(150):
            action, writer = chance.choice(["write", "group", "fail", "draw", "draw"]), chance.choice(writers)
            left = (max_age + 1 + version) * batch_size - begun
            if action == "write" and left:
                with writer.admit(timeout=0):
                    writer.append(x=1)
                begun += 1
            elif action == "group" and left >= 2:
                with writer.admit(2, timeout=0):
                    writer.append(x=1)  # of two only one comes about
                begun += 1
            elif action == "fail" and left:
                with pytest.raises(KeyError), writer.admit(timeout=0):
                    raise KeyError
            elif action == "draw" and queue.num_items >= batch_size:
                assert queue.sample(batch_size)["age"].max() <= max_age
                version += 1
                queue.policy_version = version
                for each in writers:
                    each.policy_version = version
            if begun == (max_age + 1 + version) * batch_size:
                with pytest.raises(tr.ReplayTimeout, match=r"admit\(\) does not wait: 0 items may be admitted"):
                    writer.admit(timeout=0).__enter__()
            writer.flush()
            stats = queue.stats()
            assert (stats.admitted_items, stats.open_admissions) == (begun, 0)
        assert room(queue) == (max_age + 1 + version) * batch_size - begun
        assert version > 3


def test_its_errors_are_those_of_a_writer_on_the_same_node(far):
    with queue_of(4, 0, name="rollouts") as queue, far(queue).writer() as there, queue.writer() as here:

        def told(writer, call):
            with pytest.raises(Exception) as caught:  # the texts are compared
                call(writer)
            return caught.type, str(caught.value)

        def full(writer):
            with queue.writer() as other, other.admit(4), writer.admit(timeout=0):
                pass

        for call in (
            lambda w: w.append(x=1),
            lambda w: w.extend(x=[1, 2, 3]),
            lambda w: w.admit(5).__enter__(),
            lambda w: w.admit(0),
            lambda w: w.admit().__exit__(None, None, None),
            lambda w: [w.admit(2).__enter__(), w.extend(x=[1, 2, 3])],
        ):
            assert told(there, call) == told(here, call)
            there._end_admission(2), here._end_admission(2), there.flush()
        (kind, text), (_, local) = told(there, full), told(here, full)
        assert (kind, text.split("; learners alive")[0]) == (tr.ReplayTimeout, local)
        queue.limiter = tr.Admission(batch_size=4, max_age=1)
        with there.admit(5, timeout=0):
            assert queue.stats().open_admissions == 5
    with tr.ReplayBuffer(SPEC, 8, sampler=tr.Fifo()) as plain, far(plain).writer() as writer:
        block = writer.admit()
        with pytest.raises(ValueError, match=r"admit\(\) is for buffers with"):
            block.__enter__()


def test_blocks_may_overlap_and_a_writer_that_is_closed_in_one_gives_it_back(far):
    with queue_of(6, 0) as queue:
        writer = far(queue).writer()
        first, second, third = writer.admit(), writer.admit(2), writer.admit(3)
        for block in (first, second, third):
            block.__enter__()
        writer.append(x=1)
        first.__exit__(None, None, None)
        writer.flush()
        assert queue.stats().open_admissions == 5
        third.__exit__(None, None, None)
        writer.flush()
        assert queue.stats().open_admissions == 2
        writer.append(x=2)
        writer.close()
        second.__exit__(None, None, None)
        eventually(lambda: queue.stats().open_admissions == 0)
        assert queue.stats().admitted_items == 2


def test_it_waits_for_a_version_and_no_longer_than_it_may(far):
    with queue_of(2, 0) as queue, far(queue).writer() as writer:
        with writer.admit(2):
            writer.extend(x=[1, 2])
        start = time.monotonic()
        with pytest.raises(tr.ReplayTimeout, match=r"admit\(\).*found no room within 0\.3 s: 0 items may be admitted"):
            writer.admit(timeout=0.3).__enter__()
        assert 0.3 <= time.monotonic() - start < 2
        came = threading.Event()

        def wait():
            with writer.admit():
                writer.append(x=3)
            came.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert queue.sample(2)["x"].tolist() == [1, 2]
        assert not came.is_set()
        queue.policy_version = 1
        assert came.wait(10)
        thread.join()
        assert queue.sample(1)["x"].tolist() == [3]


@pytest.mark.parametrize("end", ["stop", "give_up"])
def test_the_end_of_the_buffer_or_of_its_process_ends_the_wait(far, end):
    with queue_of(1, 0) as queue:
        there = far(queue)
        with there.writer() as writer:
            with writer.admit():
                writer.append(x=1)
            threading.Timer(0.1, queue.stop if end == "stop" else there.senders[0].give_up).start()
            with pytest.raises(tr.Stopped, match="was stopped" if end == "stop" else "to end.*0 items may be"):
                writer.admit().__enter__()


@pytest.mark.filterwarnings("ignore:Exception ignored in")  # one that comes where a block is freed
def test_interrupts_wherever_they_come_lose_no_item_and_give_all_back(far):
    class Interrupted(Exception):
        pass

    def interrupt(number, frame):
        if interruptible:
            raise Interrupted

    chance, interruptible, interrupts, rows = random.Random(0), True, 0, 0
    with queue_of(4000, 0, 4096) as queue, far(queue).writer() as writer:
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            while interruptible:
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.005))
                    while (rows := writer.rows) < 3000:
                        with writer.admit(2):
                            writer.append(x=rows)
                    interruptible = False
                except Interrupted:
                    interrupts += 1
        finally:
            interruptible = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        writer.flush()
        assert interrupts > 5
        stats = queue.stats()
        assert (stats.open_admissions, stats.admitted_items) == (0, rows)
        assert queue.sample(rows)["x"].tolist() == list(range(rows))


def test_what_was_begun_when_the_ingest_died_is_admitted_anew_when_it_comes(far):
    """As far as there is room: others may have been admitted instead, and never too many are."""
    with queue_of(4, 0) as queue, queue.writer() as here:
        there = far(queue)
        writer = there.writer()
        block = writer.admit(3)
        block.__enter__()
        writer.append(x=0)
        writer.flush()
        there.restart()
        assert queue.stats().open_admissions == 0
        with here.admit(2):
            here.extend(x=[10, 11])
        writer.extend(x=[1, 2])
        eventually(lambda: queue.num_items == 4)  # one of the two
        assert queue.stats().admitted_items == 4
        assert queue.sample(4)["x"].tolist() == [0, 10, 11, 1]
        queue.policy_version = 1
        assert queue.sample(1)["x"].tolist() == [2]
        block.__exit__(None, None, None)
        with writer.admit(3, timeout=5):
            assert queue.stats().open_admissions == 3
        writer.close()
        assert queue.stats().open_admissions == 0


def test_while_the_buffers_node_does_not_answer_timeouts_hold(far, monkeypatch):
    monkeypatch.setattr(row_sender, "PAUSE", 0.01)
    with queue_of(4, 0) as queue:
        there = far(queue)
        with there.writer() as writer:
            admit, lost = there.served.ingest.admit, []

            def lose(*args):
                lost.append(admit(*args))
                raise Unreachable

            there.served.admit = Method(lose)
            for timeout, told in ((0, "does not wait: the buffer's node does not answer"), (0.1, r"within 0\.1 s")):
                with pytest.raises(tr.ReplayTimeout, match=told):
                    writer.admit(3, timeout=timeout).__enter__()
                eventually(lambda: queue.stats().open_admissions == 0)
            assert len(lost) > 2, "it was admitted once, though it was asked for often"
            there.served.admit = Method(admit)
            with writer.admit(4, timeout=0):
                writer.extend(x=[1, 2, 3, 4])


def test_requests_that_come_late_or_again_change_nothing(far):
    with queue_of(8, 0) as queue:
        there = far(queue)
        with there.writer() as writer:
            ingest, source = there.served.ingest, writer._send_buffer.source
            for number, end, n, begun in ((2, 3, 3, 3), (1, 5, 2, 3), (2, 3, 3, 3), (4, 2, 0, 2), (3, 6, 3, 2)):
                assert ingest.admit(source, number, end, n, 0.0) == ("", 0)
                assert queue.stats().open_admissions == begun


def test_a_writer_of_which_nothing_is_heard_gives_back_what_it_had(far):
    with queue_of(4, 0) as queue:
        there = far(queue)
        with there.writer() as writer:
            block = writer.admit(3)
            block.__enter__()
            ingest = there.served.ingest
            (number, known), audience = *ingest._writers.items(), ingest._audience()
            ingest.lost(number)
            assert ingest_actor.LOST - 1 < known.heard + SILENCE - time.monotonic() <= ingest_actor.LOST
            assert queue.stats().open_admissions == 3
            known.heard -= ingest_actor.LOST
            ingest._look_around(audience)
            assert queue.stats().open_admissions == 0
            writer.append(x=1)  # it was only slow
            writer.flush()
            assert queue.stats().admitted_items == 1


def test_rollouts_of_any_length_are_written_in_blocks(far):
    """Of nothing, and of more than is collected before it is sent."""
    spec, lengths = {"tokens": tr.Ragged(torch.int32)}, [0, 5, 3_000_000, 1, 2_000_000, 4_000_000, 7]
    rules = {"sampler": tr.Fifo(), "limiter": tr.Admission(batch_size=len(lengths), max_age=0)}
    with tr.ReplayBuffer(spec, 16, ragged_bytes=1 << 27, **rules) as queue, far(queue).writer() as writer:
        for length in lengths:
            with writer.admit():
                writer.append(tokens=torch.full((length,), length, dtype=torch.int32))
        batch = queue.sample(len(lengths))
        assert batch.lengths("tokens").tolist() == lengths
        expected = [torch.full((length,), length, dtype=torch.int32) for length in lengths]
        assert torch.equal(batch["tokens"], torch.cat(expected))


def test_a_context_admits_items_of_its_only_writer(far):
    with queue_of(4, 0) as queue:
        there = far(queue)
        ctx = ExplorerContext(queue)
        ctx._buffers = {None: there}
        with ctx.writer() as writer:
            with ctx.admit(2, timeout=0):
                writer.extend(x=[1, 2])
            writer.flush()
        ctx.close()
        assert queue.num_items == 2

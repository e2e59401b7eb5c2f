"""A queue of rows of any length: no page is taken of a row that is still needed, and every item comes whole."""

import itertools
import signal
import threading
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters
from ragged_model import RaggedModel, random_values, split
from small_queues import VIEWS
from two_learners import drawn_by_two_learners

import torchreplay as tr

SPEC = {
    "tokens": tr.Ragged(torch.int32),
    "logprob": tr.Ragged(torch.float32, like="tokens"),
    "picture": tr.Ragged(torch.uint8),
    "number": tr.Field((), "int64"),
}
TEXT = {"text": tr.Ragged(torch.uint8), "number": tr.Field((), "int64")}
FLAG = tr.Field((), torch.bool)
STEPS = {"obs": tr.Ragged(torch.uint8), "reward": tr.Field(), "terminated": FLAG, "truncated": FLAG}


def queue(ragged_bytes=4096, capacity=512, spec=SPEC, view=None, **fifo):
    return tr.ReplayBuffer(spec, capacity, view=view or tr.Rows(), sampler=tr.Fifo(**fifo), ragged_bytes=ragged_bytes)


def text(number, length):
    """Bytes that tell which number they belong to, and how long they are."""
    return bytes((number * 7 + k * k + length) % 256 for k in range(length))


def numbers_of(batch, lengths):
    """Returns the numbers of a batch of texts, each of which has the bytes that its number says."""
    numbers = batch["number"].tolist()
    for number, value in zip(numbers, split(batch, "text"), strict=True):
        assert value.tobytes() == text(number, lengths[number])
    return numbers


class RaggedQueueModel(RaggedModel):
    """A queue whose slots suffice, as a list of rows. Each is "free", "held", or "done"."""

    def __init__(self, spec, capacity, ragged_bytes, max_draws):
        super().__init__(spec, capacity, ragged_bytes)
        self.states, self.draws, self.max_draws = [], [], max_draws

    @property
    def oldest_page(self):
        needed = [self.rows[key][1] for key, state in enumerate(self.states) if state != "done"]
        return min((first for first in needed if first is not None), default=self.next_page)

    def has_room(self, values):
        """Whether the run ends before the first page of the oldest row that is needed comes again."""
        before = self.next_page
        self.append(values)
        end, self.next_page = self.next_page, before
        self.rows.pop()
        return end == before or end <= self.oldest_page + self.pages

    def write(self, values):
        self.append(values)
        self.states.append("free")
        self.draws.append(0)

    def oldest(self, most):
        return [key for key, state in enumerate(self.states) if state == "free"][:most]

    def end(self, keys, done):
        for key in keys:
            self.draws[key] += done
            self.states[key] = "done" if self.draws[key] == self.max_draws else "free"


class Program:
    """Random calls of a queue, beside the model of it."""

    def __init__(self, buffer, seed, max_draws):
        self.buffer, self.writer = buffer, buffer.writer()
        self.random, self.waits = np.random.default_rng(seed), 0
        self.model = RaggedQueueModel(SPEC, 512, 4096, max_draws)

    @property
    def held(self):
        return [key for key, state in enumerate(self.model.states) if state == "held"]

    def write(self):
        values = random_values(self.random, SPEC, longest=40)
        if not self.model.fits(values):
            return
        if self.model.has_room(values):
            assert self.writer.append(**values) == len(self.model.rows)
            self.model.write(values)
        elif self.waits < 5:
            self.waits += 1
            with pytest.raises(tr.WouldBlockForever, match="and the next row takes"):
                self.writer.append(**values)

    def draw(self):
        due = self.model.oldest(int(self.random.integers(1, 6)))
        if not due:
            return
        batch = self.buffer.sample(len(due))
        assert batch["key"].tolist() == due
        for name in SPEC:
            for key, value in zip(due, split(batch, name), strict=True):
                assert np.array_equal(value, self.model.value(key, name)), name
        for key in due:
            self.model.states[key] = "held"

    def end(self):
        if held := self.held:
            some = self.random.permutation(held)[: self.random.integers(1, len(held) + 1)].tolist()
            done = bool(self.random.random() < 0.7)
            (self.buffer.commit if done else self.buffer.release)(torch.tensor(some))
            self.model.end(some, done)

    def compare(self):
        stats, model = self.buffer.stats(), self.model
        assert stats.held_items == len(self.held)
        assert stats.drawable == model.states.count("free")
        assert stats.ragged_fill == (model.next_page - model.oldest_page) / model.pages


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_with_a_queue_go_as_lists_of_arrays_say(seed):
    max_draws = 1 + seed % 2
    with queue(max_draws=max_draws, commit="manual") as buffer:
        program = Program(buffer, seed, max_draws)
        calls = 4 * [program.write] + 2 * [program.draw] + 2 * [program.end]
        for _ in range(300):
            calls[program.random.integers(0, 8)]()
            program.compare()
    assert program.waits, "there was always room"
    assert program.model.next_page > 3 * program.model.pages, "the pages were never taken again"


def test_a_writer_without_bytes_says_so_with_numbers_and_goes_on_when_an_item_is_done():
    with queue(1024, 16, TEXT) as buffer:
        writer = buffer.writer()
        for number in range(4):
            writer.append(text=text(number, 250), number=number)
        over = threading.Event()
        other = threading.Thread(target=over.wait)  # which could draw, for all that is known
        other.start()
        writer.timeout = 0.1
        with pytest.raises(tr.ReplayTimeout) as caught:
            writer.append(text=text(4, 100), number=4)
        assert (
            "the queue is full: 4 items wait to be drawn; 0 are held; capacity: 16 rows; ragged_bytes: 1,024, of which "
            "1,024 are in use, and the next row takes 128 in one piece"
        ) in str(caught.value)
        assert "number" in buffer.sample(1)
        with pytest.raises(tr.ReplayTimeout, match=r"3 items wait to be drawn; 1 are held: 1 by this process"):
            writer.append(text=text(4, 100), number=4)
        buffer.commit()
        assert writer.append(text=text(4, 100), number=4) == 4
        assert numbers_of(buffer.sample(4), [250] * 4 + [100]) == [1, 2, 3, 4]
        over.set()
        other.join()
    with queue(1024, 16, TEXT) as buffer, buffer.writer() as writer:
        for number in range(4):
            writer.append(text=text(number, 250), number=number)
        with pytest.raises(tr.WouldBlockForever, match=r"choose a larger ragged_bytes, or give Fifo when_full"):
            writer.append(text=text(4, 250), number=4)
        assert numbers_of(buffer.sample(4), [250] * 4) == [0, 1, 2, 3]


def test_a_claim_that_fails_goes_back_with_its_values_and_nobody_takes_their_bytes():
    with queue(1024, 16, TEXT) as buffer, buffer.writer() as writer:
        lengths = [250] * 9
        for number in range(4):
            writer.append(text=text(number, 250), number=number)
        with suppress(KeyError), buffer.claim(2) as batch:
            assert numbers_of(batch, lengths) == [0, 1]
            raise KeyError
        for first in range(0, 4, 2):
            with buffer.claim(2) as batch:
                assert numbers_of(batch, lengths) == [first, first + 1]
            for number in range(4 + first, 6 + first):
                writer.append(text=text(number, 250), number=number)
        assert numbers_of(buffer.sample(4), lengths) == [4, 5, 6, 7]


def test_a_claim_with_a_budget_has_the_oldest_within_it_and_the_others_stay():
    lengths = [100, 150, 100, 900]
    with queue(1 << 14, 16, TEXT) as buffer:
        buffer.extend(text=[text(k, n) for k, n in enumerate(lengths)], number=list(range(4)))
        for expected in ([0, 1], [2]):
            with buffer.claim(4, budget={"text": 300}) as batch:
                assert numbers_of(batch, lengths) == expected
        with pytest.warns(RuntimeWarning, match="the budget is 300"), buffer.claim(1, budget={"text": 300}) as batch:
            assert numbers_of(batch, lengths) == [3]
        with pytest.raises(ValueError, match="budget names 'number', which is no ragged field"):
            buffer.claim(1, budget={"number": 300}).__enter__()
        assert buffer.num_items == 0


def test_the_oldest_are_dropped_and_counted_when_their_bytes_are_taken_again():
    random = np.random.default_rng(0)
    with queue(2048, 40, when_full="drop_oldest") as buffer, buffer.writer() as writer:
        model, came, gone = RaggedModel(SPEC, 40, 2048), set(), 0
        for turn in range(200):
            values = random_values(random, SPEC, longest=20)
            writer.append(**values)
            model.append(values)
            there = model.keys()
            if turn % 3 == 0:
                due = [key for key in there if key not in came][:2]
                batch = buffer.sample(2, at_least=1)
                assert batch["key"].tolist() == due
                for key, value in zip(due, split(batch, "tokens"), strict=True):
                    assert np.array_equal(value, model.value(key, "tokens"))
                buffer.commit()
                came.update(due)
            gone = len([key for key in range(len(model.rows)) if key not in came and key not in there])
            assert buffer.stats().dropped_items == gone
    assert gone > 50


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_items_of_several_rows_come_whole_and_in_order_though_some_rows_have_no_bytes(view):
    """The same episodes in a queue with little room and in one that holds them all give the same batches."""
    random = np.random.default_rng(1)
    lengths = [0 if random.random() < 0.4 else int(random.integers(1, 250)) for _ in range(400)]

    def episodes(writer, before_each=lambda: None):
        at = iter(range(400))
        for _ in range(20):
            number = next(at)
            writer.reset(obs=text(number, lengths[number]))
            for k in range(12):
                before_each()
                number = next(at)
                writer.step(obs=text(number, lengths[number]), reward=number, terminated=k == 11, truncated=False)

    def flat(batch):
        values = {name: value for name, value in batch.items() if name not in ("key", "offsets", "lengths")}
        return [batch["key"].tolist(), *(leaf.numpy().tobytes() for leaf in leaves(values))]

    with queue(1 << 20, 1000, STEPS, view) as large, queue(4096, 64, STEPS, view) as small:
        episodes(large.writer())
        expected, given = drain(large, flat), []
        episodes(small.writer(), lambda: given.extend(drain(small, flat)))
        given += drain(small, flat)
        assert small.stats().evicted_by_pages > 50
    assert given == expected


def leaves(value):
    """Returns the tensors of a nested dict, in its order."""
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    return [value]


def drain(buffer, convert):
    """Draws all items, one by one."""
    drawn = []
    while buffer.num_items:
        drawn.append(convert(buffer.sample(1)))
    return drawn


def test_what_a_budget_leaves_out_is_not_lost():
    lengths = [(number * 37) % 200 for number in range(60)]
    with queue(1 << 16, 100, TEXT) as buffer:
        buffer.extend(text=[text(k, n) for k, n in enumerate(lengths)], number=list(range(60)))
        came = []
        while buffer.num_items:
            batch = buffer.sample(10, at_least=1, budget={"text": 300})
            assert len(batch["text"]) <= 300
            came += numbers_of(batch, lengths)
    assert came == list(range(60))


def within(lengths, budget):
    """How many of the first items stay within a budget: at least one."""
    return max(1, int(np.searchsorted(np.cumsum(lengths), budget, "right")))


def used_up(lengths, budget):
    """Whether no other item with a value would go into a batch of these."""
    return sum(lengths) >= budget


@pytest.mark.parametrize("least", [None, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_draw_waits_no_longer_than_until_what_is_there_uses_its_budget_up(seed, least):
    """Of each number of items, a draw gives the batch that the lengths say, or waits."""
    budget, random = 300, np.random.default_rng(seed)
    waited = 0
    with queue(1 << 16, 100, TEXT) as buffer, buffer.expect_writers():
        for _ in range(25):
            lengths = random.integers(0, 200, int(random.integers(1, 9))).tolist()
            buffer.extend(text=[text(k, n) for k, n in enumerate(lengths)], number=list(range(len(lengths))))
            if used_up(lengths, budget) or len(lengths) >= (least or 8):
                batch = buffer.sample(8, at_least=least, budget={"text": budget}, timeout=30)
                assert numbers_of(batch, lengths) == list(range(within(lengths, budget)))
            else:
                waited += 1
                with pytest.raises(tr.ReplayTimeout, match=rf"{len(lengths)} can be drawn"):
                    buffer.sample(8, at_least=least, budget={"text": budget}, timeout=0)
            buffer.clear()
    assert 0 < waited < 25


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_within_a_budget_gets_each_batch_when_the_row_comes_that_uses_it_up(prefetch):
    """The writer goes on when the batch came: were it to wait for 64 items, none would come."""
    lengths, came = [100, 100, 250, 50, 300, 299, 2], []
    with queue(1 << 14, 100, TEXT) as buffer, buffer.writer() as writer, buffer.expect_writers():
        loop = iter(tr.ReplayDataset(buffer, 64, budget={"text": 300}, prefetch=prefetch, timeout=60))
        turns = iter(range(len(lengths)))

        def write(rows):
            for number in itertools.islice(turns, rows):
                writer.append(text=text(number, lengths[number]), number=number)

        for rows in (3, 1, 1, 2):
            writes = threading.Thread(target=write, args=(rows,))
            writes.start()
            came.append(numbers_of(next(loop), lengths))
            writes.join()
        assert came == [[0, 1], [2, 3], [4], [5]]
        loop.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_several_learners_and_writers_in_processes_get_every_item_once_and_whole(prefetch, monkeypatch):
    monkeypatch.setattr("torchreplay.segment.waits.RETURN_GRACE", 0.3)  # no writer comes again
    lengths = [(number * 97) % 900 for number in range(300)]
    with queue(8192, 64, TEXT) as buffer:

        def row_of(number):
            return {"text": text(number, lengths[number]), "number": number}

        drawn = drawn_by_two_learners(buffer, 300, row_of, lambda batch: numbers_of(batch, lengths), 4, prefetch)
        assert set(drawn) == {1}


def test_a_queue_in_a_file_goes_on_with_the_values_that_were_not_committed(tmp_path):
    lengths = [(number * 61) % 250 for number in range(40)]
    path = tmp_path / "queue.replay"

    def live(told):
        buffer = tr.ReplayBuffer(TEXT, 64, sampler=tr.Fifo(), ragged_bytes=4096, path=path)
        writer = buffer.writer()
        for number in range(40):
            writer.append(text=text(number, lengths[number]), number=number)
            if number % 4 == 3:
                buffer.sample(3)
        told[0] = 1
        signal.pause()

    told = shared_counters(1)
    with Forked(live, told) as process:
        eventually(lambda: told[0])
        process.kill()
    with tr.ReplayBuffer.open(path) as buffer:
        assert numbers_of(buffer.sample(13), lengths) == list(range(27, 40))  # 27 to 29 were held
        buffer.commit()
        assert buffer.stats().ragged_fill == 0
        buffer.extend(text=[text(k, lengths[k]) for k in range(10)], number=list(range(10)))
        assert numbers_of(buffer.sample(10), lengths) == list(range(10))


# Waits that cannot end


def in_step(buffer, steps):
    """Writes episodes of four environments in step, each row of 200 bytes."""
    with buffer.writer(num_envs=4) as writer:
        obs, flags = [text(0, 200)] * 4, np.zeros(4, bool)
        writer.reset(obs=obs)
        for k in range(steps):
            writer.step(obs=obs, reward=np.zeros(4), terminated=flags | (k == steps - 1), truncated=flags)


def test_unfinished_episodes_that_fill_the_bytes_are_named_with_as_many_as_do(monkeypatch):
    monkeypatch.setattr("torchreplay.buffer.jams.IN_VAIN", 0.2)
    monkeypatch.setattr("torchreplay.buffer.jams.RETURN_GRACE", 1e9)  # the writer finds it

    def run(ragged_bytes):
        """Returns what the writer says; None: it wrote all."""
        said = []
        with queue(ragged_bytes, 100, STEPS, tr.Sequences(length=8)) as buffer:

            def write():
                try:
                    in_step(buffer, 8)
                except (tr.WouldBlockForever, tr.Stopped) as error:
                    said.append(error)

            thread = threading.Thread(target=write)
            thread.start()
            with pytest.raises(tr.WouldBlockForever) if ragged_bytes == 4096 else nullcontext():
                buffer.sample(4)
            thread.join()
        return str(said[0]) if said else None

    said = run(4096)
    assert "unfinished episodes of 4 environments fill the 4,096 ragged_bytes" in said
    advised = int(said.split("ragged_bytes of at least ")[1].split(" ")[0].replace(",", ""))
    assert "(it is 4,096)" in said
    assert run(advised) is None


def test_a_learner_that_asks_for_more_than_the_bytes_hold_is_told_how_many_do(monkeypatch):
    monkeypatch.setattr("torchreplay.buffer.jams.RETURN_GRACE", 0.2)

    def run(ragged_bytes):
        with queue(ragged_bytes, 100, TEXT) as buffer:

            def write():
                writer = buffer.writer()
                for number in range(12):
                    writer.append(text=text(number, 500), number=number)

            thread = threading.Thread(target=write)
            thread.start()
            try:
                return numbers_of(buffer.sample(10), [500] * 12)
            except tr.WouldBlockForever as error:
                return str(error)
            finally:
                while buffer.sample(1, at_least=1)["number"].item() != 11:
                    pass
                thread.join()

    said = run(4096)
    assert "10 items are asked for, 8 can be drawn" in said
    assert "of the items that the 4,096 ragged_bytes have; ask for fewer, or for at_least=1" in said
    advised = int(said.split("ragged_bytes of at least ")[1].split(" ")[0].replace(",", ""))
    assert run(advised) == list(range(10))

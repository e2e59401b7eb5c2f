"""Whoever dies loses and doubles nothing of a queue: at least once after a death, and never what was committed."""

import os
import signal
import time

import numpy as np
import pytest
import torch
from forked import Forked, eventually, shared_counters

import torchreplay as tr

SPEC = {"x": tr.Field((), "int64")}
RAGGED = {"x": tr.Field((), "int64"), "text": tr.Ragged(torch.uint8)}
ROWS, KEYS = 400, 20_000


def text(number):
    """The value of a row: up to four pages, and often none. So bytes and slots are full about as often."""
    length = number * 7919 % 250 if number % 5 else 0
    return (np.arange(length) * 31 + number).astype(np.uint8)


class Journal:
    """By key: how often it was handed out, and done. By number: how often it came. By writer: how far it has come."""

    def __init__(self):
        self.got, self.done = shared_counters(KEYS), shared_counters(KEYS)
        self.came, self.written, self.revived = shared_counters(2 * ROWS), shared_counters(2), shared_counters(1)
        self.torn = shared_counters(1)

    def note_got(self, batch):
        if "text" in batch:
            values = np.split(batch["text"].numpy(), batch.offsets("text")[1:-1].tolist())
            for number, value in zip(batch["x"].tolist(), values, strict=True):
                assert np.array_equal(value, text(number)), "a value is torn"
        for key, number in zip(batch["key"].tolist(), batch["x"].tolist(), strict=True):
            self.got[key] += 1
            self.came[number] += 1
            self.revived[0] += self.done[key] > 0

    def note_done(self, keys):
        for key in keys:
            self.done[key] += 1


def write(queue, journal, number):
    """Goes on where its lives before have noted that they came."""
    with queue.writer() as writer:
        for index in range(journal.written[number], ROWS):
            x = number * ROWS + index
            writer.append(x=x, **({"text": text(x)} if "text" in queue.spec else {}))
            journal.written[number] = index + 1


def learn(queue, journal, prefetch):
    last = []
    for batch in tr.ReplayDataset(queue, 8, prefetch=prefetch):
        journal.note_done(last)
        try:
            journal.note_got(batch)
        except AssertionError:
            journal.torn[0] = 1
            raise
        last = batch["key"].tolist()
    journal.note_done(last)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_killed_learner_gives_back_what_it_held_in_its_order(prefetch):
    with tr.ReplayBuffer(SPEC, 100, sampler=tr.Fifo()) as queue:
        queue.extend(x=np.arange(60))
        got = shared_counters(1)

        def hold():
            for batch in tr.ReplayDataset(queue, 10, prefetch=prefetch):
                got[0] += len(batch["x"])
                if got[0] == 20:
                    signal.pause()

        with Forked(hold) as learner:
            eventually(lambda: got[0] == 20)
            eventually(lambda: queue.stats().held_items == 10 + 10 * prefetch)
            learner.kill()
        assert queue.sample(12)["x"].tolist() == list(range(10, 22))
        assert queue.stats().held_items == 12


def test_a_stopped_learner_keeps_what_it_holds():
    with tr.ReplayBuffer(SPEC, 100, sampler=tr.Fifo()) as queue:
        queue.extend(x=np.arange(60))
        held = shared_counters(1)

        def hold():
            held[0] = len(queue.sample(10)["x"])
            signal.pause()

        with Forked(hold) as learner:
            eventually(lambda: held[0] == 10)
            os.kill(learner.pid, signal.SIGSTOP)
            assert queue.sample(10)["x"].tolist() == list(range(10, 20))
            time.sleep(0.3)
            assert queue.sample(10)["x"].tolist() == list(range(20, 30))
            assert queue.stats().held_items == 20
            os.kill(learner.pid, signal.SIGCONT)


@pytest.mark.parametrize("seed", range(2))  # the soak has forty more
@pytest.mark.parametrize("prefetch", [0, 2])
def test_random_deaths_lose_and_double_nothing(seed, prefetch):
    many_deaths(seed, prefetch, deaths=25)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_random_deaths_lose_and_double_and_tear_no_row_of_any_length(prefetch):
    many_deaths(7, prefetch, deaths=25, ragged_bytes=4096)


@pytest.mark.soak
@pytest.mark.parametrize("ragged_bytes", [None, 4096])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_thousand_deaths_lose_and_double_and_tear_nothing(prefetch, ragged_bytes):
    for seed in range(100, 140):
        many_deaths(seed, prefetch, 25, ragged_bytes)


# A loop of one's own that saves its model


def train(queue, file, batches, prefetch, at=None, final=None):
    """Learns from all that is there, and saves after every third batch; dies at one of its steps, if that is given."""
    steps = 0

    def step():
        nonlocal steps
        steps += 1
        if steps == at:
            os.kill(os.getpid(), signal.SIGKILL)

    dataset, seen = tr.ReplayDataset(queue, 4, batches, prefetch), []
    if file.exists():
        saved = torch.load(file)
        seen = saved["seen"]
        dataset.load_state_dict(saved["dataset"])
    for batch in dataset:
        step()
        seen += batch["x"].tolist()
        if len(seen) % 3 == 0:
            torch.save({"seen": seen, "dataset": dataset.state_dict()}, f"{file}.new")
            step()
            os.replace(f"{file}.new", file)
            step()
            queue.commit()
            step()
    for place, item in enumerate(seen if final else []):
        final[place] = item


@pytest.mark.parametrize(("max_draws", "prefetch"), [(1, 0), (1, 2), (2, 0)])
def test_a_loop_killed_at_any_step_of_a_save_goes_on_with_what_the_saved_model_had_not_seen(
    tmp_path, max_draws, prefetch
):
    for at in range(1, 16):
        file, final = tmp_path / f"{at}.pt", shared_counters(60 * max_draws)
        with tr.ReplayBuffer(SPEC, 64, sampler=tr.Fifo(max_draws=max_draws, commit="manual")) as queue:
            queue.extend(x=np.arange(60))
            given = queue, file, 15 * max_draws, prefetch
            with Forked(train, *given, at) as learner:
                assert learner.wait() == -signal.SIGKILL
            with Forked(train, *given, None, final) as learner:
                assert learner.wait() == 0
        groups = [range(first, first + 12) for first in range(0, 60, 12)]  # as they are committed
        assert final.tolist() == [item for group in groups for item in [*group] * max_draws]


def many_deaths(seed, prefetch, deaths, ragged_bytes=None):
    rng = np.random.default_rng(seed)
    spec = RAGGED if ragged_bytes else SPEC
    with (
        tr.ReplayBuffer(spec, 32, sampler=tr.Fifo(), ragged_bytes=ragged_bytes) as queue,
        queue.expect_writers(),
    ):
        journal = Journal()
        for _ in range(deaths):
            with (
                Forked(write, queue, journal, 0) as one,
                Forked(write, queue, journal, 1) as two,
                Forked(learn, queue, journal, prefetch) as three,
                Forked(learn, queue, journal, prefetch) as four,
            ):
                time.sleep(float(rng.uniform(0, 0.02)))
                for process in rng.permutation(np.array([one, two, three, four], dtype=object)):
                    process.kill()
        with Forked(write, queue, journal, 0) as one, Forked(write, queue, journal, 1) as two:
            while one.is_running() or two.is_running() or queue.num_items:
                if queue.num_items:
                    batch = queue.sample(8, at_least=1)
                    journal.note_got(batch)
                    journal.note_done(batch["key"].tolist())
                    queue.commit()  # the writers may need the bytes of what is held
            assert one.wait() == two.wait() == 0
        queue.commit()
        assert journal.torn[0] == 0, "a value was torn"
        assert min(journal.came[:]) >= 1, "a row was lost"
        assert journal.revived[0] == 0, "what was committed came again"
        assert max(journal.done[:]) == 1
        assert (queue.stats().held_items, queue.num_items) == (0, 0)

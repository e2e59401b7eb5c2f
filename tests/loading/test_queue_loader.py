"""Workers of a loader draw from a queue: the loop of the main process holds what it gets, loses and doubles none."""

import os
import signal

import pytest
from forked import Forked, eventually, shared_counters

import torchreplay as tr

SPEC = {"x": tr.Field((), "int64")}


@pytest.fixture(autouse=True)
def _quick_ends(monkeypatch):
    monkeypatch.setattr("torchreplay.segment.waits.RETURN_GRACE", 0.3)  # for the workers, too, which are forked


def queue(items, capacity=200, **fifo):
    """A queue that nobody writes to any more."""
    buffer = tr.ReplayBuffer(SPEC, capacity, sampler=tr.Fifo(**fifo))
    with buffer.writer() as writer:
        for number in range(items):
            writer.append(x=number)
    return buffer


def loader(buffer, size=5, steps=None, workers=2, **options):
    return tr.QueueLoader(tr.ReplayDataset(buffer, size, steps), workers, **options)


def values(batch):
    return batch["x"].tolist()


def held(buffer):
    """How many items this process holds, and how many others do."""
    holders = buffer._segment.queue_state(False)["holders"]
    return tuple(sum(items for _, items, mine in holders if mine is own) for own in (True, False))


def negated(batch):
    return batch | {"x": -batch["x"]}


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_workers_are_within_the_budget_of_their_dataset(workers):
    spec = SPEC | {"tokens": tr.Ragged("int32")}
    with tr.ReplayBuffer(spec, 64, sampler=tr.Fifo(), ragged_bytes=1 << 14) as buffer:
        with buffer.writer() as writer:
            for number in range(12):
                writer.append(x=number, tokens=[number] * 10)
        dataset = tr.ReplayDataset(buffer, 6, 3, budget={"tokens": 40})
        batches = list(tr.QueueLoader(dataset, workers))
        assert [batch.lengths("tokens").tolist() for batch in batches] == [[10] * 4] * 3
        assert sorted(number for batch in batches for number in values(batch)) == list(range(12))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("commit", ["next", "manual"])
def test_every_item_comes_once_transformed_by_a_worker(workers, commit):
    with queue(103, commit=commit) as buffer:
        transform = {"collate_fn": negated} if workers else {}
        got = [values(batch) for batch in loader(buffer, workers=workers, **transform)]
        assert sorted(number for batch in got for number in batch) == (
            list(range(-102, 1)) if workers else list(range(103))
        )
        assert all(batch == sorted(batch, reverse=workers > 0) for batch in got)
        assert held(buffer) == ((103, 0) if commit == "manual" else (0, 0))
        assert buffer.commit() == (103 if commit == "manual" else 0)
        assert buffer.num_items == 0


def test_items_come_as_often_as_max_draws_says():
    with queue(60, max_draws=2) as buffer:
        got = [number for batch in loader(buffer, steps=24) for number in values(batch)]
        assert sorted(got) == sorted([*range(60)] * 2)


def test_the_loop_holds_what_it_has_until_it_asks_for_more():
    with queue(60) as buffer:
        batches = iter(loader(buffer))
        first = next(batches)
        eventually(lambda: held(buffer) == (5, 20))
        second = next(batches)
        assert held(buffer)[0] == 5
        with pytest.raises(ValueError, match="no item that this process holds"):
            buffer.release(first)
        assert buffer.release(second) == 5
        batches.close()
        assert buffer.sample(30)["x"].tolist() == sorted({*range(60)} - {*values(first)})[:30]


@pytest.mark.parametrize("persistent", [False, True])
def test_what_a_loop_that_ends_early_never_got_goes_back(persistent):
    with queue(60) as buffer:
        batches, got = loader(buffer, persistent_workers=persistent), []
        for _ in range(4):
            for number, batch in enumerate(batches):
                got += values(batch)
                if number == 1:
                    break
        got += [number for batch in batches for number in values(batch)]
        assert sorted(got) == list(range(60))
        assert (buffer.num_items, buffer.stats().held_items) == (0, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's, in a destructor
def test_a_killed_worker_loses_and_doubles_nothing():
    with queue(150) as buffer:
        batches, got = loader(buffer, 3), []

        def learn(deaths):
            for number, batch in enumerate(batches):
                got.extend(values(batch))
                if number == 2 and deaths:
                    victims = [pid for pid, _, mine in buffer._segment.queue_state(False)["holders"] if not mine]
                    os.kill(victims[0], signal.SIGKILL)
                    eventually(lambda: False)  # until torch's handler raises

        for _ in range(6):
            with pytest.raises(RuntimeError, match="killed by signal"):
                learn(True)
        learn(False)
        assert sorted(got) == list(range(150))


@pytest.mark.slow
@pytest.mark.parametrize("items", [30, 60])  # the workers wait for more, or for the loop
def test_what_a_killed_learner_and_its_workers_held_comes_again(items, monkeypatch):
    monkeypatch.setattr("torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL", 0.3)  # an idle worker's, else 5 s
    with queue(items) as buffer, buffer.expect_writers():
        got = shared_counters(60)

        def learn():
            for number, batch in enumerate(loader(buffer)):
                for item in values(batch):
                    got[item] += 1
                if number == 3:
                    signal.pause()

        with Forked(learn) as learner:
            eventually(lambda: sum(got[:]) == 20)
            last = {item for item in range(60) if got[item]}
            learner.kill()
        eventually(lambda: held(buffer) == (0, 0))  # the workers see that they are orphans
        again = values(buffer.sample(items, at_least=1))
        assert len(again) == items - 15
        assert len(last & {*again}) == 5
        assert {*again} | last == {*range(items)}


def test_a_batch_goes_to_the_loop_unless_somebody_else_has_got_some_of_it():
    with queue(20) as buffer:
        drawn = shared_counters(2)

        def draw(place):
            drawn[place] = buffer._segment.presence
            buffer.sample(4)

        for place, first in ((0, 0), (1, 0)):
            with Forked(draw, place) as worker:
                assert worker.wait() == 0
            keys = list(range(first, 4))
            if place:
                batch = buffer.sample(2)  # which finds that it died
                assert values(batch) == [0, 1]
                assert not buffer._segment.adopt(keys, drawn[place], 0)
                assert buffer._segment.adopt(keys[2:], drawn[place], 0)
                assert values(buffer.sample(3)) == [4, 5, 6]
            else:
                assert buffer._segment.adopt(keys, drawn[place], 0)
                assert buffer._segment.adopt(keys, drawn[place], 0) is False
                assert buffer.release() == 4


def test_a_commit_ends_what_the_loop_has_got_and_not_what_is_on_its_way():
    with queue(60, commit="manual") as buffer:
        batches = iter(loader(buffer))
        got = values(next(batches)) + values(next(batches))
        assert buffer.commit() == 10
        batches.close()
        assert values(buffer.sample(50)) == sorted({*range(60)} - {*got})


# Bad input


def test_what_cannot_work_is_refused():
    with queue(20) as buffer, tr.ReplayBuffer(SPEC, 100) as replay:
        with pytest.raises(ValueError, match=r"a QueueLoader needs a queue"):
            tr.QueueLoader(tr.ReplayDataset(replay, 5))
        with pytest.raises(TypeError, match="a ReplayDataset of a queue"):
            tr.QueueLoader(buffer)
        with pytest.raises(ValueError, match=r"4 batches of 40 items ahead.*240 rows.*capacity of 200"):
            loader(buffer, 40)
        with pytest.raises(ValueError, match="batch_size is 20: the dataset has one, 5"):
            tr.QueueLoader(tr.ReplayDataset(buffer, 5), batch_size=20)
        for lost in (dict, lambda batch: batch["x"]):
            with pytest.raises(TypeError, match="which items it is of"):
                next(iter(loader(buffer, steps=2, collate_fn=lost)))
        assert values(buffer.sample(20)) == list(range(20))

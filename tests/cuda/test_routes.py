"""The ways of batches to a device: which one is taken, and what becomes of batches that are lost on one."""

import gc
import logging
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from delayed_draws import assert_same
from long_values import VIEWS, TimedCopies, numbered_buffer, writing_rows
from numbered_episodes import Explorers, spec
from numbered_items import VIEWS as ALL_VIEWS

import torchreplay as tr
from torchreplay.cuda import staging
from torchreplay.cuda.routes import PathSelector, Route


def choice_between(*took):
    """A choice that was told (draw, copy) of batches of each route in turn, and those routes."""
    choice = PathSelector([Route(str(k), SimpleNamespace(device="cuda:0"), 0, None, None) for k in range(len(took))])
    for times in zip(*took, strict=True):
        for pair in times:
            choice.note(choice.next(), *pair)
    return choice


def chosen(choice):
    return choice.routes.index(choice.next())


def test_the_route_that_is_quicker_by_a_margin_is_taken_but_for_the_first_batches():
    n = PathSelector.TRIED
    for usual, other, best in [
        ([(1, 1)] + [(5, 0)] * n, [(9, 9)] + [(0, 3)] * n, 1),
        ([(1, 1)] + [(5, 0)] * n, [(9, 9)] + [(3, 3)] * n, 1),  # beside each other
        ([(1, 1)] + [(5, 0)] * n, [(0, 0)] + [(0, 4.5)] * n, 0),  # hardly quicker
        ([(1, 1)] + [(0, 5)] * n, [(0, 0)] + [(0, 6)] * n, 0),
        ([(9, 9), (9, 9), (2, 0)] + [(9, 9)] * (n - 2), [(9, 9)] + [(0, 3)] * n, 0),  # the quickest counts
    ]:
        choice = choice_between(usual, other)
        assert (choice.open, chosen(choice)) == (False, best)
    assert choice_between([(5, 5)] * n, [(1, 1)] * n).open
    assert not PathSelector([None]).open


@pytest.mark.parametrize("still_open", [False, True])
def test_a_route_on_which_batches_are_lost_is_given_up(still_open):
    choice = choice_between(*([[(5, 5)], [(1, 1)]] if still_open else [[(5, 5)] * 6, [(1, 1)] * 6]))
    usual, other = choice.routes
    for k in range(1000):  # one of a hundred
        choice.note_outcome(other, k % 100 == 0)
        choice.note_outcome(usual, False)
    assert choice.open == still_open
    assert still_open or choice.next() is other
    for _ in range(3):
        choice.note_outcome(other, True)
    assert not choice.open
    assert choice.next() is choice.next() is usual


@pytest.fixture
def reading_device(monkeypatch):
    """A device that reads the ring: returns what it is like, by what its two ways are said to take."""
    device = SimpleNamespace(copied=1e3, read=0.0, lock=SimpleNamespace(held=True, release=lambda: None), copies=[])

    def made(copies):
        device.copies.append(copies)
        return copies

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("torchreplay.buffer.replay_buffer.DeviceCopies", lambda _: made(TimedCopies(device.copied)))
    monkeypatch.setattr(staging, "GatherCopies", lambda _, rows, lock: made(TimedCopies(device.read, rows)))
    monkeypatch.setattr(staging, "seen_by", lambda _, tensor: tensor)

    def lock_pages(buffer, _):
        buffer._page_lock = device.lock
        return device.lock

    monkeypatch.setattr(tr.ReplayBuffer, "_lock_pages", lock_pages)
    return device


@pytest.mark.parametrize(("copied", "read"), [(1e3, 0.0), (0.0, 1e3)])
def test_the_first_batches_go_both_ways_and_the_others_the_quicker_one(reading_device, caplog, copied, read):
    reading_device.copied, reading_device.read = copied, read
    caplog.set_level(logging.INFO, "torchreplay")
    n = 100
    expected = list(tr.ReplayDataset(numbered_buffer("transitions"), 16, steps=n))
    given = list(tr.ReplayDataset(numbered_buffer("transitions"), 16, steps=n, device="cuda", pin="ring"))
    assert_same(given, expected)
    ways = [len(copies.started) for copies in reading_device.copies]
    assert sum(ways) == n
    assert min(ways) <= PathSelector.TRIED + 2 + 5  # and those on their way when it was known
    assert (ways[0] < ways[1]) == (copied > read)
    assert sum(copies.timed for copies in reading_device.copies) < 2 * (PathSelector.TRIED + 2 + 5)
    way = "read by the device" if copied > read else "copied by the host"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [f"batches to cpu are {way}"]


def test_what_was_found_out_holds_for_the_next_iteration(reading_device):
    dataset = tr.ReplayDataset(numbered_buffer("transitions"), 16, steps=7, device="cuda", pin="ring")
    for _ in range(10):
        assert len(list(dataset)) == 7
    ways = [len(copies.started) for copies in reading_device.copies if copies.started]
    assert sum(ways) == 70
    assert len(ways) == 2
    assert ways[0] <= PathSelector.TRIED + 2 + 5
    dataset.buffer.close()
    assert not dataset.buffer._choices


def test_explorers_that_overwrite_much_of_what_is_read_have_the_host_copy_it(reading_device):
    buffer = numbered_buffer("rows", rows=128, calls=0)
    with Explorers(buffer, number=2, write=writing_rows) as explorers:
        explorers.await_rows_of(*explorers.places, rows=128)
        for batch in tr.ReplayDataset(buffer, 64, steps=100, device="cuda", pin="ring"):
            VIEWS["rows"].assert_exact(batch, explorers.streams)
            time.sleep(0.002)
        explorers.stop()
    copied, read = (len(copies.started) for copies in reading_device.copies)
    assert copied > 80
    assert read < 20


def ways_of(buffer, **arguments):
    given = {"prefetch": 2, "device": torch.device("cuda"), "pin": "ring"} | arguments
    return len(buffer.staging(8, **given)._choice.routes)


def test_there_is_one_way_where_nothing_is_long_or_locked_or_drawn_ahead(reading_device):
    long = numbered_buffer("transitions")
    assert ways_of(long) == 2
    assert ways_of(long, pin="staging") == ways_of(long, prefetch=0) == 1
    assert ways_of(tr.ReplayBuffer({"x": tr.Field((200,))}, 8)) == 1
    hindsight = ALL_VIEWS["hindsight"].view
    assert ways_of(tr.ReplayBuffer(spec(), 512, view=hindsight)) == 1  # its functions want all values on the host
    reading_device.lock.held = False
    assert ways_of(long) == 1


def test_a_device_that_does_not_reach_the_memory_is_a_warning(reading_device, monkeypatch):
    def out_of_reach(_, tensor):
        raise RuntimeError("memory that cuda:0 cannot read where it lies")

    monkeypatch.setattr(staging, "seen_by", out_of_reach)
    with pytest.warns(RuntimeWarning, match=r'pin="ring".*cuda:0 cannot read where it lies.*copied by the host'):
        assert ways_of(numbered_buffer("transitions")) == 1


def test_nothing_keeps_a_buffer_whose_iteration_has_ended(reading_device):
    dataset = tr.ReplayDataset(numbered_buffer("transitions"), 8, steps=20, device="cuda", pin="ring")
    gone = weakref.ref(dataset.buffer)
    gc.disable()
    try:
        list(dataset)
        del dataset
        assert gone() is None
    finally:
        gc.enable()

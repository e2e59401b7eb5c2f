"""TD errors that are on their way from a device: applied in order when they arrive, and never waited for unasked."""

import pickle
import threading

import pytest
import torch
from delayed_draws import BATCH, ROWS, filled_buffer
from forked import Forked
from late_copies import OnDevice, send_late

import torchreplay as tr
from torchreplay.buffer.pending_updates import PendingUpdates


@pytest.fixture
def sent(monkeypatch):
    """The TD errors that went on their way, in order, and have not arrived."""
    return send_late(monkeypatch)


class Arrived:
    """TD errors that are there."""

    values = torch.ones(1)

    def done(self):
        return True

    def wait(self):
        pass

    def release(self):
        pass


def on_device(*values):
    return torch.tensor(values).as_subclass(OnDevice)


def priorities(buffer, *keys):
    """Raw priorities of rows; alpha is 1."""
    return [round(float(buffer._segment.column(-1)[key]), 3) for key in keys]


def test_an_update_is_applied_once_it_has_arrived_by_the_next_call(sent):
    for comes_by in (
        lambda buffer, batches: buffer.sample(BATCH),
        lambda buffer, batches: next(batches),
        lambda buffer, batches: buffer.stats(),
        lambda buffer, batches: buffer.gather([0]),
        lambda buffer, batches: buffer.histograms(),
        lambda buffer, batches: buffer.update_priorities([5], on_device(1.0)),
        lambda buffer, batches: buffer.update_priorities([5], [1.0]),
    ):
        sent.clear()
        buffer = filled_buffer()
        batches = iter(tr.ReplayDataset(buffer, BATCH))
        next(batches)
        buffer.update_priorities([3, 4], on_device(7.0, -8.0))
        assert priorities(buffer, 3, 4) == [1, 1]
        buffer.sample(BATCH)
        assert priorities(buffer, 3, 4) == [1, 1]
        sent[0].arrive()
        comes_by(buffer, batches)
        assert priorities(buffer, 3, 4) == [7, 8]
        assert not sent[0].waited
        buffer.flush()


def test_keys_and_td_errors_are_those_of_the_call_whatever_becomes_of_the_tensors(sent):
    buffer = filled_buffer()
    keys = torch.tensor([1, 2])
    buffer.update_priorities(keys, on_device(4.0, 5.0))
    keys.fill_(9)
    buffer.flush()
    assert priorities(buffer, 1, 2, 9) == [4, 5, 1]


def test_updates_are_applied_in_the_order_in_which_they_were_given(sent):
    buffer = filled_buffer()
    for td in (2.0, 3.0, 4.0):
        buffer.update_priorities([0], on_device(td))
    sent[1].arrive()
    sent[2].arrive()
    assert buffer.stats().updated == 0
    sent[0].arrive()
    assert buffer.stats().updated == 3
    assert priorities(buffer, 0) == [4]
    buffer.update_priorities([0], on_device(5.0))
    buffer.update_priorities([0], torch.tensor([6.0]))  # of the CPU: those before come first
    assert sent[3].waited
    assert priorities(buffer, 0) == [6]


@pytest.mark.parametrize("ask", ["apply_arrived", "flush"])
def test_what_comes_by_in_the_midst_of_an_update_applies_none_before_it_is_over(ask):
    applied = []

    def apply(keys, td):
        getattr(updates, ask)()  # a signal handler, say
        applied.append(int(keys[0]))

    updates = PendingUpdates(apply)
    for number in range(3):
        updates.add(torch.tensor([number]), Arrived())
    updates.apply_arrived()
    assert applied == [0, 1, 2]
    assert not updates.waiting


def test_what_a_signal_handler_applied_meanwhile_does_not_pass_its_turn_to_one_that_has_not_arrived():
    applied = []

    class Asked(Arrived):
        def done(self):
            if not applied:
                applied.append("asked")
                updates.apply_arrived()  # a signal handler, once it is known that they are there
            return True

    class OnItsWay(Arrived):
        def done(self):
            return False

    updates = PendingUpdates(lambda keys, td: applied.append(int(keys[0])))
    for number, arrival in enumerate([Asked(), OnItsWay()]):
        updates.add(torch.tensor([number]), arrival)
    updates.apply_arrived()
    assert applied == ["asked", 0]
    updates.flush()
    assert applied == ["asked", 0, 1]


def test_an_update_that_was_interrupted_is_applied_again():
    applied = []

    def apply(keys, td):
        applied.append(int(keys[0]))
        if len(applied) == 2:
            raise KeyboardInterrupt

    updates = PendingUpdates(apply)
    for number in range(3):
        updates.add(torch.tensor([number]), Arrived())
    with pytest.raises(KeyboardInterrupt):
        updates.apply_arrived()
    updates.flush()
    assert applied == [0, 1, 1, 2]


def test_flush_waits_for_everything_and_returns_at_once_without_anything(sent):
    buffer = filled_buffer()
    buffer.flush()
    for key in range(5):
        buffer.update_priorities([key], on_device(10.0 + key))
    buffer.flush()
    assert priorities(buffer, *range(5)) == [10, 11, 12, 13, 14]
    buffer.flush()
    assert buffer.stats().updated == 5


def test_rows_overwritten_before_the_td_errors_arrive_are_counted(sent):
    buffer = filled_buffer(capacity=ROWS)
    buffer.update_priorities([0, ROWS - 1], on_device(4.0, 5.0))
    buffer.extend(number=torch.zeros(1, dtype=torch.int64), obs=torch.zeros(1, 4))
    buffer.flush()
    assert (buffer.stats().updated, buffer.stats().stale_updates) == (1, 1)


def test_what_can_be_known_at_once_is_refused_at_once(sent):
    buffer, other = filled_buffer(), filled_buffer()
    for keys, td, message in (
        ([0, 1], on_device(1.0), r"torch.float32 of shape \(1,\), expected one real number for each key: shape \(2,\)"),
        ([0], on_device(1j), r"torch.complex64 of shape \(1,\)"),
        ([0.5], on_device(1.0), "expected int64"),
        ([ROWS], on_device(1.0), f"key {ROWS} at index 0 was never issued by this buffer: expected 0 to {ROWS - 1}"),
        ([0, -1], on_device(1.0, 1.0), "key -1 at index 1 was never issued"),
        (other.sample(1), on_device(1.0), "drawn from another buffer"),
    ):
        with pytest.raises(ValueError, match=message):
            buffer.update_priorities(keys, td)
    assert sent == []


NAN = float("nan")


def test_td_errors_that_are_not_finite_are_told_by_the_next_call_with_the_number_of_the_update(sent):
    buffer = filled_buffer()
    for td in (2.0, NAN, 4.0):
        buffer.update_priorities([0, 1], on_device(1.0, td))
    for arrival in sent:
        arrival.arrive()
    with pytest.raises(ValueError, match=r"number 2 .* of 2 items: 1 of 2 TD errors are NaN .* first at index 1"):
        buffer.sample(BATCH)
    assert priorities(buffer, 1) == [2]
    buffer.sample(BATCH)  # told once; those after it have their turn
    assert priorities(buffer, 1) == [4]


def test_an_update_that_meets_the_failure_of_an_earlier_one_is_not_lost(sent):
    buffer = filled_buffer()
    for td, given in ((on_device(NAN), on_device(3.0)), (on_device(NAN), torch.tensor([4.0]))):
        buffer.update_priorities([0], td)
        sent[-1].arrive()
        with pytest.raises(ValueError, match="NaN"):
            buffer.update_priorities([0], given)
        buffer.flush()
        assert priorities(buffer, 0) == [float(given[0])]


def test_flush_applies_what_is_right_and_then_tells_all_that_was_wrong(sent):
    buffer = filled_buffer()
    for td in (NAN, 2.0, float("inf"), 4.0):
        buffer.update_priorities([0], on_device(td))
    with pytest.raises(ValueError, match="number 1 ") as caught:
        buffer.flush()
    assert ["number 3 " in note for note in caught.value.__notes__] == [True]
    assert priorities(buffer, 0) == [4]
    buffer.flush()


def test_the_failure_of_a_device_is_told_once_and_takes_what_was_on_its_way_along(sent):
    def fails():
        raise RuntimeError("CUDA error: device-side assert triggered")

    buffer = filled_buffer()
    for meets_it, question in ((buffer.flush, "wait"), (lambda: buffer.sample(BATCH), "done")):
        buffer.update_priorities([0], on_device(5.0))
        buffer.update_priorities([0], on_device(6.0))
        setattr(sent[-2], question, fails)
        with pytest.raises(RuntimeError, match="CUDA error"):
            meets_it()
        buffer.flush()
        assert buffer.stats().updated == 0
    buffer.close()


def test_a_saved_buffer_has_what_was_fed_back_before(sent, tmp_path):
    buffer = filled_buffer()
    dataset = tr.ReplayDataset(buffer, BATCH)
    next(batches := iter(dataset))
    buffer.update_priorities([0], on_device(50.0))
    dataset.state_dict()
    assert priorities(buffer, 0) == [50]
    buffer.update_priorities([1], on_device(60.0))
    buffer.save(tmp_path)
    assert priorities(tr.ReplayBuffer.load(tmp_path), 0, 1) == [50, 60]
    batches.close()


def test_closing_waits_for_updates_and_closes_whatever_they_are(sent):
    buffer = filled_buffer()
    other = pickle.loads(pickle.dumps(buffer))
    buffer.update_priorities([0], on_device(50.0))
    buffer.close()
    assert priorities(other, 0) == [50]
    other.update_priorities([0], on_device(NAN))
    with pytest.raises(ValueError, match="number 1 "):
        other.close()
    with pytest.raises(RuntimeError, match="closed"):
        other.sample(1)
    other.close()


def test_a_stopped_buffer_takes_what_was_on_its_way(sent):
    buffer = filled_buffer()
    buffer.update_priorities([0], on_device(50.0))
    buffer.stop()
    buffer.flush()
    assert priorities(buffer, 0) == [50]


def test_a_repr_raises_nothing(sent):
    buffer = filled_buffer()
    buffer.update_priorities([0], on_device(NAN))
    sent[0].arrive()
    assert "256/1,024 rows" in repr(buffer)
    with pytest.raises(ValueError, match="NaN"):
        buffer.stats()


def test_what_is_on_its_way_is_the_parents_to_apply_and_not_a_childs_or_a_copys(sent):
    buffer = filled_buffer()
    buffer.update_priorities([0], on_device(50.0))
    copy = pickle.loads(pickle.dumps(buffer))
    copy.flush()

    def in_child():
        buffer.flush()
        buffer.sample(BATCH)
        assert priorities(buffer, 0) == [1]
        buffer.update_priorities([1], on_device(60.0))
        buffer.close()

    with Forked(in_child) as child:
        assert child.wait() == 0
    assert not sent[0].done()
    assert priorities(buffer, 0, 1) == [1, 60]
    buffer.flush()
    assert priorities(buffer, 0) == [50]


def test_threads_that_come_by_together_apply_each_update_once_and_in_order(sent):
    buffer, rounds = filled_buffer(), 200
    done = threading.Event()

    def come_by():
        while not done.is_set():
            buffer.stats()

    threads = [threading.Thread(target=come_by) for _ in range(3)]
    for thread in threads:
        thread.start()
    for k in range(rounds):
        buffer.update_priorities([0], on_device(1.0 + k))
        sent[k].arrive()
    buffer.flush()
    done.set()
    for thread in threads:
        thread.join()
    assert buffer.stats().updated == rounds
    assert priorities(buffer, 0) == [rounds]

"""Writing: rows come back byte for byte under consecutive keys, from any thread and after any turn of the ring."""

import pickle
import threading

import numpy as np
import pytest
import torch
from forked import Forked

import torchreplay as tr


def buffer_of(dtype, shape=(), capacity=4):
    return tr.ReplayBuffer({"x": tr.Field(shape, dtype)}, capacity, seed=0)


@pytest.mark.parametrize("nbytes", [1, 3, 64, 1000, 1023, 1024, 1025, 5000])
def test_payloads_of_any_size_come_back_byte_for_byte_through_several_turns(nbytes):
    chance = np.random.default_rng(nbytes)
    spec = {
        "small": tr.Field((), torch.int8),
        "bytes": tr.Field((nbytes,), torch.uint8),
        "wide": tr.Field((2,), torch.float64),
    }
    buffer = tr.ReplayBuffer(spec, 7, seed=0)
    rows = {
        "small": chance.integers(-128, 128, 30, np.int8),
        "bytes": chance.integers(0, 256, (30, nbytes), np.uint8),
        "wide": chance.normal(size=(30, 2)),
    }
    with buffer.writer() as writer:
        for i in range(13):
            writer.append(**{name: value[i] for name, value in rows.items()})
    buffer.extend(**{name: value[13:] for name, value in rows.items()})
    batch = buffer.sample(70)
    assert set(batch["key"].tolist()) == set(range(23, 30))
    for name, value in rows.items():
        assert np.array_equal(batch[name].numpy(), value[batch["key"].numpy()])
        assert np.array_equal(buffer.storage[name].numpy(), np.stack([value[k] for k in (28, 29, 23, 24, 25, 26, 27)]))


def test_nested_fields_come_back_nested_as_they_were_given():
    spec = {
        "a": {"b": {"c": tr.Field((2,)), "d": tr.Field((), torch.int32)}, "e": tr.Field((), torch.bool)},
        "f": tr.Field(),
    }
    buffer = tr.ReplayBuffer(spec, 4, seed=0)
    assert buffer.spec == spec
    row = {"f": 4.0, "a": {"e": True, "b": {"d": 3, "c": np.array([1.0, 2.0])}}}
    buffer.writer().append(**row)
    buffer.extend(f=np.array([4.0]), a={"e": np.array([True]), "b": {"d": np.array([3]), "c": np.array([[1.0, 2.0]])}})
    batch = buffer.sample(4)
    assert list(batch) == ["a", "f", "key", "weight", "probability"]
    assert list(batch["a"]["b"]) == ["c", "d"]
    assert batch["a"]["b"]["c"].tolist() == [[1.0, 2.0]] * 4
    assert (batch["a"]["b"]["d"].tolist(), batch["a"]["e"].tolist(), batch["f"].tolist()) == (
        [3] * 4,
        [True] * 4,
        [4.0] * 4,
    )
    assert buffer.storage["a"]["b"]["d"][:2].tolist() == [3, 3]


def test_keys_of_one_writer_are_consecutive_from_0_and_extend_returns_them_as_int64():
    buffer = buffer_of(torch.float32, capacity=100)
    with buffer.writer() as writer:
        assert [writer.append(x=1.0) for _ in range(5)] == list(range(5))
        keys = writer.extend(x=np.zeros(250))
        assert (keys.dtype, keys.tolist()) == (torch.int64, list(range(5, 255)))
        assert writer.extend(x=np.zeros(0)).tolist() == []
        assert writer.append(x=1.0) == 255
        assert writer.rows == 256


def test_the_newest_rows_are_kept_when_the_ring_wraps():
    buffer = buffer_of(torch.int64, capacity=10)
    buffer.extend(x=np.arange(1234))
    assert len(buffer) == 10
    assert sorted(buffer.storage["x"].tolist()) == list(range(1224, 1234))
    batch = buffer.sample(100)
    assert torch.equal(batch["x"], batch["key"])


def test_a_call_with_other_names_or_order_is_matched_anew():
    buffer = tr.ReplayBuffer({"a": tr.Field(), "b": tr.Field()}, 8)
    with buffer.writer() as writer:
        for _ in range(2):
            writer.append(a=1.0, b=2.0)
            writer.append(b=2.0, a=1.0, priority=3.0)
            writer.append(priority=None, b=2.0, a=1.0)
            with pytest.raises(ValueError, match="missing field 'b'"):
                writer.append(a=1.0)
    assert buffer.storage["a"][:6].tolist() == [1.0] * 6
    assert buffer.storage["b"][:6].tolist() == [2.0] * 6


def test_what_is_written_is_a_copy():
    buffer = buffer_of(torch.float32, (3,))
    value = np.ones(3, np.float32)
    buffer.writer().append(x=value)
    value[:] = 5
    batch = buffer.sample(1)
    buffer.extend(x=np.full((8, 3), 7.0))
    assert buffer.storage["x"][0].tolist() == [7.0] * 3
    assert batch["x"].tolist() == [[1.0] * 3]


def test_arrays_are_let_go_after_the_call():
    buffer = buffer_of(torch.float32, (3,))
    writer = buffer.writer()
    given = bytearray(12)
    writer.append(x=memoryview(given).cast("f"))
    with pytest.raises(ValueError, match="expected float32"):
        writer.append(x=memoryview(given))
    given.extend(b"more")  # BufferError while somebody still holds it


def test_two_threads_in_one_writer_are_told_to_use_two_or_write_one_after_the_other():
    buffer = buffer_of(torch.float32, (100_000,), capacity=8)
    writer = buffer.writer()
    outcomes = []

    def write():
        for _ in range(50):
            try:
                outcomes.append(writer.append(x=np.zeros(100_000)))
            except RuntimeError as error:
                outcomes.append("one writer for each thread" in str(error))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys = [o for o in outcomes if not isinstance(o, bool)]
    assert sorted(keys) == list(range(len(keys)))
    assert False not in [o for o in outcomes if isinstance(o, bool)]


def test_threads_with_a_writer_each_write_every_row_once():
    buffer = buffer_of(torch.int64, capacity=4000)

    def write(start):
        with buffer.writer() as writer:
            for i in range(500):
                writer.append(x=start + i)
            buffer.extend(x=np.arange(start + 500, start + 1000))

    threads = [threading.Thread(target=write, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(buffer.storage["x"].tolist()) == list(range(4000))
    assert len(buffer) == 4000


def test_a_writer_inherited_by_fork_goes_on_under_an_id_of_its_own():
    buffer = buffer_of(torch.int64, capacity=4000)
    writer = buffer.writer()
    writer.append(x=0)

    def write(start):
        for i in range(1, 500):
            writer.append(x=start + i)
        assert buffer.stats().writers == 2

    with Forked(write, 1000) as child:
        for i in range(1, 500):
            writer.append(x=i)
        assert child.wait() == 0
    assert buffer.stats().writers == 1
    values = buffer.storage["x"][: len(buffer)].tolist()
    assert sorted(values) == [*range(500), *range(1001, 1500)]


def test_a_writer_is_not_passed_to_another_process():
    with pytest.raises(TypeError, match=r"pass the buffer, and call buffer.writer\(\) there"):
        pickle.dumps(buffer_of(torch.float32).writer())


def test_writers_count_while_they_are_open():
    buffer = buffer_of(torch.float32)
    assert buffer.stats().writers == 0
    with buffer.writer() as first, buffer.writer():
        assert buffer.stats().writers == 2
        first.flush()
        assert "0 rows" in repr(first)
    assert buffer.stats().writers == 0
    assert repr(first) == "Writer(closed)"
    forgotten = buffer.writer()
    assert buffer.stats().writers == 1
    del forgotten
    assert buffer.stats().writers == 0

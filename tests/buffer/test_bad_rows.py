"""Bad rows: an error that names the field, what was given and what is expected, and nothing is written."""

import re

import numpy as np
import pytest
import torch
from small_rows import SPEC, assert_nothing_was_written_and_the_buffer_works, good_row

import torchreplay as tr
from torchreplay.ray.sharded.local_shard import ShardLost, ShardWriter


@pytest.fixture
def buffer():
    return tr.ReplayBuffer(SPEC, 8, sampler=tr.Prioritized(), seed=0)


# Fields

BAD_ROWS = [
    ({"x": np.zeros(4)}, "missing field 'nested'"),
    ({"nested": {"n": 1}}, "missing field 'x'"),
    ({}, "missing field"),
    ({**good_row(), "y": 1.0}, "unknown field 'y'"),
    ({**good_row(), "nested": {}}, "missing field 'nested/n'"),
    ({**good_row(), "nested": {"n": 1, "m": 2}}, "unknown field 'nested/m'"),
    ({**good_row(), "nested": {"n": 1, 2: 2}}, "unknown field"),
    ({**good_row(), "nested": 1}, "'nested' is nested: expected a dict, got a value of type int"),
    ({**good_row(), "x": np.zeros(3)}, r"'x': got float64 of shape \(3,\), expected float32 of shape \(4,\)"),
    ({**good_row(), "x": np.zeros((1, 4))}, r"'x': got float64 of shape \(1, 4\), expected float32 of shape \(4,\)"),
    ({**good_row(), "x": np.zeros((3, 4))}, r"\(4,\): append\(\) writes one row; extend\(\) takes rows, here 3"),
    ({**good_row(), "x": torch.zeros(5)}, r"'x': got float32 of shape \(5,\), expected float32 of shape \(4,\)"),
    ({**good_row(), "x": 1.0}, r"'x': got a Python float, expected float32 of shape \(4,\)"),
    ({**good_row(), "x": None}, "'x': got a value of type NoneType"),
    ({**good_row(), "x": "abcd"}, "'x': got a value of type str"),
    ({**good_row(), "x": [1.0, None, 1.0, 1.0]}, "'x': got a value of type list"),
    ({**good_row(), "x": [[1.0], [1.0, 2.0]]}, "'x': got a list whose parts are of different lengths"),
    ({**good_row(), "x": (1.0, [1.0], 1.0, 1.0)}, "'x': got a list whose parts are of different lengths"),
    ({**good_row(), "x": [torch.zeros(2), torch.zeros(1)]}, "'x': got a list whose parts are of different lengths"),
    ({**good_row(), "x": np.zeros(4, complex)}, "'x': got an array of a dtype that a row cannot hold"),
    ({**good_row(), "x": np.zeros(4, object)}, "'x': got an array of a dtype that a row cannot hold"),
    ({**good_row(), "x": np.zeros(4, ">c8")}, "'x': got an array of a dtype that a row cannot hold"),
    ({**good_row(), "x": np.zeros(4, np.clongdouble)}, "'x': got an array of a dtype that a row cannot hold"),
    ({**good_row(), "x": np.zeros(4, ">M8[s]")}, "'x': got a value of type ndarray"),
    ({**good_row(), "nested": {"n": np.array(1.5, ">f8")}}, "'nested/n': float64 does not cast to int32"),
    ({**good_row(), "x": torch.zeros(4, dtype=torch.complex64)}, "'x': got a tensor of a dtype that a row cannot"),
    ({**good_row(), "x": torch.zeros(4, device="meta")}, "'x': got a tensor"),
    ({**good_row(), "x": torch.zeros(4).to_sparse()}, "'x': got a tensor"),
    ({**good_row(), "nested": {"n": 1.5}}, "'nested/n': a Python float does not cast to int32"),
    ({**good_row(), "nested": {"n": np.float32(1)}}, "'nested/n': float32 does not cast to int32"),
    ({**good_row(), "nested": {"n": torch.tensor(1.0)}}, "'nested/n': float32 does not cast to int32"),
    ({**good_row(), "nested": {"n": 2**31}}, "'nested/n': got a Python int that is out of range for int32"),
    ({**good_row(), "nested": {"n": -(2**31) - 1}}, "'nested/n': got a Python int that is out of range for int32"),
    ({**good_row(), "nested": {"n": 10**30}}, "'nested/n': got a Python int that is out of range for int32"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=[message[:40] for _, message in BAD_ROWS])
def test_a_bad_row_is_a_value_error_that_names_field_and_expectation(buffer, row, message):
    with buffer.writer() as writer, pytest.raises(ValueError, match=message):
        writer.append(**row)
    assert_nothing_was_written_and_the_buffer_works(buffer)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"x": np.zeros((3, 4)), "nested": {"n": np.zeros(2, int)}}, "'nested/n': got 2 rows, .* have 3"),
        (
            {"x": np.zeros(4), "nested": {"n": np.zeros(4, int)}},
            r"got float64 of shape \(4,\), expected float32 of shape \(n, 4,?\)",
        ),
        ({"x": np.zeros((3, 4)), "nested": {"n": 1}}, r"'nested/n': got a Python int, expected int32 of shape \(n,\)"),
        ({"x": np.zeros((3, 4)), "nested": {"n": [1, None, 3]}}, "'nested/n': got a value of type list"),
        ({"x": np.zeros((3, 4)), "nested": {"n": np.zeros(3)}}, "'nested/n': float64 does not cast to int32"),
    ],
)
def test_bad_rows_are_a_value_error_that_names_the_field(buffer, rows, message):
    with pytest.raises(ValueError, match=message):
        buffer.extend(**rows)
    assert_nothing_was_written_and_the_buffer_works(buffer)


def test_more_rows_than_there_are_keys_are_refused_though_they_need_no_memory():
    # Keys of 8 bytes each for 2**61 rows are so many bytes that 64 bits do not count them.
    buffer = tr.ReplayBuffer({"x": tr.Field((), torch.uint8)}, 8)
    for rows in (2**61, 2**61 + 5, 2**47 + 1):
        with pytest.raises(ValueError, match=f"field 'x': got {rows} rows, expected at most {2**47}"):
            buffer.extend(x=torch.zeros(1, dtype=torch.uint8).expand(rows))
    assert buffer.stats().rows_written == 0


@pytest.mark.gpu
def test_a_cuda_tensor_is_refused_with_the_advice_to_copy_it(buffer):
    with pytest.raises(ValueError, match=r"not on the CPU: pass tensor.cpu\(\)"):
        buffer.writer().append(x=torch.zeros(4, device="cuda"), nested={"n": 1})
    assert_nothing_was_written_and_the_buffer_works(buffer)


@pytest.mark.parametrize("value", [True, 300, -1, np.int8(1), torch.tensor(-1)], ids=repr)
def test_integers_that_do_not_fit_an_unsigned_field_are_refused_by_the_rules_of_same_kind(value):
    buffer = tr.ReplayBuffer({"u": tr.Field((), torch.uint8)}, 4)
    with buffer.writer() as writer:
        if value is True:
            assert writer.append(u=value) == 0
        else:
            with pytest.raises(ValueError, match=r"out of range for uint8|does not cast to uint8"):
                writer.append(u=value)


@pytest.mark.parametrize("value", [0, 1, 2, 1.0, np.uint8(1), torch.tensor(1)], ids=repr)
def test_only_bools_go_into_a_bool_field(value):
    buffer = tr.ReplayBuffer({"b": tr.Field((), torch.bool)}, 4)
    with buffer.writer() as writer:
        with pytest.raises(ValueError, match=r"does not cast to bool .*, such as bool\(b\)$"):
            writer.append(b=value)
        assert writer.append(b=np.bool_(True)) == 0


@pytest.mark.parametrize(
    ("values", "as_bools"),
    [
        (np.zeros(2), r"b.astype\(bool\)"),
        (torch.zeros(2), r"b.bool\(\)"),
        ([0, 1], r"numpy.array\(b, bool\)"),
    ],
    ids=["numpy", "torch", "list"],
)
def test_numbers_for_a_bool_field_are_refused_with_the_call_that_makes_bools_of_them(values, as_bools):
    buffer = tr.ReplayBuffer({"a": {"b": tr.Field((), torch.bool)}}, 4)
    with pytest.raises(ValueError, match=f"field 'a/b': .* does not cast to bool .*, such as {as_bools}$"):
        buffer.extend(a={"b": values})


@pytest.mark.parametrize(
    "priority",
    [float("nan"), float("inf"), -float("inf"), "high", object(), 1j, 10**400, [1.0], torch.ones(2), torch.tensor(1j)],
)
def test_a_bad_priority_is_refused(buffer, priority):
    with buffer.writer() as writer, pytest.raises(ValueError, match="the priority is"):
        writer.append(**good_row(), priority=priority)
    assert_nothing_was_written_and_the_buffer_works(buffer)


def test_a_tensor_whose_device_fails_to_give_the_priority_says_so_itself(buffer):
    priority = torch.empty((), device="meta")
    with pytest.raises(RuntimeError, match="meta") as failure:
        float(priority)
    with buffer.writer() as writer, pytest.raises(RuntimeError, match=re.escape(str(failure.value))):
        writer.append(**good_row(), priority=priority)
    assert_nothing_was_written_and_the_buffer_works(buffer)


class Interrupting(torch.Tensor):
    """Calls that Ctrl-C may interrupt."""

    def __array__(self, *_, **__):
        raise KeyboardInterrupt

    def __float__(self):
        raise KeyboardInterrupt


class InterruptingList(list):
    def __array__(self, *_, **__):
        raise KeyboardInterrupt


def test_ctrl_c_while_what_was_given_is_read_gets_through(buffer):
    keys = buffer.extend(x=np.zeros((2, 4)), nested={"n": np.zeros(2, int)})
    for given in (
        lambda: buffer.update_priorities(keys, InterruptingList([1.0, 1.0])),
        lambda: buffer.update_priorities(InterruptingList([0, 1]), [1.0, 1.0]),
        lambda: buffer.gather(InterruptingList([0, 1])),
        lambda: buffer.writer().append(**good_row(), priority=torch.ones(()).as_subclass(Interrupting)),
    ):
        with pytest.raises(KeyboardInterrupt):
            given()
    assert buffer.stats().updated == 0
    assert len(buffer) == 2


@pytest.mark.parametrize("priority", [2.0, torch.tensor(2.0), np.array(2.0), np.float32(2.0)], ids=repr)
def test_one_number_of_any_kind_is_the_priority_of_all_rows(buffer, priority):
    buffer.extend(x=np.zeros((2, 4)), nested={"n": np.zeros(2, int)}, priority=priority)
    assert buffer.stats().priority_total == pytest.approx(2 * 2.0**buffer.sampler.alpha)


@pytest.mark.parametrize("priority", [[1.0], [1.0, np.nan], "ab", np.ones((2, 1)), np.array([1j, 1]), [None, 1]])
def test_bad_priorities_of_rows_are_refused(buffer, priority):
    with pytest.raises(ValueError, match="priority"):
        buffer.extend(x=np.zeros((2, 4)), nested={"n": np.zeros(2, int)}, priority=priority)
    assert_nothing_was_written_and_the_buffer_works(buffer)


def test_fields_given_by_position_are_refused_with_how_to_give_them(buffer):
    rows = {"x": np.zeros((2, 4)), "nested": {"n": np.zeros(2, int)}}
    writer, shard_writer = buffer.writer(), ShardWriter(buffer._segment, buffer._config, 1000, None, "next_step")
    for call in (buffer.extend, writer.extend, writer.append, shard_writer.extend, shard_writer.append):
        for given in (rows, rows["x"]):
            with pytest.raises(TypeError, match=r"takes the fields as keyword arguments: \w+\("):
                call(given)
    writer.close()
    shard_writer.close()
    assert_nothing_was_written_and_the_buffer_works(buffer)


def test_a_closed_writer_says_how_to_get_another(buffer):
    writer = buffer.writer()
    writer.close()
    writer.close()
    for call in (lambda: writer.append(**good_row()), writer.flush, writer.__enter__):
        with pytest.raises(ValueError, match=r"the writer is closed: .*buffer.writer\(\)"):
            call()
    assert_nothing_was_written_and_the_buffer_works(buffer)


def test_a_writer_of_a_shard_that_was_let_go_of_says_how_to_get_another(buffer):
    shard_writer = ShardWriter(buffer._segment, buffer._config, 1000, None, "next_step")
    other = tr.ReplayBuffer.attach(buffer.handle())
    buffer.close()
    with shard_writer, pytest.raises(ShardLost, match=r"closed, or the shard of this node is gone, .* call writer\(\)"):
        shard_writer.append(**good_row())
    assert other.stats().rows_written == 0

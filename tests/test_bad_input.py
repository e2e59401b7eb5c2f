"""Bad input: a clear error each, nothing written, the buffer usable afterwards, never the end of the interpreter."""

import ctypes
import dataclasses
import gc
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchreplay as tr

SPEC = {"x": tr.Field((4,)), "nested": {"n": tr.Field((), torch.int32)}}


def good_row(value=1.0):
    return {"x": np.full(4, value, np.float32), "nested": {"n": int(value)}}


@pytest.fixture
def buffer():
    return tr.ReplayBuffer(SPEC, 8, sampler=tr.Prioritized(), seed=0)


def assert_nothing_was_written_and_the_buffer_works(buffer):
    issued = buffer.stats().rows_written
    assert len(buffer) == 0
    with buffer.writer() as writer:
        assert writer.append(**good_row(7.0)) == issued
    batch = buffer.sample(3)
    assert batch["x"].eq(7).all()
    buffer.update_priorities(batch, torch.ones(3))
    assert buffer.stats().updated == 3


# Fields

BAD_ROWS = [
    ({"x": np.zeros(4)}, "missing field 'nested'"),
    ({"nested": {"n": 1}}, "missing field 'x'"),
    ({}, "missing field"),
    ({**good_row(), "y": 1.0}, "unknown field 'y'"),
    ({**good_row(), "nested": {}}, "missing field 'nested/n'"),
    ({**good_row(), "nested": {"n": 1, "m": 2}}, "unknown field 'nested/m'"),
    ({**good_row(), "nested": {"n": 1, 2: 2}}, "unknown field"),
    ({**good_row(), "nested": 1}, "'nested' is nested: expected a dict"),
    ({**good_row(), "x": np.zeros(3)}, r"'x': got float64 of shape \(3,\), expected float32 of shape \(4,\)"),
    ({**good_row(), "x": np.zeros((1, 4))}, r"'x': got float64 of shape \(1, 4\), expected float32 of shape \(4,\)"),
    ({**good_row(), "x": torch.zeros(5)}, r"'x': got float32 of shape \(5,\), expected float32 of shape \(4,\)"),
    ({**good_row(), "x": 1.0}, r"'x': got a Python float, expected float32 of shape \(4,\)"),
    ({**good_row(), "x": None}, "'x': got a value of type NoneType"),
    ({**good_row(), "x": "abcd"}, "'x': got a value of type str"),
    ({**good_row(), "x": [1.0] * 4}, "'x': got a value of type list"),
    ({**good_row(), "x": np.zeros(4, complex)}, "'x': got an array of a dtype that a row cannot hold"),
    ({**good_row(), "x": np.zeros(4, object)}, "'x': got an array of a dtype that a row cannot hold"),
    ({**good_row(), "x": np.zeros(4, ">f4")}, "'x': got an array of a dtype that a row cannot hold"),
    ({**good_row(), "x": np.zeros(4, np.longdouble)}, "'x': got an array of a dtype that a row cannot hold"),
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
        ({"x": np.zeros((3, 4)), "nested": {"n": [1, 2, 3]}}, "'nested/n': got a value of type list"),
        ({"x": np.zeros((3, 4)), "nested": {"n": np.zeros(3)}}, "'nested/n': float64 does not cast to int32"),
    ],
)
def test_bad_rows_are_a_value_error_that_names_the_field(buffer, rows, message):
    with pytest.raises(ValueError, match=message):
        buffer.extend(**rows)
    assert_nothing_was_written_and_the_buffer_works(buffer)


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
        with pytest.raises(ValueError, match="does not cast to bool"):
            writer.append(b=value)
        assert writer.append(b=np.bool_(True)) == 0


@pytest.mark.parametrize("priority", [float("nan"), float("inf"), -float("inf"), "high", object(), 1j, 10**400, [1.0]])
def test_a_bad_priority_is_refused(buffer, priority):
    with buffer.writer() as writer, pytest.raises((ValueError, TypeError, OverflowError)):
        writer.append(**good_row(), priority=priority)
    assert_nothing_was_written_and_the_buffer_works(buffer)


@pytest.mark.parametrize("priority", [[1.0], [1.0, np.nan], "ab", np.ones((2, 1)), np.array([1j, 1]), [None, 1]])
def test_bad_priorities_of_rows_are_refused(buffer, priority):
    with pytest.raises((ValueError, TypeError)):
        buffer.extend(x=np.zeros((2, 4)), nested={"n": np.zeros(2, int)}, priority=priority)
    assert_nothing_was_written_and_the_buffer_works(buffer)


def test_fields_are_keyword_arguments_only(buffer):
    with pytest.raises(TypeError, match="keyword"):
        buffer.writer().append(np.zeros(4))
    with pytest.raises(TypeError):
        buffer.extend(np.zeros((1, 4)))
    assert_nothing_was_written_and_the_buffer_works(buffer)


def test_a_closed_writer_says_how_to_get_another(buffer):
    writer = buffer.writer()
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match=r"buffer.writer\(\)"):
        writer.append(**good_row())
    assert_nothing_was_written_and_the_buffer_works(buffer)


# The buffer's own arguments


@pytest.mark.parametrize("capacity", [0, -1, 2**31 + 1, 2.5, "many", None, True])
def test_a_bad_capacity_is_a_value_error(capacity):
    with pytest.raises(ValueError, match="capacity is"):
        tr.ReplayBuffer(SPEC, capacity)


@pytest.mark.parametrize("batch_size", [0, -1, 2**24 + 1, 2.5, "many", None, True])
def test_a_bad_batch_size_is_a_value_error(buffer, batch_size):
    buffer.extend(x=np.zeros((2, 4)), nested={"n": np.zeros(2, int)})
    with pytest.raises(ValueError, match="batch_size is"):
        buffer.sample(batch_size)
    assert buffer.stats().sampled == 0
    assert len(buffer.sample(2)["key"]) == 2


@pytest.mark.parametrize("beta", [-0.5, float("nan"), float("inf"), "x", lambda step: -1.0])
def test_a_bad_beta_is_a_value_error(buffer, beta):
    buffer.extend(x=np.zeros((2, 4)), nested={"n": np.zeros(2, int)})
    with pytest.raises(ValueError, match=r"beta|float"):
        buffer.sample(2, beta=beta)
    assert buffer.stats().sampled == 0


@pytest.mark.parametrize("timeout", [float("nan"), "soon"])
def test_a_bad_timeout_is_refused(timeout):
    buffer = tr.ReplayBuffer(SPEC, 8, limiter=tr.MinSize(5))
    buffer.handle()
    with pytest.raises((ValueError, TypeError)):
        buffer.sample(2, timeout=timeout)


@pytest.mark.parametrize(
    "arguments",
    [{"alpha": -0.1}, {"alpha": float("nan")}, {"eps": 0.0}, {"eps": -1.0}, {"beta": -1.0}, {"weights": "all"}],
    ids=str,
)
def test_a_bad_sampler_is_a_value_error_that_names_the_argument(arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} is"):
        tr.Prioritized(**arguments)


@pytest.mark.parametrize("argument", ["sampler", "limiter", "view"])
def test_a_sampler_limiter_or_view_of_another_type_is_a_type_error(argument):
    with pytest.raises(TypeError, match=f"{argument} is 'x': expected torchreplay"):
        tr.ReplayBuffer(SPEC, 8, **{argument: "x"})


def test_too_little_memory_is_a_memory_error_with_the_sizes_before_anything_is_touched():
    with pytest.raises(MemoryError, match=r"needs \d+\.\d+ GiB of memory, and \d+\.\d+ GiB can still be had"):
        tr.ReplayBuffer({"x": tr.Field((2**20,))}, 2**20)


@pytest.mark.parametrize("shape", [(2**32, 2**32), (2**62, 4, 3), (2**40, 2**40), (2**63,), (2**64,)], ids=str)
def test_a_field_too_large_for_any_machine_is_refused(shape):
    # Its size does not fit 64 bits: computed there, it may look small, or like nothing at all.
    with pytest.raises((ValueError, MemoryError, OverflowError)):
        tr.ReplayBuffer({"x": tr.Field(shape, torch.uint8)}, 1)


def test_a_batch_that_does_not_fit_in_memory_is_a_memory_error():
    buffer = tr.ReplayBuffer({"x": tr.Field((100_000,))}, 4)
    buffer.extend(x=np.ones((2, 100_000)))
    with pytest.raises(MemoryError):
        buffer.sample(2**24)
    assert buffer.sample(2)["x"].eq(1).all()


# Feedback


@pytest.fixture
def drawn():
    buffer = tr.ReplayBuffer(SPEC, 8, sampler=tr.Prioritized(), seed=0)
    buffer.extend(x=np.ones((3, 4)), nested={"n": np.zeros(3, int)})
    return buffer, buffer.sample(4)


def assert_nothing_was_applied(buffer):
    stats = buffer.stats()
    assert (stats.updated, stats.stale_updates, stats.unready_updates) == (0, 0, 0)
    assert stats.priority_total == pytest.approx(3.0, rel=1e-5)
    assert stats.priority_max == 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_td_errors_are_counted_and_located_and_nothing_is_applied(drawn, dtype, bad):
    buffer, batch = drawn
    td = torch.tensor([1.0, bad, 2.0, bad], dtype=dtype)
    with pytest.raises(ValueError, match="2 of 4 TD errors are NaN or infinite, the first at index 1"):
        buffer.update_priorities(batch, td)
    assert_nothing_was_applied(buffer)


@pytest.mark.parametrize(
    "td",
    [
        *(torch.ones(3), torch.ones(4, 1), torch.ones(()), 1.0, None, "abcd", [None] * 4),
        *(torch.ones(4).to_sparse(), torch.ones(4, dtype=torch.complex64), np.array([1, 2, 3, "x"], object)),
    ],
    ids=lambda td: type(td).__name__,
)
def test_td_errors_of_another_shape_or_type_are_refused(drawn, td):
    buffer, batch = drawn
    with pytest.raises(ValueError, match=r"expected one number for each key: shape \(4,\)"):
        buffer.update_priorities(batch, td)
    assert_nothing_was_applied(buffer)


@pytest.mark.parametrize("key", [-1, 3, 2**62, -(2**63)])
def test_a_key_never_issued_is_named_with_its_place_and_the_range(drawn, key):
    buffer, _ = drawn
    message = f"key {key} at index 1 was never issued by this buffer: expected 0 to 2"
    with pytest.raises(ValueError, match=re.escape(message)):
        buffer.update_priorities(torch.tensor([0, key]), torch.ones(2))
    assert_nothing_was_applied(buffer)


@pytest.mark.parametrize(
    "keys", [torch.tensor([0.0]), torch.tensor([[0]]), torch.tensor([0], dtype=torch.int32), "0", None, {"key": 0}, 0]
)
def test_keys_that_are_no_int64_vector_are_refused(drawn, keys):
    buffer, _ = drawn
    with pytest.raises(ValueError, match=r"expected int64 of shape \(n,\)"):
        buffer.update_priorities(keys, torch.ones(1))
    assert_nothing_was_applied(buffer)


def test_a_batch_of_another_buffer_is_refused_even_after_it_was_copied_and_moved(drawn):
    buffer, _ = drawn
    other = tr.ReplayBuffer(SPEC, 8, sampler=tr.Prioritized(), seed=0)
    other.extend(x=np.ones((3, 4)), nested={"n": np.zeros(3, int)})
    foreign = other.sample(4)
    for batch in (foreign, foreign.to("cpu"), foreign.to(torch.device("cpu"), non_blocking=False)):
        with pytest.raises(ValueError, match="another buffer"):
            buffer.update_priorities(batch, torch.ones(4))
    assert_nothing_was_applied(buffer)


# Handles and closed buffers


def test_what_is_no_handle_is_a_type_error():
    for value in (None, 1, "handle", (1, 2, 3, 4, 5, "m")):
        with pytest.raises(TypeError, match=r"expected a torchreplay\.Handle"):
            tr.ReplayBuffer.attach(value)


def test_a_handle_of_another_machine_is_an_attach_error_that_says_where_to_run(buffer):
    elsewhere = dataclasses.replace(buffer.handle(), machine="00000000-0000-0000-0000-000000000000")
    with pytest.raises(tr.AttachError, match=r"on another machine .* run this process where"):
        tr.ReplayBuffer.attach(elsewhere)


@pytest.mark.parametrize(
    "change", [{"pid": 2**22 + 1}, {"fd": 99_999}, {"fd": 0}, {"inode": 1}, {"size": 1}, {"nonce": 1}], ids=str
)
def test_a_handle_whose_segment_is_not_there_any_more_is_an_attach_error(buffer, change):
    with pytest.raises(tr.AttachError, match="gone"):
        tr.ReplayBuffer.attach(dataclasses.replace(buffer.handle(), **change))
    assert_nothing_was_written_and_the_buffer_works(buffer)


def test_every_call_of_a_closed_buffer_is_a_runtime_error(buffer):
    buffer.extend(x=np.ones((2, 4)), nested={"n": np.zeros(2, int)})
    batch = buffer.sample(2)
    buffer.close()
    buffer.close()
    calls = [
        lambda: len(buffer),
        lambda: buffer.sample(1),
        lambda: buffer.extend(x=np.ones((2, 4)), nested={"n": np.zeros(2, int)}),
        lambda: buffer.update_priorities(batch, torch.ones(2)),
        buffer.writer,
        buffer.handle,
        buffer.stats,
        buffer.histograms,
        buffer.stop,
        lambda: buffer.stopped,
        lambda: buffer.storage,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert repr(buffer) == "ReplayBuffer(closed)"
    assert batch["x"].eq(1).all(), "a batch outlives its buffer"


# No input may end the interpreter

PRELUDE = """
import ctypes, faulthandler
import numpy as np
import torch
import torchreplay as tr
buffer = tr.ReplayBuffer({"x": tr.Field((4,))}, 8)
writer = buffer.writer()
def refused_or_right(value):
    try:
        writer.append(x=value)
    except ValueError:
        return
    assert buffer.storage["x"][0].tolist() == [1.0, 1.0, 1.0, 1.0], buffer.storage["x"][0]
"""


def assert_the_interpreter_survives(code):
    """Runs `code` in an interpreter of its own: a crash there must not hide the other tests."""
    script = PRELUDE + textwrap.dedent(code)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, f"exit status {result.returncode}: {result.stderr[-2000:]}"


# Tensors whose memory is not what their shape says: no memory at all, or to be read with another sign.
ODD_TENSORS = {
    "without memory, standing for zeros": "torch._efficientzerotensor(4)",
    "whose storage was freed": "(lambda t: (t.untyped_storage().resize_(0), t)[1])(torch.ones(4))",
    "that are fake": "__import__('torch._subclasses')._subclasses.FakeTensorMode().from_tensor(torch.ones(4))",
    "that are functional wrappers": "torch._to_functional_tensor(torch.ones(4))",
    "whose sign is yet to be flipped": "torch.complex(torch.zeros(4), -torch.ones(4)).conj().imag",
    "that are nested": "torch.nested.nested_tensor([torch.ones(4)])",
    "of vmap": "(lambda got: (torch.vmap(lambda t: (got.append(t), t)[1])(torch.ones(2, 4)), got[0])[1])([])",
}


@pytest.mark.parametrize("expression", ODD_TENSORS.values(), ids=ODD_TENSORS.keys())
def test_the_interpreter_survives_tensors(expression):
    assert_the_interpreter_survives(f"refused_or_right({expression})")


def test_the_interpreter_survives_td_errors_and_keys_without_memory():
    assert_the_interpreter_survives(
        """
        keys = buffer.extend(x=np.ones((2, 4)))
        freed = torch.ones(2)
        freed.untyped_storage().resize_(0)
        for td in (torch._efficientzerotensor(2), freed):
            for call in (lambda: buffer.update_priorities(keys, td), lambda: buffer.update_priorities(td, keys),
                         lambda: buffer.extend(x=np.ones((2, 4)), priority=td)):
                try:
                    call()
                except ValueError:
                    pass
        """
    )


def test_the_interpreter_survives_buffers_without_strides():
    # ctypes arrays export none: they are contiguous by definition.
    assert_the_interpreter_survives("refused_or_right((ctypes.c_float * 4)(1, 1, 1, 1))")
    assert_the_interpreter_survives("refused_or_right(memoryview((ctypes.c_float * 4)(1, 1, 1, 1)))")


def test_the_interpreter_survives_field_names_with_a_zero_byte():
    assert_the_interpreter_survives(
        r"""
        try:
            buffer = tr.ReplayBuffer({"a": tr.Field(), "a\0b": tr.Field()}, 4)
        except ValueError:
            pass
        else:
            writer = buffer.writer()
            try:
                writer.append(a=1.0)
            except ValueError:
                pass
            writer.append(**{"a": 1.0, "a\0b": 2.0})
            assert buffer.storage["a\0b"][0] == 2.0
        """
    )


def test_the_interpreter_survives_a_dict_that_changes_while_it_is_read():
    assert_the_interpreter_survives(
        """
        buffer = tr.ReplayBuffer({"d": {"a": tr.Field((1000,)), "b": tr.Field()}}, 4)
        class Spiteful:
            armed = False
            def __hash__(self):
                return hash("b")
            def __eq__(self, other):
                if self.armed:
                    given.pop("a", None)
                    self.junk = [np.full(1000, 3.0, np.float32) for _ in range(50)]
                return False
        name = Spiteful()
        given = {name: 1, "a": np.full(1000, 7.0, np.float32), "b": 1.0}
        name.armed = True
        for _ in range(100):
            given.setdefault("a", np.full(1000, 7.0, np.float32))
            try:
                key = buffer.writer().append(d=given)
            except ValueError:
                continue
            assert (buffer.storage["d"]["a"][key % 4] == 7).all(), "a row of memory that was freed"
        """
    )


def test_objects_that_were_never_initialised_say_so():
    for type_ in (tr.Writer, tr.ReplayBuffer, tr.SharedWeights):
        blank = type_.__new__(type_)
        for name in ("append", "close", "rows", "closed", "sample", "stats", "version", "publish", "pull"):
            if hasattr(type_, name):
                with pytest.raises((RuntimeError, AttributeError, TypeError)):
                    getattr(blank, name)()


class Hostile:
    """Answers every protocol with an exception."""

    def _fail(self, *_, **__):
        raise ArithmeticError("hostile")

    __float__ = __index__ = __len__ = __getitem__ = __iter__ = __array__ = __bool__ = __call__ = _fail


class Reentrant:
    """Uses the buffer while the buffer uses it."""

    def __init__(self, act):
        self._act = act

    def __float__(self):
        self._act()
        return 1.0


def test_a_priority_that_uses_the_writer_while_it_is_converted_is_refused(buffer):
    writer = buffer.writer()
    with pytest.raises(RuntimeError, match="in use"):
        writer.append(**good_row(), priority=Reentrant(lambda: writer.append(**good_row())))
    with pytest.raises(RuntimeError, match="in use"):
        writer.append(**good_row(), priority=Reentrant(writer.close))
    assert_nothing_was_written_and_the_buffer_works(buffer)


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(max_size=5),
        st.binary(max_size=20),
        st.sampled_from([object(), Hostile(), int, torch, np.float32(1), np.zeros(0), np.zeros((2, 0, 4)), np.ones(4)]),
        st.sampled_from([torch.ones(4), torch.ones(2, 4), torch.zeros(0), torch.tensor(1), torch.float32]),
        st.sampled_from([memoryview(b"abcd"), bytearray(16), np.zeros(4, "M8[s]"), np.zeros(4, "U3"), ctypes.c_int(3)]),
        st.sampled_from([np.zeros(4, [("a", "f4")]), np.broadcast_to(np.float32(1), (2, 4)), range(4), slice(3)]),
        st.sampled_from([tr.ReplayBatch(), tr.Field(), tr.Uniform(), iter([1]), torch.ones(4).unsqueeze(0)[::2]]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(["n", "x", "key", ""]), inner, max_size=3)
    ),
    max_leaves=4,
)
# Never the whole of memory, whatever the number drawn: what is asked for must be refused or be small.
fuzzed = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzzed
@given(x=anything, nested=anything, priority=anything)
def test_append_and_extend_raise_ordinary_exceptions_for_any_objects(x, nested, priority):
    buffer = tr.ReplayBuffer(SPEC, 8, seed=0)
    writer = buffer.writer()
    for write in (writer.append, writer.extend, buffer.extend):
        for fields in ({"x": x, "nested": nested}, {"x": x, "nested": {"n": nested}}):
            before = buffer.stats().rows_written
            try:
                write(**fields, priority=priority)
            except Exception:
                assert buffer.stats().rows_written == before
    assert writer.append(**good_row(2.0)) == buffer.stats().rows_written - 1


@fuzzed
@given(first=anything, second=anything)
def test_update_sample_and_attach_raise_ordinary_exceptions_for_any_objects(first, second):
    buffer = tr.ReplayBuffer(SPEC, 8, sampler=tr.Prioritized(), seed=0)
    buffer.extend(x=np.ones((3, 4)), nested={"n": np.zeros(3, int)})
    calls = [
        lambda: buffer.update_priorities(first, second),
        lambda: buffer.update_priorities([0, 1], first),
        lambda: buffer.update_priorities(first, [1.0, 2.0]),
        lambda: buffer.sample(4, beta=first),
        lambda: buffer.sample(4, timeout=first),
        lambda: tr.ReplayBuffer.attach(first),
        lambda: tr.ReplayBuffer.attach(dataclasses.replace(buffer.handle(), nonce=first)),
        lambda: tr.ReplayBuffer.attach(dataclasses.replace(buffer.handle(), fd=first, pid=second)),
        lambda: buffer.histograms(bins=first) if not isinstance(first, int) or first < 1000 else None,
        lambda: buffer.sample(first) if not isinstance(first, int) or first < 1000 else None,
    ]
    for call in calls:
        try:
            call()
        except Exception:
            gc.collect(0)
    assert len(buffer.sample(4)["key"]) == 4
    assert len(buffer) == 3


@fuzzed
@given(name=st.text(max_size=6) | anything, shape=anything, dtype=anything, capacity=anything, seed=anything)
def test_specs_and_constructor_arguments_raise_ordinary_exceptions_for_any_objects(name, shape, dtype, capacity, seed):
    calls = [
        lambda: tr.Field(shape, dtype),
        lambda: tr.ReplayBuffer(shape, 4),
        lambda: tr.ReplayBuffer({name: tr.Field()}, 4, seed=seed),
        lambda: tr.ReplayBuffer({"a": {name: tr.Field((2,))}}, 4),
        lambda: tr.ReplayBuffer({"a": shape}, 4),
        lambda: tr.ReplayBuffer(SPEC, capacity) if not isinstance(capacity, int) or capacity < 1000 else None,
        lambda: tr.ReplayBuffer(SPEC, 4, sampler=shape, limiter=dtype, view=seed),
        lambda: tr.Prioritized(alpha=shape, beta=dtype, eps=capacity, weights=seed),
        lambda: tr.SamplesPerInsert(shape, dtype, capacity),
        lambda: tr.MinSize(capacity),
        lambda: tr.Linear(shape, dtype, capacity),
        lambda: tr.SharedWeights(shape),
    ]
    for call in calls:
        try:
            call()
        except Exception:
            gc.collect(0)

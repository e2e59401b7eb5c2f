"""No input may end the interpreter: for any argument, at most an exception comes back."""

import contextlib
import ctypes
import dataclasses
import gc

import numpy as np
import pytest
import torch
from forked import Forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_rows import SPEC, good_row

import torchreplay as tr


@pytest.fixture
def buffer():
    return tr.ReplayBuffer(SPEC, 8, sampler=tr.Prioritized(), seed=0)


def assert_the_interpreter_survives(body, *args):
    """Runs `body` in a child: a crash there must not end the other tests."""
    with Forked(body, *args) as child:
        assert child.wait() == 0


def refused_or_right(make):
    """Four ones are either written as they are, or refused."""
    buffer = tr.ReplayBuffer({"x": tr.Field((4,))}, 8)
    try:
        buffer.writer().append(x=make())
    except ValueError:
        return
    assert buffer.storage["x"][0].tolist() == [1.0] * 4


def fake():
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.ones(4))


def freed(n):
    tensor = torch.ones(n)
    tensor.untyped_storage().resize_(0)
    return tensor


def inside_vmap():
    seen = []
    torch.vmap(lambda t: (seen.append(t), t)[1])(torch.ones(2, 4))
    return seen[0]


# Their memory is not what their shape says: none at all, or to be read with another sign.
ODD_ARRAYS = {
    "a tensor without memory that stands for zeros": lambda: torch._efficientzerotensor(4),
    "a tensor whose storage was freed": lambda: freed(4),
    "a fake tensor": fake,
    "a functional wrapper": lambda: torch._to_functional_tensor(torch.ones(4)),
    "a tensor whose sign is yet to be flipped": lambda: torch.complex(torch.zeros(4), -torch.ones(4)).conj().imag,
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(4)]),
    "a tensor of vmap": inside_vmap,
    "a ctypes array, which exports no strides": lambda: (ctypes.c_float * 4)(1, 1, 1, 1),
    "a memoryview of a ctypes array": lambda: memoryview((ctypes.c_float * 4)(1, 1, 1, 1)),
}


@pytest.mark.parametrize("make", ODD_ARRAYS.values(), ids=ODD_ARRAYS.keys())
def test_the_interpreter_survives(make):
    assert_the_interpreter_survives(refused_or_right, make)


def test_the_interpreter_survives_td_errors_and_keys_without_memory(buffer):
    def feed(td):
        rows = {"x": np.ones((2, 4)), "nested": {"n": np.zeros(2, int)}}
        keys = buffer.extend(**rows)
        for call in (
            lambda: buffer.update_priorities(keys, td),
            lambda: buffer.update_priorities(td, keys),
            lambda: buffer.extend(**rows, priority=td),
        ):
            with contextlib.suppress(ValueError):
                call()

    assert_the_interpreter_survives(feed, torch._efficientzerotensor(2))
    assert_the_interpreter_survives(feed, freed(2))


def test_a_field_name_with_a_zero_byte_is_refused():
    # C strings end there: the name would be taken for a shorter one.
    with pytest.raises(ValueError, match="expected a name"):
        tr.ReplayBuffer({"a": tr.Field(), "a\0b": tr.Field()}, 4)


class Spiteful:
    """A key that empties the dict it is in while that is searched."""

    def __init__(self, given):
        self.given = given
        self.junk = []

    def __hash__(self):
        return hash("b")

    def __eq__(self, other):
        self.given.pop("a", None)
        self.junk = [np.full(1000, 3.0, np.float32) for _ in range(50)]
        return False


def test_the_interpreter_survives_a_dict_that_changes_while_it_is_read():
    def write():
        buffer = tr.ReplayBuffer({"d": {"a": tr.Field((1000,)), "b": tr.Field()}}, 4)
        given = {}
        given[Spiteful(given)] = 1
        given["b"] = 1.0
        for _ in range(100):
            given["a"] = np.full(1000, 7.0, np.float32)
            with contextlib.suppress(ValueError):
                key = buffer.writer().append(d=given)
                assert (buffer.storage["d"]["a"][key % 4] == 7).all(), "a row of memory that was freed"

    assert_the_interpreter_survives(write)


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
    assert buffer.stats().rows_written == 0
    assert writer.append(**good_row()) == 0


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
        lambda: tr.LinearSchedule(shape, dtype, capacity),
        lambda: tr.SharedWeights(shape),
    ]
    for call in calls:
        try:
            call()
        except Exception:
            gc.collect(0)

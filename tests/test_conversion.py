"""Conversion: every value that fits arrives as numpy or torch would convert it, whatever its memory looks like."""

import array

import numpy as np
import pytest
import torch

import torchreplay as tr
from torchreplay.spec import ELEMENTS


def numpy_name(dtype):
    return str(dtype).removeprefix("torch.")


def can_cast(given, field):
    """numpy's same_kind rule; bfloat16, which numpy does not know, is a float like the others."""
    names = ["float16" if numpy_name(d) == "bfloat16" else numpy_name(d) for d in (given, field)]
    return np.can_cast(names[0], names[1], casting="same_kind")


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def buffer_of(dtype, shape=(), capacity=4):
    return tr.ReplayBuffer({"x": tr.Field(shape, dtype)}, capacity, seed=0)


def interesting(dtype):
    """Values at the edges of a torch dtype, as a tensor of 8 elements."""
    if dtype == torch.bool:
        return torch.tensor([True, False] * 4)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        edges = [0.0, -0.0, 1.0, -1 / 3, info.max, info.smallest_normal / 4, float("inf"), float("nan")]
        return torch.tensor(edges, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    return torch.from_numpy(np.array([info.min, info.max, 0, 1, 2, 3, info.max // 2, info.max // 3], numpy_name(dtype)))


def converted(values, field):
    """numpy's conversion, or torch's where bfloat16 takes part."""
    if torch.bfloat16 in (values.dtype, field):
        return values.to(field)
    with np.errstate(all="ignore"):
        return torch.from_numpy(values.numpy().astype(numpy_name(field)))


@pytest.mark.parametrize("field", ELEMENTS, ids=numpy_name)
@pytest.mark.parametrize("given", ELEMENTS, ids=numpy_name)
def test_every_pair_of_dtypes_follows_same_kind_and_torchs_conversion(given, field):
    values = interesting(given)
    buffer = buffer_of(field, (8,))
    if not can_cast(given, field):
        with pytest.raises(ValueError, match=f"{numpy_name(given)} does not cast to {numpy_name(field)}"):
            buffer.writer().append(x=values)
        assert len(buffer) == 0
        return
    buffer.writer().append(x=values)
    buffer.extend(x=values[None])
    expected = converted(values, field)
    for row in (*buffer.storage["x"][:2], *buffer.sample(2)["x"]):
        nan = expected.isnan()
        assert torch.equal(row.isnan(), nan)
        assert same_bits(row[~nan], expected[~nan])


@pytest.mark.parametrize("field", [torch.float16, torch.bfloat16], ids=numpy_name)
def test_every_value_of_a_16_bit_float_survives_and_rounding_is_to_nearest_even(field):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(field)
    finite = every[every.isfinite()].double().sort().values.unique()
    middles = (finite[1:] + finite[:-1]) / 2
    nearly = torch.cat([middles, torch.nextafter(middles, finite[1:]), torch.nextafter(middles, finite[:-1])])
    values = torch.cat([finite, nearly, torch.tensor([1e39, -1e39, 65519.99, 65520.0, 3.4e38, 1e-30, 2e-45])])
    buffer = buffer_of(field, (len(values),))
    buffer.writer().append(x=values.numpy())
    stored = buffer.storage["x"][0].clone()
    if field == torch.float16:
        with np.errstate(over="ignore"):
            expected = torch.from_numpy(values.numpy().astype(np.float16))
    else:  # correctly rounded straight from double: numpy has no bfloat16, and torch goes through float32
        expected = nearest_even(values, finite, field)
    assert same_bits(stored, expected)
    wide = buffer_of(torch.float64, (2**16,))
    wide.writer().append(x=every)
    back = wide.storage["x"][0]
    assert torch.equal(back[~every.isnan()], every.double()[~every.isnan()])
    assert torch.equal(back.isnan(), every.isnan())


def nearest_even(values, finite, dtype):
    """The closest of `finite`, of two equally close ones that with an even significand; beyond the last, infinity."""
    upper = torch.searchsorted(finite, values).clamp(1, len(finite) - 1)
    low, high = finite[upper - 1], finite[upper]
    middle = (low + high) / 2
    high_is_even = high.to(dtype).view(torch.int16) % 2 == 0
    rounded = torch.where((values > middle) | ((values == middle) & high_is_even), high, low).to(dtype)
    overflow = finite[-1] + (finite[-1] - finite[-2]) / 2
    rounded = torch.where(values.abs() >= overflow, torch.copysign(torch.tensor(torch.inf), values).to(dtype), rounded)
    return torch.where(rounded == 0, torch.copysign(rounded.float(), values.float()).to(dtype), rounded)


@pytest.mark.parametrize("field", ["float32", "float64", "int32", "uint16", "int64"])
@pytest.mark.parametrize("given", [">f2", ">f4", ">f8", "longdouble", ">i2", ">i4", ">i8", ">u2", ">u8", "<i4"])
def test_other_byte_orders_and_long_doubles_are_numbers_like_the_others(given, field):
    values = np.array([[1, 2, 3], [40, 500, 6000]]).astype(given)
    buffer = buffer_of(getattr(torch, field), (3,))
    if not np.can_cast(given, field, casting="same_kind"):
        with buffer.writer() as writer, pytest.raises(ValueError, match="does not cast"):
            writer.append(x=values[0])
        return
    with buffer.writer() as writer:
        writer.append(x=values[0])
        writer.append(x=np.repeat(values, 2, axis=1)[1, ::2])
    buffer.extend(x=values)
    expected = values.astype(field)[[0, 1, 0, 1]]
    assert np.array_equal(buffer.storage["x"][:4].numpy(), expected)


PATTERN = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


LAYOUTS = {
    "contiguous": lambda a: a.copy(),
    "Fortran order": np.asfortranarray,
    "negative strides": lambda a: a[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
    "every other": lambda a: np.repeat(np.repeat(a, 2, axis=0), 2, axis=2)[::2, :, ::2],
    "transposed": lambda a: a.transpose(2, 0, 1).copy().transpose(1, 2, 0),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "unaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape),
    "of another float type": lambda a: a.astype(np.float64)[:, ::-1][:, ::-1],
    "a field of a record": lambda a: np.rec.fromarrays([a, a], names="a,b")["a"],
    "a memoryview": lambda a: memoryview(a.copy()),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_numpy_arrays_are_taken_as_they_lie_in_memory(layout):
    buffer = buffer_of(torch.float32, PATTERN.shape)
    buffer.writer().append(x=layout(PATTERN))
    if not isinstance(layout(PATTERN), memoryview):
        rows = layout(np.concatenate([PATTERN + 1, PATTERN + 2])).reshape(2, *PATTERN.shape)
        buffer.extend(x=rows)
        assert np.array_equal(buffer.storage["x"][1:3].numpy(), [PATTERN + 1, PATTERN + 2])
    assert np.array_equal(buffer.storage["x"][0].numpy(), PATTERN)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)], ids=str)
@pytest.mark.parametrize("step", [1, -1, 2])
def test_extend_takes_rows_of_any_strides(order, step):
    rows = np.arange(5 * 24, dtype=np.float32).reshape(5, *PATTERN.shape)
    there_and_back = rows.transpose(order).copy().transpose(np.argsort(order))[::step]
    buffer = buffer_of(torch.float32, PATTERN.shape, capacity=8)
    for value in (there_and_back, torch.from_numpy(there_and_back.copy())):
        keys = buffer.extend(x=value)
        assert np.array_equal(buffer.storage["x"][keys % 8].numpy(), rows[::step])


TENSORS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "every other": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda t: torch.cat([t, t])[2:],
    "needs a gradient": lambda t: t.clone().requires_grad_() * 1,
    "a parameter": torch.nn.Parameter,
    "half": lambda t: t.half(),
    "broadcast": lambda t: (t[:1, :1, :1] * 0).expand(t.shape) + t,
    "inference": lambda t: torch.inference_mode()(lambda: t.clone())(),
    "a subclass": lambda t: t.as_subclass(type("Odd", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_torch_tensors_are_taken_as_they_lie_in_memory(make):
    buffer = buffer_of(torch.float32, PATTERN.shape)
    pattern = torch.from_numpy(PATTERN)
    buffer.writer().append(x=make(pattern))
    assert torch.equal(buffer.storage["x"][0], pattern)


def test_a_broadcast_view_is_written_in_full():
    buffer = buffer_of(torch.int64, (2, 3))
    with buffer.writer() as writer:
        writer.append(x=torch.tensor([[1], [2]]).expand(2, 3))
        writer.append(x=np.broadcast_to(np.arange(3), (2, 3)))
    assert buffer.storage["x"][0].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert buffer.storage["x"][1].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_anything_with_the_buffer_protocol_is_an_array():
    buffer = buffer_of(torch.uint8, (4,))
    with buffer.writer() as writer:
        for value in (b"\1\2\3\4", bytearray([1, 2, 3, 4]), array.array("B", [1, 2, 3, 4])):
            writer.append(x=value)
    assert buffer.storage["x"][:3].tolist() == [[1, 2, 3, 4]] * 3


@pytest.mark.parametrize("dtype", [d for d in ELEMENTS if d != torch.bool], ids=numpy_name)
def test_python_and_numpy_scalars_and_0d_arrays_go_into_scalar_fields(dtype):
    buffer = buffer_of(dtype, capacity=10)
    scalars = [3, True, np.array(3, np.uint8), np.uint8(3), torch.tensor(3, dtype=torch.uint8), np.bool_(True)]
    if dtype.is_floating_point:
        scalars += [3.0, np.float16(3), np.float64(3), torch.tensor(3.0)]
    with buffer.writer() as writer:
        for scalar in scalars:
            writer.append(x=scalar)
    expected = [1 if isinstance(s, (bool, np.bool_)) else 3 for s in scalars]
    assert buffer.storage["x"][: len(scalars)].tolist() == expected


@pytest.mark.parametrize("dtype", [d for d in ELEMENTS if not d.is_floating_point and d != torch.bool], ids=numpy_name)
def test_python_ints_reach_exactly_the_ends_of_an_integer_field(dtype):
    info = torch.iinfo(dtype)
    buffer = buffer_of(dtype)
    with buffer.writer() as writer:
        writer.append(x=info.min)
        writer.append(x=info.max)
        for value in (info.min - 1, info.max + 1):
            with pytest.raises(ValueError, match="out of range"):
                writer.append(x=value)
    assert buffer.storage["x"][:2].tolist() == [info.min, info.max]


@pytest.mark.parametrize("dtype", [d for d in ELEMENTS if d.is_floating_point], ids=numpy_name)
def test_python_ints_beyond_a_float_field_are_refused_where_floats_become_infinite(dtype):
    largest = int(torch.finfo(dtype).max)
    buffer = buffer_of(dtype)
    with buffer.writer() as writer:
        writer.append(x=largest)
        writer.append(x=-largest)
        for value in (2 * largest, -2 * largest, 10**400):
            with pytest.raises(ValueError, match=f"'x': got a Python int that is out of range for {numpy_name(dtype)}"):
                writer.append(x=value)
        writer.append(x=float("inf"))
    assert buffer.storage["x"][:3].tolist() == [largest, -largest, float("inf")]

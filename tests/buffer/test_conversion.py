"""Conversion: every value that fits arrives as numpy or torch would convert it, from every memory layout."""

import array
import math

import numpy as np
import pytest
import torch

import torchreplay as tr
from torchreplay.schema.spec import ELEMENTS


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


def zero_but(values, kept):
    """The values, with zeros for those not kept. By their bytes: torch does little with its unsigned integers."""
    return (values.view(torch.uint8).view(len(values), -1) * kept[:, None]).view(values.dtype)[:, 0]


def fits(values, field):
    """Which finite values stay finite, and which integers stay what they are: compared as Python's exact numbers."""
    after = converted(values, field).tolist()
    pairs = zip(values.tolist(), after, strict=True)
    return torch.tensor([math.isfinite(b) if field.is_floating_point else a == b for a, b in pairs]) | (
        ~values.isfinite()
    )


@pytest.mark.parametrize("field", ELEMENTS, ids=numpy_name)
@pytest.mark.parametrize("given", ELEMENTS, ids=numpy_name)
def test_every_pair_of_dtypes_follows_same_kind_and_torchs_conversion_and_refuses_what_that_would_lose(given, field):
    values = interesting(given)
    buffer = buffer_of(field, (8,))
    if not can_cast(given, field):
        with pytest.raises(ValueError, match=f"{numpy_name(given)} does not cast to {numpy_name(field)}"):
            buffer.writer().append(x=values)
        assert len(buffer) == 0
        return
    kept = fits(values, field)
    for at in (~kept).nonzero()[:, 0].tolist():
        with pytest.raises(ValueError, match=rf"'x': got \S+ at index \({at},\), which {numpy_name(field)} does not"):
            buffer.writer().append(x=zero_but(values, kept | (torch.arange(8) == at)))
    assert buffer.stats().rows_written == 0
    values = zero_but(values, kept)
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
    others = [1e39, -1e39, 65519.99, 65520.0, 3.4e38, 1e-30, 2e-45]
    values = torch.cat([finite, nearly, torch.tensor(others, dtype=torch.float64)])
    beyond = finite[-1] + (finite[-1] - finite[-2]) / 2
    for value in values[values.abs() >= beyond].tolist():
        with pytest.raises(ValueError, match="does not hold"):
            buffer_of(field, (1,)).writer().append(x=np.array([value]))
    values = torch.cat([values[values.abs() < beyond], torch.tensor([torch.inf, -torch.inf])])
    buffer = buffer_of(field, (len(values),))
    buffer.writer().append(x=values.numpy())
    stored = buffer.storage["x"][0].clone()
    if field == torch.float16:
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=numpy_name)
def test_python_floats_beyond_a_field_are_refused_and_infinity_and_nan_are_stored(dtype):
    beyond = {torch.float16: 65520.0, torch.bfloat16: 2.0**128 - 2.0**119, torch.float32: 2.0**128 - 2.0**103}[dtype]
    buffer = buffer_of(dtype, capacity=8)
    with buffer.writer() as writer:
        for value in (beyond, -beyond, 1e300, np.float64(1e300)):
            with pytest.raises(ValueError, match=rf"'x': got \S+, which {numpy_name(dtype)} does not hold"):
                writer.append(x=value)
        kept = [math.nextafter(beyond, 0), -math.nextafter(beyond, 0), math.inf, -math.inf, math.nan]
        for value in kept:
            writer.append(x=value)
    largest = torch.finfo(dtype).max
    assert buffer.storage["x"][:4].tolist() == [largest, -largest, math.inf, -math.inf]
    assert buffer.storage["x"][4].isnan()
    assert buffer.stats().rows_written == 5


SPEC = {"deep": {"x": tr.Field((2,))}, "n": tr.Field((), torch.int64)}
LINKED = {"obs": tr.Field((2,)), "n": tr.Field((), torch.int64), "reward": tr.Field()} | dict.fromkeys(
    ("terminated", "truncated"), tr.Field((), torch.bool)
)


def rest(*shape):
    """Values of the fields beside `obs` and `n`."""
    return {"reward": np.zeros(shape), **dict.fromkeys(("terminated", "truncated"), np.zeros(shape, bool))}


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_a_row_among_many_that_does_not_fit_keeps_all_from_being_written(kind):
    buffer = tr.ReplayBuffer(SPEC, 100)
    x, n = np.zeros((50, 2)), np.zeros(50, np.uint64)
    x[31, 1] = -1e39
    with pytest.raises(ValueError, match=r"'deep/x': got -1e\+39 at index \(31, 1\), which float32 .* nothing was"):
        buffer.extend(deep={"x": kind(x)}, n=kind(n))
    x[31, 1], n[7] = -1e38, 2**63
    with pytest.raises(ValueError, match=r"'n': got 9223372036854775808 at index \(7,\), which int64 does not hold"):
        buffer.extend(deep={"x": kind(x)}, n=kind(n))
    n[7] = 2**63 - 1
    assert buffer.stats().rows_written == 0
    buffer.extend(deep={"x": kind(x)}, n=kind(n))
    assert buffer.storage["n"][7] == 2**63 - 1
    assert buffer.storage["deep"]["x"][31, 1] == np.float32(-1e38)


def test_large_values_are_looked_at_wherever_they_lie():
    x = np.zeros((4, 300, 300))  # more than is looked at with the interpreter lock held
    buffer = buffer_of(torch.float32, (300, 300), capacity=8)
    for layout in (x, x[:, ::-1], np.asfortranarray(x), x[:, ::2].repeat(2, axis=1)):
        layout[2, 298, 299] = 4e38
        with pytest.raises(ValueError, match=r"got 4e\+38 at index \(2, 298, 299\), which float32 does not hold"):
            buffer.extend(x=layout)
        layout[2, 298, 299] = 0
    assert buffer.stats().rows_written == 0
    buffer.extend(x=np.broadcast_to(x[:1], x.shape))
    with pytest.raises(ValueError, match=r"got 4e\+38 at index \(0, 0, 0\)"):
        buffer.extend(x=np.broadcast_to(np.float64(4e38), x.shape))
    assert len(buffer) == 4


def test_steps_and_whole_episodes_refuse_what_does_not_fit_before_the_first_row_and_go_on_after_it():
    buffer = tr.ReplayBuffer(LINKED, 100, view=tr.Transitions(), seed=0)
    with buffer.writer() as writer:
        with pytest.raises(ValueError, match=r"'obs': got 1e\+39 at index \(0,\)"):
            writer.reset(obs=np.full(2, 1e39))
        writer.reset(obs=np.zeros(2))
        with pytest.raises(ValueError, match=r"'n': got 18446744073709551615, which int64"):
            writer.step(obs=np.zeros(2), n=np.uint64(2**64 - 1), **rest())
        assert writer.step(obs=np.zeros(2), n=1, **rest()) == 1
    obs = np.zeros((4, 2))
    obs[3, 0] = 1e39
    with pytest.raises(ValueError, match=r"'obs': got 1e\+39 at index \(3, 0\)"):
        buffer.extend(obs=obs, n=np.zeros(3, int), **rest(3))
    with pytest.raises(ValueError, match=r"'obs': got 1e\+39 at index \(3, 0, 0\)"):
        buffer.extend(obs=obs[:, None], n=np.zeros((3, 1), int), **rest(3, 1))
    assert buffer.stats().rows_written == 2


def test_vector_writers_refuse_what_does_not_fit_in_observations_and_in_final_ones():
    buffer = tr.ReplayBuffer(LINKED, 100, view=tr.Transitions(), seed=0)
    with buffer.writer(2, "same_step") as writer:
        with pytest.raises(ValueError, match=r"'obs': got 1e\+39 at index \(1, 0\)"):
            writer.reset(obs=np.array([[0, 0], [1e39, 0]]))
        writer.reset(obs=np.zeros((2, 2)))
        ended = rest(2) | {"terminated": np.array([True, False])}
        for final in (np.array([[1e39, 0], [0, 0]]), [np.array([1e39, 0]), None]):
            with pytest.raises(ValueError, match=r"'obs': got 1e\+39 at index \(0, 0\)"):
                writer.step(obs=np.zeros((2, 2)), n=np.zeros(2, int), **ended, final_obs=final)
        masked = np.ma.array([0.0, 1.0], mask=[True, False])
        with pytest.raises(ValueError, match=r"'obs': final_obs of environment 0 is of MaskedArray"):
            writer.step(obs=np.zeros((2, 2)), n=np.zeros(2, int), **ended, final_obs=[masked, None])
    assert buffer.stats().rows_written == 2


def test_masked_values_are_refused_and_a_mask_that_hides_nothing_is_none():
    buffer = tr.ReplayBuffer(SPEC, 10, sampler=tr.Prioritized())
    n, hidden = np.ma.array([1, 2], mask=[False, True]), r"an array of which values are masked: pass array\.filled"
    x = np.zeros((2, 2), np.float32)
    for casting in ("same_kind", "unsafe"):
        with pytest.raises(ValueError, match=f"'n': got {hidden}"):
            buffer.extend(deep={"x": x}, n=n, casting=casting)
    with pytest.raises(ValueError, match=f"'n': got {hidden}"):
        buffer.writer().append(deep={"x": x[0]}, n=np.ma.masked)
    with pytest.raises(ValueError, match=f"priority: got {hidden}"):
        buffer.extend(deep={"x": x}, n=n.filled(7), priority=n.astype(float))
    assert buffer.stats().rows_written == 0
    keys = buffer.extend(deep={"x": np.ma.array(x)}, n=np.ma.array([1, 2], mask=[False, False]))
    assert buffer.storage["n"][:2].tolist() == [1, 2]
    with pytest.raises(ValueError, match=f"TD errors are {hidden}"):
        buffer.update_priorities(keys, n)
    with pytest.raises(ValueError, match=f"keys are {hidden}"):
        buffer.update_priorities(np.ma.array([0, 1], mask=[True, False]), [1.0, 1.0])
    with pytest.raises(ValueError, match=f"TD errors for 'one': got {hidden}"):
        tr.MixedDataset({"one": buffer}, 2).update_priorities({"one": buffer.sample(2)}, {"one": n})
    assert buffer.stats().updated == 0


@pytest.mark.skipif(np.finfo(np.longdouble).max == np.finfo(float).max, reason="long doubles are doubles here")
def test_long_doubles_beyond_float64_are_refused():
    buffer = buffer_of(torch.float64)
    value = np.longdouble("1e400")
    for given in (value, np.array(value)):
        with pytest.raises(ValueError, match="'x': got long doubles, one of which float64 does not hold: clip it"):
            buffer.writer().append(x=given)
    with pytest.raises(ValueError, match="'x': got long doubles, one of which float64 does not hold: clip it"):
        buffer.extend(x=np.array([1, 2, value, 3])[::2])
    buffer.writer().append(x=np.longdouble("inf"))
    assert buffer.storage["x"][0] == math.inf
    assert buffer.stats().rows_written == 1


@pytest.mark.parametrize("as_given", [lambda b: b, torch.from_numpy], ids=["numpy", "torch"])
def test_a_bool_of_any_byte_is_stored_as_0_or_1(as_given, tmp_path):
    """Other languages may mean true by any byte but 0."""
    given = np.array([[2, 0], [0, 255], [1, 0]], np.uint8).view(bool)
    buffer = tr.ReplayBuffer({"flag": tr.Field((2,), torch.bool)}, 8)
    with buffer.writer() as writer:
        writer.append(flag=as_given(given[0]))
        writer.append(flag=as_given(np.asfortranarray(given))[1])  # not dense
    buffer.extend(flag=as_given(given))
    expected = [[1, 0], [0, 1], [1, 0], [0, 1], [1, 0]]
    assert buffer.storage["flag"].view(torch.uint8)[:5].tolist() == expected
    buffer.save(tmp_path)
    for other in (tr.ReplayBuffer.load(tmp_path), buffer.copy(8)):
        assert other.storage["flag"].view(torch.uint8)[:5].tolist() == expected

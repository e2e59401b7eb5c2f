"""Specs: what a field may be, and how nested names become the keys of a batch."""

import dataclasses
import json
import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import torchreplay as tr
from torchreplay.schema.config import Config
from torchreplay.schema.spec import ELEMENTS, Ragged, flatten, from_native, nest, to_native

DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def test_a_field_is_a_float32_scalar_by_default():
    assert (tr.Field().shape, tr.Field().dtype) == ((), torch.float32)


@pytest.mark.parametrize("shape", [5, (5,), [5], np.int64(5), (np.int32(5),), torch.Size([5]), np.array([5])], ids=repr)
def test_a_shape_is_anything_that_counts(shape):
    field = tr.Field(shape)
    assert field.shape == (5,)
    assert {type(n) for n in field.shape} == {int}


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_a_dtype_may_be_torchs_numpys_or_a_name(name, dtype):
    for given_dtype in (dtype, name, np.dtype(name), np.dtype(name).type):
        assert tr.Field((), given_dtype).dtype == dtype
    assert tr.Field((2, 3), dtype).nbytes == 6 * np.dtype(name).itemsize


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
def test_every_name_that_a_refusal_tells_is_taken(dtype):
    assert tr.Field((), str(dtype)).dtype == tr.Field((), str(dtype).removeprefix("torch.")).dtype == dtype


def test_python_types_mean_what_they_mean_to_numpy():
    assert [tr.Field((), kind).dtype for kind in (bool, int, float)] == [torch.bool, torch.int64, torch.float64]
    assert tr.Field((), torch.bfloat16).nbytes == 2


@pytest.mark.parametrize(
    "dtype",
    [None, "U5", "S3", "datetime64[s]", complex, torch.complex64, object, "nonsense", 3, [("a", "f4")], torch.ones(2)],
    ids=str,
)
def test_a_dtype_that_rows_cannot_hold_is_refused_with_those_they_can(dtype):
    with pytest.raises(
        ValueError, match=r"a row cannot hold values of dtype .*: expected one of bool, uint8, .*float64"
    ):
        tr.Field((), dtype)


@pytest.mark.parametrize("shape", [0, -1, (2, 0), (3, -1), (1,) * 16, (2**63,), (2**62, 4)], ids=str)
def test_a_shape_without_values_or_beyond_memory_is_a_value_error(shape):
    with pytest.raises(ValueError, match="a field "):
        tr.Field(shape)


@pytest.mark.parametrize("shape", [1.5, (1.5,), "3", None, ("a",), {"a": 1}, {}, True, b"3"], ids=str)
def test_a_shape_of_other_things_is_a_type_error(shape):
    with pytest.raises(TypeError, match=r"a field has shape .*: expected an int or a tuple of ints"):
        tr.Field(shape)


def test_fields_are_values():
    field = tr.Field((2,), torch.int32)
    assert field == tr.Field([2], "int32")
    assert field != tr.Field((2,), torch.int64)
    assert len({field, tr.Field(2, np.int32)}) == 1
    assert repr(field) == "Field((2,), torch.int32)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        field.shape = (3,)


def test_the_most_dimensions_a_field_may_have_all_come_back():
    shape = (1, 2) * 7 + (1,)
    values = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    buffer = tr.ReplayBuffer({"x": tr.Field(shape, torch.int16)}, 2)
    buffer.writer().append(x=values)
    assert buffer.sample(3)["x"].shape == (3, *shape)
    assert np.array_equal(buffer.sample(1)["x"][0].numpy(), values)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "the spec is {}: expected a non-empty dict"),
        (None, "the spec is None: expected a non-empty dict"),
        ([tr.Field()], "expected a non-empty dict of names"),
        ({"a": {}}, "field 'a' is {}: expected torchreplay.Field"),
        ({"a": {"b": torch.float32}}, "field 'a/b' is torch.float32: expected torchreplay.Field"),
        ({"a": tr.Field}, "field 'a' is .*: expected torchreplay.Field"),
        ({"a": (4,)}, r"field 'a' is \(4,\): expected torchreplay.Field"),
        ({"": tr.Field()}, "a field of 'the spec' is named '': expected a name without '/'"),
        ({"a/b": tr.Field()}, "a field of 'the spec' is named 'a/b'"),
        ({"a": {"b\0": tr.Field()}}, "a field of 'a' is named"),
        ({"a": {3: tr.Field()}}, "a field of 'a' is named 3"),
        ({"a": {"\ud800": tr.Field()}}, "a field of 'a' is named .*: expected Unicode text"),
        (tr.Field(), "expected a non-empty dict"),
        (gymnasium.make("CartPole-v1"), r"expected a non-empty dict .*; tr.spec_from_env\(env\)"),
        (gymnasium.make_vec("CartPole-v1", 2), r"expected a non-empty dict .*; tr.spec_from_env\(env\)"),
        (spaces.Discrete(3), r"expected a non-empty dict .*; tr.spec_from_space\(space\)"),
        (spaces.Dict(a=spaces.Discrete(3)), r"expected a non-empty dict .*; tr.spec_from_space\(space\)"),
        ({"a": spaces.Discrete(3)}, r"field 'a' is Discrete\(3\): expected .*; tr.spec_from_space\(space\)"),
        ({"a": {"b": spaces.Dict(c=spaces.Discrete(3))}}, r"field 'a/b' is Dict.*; tr.spec_from_space\(space\)"),
        ({"a": spaces.Tuple([spaces.Discrete(3)])}, r"field 'a' is Tuple.*; tr.spec_from_space\(space\)"),
    ],
    ids=str,
)
def test_a_bad_spec_is_a_value_error_that_names_the_place(spec, message):
    with pytest.raises(ValueError, match=message):
        tr.ReplayBuffer(spec, 4)


def test_as_many_fields_as_a_buffer_takes_are_found_where_it_is_attached():
    spec = {"inner": {str(i): tr.Field() for i in range(4096)}}
    buffer = tr.ReplayBuffer(spec, 1)
    assert tr.ReplayBuffer.attach(buffer.handle()).spec == spec
    with pytest.raises(ValueError, match="4,097 fields: expected at most 4,096"):
        tr.ReplayBuffer({**spec, "more": tr.Field()}, 1)


@pytest.mark.parametrize("name", ["key", "weight", "probability", "priority", "buffer"])
def test_names_of_the_batchs_own_entries_are_reserved_at_the_top_and_free_below(name):
    with pytest.raises(ValueError, match=f"the field name '{name}' is reserved"):
        tr.ReplayBuffer({name: tr.Field()}, 4)
    buffer = tr.ReplayBuffer({"inner": {name: tr.Field()}}, 4)
    buffer.extend(inner={name: np.array([3.0])})
    assert buffer.sample(2)["inner"][name].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("name", ["self", "priorities", "class", "batch_size", "Ωμέγα", "with space", "a.b"])
def test_any_other_name_is_a_name(name):
    buffer = tr.ReplayBuffer({name: tr.Field()}, 4)
    with buffer.writer() as writer:
        writer.append(**{name: 1.0})
    buffer.extend(**{name: np.array([2.0])})
    assert sorted(set(buffer.sample(64)[name].tolist())) == [1.0, 2.0]
    assert list(tr.ReplayBuffer.attach(buffer.handle()).spec) == [name]


names = st.text("abc", min_size=1, max_size=3)
fields = st.builds(
    tr.Field,
    st.lists(st.integers(1, 3), max_size=3).map(tuple),
    st.sampled_from([*DTYPES.values(), torch.bfloat16]),
)
specs = st.dictionaries(
    names, st.recursive(fields, lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3)), min_size=1
)


def mapped(spec, function):
    return {
        name: mapped(value, function) if isinstance(value, dict) else function(value) for name, value in spec.items()
    }


@given(spec=specs)
def test_every_spec_comes_back_as_it_was_given_here_and_where_it_is_attached(spec):
    buffer = tr.ReplayBuffer(spec, 3)
    attached = tr.ReplayBuffer.attach(buffer.handle())
    assert buffer.spec == attached.spec == spec
    assert repr(buffer.spec) == repr(attached.spec) == repr(spec), "in the same order"
    attached.extend(**mapped(spec, lambda field: torch.ones(2, *field.shape, dtype=field.dtype)))
    batch = buffer.sample(5)
    for name in ("key", "weight", "probability"):
        del batch[name]
    assert mapped(dict(batch), lambda t: tr.Field(t.shape[1:], t.dtype)) == spec
    assert mapped(buffer.storage, lambda t: tr.Field(t.shape[1:], t.dtype)) == spec


def test_a_ragged_field_has_a_dtype_and_the_shape_of_one_element():
    tokens, points = Ragged(torch.int32), Ragged("float32", 3)
    assert (tokens.dtype, tokens.shape, tokens.like, tokens.nbytes) == (torch.int32, (), None, 4)
    assert (points.dtype, points.shape, points.nbytes) == (torch.float32, (3,), 12)
    assert repr(Ragged(torch.float32, (3,), like="obs/points")) == "Ragged(torch.float32, (3,), like='obs/points')"
    assert Ragged(np.uint8) == Ragged(torch.uint8) != Ragged(torch.int8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((3,), torch.float32), TypeError, r"dtype \(3,\): expected a dtype, and then the shape of one element"),
        ((100,), TypeError, "the length of values is said nowhere"),
        ((None,), TypeError, "dtype None: expected a dtype"),
        (("complex64",), ValueError, "cannot hold values of dtype 'complex64': expected one of bool, uint8"),
        ((str,), ValueError, "cannot hold values of dtype <class 'str'>"),
        ((torch.int32, "tokens"), TypeError, "shape 'tokens': expected .*; did you mean like='tokens'"),
        ((torch.int32, (0,)), ValueError, r"shape \(0,\): expected at most 15 dimensions, each a positive int"),
        ((torch.int32, (-1,)), ValueError, r"each a positive int"),
        ((torch.int32, (1,) * 16), ValueError, "expected at most 15 dimensions"),
        ((torch.int32, 2.5), TypeError, "shape 2.5: expected an int or a tuple of ints"),
        ((torch.float64, (1 << 44,)), ValueError, "an element of shape .* needs 140,737,488,355,328 bytes"),
        ((torch.int32, (), 3), TypeError, "like is 3: expected the name of another ragged field, or None"),
        ((torch.int32, (), ""), ValueError, "like is '': expected the name of another ragged field"),
        ((torch.int32, (), "obs//tokens"), ValueError, "such as 'obs/tokens'"),
    ],
    ids=str,
)
def test_what_is_no_ragged_field_is_refused_with_what_was_given(arguments, error, message):
    with pytest.raises(error, match=message):
        Ragged(*arguments)


def test_fields_that_are_like_each_other_name_the_first_one():
    spec = {
        "mask": Ragged(torch.bool, like="obs/logprob"),
        "obs": {"tokens": Ragged(torch.int32), "logprob": Ragged(torch.float32, like="obs/tokens")},
        "picture": Ragged(torch.uint8),
        "reward": tr.Field(),
    }
    columns = flatten(spec)
    assert list(columns) == [("mask",), ("obs", "tokens"), ("obs", "logprob"), ("picture",), ("reward",)]
    likes = {path[-1]: column.like for path, column in columns.items() if isinstance(column, Ragged)}
    assert likes == {"mask": "obs/tokens", "tokens": None, "logprob": "obs/tokens", "picture": None}
    assert columns["reward",] == tr.Field()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"a": Ragged("int8", like="a")},
            "like leads in a circle, 'a' -> 'a': expected a field of a length of its own",
        ),
        (
            {"a": Ragged("int8", like="b"), "b": Ragged("int8", like="c"), "c": Ragged("int8", like="b")},
            "in a circle, 'a' -> 'b' -> 'c' -> 'b'",
        ),
        (
            {"a": Ragged("int8", like="token"), "tokens": Ragged("int8")},
            "'a' -> 'token', which is no field of the spec: expected 'tokens'",
        ),
        (
            {"a": Ragged("int8", like="b"), "b": tr.Field()},
            r"'b', which is Field\(\(\), torch.float32\): expected None",
        ),
        ({"a": Ragged("int8", like="obs"), "obs": {"b": Ragged("int8")}}, "'obs', which is no .*: expected 'obs/b'"),
        ({"offsets": Ragged("int8")}, "the field name 'offsets' is reserved, as are .*'lengths'"),
        ({"a": Ragged("int8"), "lengths": tr.Field()}, "the field name 'lengths' is reserved"),
    ],
    ids=str,
)
def test_a_length_that_no_field_has_is_refused_with_the_way_that_was_followed(spec, message):
    with pytest.raises(ValueError, match=message):
        flatten(spec)


def test_like_names_a_field_of_the_whole_spec_or_else_one_of_the_same_dict():
    graph = {"nodes": Ragged("int8"), "edges": Ragged("int8"), "links": Ragged("int8", like="edges")}
    assert flatten({"obs": {"graph": graph}})["obs", "graph", "links"].like == "obs/graph/edges"
    assert flatten({"obs": graph, "edges": Ragged("int8")})["obs", "links"].like == "edges"


def test_names_of_offsets_and_lengths_are_free_where_all_fields_have_one_shape():
    assert list(flatten({"offsets": tr.Field(), "lengths": tr.Field()})) == [("offsets",), ("lengths",)]


@given(spec=specs, data=st.data())
def test_fields_come_back_from_the_description_of_a_segment(spec, data):
    columns = flatten(spec)
    for path, column in columns.items():
        if data.draw(st.booleans()):
            likes = ["/".join(p) for p, c in columns.items() if isinstance(c, Ragged) and c.like is None]
            columns[path] = Ragged(column.dtype, column.shape, data.draw(st.sampled_from([None, *likes])))
    assert from_native(json.loads(json.dumps(to_native(columns)))) == columns
    assert list(from_native(to_native(columns))) == list(columns)
    assert flatten(nest(columns)) == columns


@pytest.mark.parametrize("of", [5, -5, "tokens", 1.5], ids=str)
def test_a_description_with_a_length_that_no_field_has_is_refused(of):
    native = to_native({("tokens",): Ragged("int8"), ("reward",): tr.Field()})
    with pytest.raises((ValueError, TypeError, IndexError)):
        from_native([(*native[0][:3], of), native[1]])


TOKENS = {"tokens": Ragged(torch.int32), "logprob": Ragged(torch.float32, like="tokens"), "reward": tr.Field()}


def described(spec, capacity, **arguments):
    return Config.of(spec, capacity, None, None, None, **arguments)


@pytest.mark.parametrize(
    ("spec", "given", "message"),
    [
        (
            TOKENS,
            None,
            "missing, and the spec has ragged fields, 'tokens', 'logprob': .* 20,000 rows of 8 bytes an element need "
            "ragged_bytes=160,000,000",
        ),
        (TOKENS, 1023, "ragged_bytes is 1023: expected an int from 1024 to "),
        (TOKENS, 1 << 47, "expected an int from 1024 to"),
        (TOKENS, 1e6, "ragged_bytes is 1000000.0: expected an int"),
        (TOKENS, True, "ragged_bytes is True"),
        ({"x": tr.Field()}, 4096, "ragged_bytes is 4096, and the spec has no Ragged field: leave it out"),
        (
            {"frames": Ragged(torch.uint8, (64, 64))},
            16_383,
            "ragged_bytes is 16,383, and one element of field 'frames' takes 4,096 bytes: .*at least 16,384",
        ),
    ],
    ids=str,
)
def test_bytes_for_ragged_values_that_do_not_fit_the_spec_are_refused(spec, given, message):
    with pytest.raises(ValueError, match=message):
        described(spec, 20_000, ragged_bytes=given)


def test_bytes_for_ragged_values_are_in_the_description_of_a_buffer_that_has_some():
    config = described(TOKENS, 20_000, ragged_bytes=2 << 30)
    assert Config.from_text(config.to_text()) == config
    assert json.loads(config.to_text())["ragged_bytes"] == 2 << 30
    assert "ragged_bytes" not in json.loads(described({"x": tr.Field()}, 10).to_text())
    damaged = json.loads(config.to_text()) | {"ragged_bytes": 5}
    with pytest.raises(ValueError, match=r"damaged: .*ragged_bytes is 5"):
        Config.from_text(json.dumps(damaged))

"""Rows of any length: what is written comes back, whoever is overwritten, and what cannot be is refused before."""

import array
import multiprocessing
import re
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from ragged_model import RaggedModel, random_values, split

import torchreplay as tr
from torchreplay.ops import Ring
from torchreplay.schema.spec import ELEMENTS, Ragged

TOKENS = {
    "tokens": Ragged(torch.int32),
    "logprob": Ragged(torch.float32, like="tokens"),
    "picture": Ragged(torch.uint8),
    "points": Ragged(torch.float32, (3,)),
    "reward": tr.Field(),
    "prompt": tr.Field((), torch.int64),
}


def row(tokens=(1, 2), picture=b"", points=(), **others):
    values = {"tokens": list(tokens), "logprob": [0.5] * len(tokens), "picture": picture, "points": points}
    return values | {"reward": 1.0, "prompt": 7} | others


@pytest.fixture
def buffer():
    with tr.ReplayBuffer(TOKENS, 100, ragged_bytes=1 << 20, seed=0) as made:
        yield made


def one(field):
    return tr.ReplayBuffer({"x": field}, 8, ragged_bytes=1 << 16, seed=0)


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_values_of_every_dtype_and_shape_come_back_as_they_were(dtype, shape):
    numbers = torch.arange(5 * torch.Size(shape).numel()).reshape(5, *shape)
    values = numbers.remainder(2).bool() if dtype == torch.bool else numbers.to(dtype)
    with one(Ragged(dtype, shape)) as made:
        keys = [made.writer().append(x=values[:n]) for n in (5, 0, 3)]
        batch = made.gather(keys)
    assert batch["x"].dtype == dtype
    expected = torch.cat([values[:5], values[:3]])
    assert torch.equal(batch["x"].view(torch.uint8), expected.view(torch.uint8))
    assert batch.lengths("x").tolist() == [5, 0, 3]
    assert batch.offsets("x").tolist() == [0, 5, 5, 8]


NUMBERS = np.arange(12, dtype=np.int64)


@pytest.mark.parametrize(
    "value",
    [
        NUMBERS,
        NUMBERS.astype(np.int32),
        NUMBERS.astype(np.int8),
        NUMBERS.astype(">i4"),
        NUMBERS.tolist(),
        tuple(NUMBERS.tolist()),
        list(NUMBERS),
        list(torch.arange(12)),
        torch.arange(12),
        torch.arange(12, dtype=torch.int16),
        torch.arange(24)[::2] // 2,
        np.stack([NUMBERS, NUMBERS])[1],
        np.stack([NUMBERS, NUMBERS], 1)[:, 0],
        array.array("i", range(12)),
        memoryview(array.array("h", range(12))),
        range(12),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_numbers_are_taken_from_whatever_holds_them(value):
    with one(Ragged(torch.int32)) as made:
        made.writer().append(x=value)
        made.extend(x=[value, value])
        assert made.gather([0, 1, 2])["x"].tolist() == 3 * list(range(12))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_bytes_are_values_of_a_field_of_uint8(kind):
    with one(Ragged(torch.uint8)) as made:
        made.writer().append(x=kind(b"\x00jpeg\xff"))
        made.extend(x=[kind(b"a"), kind(b""), b"bc"])
        assert [bytes(part.tolist()) for part in split(made.gather([0, 1, 2, 3]), "x")] == [
            b"\x00jpeg\xff",
            b"a",
            b"",
            b"bc",
        ]


def test_a_value_without_elements_may_be_an_empty_list_of_any_shape():
    with one(Ragged(torch.float32, (3,))) as made:
        made.extend(x=[[], np.zeros((0, 3)), [[1, 2, 3]]])
        batch = made.gather([0, 1])
        assert batch["x"].shape == (0, 3)
        assert batch.lengths("x").tolist() == [0, 0]
        assert made.gather([2])["x"].tolist() == [[1, 2, 3]]


def test_bools_are_normalised():
    with one(Ragged(torch.bool)) as made:
        made.writer().append(x=np.frombuffer(b"\x00\x02\xff", np.bool_))
        assert made.gather([0])["x"].view(torch.uint8).tolist() == [0, 1, 1]


def test_rows_come_in_a_list_of_values_or_one_after_the_other_with_lengths():
    tokens = [np.arange(n, dtype=np.int32) for n in (3, 0, 4)]
    packed, lengths = np.concatenate(tokens), [3, 0, 4]
    rest = {"picture": [b"a", b"", b"bc"], "points": [[], [[1, 2, 3]], []], "reward": [0, 1, 2], "prompt": [0, 1, 2]}
    logprob = np.linspace(0, 1, 7, dtype=np.float32)
    with tr.ReplayBuffer(TOKENS, 100, ragged_bytes=1 << 20) as made:
        made.extend(tokens=tokens, logprob=np.split(logprob, [3, 3]), **rest)
        made.extend(tokens=(packed, lengths), logprob=(torch.from_numpy(logprob), torch.tensor(lengths)), **rest)
        made.extend(tokens=packed, logprob=logprob, lengths={"tokens": lengths}, **rest)
        ways = [made.gather(range(first, first + 3)) for first in (0, 3, 6)]
    for batch in ways:
        assert batch["tokens"].tolist() == packed.tolist()
        assert batch["logprob"].tolist() == logprob.tolist()
        assert batch.lengths("logprob").tolist() == lengths
        assert batch.offsets("logprob") is batch.offsets("tokens") or torch.equal(
            batch.offsets("logprob"), batch.offsets("tokens")
        )
        assert bytes(batch["picture"].tolist()) == b"abc"
        assert batch["points"].tolist() == [[1, 2, 3]]


def test_a_batch_can_be_written_again(buffer):
    random = np.random.default_rng(0)
    for _ in range(20):
        buffer.writer().append(**random_values(random, TOKENS, 30))
    batch = buffer.sample(50)
    with tr.ReplayBuffer(TOKENS, 100, ragged_bytes=1 << 20) as other:
        keys = other.extend(**{name: batch[name] for name in TOKENS}, lengths=batch["lengths"])
        again = other.gather(keys)
    for name in TOKENS:
        assert torch.equal(again[name], batch[name])
    assert torch.equal(again.offsets("points"), batch.offsets("points"))


def test_rows_of_one_length_may_be_an_array():
    values = np.arange(12, dtype=np.int32).reshape(3, 4)
    with one(Ragged(torch.int32)) as made:
        made.extend(x=values)
        made.extend(x=torch.from_numpy(values).long())
        assert made.gather(range(6))["x"].tolist() == 2 * list(range(12))
        assert made.gather([1]).lengths("x").tolist() == [4]


def test_fields_that_are_like_each_other_share_their_offsets(buffer):
    buffer.writer().append(**row())
    batch = buffer.sample(1)
    assert batch.offsets("tokens") is batch.offsets("logprob")
    assert (batch.nested("tokens") * batch.nested("logprob")).values().tolist() == [0.5, 1.0]


SELF = [1]
SELF.append(SELF)  # a list that holds itself

REFUSED = [
    ({"tokens": "text", "logprob": []}, r"field 'tokens': got .*str.*expected int32 of shape \(n,\)"),
    ({"picture": "text"}, r"field 'picture': got .*str.*: pass text\.encode\(\)"),
    ({"picture": None}, r"field 'picture': got None, .*: pass \[\] where there are no elements"),
    ({"picture": (b for b in b"abc")}, r"field 'picture': got .*generator.*: pass a list"),
    ({"picture": 5}, "field 'picture': got a Python int.*: pass a list of it"),
    ({"picture": 0.5}, "field 'picture': got a Python float"),
    ({"picture": {"a": 1}}, "field 'picture': got .*dict"),
    ({"picture": np.float32(1)}, "field 'picture': "),
    ({"picture": np.zeros((), np.uint8)}, r"field 'picture': got uint8 of shape \(\)"),
    ({"picture": np.zeros(3)}, "field 'picture': float64 does not cast to uint8 by the same_kind rule"),
    ({"picture": [1, 256]}, "field 'picture': got 256, which uint8 does not hold; nothing was written"),
    ({"picture": [-1]}, "field 'picture': got -1, which uint8 does not hold"),
    ({"tokens": np.array([1, 1 << 40]), "logprob": [0, 0]}, "'tokens': got 1099511627776 at index .*does not hold"),
    ({"tokens": [1.5], "logprob": [0]}, "field 'tokens': float64 does not cast to int32"),
    ({"tokens": [[1, 2], [3]], "logprob": [0]}, "field 'tokens': got .*different lengths"),
    ({"tokens": [[1], [3]], "logprob": [0]}, r"'tokens': got int64 of shape \(2, 1\), .*append\(\) writes one row"),
    ({"tokens": b"ab", "logprob": [0, 0]}, "field 'tokens': got .*bytes.*bytes are for fields of uint8"),
    (
        {"points": np.zeros((2, 4))},
        r"field 'points': got float64 of shape \(2, 4\), expected float32 of shape \(n, 3\)",
    ),
    ({"points": np.zeros(3)}, r"field 'points': got float64 of shape \(3,\)"),
    (
        {"tokens": [1, 2, 3], "logprob": [0.5]},
        "field 'logprob': got 1 elements, and 'tokens', .* 3; nothing",
    ),
    (
        {"picture": bytes((1 << 18) + 1)},
        "field 'picture': a value has 262145 elements of 1 bytes, and takes at most 262144 bytes, a quarter of "
        "ragged_bytes=1048576.*nothing was written",
    ),
    (
        {"tokens": np.zeros(40_000, np.int32), "logprob": np.zeros(40_000, np.float32)},
        "the values of a row take 320000 bytes together, and may take at most 262144, a quarter of ragged_bytes=10485",
    ),
    ({"picture": torch.zeros(3, dtype=torch.uint8, device="meta")}, "field 'picture': got a tensor "),
    ({"tokens": [1, "a"]}, r"'tokens': got .* list, .*: at index \[1\] is a value of type str; nothing was written"),
    ({"tokens": [1, None]}, r"at index \[1\] is a value of type NoneType; nothing was written"),
    ({"points": [[1.0, 2.0, 3.0], [1.0, {}, 3.0]]}, r"at index \[1\]\[1\] is a value of type dict; nothing was"),
    ({"tokens": SELF}, "field 'tokens': got "),
    ({"lengths": {"tokens": [1]}}, r"append\(\) takes no lengths"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_value_that_cannot_be_is_refused_and_nothing_is_written(buffer, given, message):
    with pytest.raises(ValueError, match=message):
        buffer.writer().append(**row() | given)
    assert len(buffer) == 0
    assert buffer.next_key == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": [[1], [2]]}, "field 'tokens': got 2 rows, the fields before it have 1|'logprob': got"),
        ({"tokens": [[1], 2]}, "field 'tokens': got a Python int"),
        ({"tokens": None}, "field 'tokens': got None, expected a list of n values"),
        (
            {"picture": (b"a" * 99, b"c")},
            r"'picture': got a tuple of a value of type bytes and .*list of one value for each",
        ),
        ({"picture": b"a" * 99, "lengths": {"picture": b"c"}}, "'picture': its lengths are a value of type bytes"),
        (
            {"tokens": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)},
            r"field 'tokens': got a nested tensor: pass list\(tensor\.unbind\(\)\), expected a list",
        ),
        ({"tokens": "abc"}, "field 'tokens': got .*str"),
        ({"picture": b"abc"}, "field 'picture': got .*bytes.*, expected a list of n values"),
        ({"tokens": ([1, 2], [3], [4])}, r"got a tuple of 3, .* expected to be \(values, lengths\): an array"),
        (
            {"tokens": ([1], [2, 3])},
            "got a tuple of a value of type list and a value of type list, .* Make an array of the values, or",
        ),
        ({"tokens": (np.arange(3), [1, 1])}, "'tokens': the lengths add up to 2, and there are 3 elements"),
        ({"tokens": (np.arange(3), [2, 2])}, "'tokens': the lengths add up to 4, and there are 3 elements"),
        ({"tokens": (np.arange(3), [4, -1])}, "'tokens': the length at index 1 is -1: expected 0 or more"),
        ({"tokens": (np.arange(3), [1.0, 2.0])}, "'tokens': its lengths are float64 of shape"),
        ({"tokens": (np.arange(3), np.array([[3]]))}, r"'tokens': its lengths are int64 of shape \(1, 1\)"),
        ({"lengths": {"reward": [1]}}, "lengths has 'reward', which is no ragged field"),
        ({"lengths": {"other": [1]}}, "lengths has 'other', which is no ragged field"),
        ({"lengths": [1]}, "lengths is a value of type list: expected a dict"),
        ({"logprob": [[0.5, 0.5, 0.5]]}, "'logprob': got 3 elements, and 'tokens', whose length they have, 2"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rows_that_cannot_be_are_refused_and_none_is_written(buffer, given, message):
    values = {name: [value] for name, value in row().items()}
    with pytest.raises(ValueError, match=message):
        buffer.extend(**values | given)
    assert len(buffer) == 0
    assert buffer.next_key == 0


def test_a_range_is_a_value_an_empty_one_too(buffer):
    keys = [buffer.writer().append(**row(tokens=range(n))) for n in (0, 3)]
    assert buffer.gather(keys)["tokens"].tolist() == [0, 1, 2]
    assert buffer.gather(keys).lengths("tokens").tolist() == [0, 3]


def test_a_value_of_a_quarter_of_the_bytes_is_taken(buffer):
    picture = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8)
    for _ in range(9):
        key = buffer.writer().append(**row(tokens=(), picture=picture))
    assert buffer.gather([key])["picture"].numpy().tobytes() == picture.tobytes()


def compare(buffer, model, random):
    """Compares everything that one can ask for with the model."""
    keys = model.keys()
    assert buffer.keys().tolist() == keys
    assert len(buffer) == len(keys)
    assert buffer.stats().ragged_fill == pytest.approx(model.fill)
    gathered = buffer.gather(range(len(model.rows)))
    assert gathered["key"].tolist() == keys
    batches = [gathered]
    if keys:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            batches.append(buffer.sample(int(random.integers(1, 20))))
    for batch in batches:
        assert set(batch["key"].tolist()) <= set(keys)
        for name, field in model.spec.items():
            expected = [model.value(key, name) for key in batch["key"].tolist()]
            for got, value in zip(split(batch, name), expected, strict=True):
                assert np.array_equal(got, value)
            if hasattr(field, "like"):
                assert batch.lengths(name).tolist() == [len(value) for value in expected]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_leave_what_a_list_of_arrays_says(seed):
    random = np.random.default_rng(seed)
    capacity, ragged_bytes = int(random.integers(1, 40)), int(random.integers(1024, 20_000))
    model = RaggedModel(TOKENS, capacity, ragged_bytes)
    longest = int(random.integers(1, 1 + max(2, ragged_bytes // 100)))
    with tr.ReplayBuffer(TOKENS, capacity, ragged_bytes=ragged_bytes, seed=seed) as made:
        writers = [made.writer() for _ in range(2)]
        for _ in range(60):
            rows = [random_values(random, TOKENS, longest) for _ in range(int(random.integers(1, 6)))]
            rows = [values for values in rows if model.fits(values)]
            if random.random() < 0.5:
                for values in rows:
                    writers[int(random.integers(2))].append(**values)
            elif rows:
                made.extend(**{name: [values[name] for values in rows] for name in TOKENS})
            for values in rows:
                model.append(values)
            if random.random() < 0.3:
                compare(made, model, random)
        compare(made, model, random)


@pytest.mark.parametrize("capacity", [1, 8, 100])
@pytest.mark.parametrize("ragged_bytes", [1024, 1027, 4500, 20_020, 1_000_000])
def test_a_value_may_take_a_quarter_of_the_bytes_and_not_one_more(ragged_bytes, capacity, tmp_path):
    quarter = ragged_bytes // 4
    value = np.random.default_rng(0).integers(0, 256, quarter, np.uint8)
    with tr.ReplayBuffer({"x": Ragged(torch.uint8)}, capacity, ragged_bytes=ragged_bytes) as made:
        with pytest.raises(
            ValueError, match=rf" {quarter + 1} elements .* most {quarter} bytes.*ragged_bytes={ragged_bytes}:"
        ):
            made.extend(x=[bytes(quarter + 1)])
        assert made.next_key == 0
        keys = [made.writer().append(x=value) for _ in range(5)]
        made.save(tmp_path)
        with made.copy() as copied, tr.ReplayBuffer.load(tmp_path) as loaded:
            for found in (made, copied, loaded):
                assert np.array_equal(found.gather(keys[-1:])["x"], value)


def test_the_oldest_rows_go_when_either_measure_is_used_up():
    with tr.ReplayBuffer({"x": Ragged(torch.uint8)}, 10, ragged_bytes=1600) as made:  # 25 pages of 64 bytes
        made.extend(x=[b"a"] * 12)
        assert made.keys().tolist() == list(range(2, 12)), "by rows"
        made.extend(x=[bytes(320)] * 3)
        assert made.keys().tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], "still by rows"
        made.extend(x=[bytes(320)] * 2)
        assert made.keys().tolist() == [13, 14, 15, 16], "by bytes"


def test_a_budget_bounds_the_elements_of_a_batch():
    lengths = [int(n) for n in np.random.default_rng(1).integers(0, 60, 50)]
    with one(Ragged(torch.int32)) as made, tr.ReplayBuffer(TOKENS, 50, ragged_bytes=1 << 18, seed=3) as both:
        made.extend(x=[[n] * n for n in lengths[:8]])
        sizes = set()
        for _ in range(100):
            batch = made.sample(8, budget={"x": 100})
            assert 1 <= batch.batch_size <= 8
            assert len(batch["x"]) <= 100
            assert batch["weight"].shape == (batch.batch_size,)
            sizes.add(batch.batch_size)
        assert len(sizes) > 1
        both.extend(**{name: [row([1] * n, bytes(60 - n))[name] for n in lengths] for name in TOKENS})
        for _ in range(50):
            batch = both.sample(30, budget={"logprob": 300, "picture": 400})
            assert len(batch["logprob"]) <= 300
            assert len(batch["picture"]) <= 400
        assert both.sample(5, budget={}).batch_size == 5
        assert both.sample(5, budget={"tokens": 10_000}).batch_size == 5


def test_an_item_that_is_more_than_the_budget_comes_alone_and_is_said_once():
    with one(Ragged(torch.int32)) as made:
        made.extend(x=[[1] * 50, [2] * 50])
        with pytest.warns(RuntimeWarning, match="an item of .* has 50 elements of 'x', and the budget is 20"):
            assert made.sample(2, budget={"x": 20}).batch_size == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(made.sample(2, budget={"x": 20})["x"]) == 50


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        (
            {"reward": 5},
            ValueError,
            "budget names 'reward', which is no ragged field of a batch: expected some of 'tok",
        ),
        ({"x": 5}, ValueError, "budget names 'x'"),
        ({"tokens": 0}, ValueError, r"budget\['tokens'\] is 0: expected an int from 1 to"),
        ({"tokens": 1 << 63}, ValueError, r"budget\['tokens'\] is 9223372036854775808: expected an int from 1 to"),
        ({"tokens": 1.5}, ValueError, r"budget\['tokens'\] is 1.5"),
        (65_536, TypeError, r"budget is 65536: expected a dict"),
    ],
    ids=str,
)
def test_a_budget_that_cannot_be_is_refused(buffer, budget, error, message):
    buffer.writer().append(**row())
    with pytest.raises(error, match=message):
        buffer.sample(2, budget=budget)
    assert buffer.draws == 0


def test_a_budget_without_ragged_fields_is_refused():
    with tr.ReplayBuffer({"x": tr.Field()}, 10) as made:
        made.extend(x=[1.0])
        with pytest.raises(ValueError, match=r"budget names 'x', .*: the batch has none"):
            made.sample(1, budget={"x": 5})


def test_what_takes_fields_of_one_shape_only_says_so(buffer, tmp_path):
    buffer.writer().append(**row())
    batch = buffer.sample(1)
    with pytest.raises(ValueError, match="out cannot take the batch: 'tokens' is Ragged"):
        buffer.sample(1, out=batch)
    with pytest.raises(ValueError, match="field 'tokens' is Ragged: a value of any length is written once"):
        buffer.rewrite([0], tokens=[[1, 2]])
    assert buffer.rewrite([0], reward=[5.0]) == 1
    assert buffer.gather([0])["reward"].tolist() == [5.0]
    assert set(buffer.storage) == {"reward", "prompt"}
    assert buffer.storage["prompt"][0] == 7


def test_parts_that_know_fields_of_one_shape_alone_refuse_others_with_their_names(buffer):
    buffer.writer().append(**row())
    calls = {
        "torchreplay.ops": lambda: Ring(buffer),
    }
    for what, call in calls.items():
        message = (
            f"{re.escape(what)}.* takes fields of one shape only, and 'tokens', 'logprob', 'picture', 'points' are Rag"
        )
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("turns", [0, 3])
def test_a_file_has_the_same_rows_when_it_is_opened_again(tmp_path, turns):
    random, path = np.random.default_rng(0), tmp_path / "rows.bin"
    model = RaggedModel(TOKENS, 20, 16_384)

    def write(made, rows):
        for _ in range(rows):
            values = random_values(random, TOKENS, 30)
            made.writer().append(**values)
            model.append(values)

    with tr.ReplayBuffer(TOKENS, 20, ragged_bytes=16_384, path=path) as made:
        write(made, 10 + 30 * turns)
    for _ in range(2):
        with tr.ReplayBuffer.open(path) as made:
            assert made.spec == TOKENS
            compare(made, model, random)
            write(made, 7)
            compare(made, model, random)


def test_rows_leave_after_so_many_draws_and_come_once_an_epoch():
    for sampler in (tr.Uniform(max_draws=1), tr.Uniform(replacement=False)):
        with tr.ReplayBuffer({"x": Ragged(torch.int32)}, 30, ragged_bytes=1 << 14, sampler=sampler) as made:
            made.extend(x=[[n] * n for n in range(30)])
            seen = [part.tolist() for _ in range(3) for part in split(made.sample(10), "x")]
            assert sorted(map(len, seen)) == list(range(30))
            assert all(part == [len(part)] * len(part) for part in seen)


def test_the_figures_have_both_measures(buffer):
    assert (buffer.stats().ragged_bytes, buffer.stats().ragged_fill) == (1 << 20, 0.0)
    for _ in range(4):
        buffer.writer().append(**row(tokens=(), picture=bytes(1 << 17)))
    assert buffer.stats().ragged_fill == 0.5
    assert "4/100 rows, 50% of 1.0 MiB for ragged values, fields: tokens" in repr(buffer)
    assert re.search(r"ragged_bytes 1,048,576, ragged_fill 0.5", str(buffer.stats()))
    found = tr.footprint(TOKENS, 100, ragged_bytes=1 << 20)
    assert found.nbytes == buffer.nbytes == sum(found.fields.values()) + sum(found.structures.values())
    assert found.structures["pages"] == 1 << 20
    assert set(found.fields) == {"reward", "prompt"}
    with tr.ReplayBuffer({"x": tr.Field()}, 10) as fixed:
        assert (fixed.stats().ragged_bytes, fixed.stats().ragged_fill) == (0, 0.0)
        assert "ragged" not in repr(fixed)


def _write_elsewhere(buffer, first):
    with buffer.writer() as writer:
        for n in range(first, first + 20):
            writer.append(**row([n] * n, bytes([n]) * n))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_processes_write_and_draw(buffer, method):
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=_write_elsewhere, args=(buffer, first)) for first in (1, 21)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    batch = buffer.gather(buffer.keys())
    values = split(batch, "tokens")
    assert sorted(len(value) for value in values) == list(range(1, 41))
    for value, picture in zip(values, split(batch, "picture"), strict=True):
        assert value.tolist() == [len(value)] * len(value) == picture.tolist()


def test_a_key_that_is_gone_has_no_item(buffer):
    buffer.writer().append(**row())
    assert buffer.gather(torch.empty(0, dtype=torch.int64))["tokens"].shape == (0,)
    buffer.discard([0])
    batch = buffer.gather([0])
    assert (batch.batch_size, batch["points"].shape, batch.offsets("points").tolist()) == (0, (0, 3), [0])
    assert batch.padded("points").shape == (0, 0, 3)


def test_fields_may_be_ragged_alone_or_nested():
    spec = {"a": {"b": Ragged(torch.int8), "c": {"d": Ragged(torch.int16, like="a/b")}}}
    with tr.ReplayBuffer(spec, 4, ragged_bytes=4096) as made:
        made.writer().append(a={"b": [1, 2], "c": {"d": [3, 4]}})
        batch = made.sample(2)
        assert batch["a"]["c"]["d"].tolist() == [3, 4, 3, 4]
        assert batch.offsets("a/c/d").tolist() == [0, 2, 4]
        assert batch["lengths"]["a"]["b"].tolist() == [2, 2]
        assert made.storage == {}
        assert made.spec == spec


def test_rows_that_left_for_want_of_bytes_are_counted():
    random = np.random.default_rng(3)
    with tr.ReplayBuffer(TOKENS, 12, ragged_bytes=2048, seed=0) as made, made.writer() as writer:
        model, there, by_pages = RaggedModel(TOKENS, 12, 2048), set(), 0
        for _ in range(400):
            values = random_values(random, TOKENS, longest=20)
            writer.append(**values)
            model.append(values)
            slot_taken = len(model.rows) - 1 - 12
            by_pages += len(there - set(model.keys()) - {slot_taken})
            there = set(model.keys())
            stats = made.stats()
            assert (stats.size, stats.evicted_by_pages) == (len(there), by_pages)
    assert 0 < by_pages < 388
    assert f"evicted_by_pages {by_pages}" in str(stats)


def test_a_limiter_sees_each_row_though_few_fit_into_the_bytes():
    limiter = tr.SamplesPerInsert(1.0, min_size=100, tolerance=0.1)
    with tr.ReplayBuffer({"x": Ragged(torch.uint8)}, 10_000, ragged_bytes=4096, limiter=limiter) as made:
        writer, most = made.writer(), 0
        for _ in range(5):
            with suppress(tr.WouldBlockForever):
                while True:
                    writer.append(x=bytes(200))
            stats = made.stats()
            assert stats.inserted == stats.rows_written, "rows were overwritten before anybody looked"
            assert most < stats.inserted <= 111 + stats.sampled
            most = stats.inserted
            made.sample(10)

"""Bad arguments: a clear error each, nothing applied, and the buffer usable afterwards."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from small_rows import SPEC, assert_nothing_was_written_and_the_buffer_works

import torchreplay as tr


@pytest.fixture
def buffer():
    return tr.ReplayBuffer(SPEC, 8, sampler=tr.Prioritized(), seed=0)


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
    with pytest.raises(ValueError, match="timeout is"):
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


@pytest.mark.parametrize("key", [0, -1])
def test_a_key_of_a_buffer_that_nobody_wrote_to_is_refused_with_that(buffer, key):
    with pytest.raises(ValueError, match=f"key {key} at index 0 was never issued .*: nothing was written to it yet"):
        buffer.update_priorities([key], [1.0])


@pytest.mark.parametrize("none", [[], (), np.empty(0), torch.empty(0, dtype=torch.int64)], ids=repr)
def test_no_keys_get_no_td_errors_and_no_items(drawn, none):
    buffer, _ = drawn
    for of in (buffer, tr.ReplayBuffer(SPEC, 8)):
        of.update_priorities(none, [])
        batch = of.gather(none)
        assert (batch.batch_size, batch["x"].shape) == (0, (0, 4))
    with pytest.raises(ValueError, match="one number for each key"):
        buffer.update_priorities(none, [1.0])
    assert_nothing_was_applied(buffer)


@pytest.mark.parametrize(
    "keys", [torch.tensor([0.0]), torch.tensor([[0]]), torch.tensor([True]), "0", None, {"key": 0}, 0]
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
        for call in (lambda given: buffer.update_priorities(given, torch.ones(4)), buffer.gather):
            with pytest.raises(ValueError, match="another buffer"):
                call(batch)
    assert_nothing_was_applied(buffer)


# Handles and closed buffers


@pytest.mark.parametrize(
    "change", [{"pid": 2**22 + 1}, {"fd": 99_999}, {"fd": 0}, {"inode": 1}, {"size": 1}, {"nonce": 1}], ids=str
)
def test_a_handle_whose_segment_is_not_there_any_more_is_an_attach_error(buffer, change):
    with pytest.raises(tr.AttachError, match="gone"):
        tr.ReplayBuffer.attach(dataclasses.replace(buffer.handle(), **change))
    assert_nothing_was_written_and_the_buffer_works(buffer)


class ClosesWhenRead:
    """Keys, or TD errors, whose conversion closes the buffer: another thread might."""

    def __init__(self, buffer, values):
        self.buffer, self.values = buffer, values

    def __array__(self, dtype=None, copy=None):
        self.buffer.close()
        return np.array(self.values)


def test_a_buffer_that_is_closed_while_an_argument_is_read_ends_its_call_and_is_closed(buffer):
    def opened():
        other = tr.ReplayBuffer.attach(buffer.handle())
        return other, lambda values: ClosesWhenRead(other, values)

    keys = buffer.extend(x=np.ones((2, 4)), nested={"n": np.zeros(2, int)})
    other, closing = opened()
    batch = other.gather(closing([0, 1]))
    assert batch["x"].eq(1).all()
    other, closing = opened()
    other.update_priorities(closing([0, 1]), torch.full((2,), 3.0))
    other, closing = opened()
    other.update_priorities(keys, closing([5.0, 5.0]))
    assert buffer.stats().updated == 4
    assert buffer.stats().priority_max == 5.0
    other, closing = opened()
    with pytest.raises(ValueError, match="got a value of type ClosesWhenRead"):
        other.extend(x=closing(np.zeros((2, 4))), nested={"n": np.zeros(2, int)})


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
        buffer.__enter__,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert repr(buffer) == "ReplayBuffer(closed)"
    assert (buffer.flush(), buffer.capacity, buffer.view) == (None, 8, tr.Rows())
    assert batch["x"].eq(1).all(), "a batch outlives its buffer"


# What is given in another place, or as another kind of thing


@pytest.mark.parametrize(
    ("kind", "argument"), [(tr.Prioritized, "sampler"), (tr.MinSize, "limiter"), (tr.Rows, "view")]
)
def test_a_class_instead_of_an_object_is_refused_with_what_was_meant(kind, argument):
    with pytest.raises(TypeError, match=rf"{argument} is <class .*did you mean {kind.__name__}\(...\)\?"):
        tr.ReplayBuffer(SPEC, 8, **{argument: kind})


@pytest.mark.parametrize(
    ("given", "argument"), [(tr.Prioritized(), "sampler"), (tr.MinSize(), "limiter"), (tr.Rows(), "view")]
)
def test_an_object_of_a_derived_class_is_refused_because_other_processes_do_not_know_it(buffer, given, argument):
    kind = type(given)
    derived = type("Mine", (kind,), {})()
    with pytest.raises(TypeError, match=rf"{argument} is a Mine, .*expected a torchreplay.{kind.__name__} itself"):
        tr.ReplayBuffer(SPEC, 8, **{argument: derived})
    if argument == "limiter":
        with pytest.raises(TypeError, match="limiter is a Mine"):
            buffer.limiter = derived


@pytest.mark.parametrize("path", [5, True, b"replay", ["a"], {}], ids=repr)
def test_what_is_no_path_is_a_type_error_that_names_the_argument(buffer, path):
    calls = [
        ("path", lambda: tr.ReplayBuffer(SPEC, 8, path=path)),
        ("path", lambda: tr.ReplayBuffer.open(path)),
        ("path", lambda: tr.ReplayBuffer.load("nowhere", path=path)),
        ("directory", lambda: tr.ReplayBuffer.load(path)),
        ("directory", lambda: buffer.restore(path)),
        ("directory", lambda: buffer.save(path)),
    ]
    for name, call in calls:
        with pytest.raises(TypeError, match=f"{name} is {re.escape(repr(path))}: expected a path"):
            call()


@pytest.mark.parametrize("number", ["0.6", b"1", "much"])
def test_a_text_is_no_number(buffer, number):
    for call in (
        lambda: tr.Prioritized(alpha=number),
        lambda: tr.SamplesPerInsert(number),
        lambda: tr.Transitions(gamma=number),
        lambda: buffer.sample(2, timeout=number),
    ):
        with pytest.raises(ValueError, match=f"is {number!r}: expected a number"):
            call()


@pytest.mark.parametrize("state", [None, 3, "state", [], {}, {"draws": 1}], ids=repr)
def test_what_is_no_state_is_a_value_error_that_says_what_a_state_has(buffer, state):
    datasets = (tr.ReplayDataset(buffer, 2), tr.MixedDataset({"one": buffer}, 2), tr.PriorityTree(4))
    for dataset, parts in zip(datasets, ("draws", "parts", "leaves"), strict=True):
        with pytest.raises(ValueError, match=parts):
            dataset.load_state_dict(state)


@pytest.mark.parametrize("drawn", [None, 3, {}, "drawn", [3]], ids=repr)
def test_batches_drawn_ahead_that_are_none_are_a_value_error(buffer, drawn):
    with pytest.raises(ValueError, match="drawn ahead"):
        tr.ReplayDataset(buffer, 2).load_state_dict({"draws": 0, "position": 0, "drawn": drawn})


@pytest.mark.parametrize("values", [None, "abc", ..., {"a": 1}, [None], 10**30], ids=repr)
def test_what_is_no_tensor_is_a_value_error_that_says_what_is_expected(buffer, values):
    buffer.extend(x=np.zeros((4, 4)), nested={"n": np.zeros(4, int)})
    tree, large = tr.PriorityTree(4), buffer.sample(4)
    for call in (
        lambda: tree.set(values, 1.0),
        lambda: tree.get(values),
        lambda: tr.LaBER(2)(large, values),
    ):
        with pytest.raises(ValueError, match=r"(index|priority): got .*, expected"):
            call()


@pytest.mark.parametrize("given", [None, 3, "buffer", {"a": 1}, torch.nn.Linear(1, 1)], ids=lambda v: type(v).__name__)
def test_what_is_no_buffer_and_no_batch_is_a_type_error(given):
    with pytest.raises(TypeError, match=r"expected a torchreplay\.ReplayBuffer"):
        tr.Reverse(given)
    with pytest.raises((TypeError, ValueError), match=r"expected (a torchreplay\.ReplayBatch|tensors)"):
        tr.LaBER(2)(given, torch.ones(2))


@pytest.mark.parametrize("given", [None, 3, [[1.0]], np.ones((1, 1))], ids=repr)
def test_sequences_td_errors_and_masks_are_tensors(given):
    td, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"td is .*: expected a torch\.Tensor"):
        tr.sequence_priority(given, mask)
    with pytest.raises(TypeError, match=r"mask is .*: expected a torch\.Tensor"):
        tr.sequence_priority(td, given)


def choices_beside_none(buffer, given):
    """Choices of which None is one."""
    return (
        ("autoreset", "next_step", lambda: buffer.writer(autoreset=given)),
        ("pin", "staging", lambda: tr.ReplayDataset(buffer, 2, device="cpu", pin=given)),
    )


@pytest.mark.parametrize("given", [np.array(["max", "none"]), np.array("max"), ["max"], {"max"}, None, 3], ids=repr)
def test_what_is_none_of_the_choices_is_a_value_error_that_names_them(buffer, given):
    for name, first, call in (
        ("weights", "buffer", lambda: tr.Prioritized(weights=given)),
        ("strategy", "future", lambda: tr.Hindsight(lambda achieved, desired: 0.0, strategy=given)),
        ("mode", "mean", lambda: tr.LaBER(2, given)),
        *([] if given is None else choices_beside_none(buffer, given)),
    ):
        with pytest.raises(ValueError, match=f"{name} is .*: expected one of '{first}'"):
            call()


def test_an_empty_path_is_refused_and_nothing_is_made_in_the_working_directory(buffer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, call in (
        ("directory", lambda: buffer.save("")),
        ("directory", lambda: buffer.restore("")),
        ("directory", lambda: tr.ReplayBuffer.load("")),
        ("path", lambda: tr.ReplayBuffer.load(tmp_path, path="")),
        ("path", lambda: tr.ReplayBuffer(SPEC, 8, path="")),
        ("path", lambda: tr.ReplayBuffer.open("")),
    ):
        with pytest.raises(ValueError, match=f"{name} is '': expected a path; that of the working directory is '.'"):
            call()
    assert list(tmp_path.iterdir()) == []
    buffer.save(".")
    assert len(tr.ReplayBuffer.load(tmp_path)) == 0

"""`ReplayDataset` under plain loops and `DataLoader`, with and without worker processes."""

import copy
import io
import math
import pickle
import random

import numpy as np
import pytest
import torch
from delayed_draws import filled_buffer
from mixed_buffers import drawn_keys, take
from torch.utils.data import DataLoader

import torchreplay as tr


@pytest.fixture
def buffer():
    buffer = filled_buffer()
    yield buffer
    buffer.close()


def test_an_endless_dataset_yields_batches_for_ever_and_has_no_length(buffer):
    dataset = tr.ReplayDataset(buffer, batch_size=8)
    batches = take(dataset, 40)
    assert all(isinstance(batch, tr.ReplayBatch) and batch["obs"].shape == (8, 4) for batch in batches)
    with pytest.raises(TypeError, match=r"endless and has no length; give it steps="):
        len(dataset)
    assert dataset


def test_a_dataset_with_steps_is_that_long_every_time(buffer):
    dataset = tr.ReplayDataset(buffer, batch_size=8, steps=5)
    assert len(dataset) == len(DataLoader(dataset, batch_size=None)) == 5
    assert [len(list(dataset)) for _ in range(3)] == [5, 5, 5]


def test_a_second_iteration_continues_the_stream_of_draws():
    in_one = drawn_keys(take(tr.ReplayDataset(filled_buffer(), batch_size=8), 6))
    dataset = tr.ReplayDataset(filled_buffer(), batch_size=8, steps=3)
    assert drawn_keys(dataset) + drawn_keys(dataset) == in_one
    assert len(set(in_one)) == 6


def test_two_iterations_at_once_are_both_of_full_length(buffer):
    dataset = tr.ReplayDataset(buffer, batch_size=8, steps=5)
    pairs = list(zip(dataset, dataset, strict=True))
    assert len(pairs) == 5
    assert all(drawn_keys([left]) != drawn_keys([right]) for left, right in pairs)


def test_nothing_is_drawn_before_the_first_batch_is_asked_for(buffer):
    iterator = iter(tr.ReplayDataset(buffer, batch_size=8, prefetch=4))
    assert buffer.stats().sampled == 0
    next(iterator)
    assert 8 <= buffer.stats().sampled <= 40


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_draws_that_nobody_gets_have_not_happened(prefetch):
    expected = drawn_keys(take(tr.ReplayDataset(filled_buffer(), batch_size=8, prefetch=0), 6))
    buffer = filled_buffer()
    dataset = tr.ReplayDataset(buffer, batch_size=8, prefetch=prefetch)
    keys = []
    for handed_out in (2, 4, 6):
        iterator = iter(dataset)
        keys += drawn_keys(next(iterator) for _ in range(2))
        assert buffer.draws == handed_out
        iterator.close()
        assert buffer.draws == handed_out
        assert buffer.stats().sampled == 8 * handed_out
    assert keys == expected


def test_no_more_is_drawn_ahead_than_the_steps_that_are_left(buffer):
    assert len(list(tr.ReplayDataset(buffer, batch_size=8, steps=3, prefetch=10))) == 3
    assert buffer.stats().draws == 3


def test_the_global_random_state_is_left_alone(buffer):
    torch.manual_seed(1), np.random.seed(1), random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    take(tr.ReplayDataset(buffer, batch_size=8), 10)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    assert random.getstate() == before[2]


def test_stopping_the_buffer_ends_an_iteration_without_an_error(buffer):
    seen = 0
    for _ in DataLoader(tr.ReplayDataset(buffer, batch_size=8), batch_size=None):
        seen += 1
        if seen == 3:
            buffer.stop()
    assert seen == 3


def test_the_timeout_of_a_draw_is_raised_and_the_next_iteration_works():
    buffer = filled_buffer(rows=0)
    with buffer.writer() as writer:
        buffer.handle()  # somebody else may write: the wait is not hopeless
        dataset = tr.ReplayDataset(buffer, batch_size=8, timeout=0.05)
        with pytest.raises(tr.ReplayTimeout):
            next(iter(dataset))
        writer.append(number=0, obs=np.zeros(4, np.float32))
    assert next(iter(dataset))["number"].tolist() == [0] * 8


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("timeout", [0, 0.02, 0.3])
def test_a_timeout_tells_the_numbers_however_short_it_is(prefetch, timeout):
    with filled_buffer(rows=2, limiter=tr.MinSize(4)) as buffer:
        buffer.handle()
        dataset = tr.ReplayDataset(buffer, batch_size=8, prefetch=prefetch, timeout=timeout)
        text = f"no batch within {timeout} s: 2 items were inserted, 4 are needed and 2 can be drawn; writers alive: 1"
        with pytest.raises(tr.ReplayTimeout, match=text):
            next(iter(dataset))


def test_a_timeout_of_later_batches_tells_the_numbers_of_the_limiter():
    limiter = tr.SamplesPerInsert(4.0, min_size=8, tolerance=0.5)
    with filled_buffer(rows=8, limiter=limiter) as buffer:
        buffer.handle()
        _, ratio, low, _ = limiter.bounds()
        admitted = int((8 * ratio - low) // 8)
        needed = math.ceil((low + 8 * admitted + 8) / ratio)
        batches = iter(tr.ReplayDataset(buffer, batch_size=8, timeout=0.2))
        assert [next(batches).batch_size for _ in range(admitted)] == [8] * admitted
        with pytest.raises(tr.ReplayTimeout, match=f"8 items were inserted, {needed} are needed and 8 can be drawn"):
            next(batches)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_rows_that_came_before_the_batch_was_asked_for_count_without_any_time_to_wait(prefetch):
    limiter = tr.SamplesPerInsert(8.0, min_size=8, tolerance=0.5)
    with filled_buffer(rows=8, limiter=limiter) as buffer, buffer.writer() as writer:
        buffer.handle()
        batches = iter(tr.ReplayDataset(buffer, batch_size=8, prefetch=prefetch, timeout=0))
        for number in range(8, 40):
            writer.append(number=number, obs=np.zeros(4, np.float32))
            assert next(batches).batch_size == 8


@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_time_to_wait_is_enough_for_what_is_there(prefetch):
    many = 1 << 17  # drawn in milliseconds
    with filled_buffer() as buffer:
        batches = iter(tr.ReplayDataset(buffer, many, prefetch=prefetch, timeout=0))
        assert [next(batches).batch_size for _ in range(5)] == [many] * 5


def test_the_device_takes_every_tensor_but_the_keys(buffer):
    batch = next(iter(tr.ReplayDataset(buffer, batch_size=8, device="meta")))
    assert batch["obs"].device.type == batch["weight"].device.type == "meta"
    assert batch["key"].device.type == "cpu"


def test_the_repr_says_how_to_load_it(buffer):
    text = repr(tr.ReplayDataset(buffer, batch_size=8, steps=5))
    assert "batch_size=8" in text
    assert "steps=5" in text
    assert "DataLoader(dataset, batch_size=None)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: expected an int from 1 to 16777216"),
        ({"batch_size": 1 << 30}, "batch_size is 1073741824: expected an int from 1 to 16777216"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"steps": 0}, "steps is 0"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"device": "nowhere"}, "device is 'nowhere'"),
    ],
)
def test_a_bad_argument_is_named_in_a_value_error(buffer, arguments, message):
    with pytest.raises(ValueError, match=message):
        tr.ReplayDataset(buffer, **arguments)


def test_only_a_replay_buffer_is_taken():
    with pytest.raises(ValueError, match="buffer is list; ReplayDataset needs a ReplayBuffer"):
        tr.ReplayDataset([1, 2, 3])


# Resuming. The buffer is quiet, so the same place in the stream gives the same batches.


def test_a_loaded_state_repeats_the_draws_that_followed_it(buffer):
    dataset = tr.ReplayDataset(buffer, batch_size=8)
    take(dataset, 3)
    state = dataset.state_dict()
    expected = drawn_keys(take(dataset, 4))
    dataset.load_state_dict(state)
    assert drawn_keys(take(dataset, 4)) == expected


def test_a_state_resumes_under_a_default_device_of_the_users(buffer):
    dataset = tr.ReplayDataset(buffer, batch_size=8, steps=5)
    iterator = iter(dataset)
    next(iterator)
    state = dataset.state_dict()
    expected = drawn_keys(iterator)
    resumed = tr.ReplayDataset(buffer, batch_size=8, steps=5)
    with torch.device("meta"):
        resumed.load_state_dict(state)
        assert drawn_keys(resumed) == expected


def test_a_state_taken_half_way_resumes_with_what_was_left(buffer):
    dataset = tr.ReplayDataset(buffer, batch_size=8, steps=5)
    iterator = iter(dataset)
    for _ in range(2):
        next(iterator)
    state = dataset.state_dict()
    expected = drawn_keys(iterator)
    resumed = tr.ReplayDataset(buffer, batch_size=8, steps=5)
    resumed.load_state_dict(state)
    assert drawn_keys(resumed) == expected
    assert len(expected) == 3
    assert len(list(resumed)) == 5


def test_a_state_taken_at_the_end_of_an_iteration_resumes_with_a_whole_one(buffer):
    dataset = tr.ReplayDataset(buffer, batch_size=8, steps=5)
    take(dataset, 5)
    dataset.load_state_dict(dataset.state_dict())
    assert len(list(dataset)) == 5


def test_the_state_loads_without_trusting_the_file(buffer):
    dataset = tr.ReplayDataset(buffer, batch_size=8)
    take(dataset, 3)
    file = io.BytesIO()
    torch.save(dataset.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == dataset.state_dict()


def test_a_foreign_state_is_refused(buffer):
    with pytest.raises(ValueError, match=r"has the entries \['epoch'\]; a ReplayDataset's state has"):
        tr.ReplayDataset(buffer).load_state_dict({"epoch": 1})


# DataLoader.


def test_a_loader_hands_out_the_batches_as_they_are(buffer):
    loader = DataLoader(tr.ReplayDataset(buffer, batch_size=8, steps=3), batch_size=None)
    for batch in loader:
        assert isinstance(batch, tr.ReplayBatch)
        assert batch.source == buffer.sample(1).source
        assert torch.equal(batch["number"], batch["key"])
        buffer.update_priorities(batch, torch.ones(8))
    assert buffer.stats().updated == 24


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_pinning_without_an_accelerator_changes_nothing(buffer):
    loader = DataLoader(tr.ReplayDataset(buffer, batch_size=8, steps=1), batch_size=None, pin_memory=True)
    with pytest.warns(UserWarning, match="pin_memory"):
        (batch,) = loader
    assert isinstance(batch, tr.ReplayBatch)
    buffer.update_priorities(batch, torch.ones(8))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_share_the_steps_and_never_repeat_each_others_draws(buffer, method):
    dataset = tr.ReplayDataset(buffer, batch_size=16, steps=7)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
    batches = list(loader) + take(dataset, 7)  # this process's own stream beside the workers'
    assert len(batches) == 14
    assert len(set(drawn_keys(batches))) == 14
    for batch in batches:
        assert torch.equal(batch["number"], batch["key"])
        # The feedback of a batch that came through another process reaches the rows it was drawn from.
        buffer.update_priorities(batch, torch.full((16,), 2.0))
    assert buffer.stats().updated == 14 * 16


def test_persistent_workers_continue_their_streams_in_the_next_epoch(buffer):
    dataset = tr.ReplayDataset(buffer, batch_size=16, steps=4)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    keys = drawn_keys(loader) + drawn_keys(loader)
    assert len(keys) == len(set(keys)) == 8


def test_the_dataset_pickles_and_copies_with_its_buffer(buffer):
    dataset = tr.ReplayDataset(buffer, batch_size=8, steps=2)
    for other in (pickle.loads(pickle.dumps(dataset)), copy.copy(dataset)):
        assert len(list(other)) == 2

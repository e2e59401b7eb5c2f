"""`MixedDataset` as a stream: what holds of a `ReplayDataset` holds of several at once."""

import copy
import io
import pickle
import random

import numpy as np
import pytest
import torch
from forked import Forked, eventually
from mixed_buffers import drawn_keys, filled, rows_of, take
from torch.utils.data import DataLoader

import torchreplay as tr


@pytest.fixture
def pair():
    buffers = filled(0), filled(1)
    yield buffers
    for buffer in buffers:
        buffer.close()


def test_an_endless_dataset_has_no_length_and_one_with_steps_is_that_long_every_time(pair):
    endless = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8)
    assert len(take(endless, 30)) == 30
    assert endless
    with pytest.raises(TypeError, match="this MixedDataset is endless and has no length; give it steps="):
        len(endless)
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8, steps=5)
    assert len(dataset) == len(DataLoader(dataset, batch_size=None)) == 5
    assert [len(list(dataset)) for _ in range(3)] == [5, 5, 5]
    assert len(set(drawn_keys(list(dataset) + list(dataset)))) == 10


def test_it_draws_what_the_buffers_would_draw_one_by_one():
    dataset = tr.MixedDataset({filled(0, seed=1): 1, filled(1, seed=2): 3}, 8)
    first, second = (filled(home, seed=home + 1) for home in range(2))
    for batch in take(dataset, 4):
        assert batch["key"].tolist() == [*first.sample(2)["key"].tolist(), *second.sample(6)["key"].tolist()]


def test_the_global_random_state_is_left_alone(pair):
    torch.manual_seed(1), random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    take(tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8), 10)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("stopped", [0, 1])
def test_stopping_one_of_the_buffers_ends_an_iteration_without_an_error(pair, stopped):
    seen = 0
    for _ in DataLoader(tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8), batch_size=None):
        seen += 1
        if seen == 3:
            pair[stopped].stop()
    assert seen == 3


def test_a_timeout_says_for_which_buffer_and_the_next_iteration_works(pair):
    late = filled(0, rows=0)
    with late.writer() as writer:
        late.handle()  # somebody else may write: the wait is not hopeless
        dataset = tr.MixedDataset({pair[0]: 1, late: 1}, 8, steps=3, timeout=0.05)
        with pytest.raises(tr.ReplayTimeout) as caught:
            next(iter(dataset))
        assert caught.value.__notes__ == [f"It was the wait for buffer 1 of {dataset!r}."]
        assert {part["position"] for part in dataset.state_dict()["parts"]} == {0}
        dataset.load_state_dict(dataset.state_dict())
        writer.append(home=5, deep={"number": 0, "pixels": np.zeros((2, 3), np.uint8)})
        assert len(list(dataset)) == 3


def test_a_buffer_that_nobody_can_fill_any_more_is_an_error_at_once(pair):
    with pytest.raises(tr.WouldBlockForever) as caught:
        next(iter(tr.MixedDataset({pair[0]: 1, filled(2, rows=0): 1}, 8)))
    assert "buffer 1 of MixedDataset" in caught.value.__notes__[0]


def test_a_batch_waits_until_the_last_buffer_has_rows(pair):
    late = filled(2, rows=0)

    def write_once_the_first_part_is_drawn():
        eventually(lambda: pair[0].stats().sampled == 4)
        late.extend(**rows_of(2, 10))

    with Forked(write_once_the_first_part_is_drawn) as child:
        batch = next(iter(tr.MixedDataset({pair[0]: 1, late: 1}, 8, timeout=60, prefetch=0)))
        assert child.wait() == 0
    assert batch["home"].tolist() == [0] * 4 + [2] * 4


def test_the_device_takes_every_tensor_but_the_keys(pair):
    batch = next(iter(tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8, device="meta")))
    assert {batch[name].device.type for name in ("home", "weight", "probability", "buffer")} == {"meta"}
    assert batch["deep"]["pixels"].device.type == "meta"
    assert batch["key"].device.type == "cpu"


@pytest.mark.gpu
def test_batches_on_the_gpu_are_those_on_the_cpu_and_their_td_errors_come_back():
    shares = {"cpu": {filled(0): 1, filled(1): 3}, "cuda": {filled(0): 1, filled(1): 3}}
    cpu, cuda = (tr.MixedDataset(buffers, 32, device=device) for device, buffers in shares.items())
    for here, there in zip(take(cpu, 5), take(cuda, 5), strict=True):
        assert there["home"].is_cuda
        assert not there["key"].is_cuda
        for name in ("home", "key", "weight", "probability", "buffer"):
            assert torch.equal(here[name], there[name].cpu())
        cuda.update_priorities(there, 2.0 + there["home"])
    assert [buffer.stats().updated for buffer in cuda.buffers] == [5 * 8, 5 * 24]
    assert [buffer.stats().priority_max for buffer in cuda.buffers] == [2, 3]


def test_the_repr_says_how_many_items_of_which_and_how_to_load_it(pair):
    text = repr(tr.MixedDataset({pair[0]: 1, pair[1]: 3}, 8, steps=5))
    assert text == "MixedDataset({0: 2, 1: 6}, steps=5; use DataLoader(dataset, batch_size=None))"


# Resuming.


def test_a_loaded_state_repeats_the_draws_that_followed_it(pair):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8, steps=5)
    iterator = iter(dataset)
    take(iterator, 2)
    file = io.BytesIO()
    torch.save(dataset.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert [(part["draws"], part["position"]) for part in state["parts"]] == [(2, 2)] * 2
    expected = drawn_keys(iterator)
    dataset.load_state_dict(state)
    assert drawn_keys(dataset) == expected
    assert len(expected) == 3
    assert len(list(dataset)) == 5


# DataLoader workers.


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_share_the_steps_and_never_repeat_each_others_draws(pair, method):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 3}, 16, steps=7)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method)
    batches = list(loader) + take(dataset, 7)  # this process's own stream beside the workers'
    assert len(batches) == 14
    assert len(set(drawn_keys(batches))) == 14
    for batch in batches:
        assert batch["home"].tolist() == [0] * 4 + [1] * 12
        assert torch.equal(batch["deep"]["number"], batch["key"])
        dataset.update_priorities(batch, 2.0 + batch["home"])
    assert [buffer.stats().updated for buffer in pair] == [14 * 4, 14 * 12]
    assert [buffer.stats().priority_max for buffer in pair] == [2, 3]


@pytest.mark.filterwarnings("ignore:.*pin_memory")  # without an accelerator it is not pinned
def test_a_batch_that_a_loader_pins_keeps_its_way_back(pair):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8, steps=1)
    (batch,) = DataLoader(dataset, batch_size=None, pin_memory=True)
    assert type(batch) is tr.ReplayBatch
    dataset.update_priorities(batch, torch.ones(8))
    assert [buffer.stats().updated for buffer in pair] == [4, 4]


def test_the_dataset_pickles_and_copies_with_its_buffers(pair):
    dataset = tr.MixedDataset({pair[0]: 1, pair[1]: 1}, 8, steps=2)
    for other in (pickle.loads(pickle.dumps(dataset)), copy.copy(dataset)):
        for batch in other:
            dataset.update_priorities(batch, torch.ones(8))
    assert [buffer.stats().updated for buffer in pair] == [16, 16]


# Queues

QUEUE = {"x": tr.Field((), torch.int64)}


def queue_of(numbers, **fifo):
    buffer = tr.ReplayBuffer(QUEUE, 100, sampler=tr.Fifo(**fifo))
    buffer.extend(x=torch.as_tensor(numbers))
    return buffer


def left_in(buffer):
    return buffer.sample(100, at_least=1)["x"].tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("commit", ["next", "manual"])
def test_a_queue_that_ends_short_ends_the_mixture_and_keeps_what_makes_no_batch(prefetch, commit, caplog):
    demonstrations = tr.ReplayBuffer(QUEUE, 100)
    demonstrations.extend(x=torch.arange(1000, 1050))
    queue = queue_of(range(20), commit=commit)
    dataset = tr.MixedDataset({demonstrations: 0.25, queue: 0.75}, 8, prefetch=prefetch)
    batches = [batch["x"][2:].tolist() for batch in dataset]
    assert batches == [list(range(first, first + 6)) for first in (0, 6, 12)]
    assert "2 items are left in the queue that is buffer 1, and a batch takes 6" in caplog.text
    queue.commit()
    assert left_in(queue) == [18, 19]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("form", "pairs"), [("names", 2), ("shares", 1)])
def test_the_part_of_a_queue_beside_one_that_ends_is_back_in_its_place(form, pairs, prefetch):
    long, short = queue_of(range(40)), queue_of(range(7))
    if form == "names":
        dataset = tr.MixedDataset({"long": long, "short": short}, 5, prefetch=prefetch)
    else:
        dataset = tr.MixedDataset({long: 1, short: 1}, 10, prefetch=prefetch)
    assert len(list(dataset)) == pairs
    assert left_in(long) == list(range(5 * pairs, 40))
    assert short.num_items == (2 if form == "shares" else 0)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_part_of_a_queue_beside_one_that_is_waited_for_in_vain_is_back_in_its_place(prefetch):
    first, second = queue_of(range(40)), queue_of(range(3))
    with second.expect_writers(), pytest.raises(tr.ReplayTimeout, match="3 can be drawn"):
        next(iter(tr.MixedDataset({first: 1, second: 1}, 8, prefetch=prefetch, timeout=0.1)))
    assert (left_in(first), left_in(second)) == (list(range(40)), [0, 1, 2])

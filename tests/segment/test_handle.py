"""Handles: one memory for many processes, gone with the last of them."""

import copy
import multiprocessing as mp
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from belongings import descriptors
from forked import Forked, eventually, shared_counters

import torchreplay as tr

SPEC = {"x": tr.Field((2,)), "deep": {"n": tr.Field((), torch.int16)}}


def make(capacity=10, **options):
    options = {"seed": 0, **options}
    return tr.ReplayBuffer(SPEC, capacity, **options)


def rows(n, value=1.0):
    return {"x": np.full((n, 2), value), "deep": {"n": np.full(n, int(value), np.int16)}}


def mappings():
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "torchreplay" in line and "memfd" in line
    ]


def test_a_pickled_buffer_is_the_same_memory_with_the_same_configuration():
    buffer = make(sampler=tr.Prioritized(alpha=0.3), limiter=tr.SamplesPerInsert(2.0, min_size=2))
    other = pickle.loads(pickle.dumps(buffer))
    assert (other.spec, other.capacity, other.nbytes) == (buffer.spec, buffer.capacity, buffer.nbytes)
    assert (other.sampler, other.limiter, other.view) == (buffer.sampler, buffer.limiter, buffer.view)
    keys = other.extend(**rows(3, 5.0))
    assert len(buffer) == len(other) == 3
    batch = buffer.sample(4)
    assert batch["deep"]["n"].eq(5).all()
    other.update_priorities(batch, torch.ones(4))
    buffer.update_priorities(keys, torch.ones(3))
    assert buffer.stats().updated == 7
    buffer.close()
    assert len(other) == 3


class Derived(tr.ReplayBuffer):
    """A user's own."""


def test_a_buffer_of_a_derived_class_is_one_wherever_it_is_passed():
    buffer = Derived(SPEC, 10)
    buffer.extend(**rows(3, 5.0))
    for other in (copy.copy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert (type(other), len(other)) == (Derived, 3)


def test_a_pickle_is_small_and_plain():
    handle = make().handle()
    assert len(pickle.dumps(make())) < 1000
    assert pickle.loads(pickle.dumps(handle)) == handle


SPAWNED = """
import pickle, sys
import numpy as np
buffer = pickle.load(sys.stdin.buffer)
print(buffer.extend(x=np.full((2, 2), 3.0), deep={"n": np.full(2, 3)}).tolist())
"""


@pytest.mark.slow
def test_a_process_started_from_nothing_attaches():
    buffer = make()
    result = subprocess.run(
        [sys.executable, "-c", SPAWNED], input=pickle.dumps(buffer), capture_output=True, check=True
    )
    assert result.stdout.decode().strip() == "[0, 1]"
    assert buffer.storage["x"][:2].tolist() == [[3.0, 3.0]] * 2
    assert buffer.stats().writers == 0


def own_until_killed(pipe):
    buffer = make()
    pipe.send(buffer.handle())
    pipe.recv()


def test_a_killed_owner_leaves_an_attach_error_and_those_attached_before_keep_the_memory():
    mine, theirs = mp.Pipe()
    with Forked(own_until_killed, theirs) as owner:
        handle = mine.recv()
        attached = tr.ReplayBuffer.attach(handle)
        attached.extend(**rows(2))
        owner.kill()
    with pytest.raises(tr.AttachError, match=r"\(process \d+\) is gone, .* take a handle from another process"):
        tr.ReplayBuffer.attach(handle)
    assert len(attached) == 2
    again = tr.ReplayBuffer.attach(attached.handle())  # a process that has it open can hand it on
    again.extend(**rows(1))
    assert len(attached) == 3
    assert attached.sample(3)["x"].eq(1).all()


@pytest.mark.slow
def test_whoever_passes_a_buffer_or_weights_on_may_end_before_those_who_get_it():
    buffer, weights = make(), tr.SharedWeights(torch.nn.Linear(1, 1))
    with mp.get_context("spawn").Pool(1) as pool:
        data = pool.apply(pickle.dumps, ((buffer, weights),))
    attached, its_weights = pickle.loads(data)
    attached.extend(**rows(3))
    assert len(buffer) == 3
    assert its_weights.version == weights.version == 0


def test_a_closed_buffers_handle_is_of_no_use_even_when_its_descriptor_is_in_use_again():
    buffer = make()
    handle = buffer.handle()
    buffer.close()
    with pytest.raises(tr.AttachError, match="has closed it"):
        tr.ReplayBuffer.attach(handle)
    files = [open(os.devnull) for _ in range(30)]  # noqa: SIM115 - one of them takes the descriptor
    assert handle.fd in [file.fileno() for file in files]
    with pytest.raises(tr.AttachError, match="gone"):
        tr.ReplayBuffer.attach(handle)
    for file in files:
        file.close()
    others = [make() for _ in range(10)]  # segments of the same size, on the same descriptor
    with pytest.raises(tr.AttachError, match="gone"):
        tr.ReplayBuffer.attach(handle)
    assert all(len(other) == 0 for other in others)


HOLD = {
    "nothing": lambda buffer: None,
    "a writer": lambda buffer: buffer.writer(),
    "storage": lambda buffer: buffer.storage,
    "a stream of batches": lambda buffer: next(stream := iter(tr.ReplayDataset(buffer, 1))) and stream,
    "another object": lambda buffer: pickle.loads(pickle.dumps(buffer)),
}


@pytest.mark.parametrize("hold", HOLD.values(), ids=HOLD.keys())
def test_nobody_attaches_once_the_buffer_is_closed_whatever_still_holds_its_memory(hold):
    buffer = make()
    buffer.extend(**rows(1))
    held, handle = hold(buffer), buffer.handle()
    tr.ReplayBuffer.attach(handle).close()
    buffer.close()
    for _ in range(3):
        with pytest.raises(tr.AttachError, match="has closed it"):
            tr.ReplayBuffer.attach(handle)
    if isinstance(held, tr.ReplayBuffer):  # it has the buffer still: its own handles are good
        tr.ReplayBuffer.attach(held.handle()).close()
        held.close()
        with pytest.raises(RuntimeError, match="is closed"):
            held.handle()


def test_attach_error_is_a_connection_error():
    assert issubclass(tr.AttachError, ConnectionError)


def test_memory_is_freed_with_the_last_thing_that_uses_it():
    before = len(mappings())
    buffer = make()
    buffer.extend(**rows(3))
    attached = tr.ReplayBuffer.attach(buffer.handle())
    writer = buffer.writer()
    batch = buffer.sample(2)
    storage = buffer.storage
    assert len(mappings()) == before + 2
    buffer.close()
    attached.close()
    assert storage["x"][0].tolist() == [1.0, 1.0], "a look into the memory keeps it"
    del storage, writer, buffer, attached
    assert len(mappings()) == before
    assert batch["x"].eq(1).all()


def test_many_buffers_leave_no_descriptor_behind():
    make().close()
    before = descriptors()
    for _ in range(100):
        buffer = make()
        buffer.extend(**rows(2))
        tr.ReplayBuffer.attach(buffer.handle()).sample(1)
    del buffer
    assert descriptors() <= before


def test_the_segment_cannot_be_resized_under_its_users():
    handle = make().handle()
    buffer = make()
    with open(f"/proc/self/fd/{buffer.handle().fd}", "r+b") as file, pytest.raises(OSError, match="not permitted"):
        file.truncate(10)
    assert handle.size % 4096 == 0


def test_views_of_the_memory_refuse_to_be_pickled():
    view = make().storage["x"]
    with pytest.raises(TypeError, match=r"pickle the buffer, or view\.clone"):
        pickle.dumps(view)
    assert torch.equal(pickle.loads(pickle.dumps(view.clone())), torch.zeros(10, 2))


# Fork


def test_a_forked_child_draws_a_stream_of_its_own_and_counts_as_a_learner_of_its_own():
    buffer = make(capacity=1000)
    buffer.extend(**rows(1000))
    first = buffer.sample(500)["key"]
    receiver, sender = mp.Pipe(duplex=False)

    def draw():
        sender.send([buffer.sample(500)["key"].tolist(), buffer.stats().learners])

    with Forked(draw) as child:
        theirs, learners = receiver.recv()
        assert child.wait() == 0
    assert learners == 2
    assert buffer.stats().learners == 1
    assert theirs != first.tolist()
    assert theirs != buffer.sample(500)["key"].tolist()


def test_a_child_that_inherited_a_writer_and_dies_leaves_the_parents_alive():
    buffer = make(capacity=100)
    writer = buffer.writer()
    writer.append(x=np.zeros(2), deep={"n": 0})
    progress = shared_counters(1)

    def write():
        while True:
            writer.append(x=np.zeros(2), deep={"n": 0})
            progress[0] += 1

    with Forked(write):
        eventually(lambda: progress[0] > 0)
        assert buffer.stats().writers == 2
    assert buffer.stats().writers == 1
    writer.append(x=np.zeros(2), deep={"n": 0})
    assert writer.rows == 2


def test_a_child_lives_on_with_the_memory_after_its_parent_is_gone():
    mine, theirs = mp.Pipe()

    def parent():
        buffer = make()
        buffer.extend(**rows(2))
        pid = os.fork()
        if pid:
            os._exit(0)
        theirs.send("ready")
        theirs.recv()
        buffer.extend(**rows(1))
        theirs.send(len(buffer))

    with Forked(parent) as gone:
        assert gone.wait() == 0
        assert mine.recv() == "ready"
        mine.send("go on")
        assert mine.recv() == 3

"""Explorers as plain `multiprocessing` processes: no Ray, the buffer is simply an argument."""

import multiprocessing as mp
import os
import signal

import pytest
import torch
from forked import eventually
from numbered_rows import SPEC, assert_intact, row

import torchreplay as tr

START_METHODS = ["fork", "spawn", "forkserver"]
# How a buffer arrives, inherited or unpickled; spawn unpickles too, and takes seconds.
QUICK_METHODS = ["fork", "forkserver"]
STARTUP = 150.0  # seconds: processes that import torch on a machine that is busy with other things
mp.set_forkserver_preload(["torchreplay"])


def write_rows(buffer, explorer, rows):
    with buffer.writer() as writer:
        for count in range(rows):
            writer.append(**row(explorer, 0, count))


def write_until_stopped(buffer, explorer):
    try:
        with buffer.writer() as writer:
            count = 0
            while not buffer.stopped:
                writer.append(**row(explorer, 0, count))
                count += 1
    except tr.Stopped:
        pass


@pytest.fixture(params=START_METHODS)
def context(request):
    return mp.get_context(request.param)


@pytest.fixture
def start():
    """Starts a process that does not outlive its test."""
    started = []

    def start(context, target, *args):
        process = context.Process(target=target, args=args, daemon=True)
        started.append(process)
        process.start()
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def join_all(processes):
    for process in processes:
        process.join(STARTUP)
        assert process.exitcode == 0


@pytest.mark.slow
def test_rows_of_explorer_processes_arrive_complete_and_intact(context, start):
    buffer = tr.ReplayBuffer(SPEC, capacity=1000, seed=0)
    join_all([start(context, write_rows, buffer, index, 200) for index in range(2)])

    assert len(buffer) == 400
    batch = buffer.sample(4096)
    assert_intact(batch)
    written = {
        (int(e), int(c)) for e, c in zip(buffer.storage["explorer"][:400], buffer.storage["count"][:400], strict=True)
    }
    assert written == {(e, c) for e in range(2) for c in range(200)}


@pytest.mark.parametrize("context", QUICK_METHODS, indirect=True)
def test_a_killed_explorer_process_disturbs_neither_learner_nor_the_others(context, start):
    buffer = tr.ReplayBuffer(SPEC, capacity=500, limiter=tr.MinSize(100), seed=0)
    victim, survivor = [start(context, write_until_stopped, buffer, index) for index in range(2)]
    eventually(lambda: buffer.stats().writers == 2, STARTUP)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(STARTUP)
    before = buffer.stats().rows_written
    # Several turns of the ring: the victim's last slot is passed again and again.
    eventually(lambda: buffer.stats().rows_written > before + 5 * buffer.capacity)
    for _ in range(50):
        assert_intact(buffer.sample(64, timeout=STARTUP))
    eventually(lambda: buffer.stats().writers == 1)
    buffer.stop()
    join_all([survivor])


def explore_with_weights(buffer, weights, seen):
    policy = torch.nn.Linear(2, 1)
    weights.pull(policy)
    with buffer.writer() as writer:
        while float(policy.weight.detach()[0, 0]) != 7.0:
            writer.append(**row(0, 0, 0))
            weights.pull(policy)
    seen.send((weights.version, policy.weight.detach().tolist()))


@pytest.mark.parametrize("context", QUICK_METHODS, indirect=True)
def test_weights_published_by_the_learner_reach_an_explorer_process(context, start):
    buffer = tr.ReplayBuffer(SPEC, capacity=100)
    policy = torch.nn.Linear(2, 1)
    weights = tr.SharedWeights(policy)
    receiver, sender = context.Pipe(duplex=False)
    explorer = start(context, explore_with_weights, buffer, weights, sender)
    buffer.sample(1, timeout=STARTUP)  # it runs, with the initial weights
    with torch.no_grad():
        policy.weight.fill_(7.0)
    weights.publish(policy)
    assert receiver.poll(STARTUP)
    assert receiver.recv() == (1, [[7.0, 7.0]])
    join_all([explorer])


def attach_in_worker(buffer):
    global attached
    attached = buffer


def write_through_pool(explorer):
    write_rows(attached, explorer, 50)
    return os.getpid()


def test_a_multiprocessing_pool_gets_the_buffer_through_its_initargs(context):
    buffer = tr.ReplayBuffer(SPEC, capacity=400)
    with context.Pool(2, initializer=attach_in_worker, initargs=(buffer,)) as pool:
        workers = pool.map_async(write_through_pool, range(4), chunksize=1).get(STARTUP)
    assert os.getpid() not in workers
    assert len(buffer) == 200
    assert_intact(buffer.sample(512))


def own_a_buffer(pipe):
    buffer = tr.ReplayBuffer(SPEC, capacity=10)
    pipe.send(buffer.handle())
    pipe.recv()


def test_a_handle_whose_owner_is_gone_says_so(start):
    context = mp.get_context("fork")
    mine, theirs = context.Pipe()
    owner = start(context, own_a_buffer, theirs)
    handle = mine.recv()
    mine.send("done")
    join_all([owner])
    with pytest.raises(tr.AttachError, match="gone"):
        tr.ReplayBuffer.attach(handle)


def wait_for_room(buffer, outcome):
    try:
        with buffer.writer() as writer:
            for count in range(10_000):
                writer.append(**row(0, 0, count))
    except tr.Stopped as error:
        outcome.send(type(error).__name__)


def test_stop_wakes_an_explorer_process_that_waits_for_the_limiter(start):
    context = mp.get_context("fork")
    buffer = tr.ReplayBuffer(SPEC, capacity=20_000, limiter=tr.SamplesPerInsert(1.0, min_size=10))
    receiver, sender = context.Pipe(duplex=False)
    explorer = start(context, wait_for_room, buffer, sender)
    eventually(lambda: buffer.stats().insert_wait > 0)
    buffer.stop()
    assert receiver.poll(STARTUP)
    assert receiver.recv() == "Stopped"
    join_all([explorer])

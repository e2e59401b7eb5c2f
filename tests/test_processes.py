"""Explorers as plain `multiprocessing` processes: no Ray, the buffer is simply an argument."""

import multiprocessing as mp
import os
import signal
import time

import pytest
import torch

import torchreplay as tr

START_METHODS = ["fork", "spawn", "forkserver"]
PAYLOAD = 16
SPEC = {
    "explorer": tr.Field((), torch.int64),
    "count": tr.Field((), torch.int64),
    "payload": tr.Field((PAYLOAD,), torch.int64),
}


def row(explorer, count):
    """A row whose every part tells the two numbers it was made from."""
    return {
        "explorer": explorer,
        "count": count,
        "payload": torch.arange(PAYLOAD) + explorer * 2**40 + count * PAYLOAD,
    }


def assert_intact(batch):
    start = batch["explorer"] * 2**40 + batch["count"] * PAYLOAD
    assert torch.equal(batch["payload"], start[:, None] + torch.arange(PAYLOAD))


def write_rows(buffer, explorer, rows):
    with buffer.writer() as writer:
        for count in range(rows):
            writer.append(**row(explorer, count))


def write_until_stopped(buffer, explorer):
    try:
        with buffer.writer() as writer:
            count = 0
            while not buffer.stopped:
                writer.append(**row(explorer, count))
                count += 1
    except tr.Stopped:
        pass


def eventually(predicate, timeout=30.0):
    """Waits for a condition of another process; fails when it does not come about."""
    deadline = time.monotonic() + timeout
    while not predicate():
        assert time.monotonic() < deadline, "the awaited condition did not come about"
        time.sleep(0.005)


def join_all(processes):
    for process in processes:
        process.join(30)
        assert process.exitcode == 0


@pytest.mark.parametrize("method", START_METHODS)
def test_rows_of_explorer_processes_arrive_complete_and_intact(method):
    context = mp.get_context(method)
    buffer = tr.ReplayBuffer(SPEC, capacity=1000, seed=0)
    explorers = [context.Process(target=write_rows, args=(buffer, index, 200)) for index in range(2)]
    for explorer in explorers:
        explorer.start()
    join_all(explorers)

    assert len(buffer) == 400
    batch = buffer.sample(4096)
    assert_intact(batch)
    written = {
        (int(e), int(c)) for e, c in zip(buffer.storage["explorer"][:400], buffer.storage["count"][:400], strict=True)
    }
    assert written == {(e, c) for e in range(2) for c in range(200)}


@pytest.mark.parametrize("method", START_METHODS)
def test_a_killed_explorer_process_disturbs_neither_learner_nor_the_others(method):
    context = mp.get_context(method)
    buffer = tr.ReplayBuffer(SPEC, capacity=500, limiter=tr.MinSize(100), seed=0)
    explorers = [context.Process(target=write_until_stopped, args=(buffer, index)) for index in range(2)]
    for explorer in explorers:
        explorer.start()
    eventually(lambda: buffer.stats().writers == 2)
    victim, survivor = explorers
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(30)
    before = buffer.stats().rows_written
    # Several turns of the ring: the victim's last slot is passed again and again.
    eventually(lambda: buffer.stats().rows_written > before + 5 * buffer.capacity)
    for _ in range(50):
        assert_intact(buffer.sample(64, timeout=30.0))
    eventually(lambda: buffer.stats().writers == 1)
    buffer.stop()
    join_all([survivor])


def explore_with_weights(buffer, weights, seen):
    policy = torch.nn.Linear(2, 1)
    weights.pull(policy)
    with buffer.writer() as writer:
        while float(policy.weight.detach()[0, 0]) != 7.0:
            writer.append(**row(0, 0))
            weights.pull(policy)
    seen.send((weights.version, policy.weight.detach().tolist()))


@pytest.mark.parametrize("method", START_METHODS)
def test_weights_published_by_the_learner_reach_an_explorer_process(method):
    context = mp.get_context(method)
    buffer = tr.ReplayBuffer(SPEC, capacity=100)
    policy = torch.nn.Linear(2, 1)
    weights = tr.SharedWeights(policy)
    receiver, sender = context.Pipe(duplex=False)
    explorer = context.Process(target=explore_with_weights, args=(buffer, weights, sender))
    explorer.start()
    buffer.sample(1, timeout=30.0)  # it runs, with the initial weights
    with torch.no_grad():
        policy.weight.fill_(7.0)
    weights.publish(policy)
    assert receiver.poll(30)
    assert receiver.recv() == (1, [[7.0, 7.0]])
    join_all([explorer])


def attach_in_worker(buffer):
    global attached
    attached = buffer


def write_through_pool(explorer):
    write_rows(attached, explorer, 50)
    return os.getpid()


@pytest.mark.parametrize("method", START_METHODS)
def test_a_multiprocessing_pool_gets_the_buffer_through_its_initargs(method):
    buffer = tr.ReplayBuffer(SPEC, capacity=400)
    with mp.get_context(method).Pool(2, initializer=attach_in_worker, initargs=(buffer,)) as pool:
        workers = pool.map(write_through_pool, range(4), chunksize=1)
    assert os.getpid() not in workers
    assert len(buffer) == 200
    assert_intact(buffer.sample(512))


def own_a_buffer(pipe):
    buffer = tr.ReplayBuffer(SPEC, capacity=10)
    pipe.send(buffer.handle())
    pipe.recv()


def test_a_handle_whose_owner_is_gone_says_so():
    context = mp.get_context("fork")
    mine, theirs = context.Pipe()
    owner = context.Process(target=own_a_buffer, args=(theirs,))
    owner.start()
    handle = mine.recv()
    mine.send("done")
    join_all([owner])
    with pytest.raises(tr.AttachError, match="gone"):
        tr.ReplayBuffer.attach(handle)


def wait_for_room(buffer, outcome):
    try:
        with buffer.writer() as writer:
            for count in range(10_000):
                writer.append(**row(0, count))
    except tr.Stopped as error:
        outcome.send(type(error).__name__)


def test_stop_wakes_an_explorer_process_that_waits_for_the_limiter():
    context = mp.get_context("fork")
    buffer = tr.ReplayBuffer(SPEC, capacity=20_000, limiter=tr.SamplesPerInsert(1.0, min_size=10))
    receiver, sender = context.Pipe(duplex=False)
    explorer = context.Process(target=wait_for_room, args=(buffer, sender))
    explorer.start()
    eventually(lambda: buffer.stats().insert_wait > 0)
    buffer.stop()
    assert receiver.poll(30)
    assert receiver.recv() == "Stopped"
    join_all([explorer])

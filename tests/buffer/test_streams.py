"""Seeds and streams: a run can be repeated, no two learners draw alike, and several of them share one buffer."""

import multiprocessing as mp
import random
import threading

import numpy as np
import pytest
import torch
from forked import Forked

import torchreplay as tr

N = 1000
SPEC = {"x": tr.Field((), torch.int64)}


def filled(seed, sampler=None):
    buffer = tr.ReplayBuffer(SPEC, N, sampler=sampler or tr.Prioritized(), seed=seed)
    buffer.extend(x=np.arange(N), priority=np.linspace(0, 1, N))
    return buffer


def run(seed, sampler):
    """What a learner does with one buffer, and everything it got."""
    buffer = filled(seed, sampler)
    seen = []
    for round_ in range(20):
        batch = buffer.sample(1 + 17 * round_)
        seen.append(batch)
        buffer.update_priorities(batch, batch["x"].double().sin())
        buffer.extend(x=np.arange(round_))
    return seen


def keys_of(buffer, n=64):
    return tuple(buffer.sample(n)["key"].tolist())


SAMPLERS = [tr.Uniform(), tr.Prioritized()]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_the_same_seed_and_the_same_writes_give_the_same_batches(seed, sampler):
    for one, other in zip(run(seed, sampler), run(seed, sampler), strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_different_seeds_and_no_seed_give_different_batches():
    buffers = [filled(seed) for seed in (0, 1, 2**32, 2**63, None, None)]
    assert len({keys_of(buffer) for buffer in buffers}) == len(buffers)


def test_the_draws_of_one_learner_are_all_different():
    buffer = filled(0)
    assert len({keys_of(buffer) for _ in range(1000)}) == 1000


def test_every_attached_object_draws_a_stream_of_its_own():
    buffer = filled(3)
    learners = [buffer, *(tr.ReplayBuffer.attach(buffer.handle()) for _ in range(5))]
    drawn = [keys_of(learner) for _ in range(20) for learner in learners]
    assert len(set(drawn)) == len(drawn)


def draws_of_forks(seed, forks, batches):
    buffer = filled(seed)
    receiver, sender = mp.Pipe(duplex=False)

    def draw(generations):
        sender.send([keys_of(buffer) for _ in range(batches)])
        if generations > 1:
            with Forked(draw, generations - 1) as grandchild:
                assert grandchild.wait() == 0

    received = [[keys_of(buffer) for _ in range(batches)]]
    for _ in range(forks):
        with Forked(draw, 2) as child:
            assert child.wait() == 0
        received += [receiver.recv(), receiver.recv()]
    return received


def test_forks_and_their_forks_draw_streams_of_their_own_which_a_seed_repeats():
    streams = draws_of_forks(seed=4, forks=3, batches=10)
    drawn = [keys for stream in streams for keys in stream]
    assert len(set(drawn)) == len(drawn) == 70
    # Streams are numbered in the order in which learners come.
    assert draws_of_forks(seed=4, forks=3, batches=10) == streams


def in_threads(body, n):
    failures = []

    def guarded(index):
        try:
            body(index)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_threads_that_draw_from_one_object_never_get_the_same_draw():
    buffer = filled(5)
    drawn = []
    in_threads(lambda _: drawn.extend([keys_of(buffer) for _ in range(200)]), 4)
    assert len(set(drawn)) == len(drawn) == 800
    assert (buffer.draws, buffer.stats().sampled) == (800, 800 * 64)


def test_global_random_states_are_neither_read_nor_written():
    def states():  # of numpy the one that other libraries share
        return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()  # noqa: NPY002

    before = states()
    first = run(7, tr.Prioritized())
    assert states() == before
    torch.manual_seed(123)
    np.random.seed(123)  # noqa: NPY002
    random.seed(123)
    assert all(torch.equal(a["key"], b["key"]) for a, b in zip(first, run(7, tr.Prioritized()), strict=True))


def test_draws_is_the_place_in_the_stream_and_setting_it_goes_there():
    buffer = filled(8)
    other = tr.ReplayBuffer.attach(buffer.handle())
    drawn = [keys_of(buffer) for _ in range(5)]
    assert (buffer.draws, other.draws) == (5, 0)
    theirs = keys_of(other)
    buffer.draws = 2
    assert [keys_of(buffer) for _ in range(3)] == drawn[2:]
    buffer.draws = np.int64(0)
    assert keys_of(buffer) == drawn[0]
    assert other.draws == 1, "every learner has its own place"
    other.draws = 0
    assert keys_of(other) == theirs
    assert buffer.stats().draws == 11, "of all learners, set back or not"


def test_a_place_set_before_the_first_draw_is_kept():
    first, second = filled(8), filled(8)
    drawn = [keys_of(first) for _ in range(3)]
    second.draws = 2
    assert keys_of(second) == drawn[2]


@pytest.mark.parametrize("draws", [-1, 1.5, None, "0", True])
def test_a_place_that_is_no_count_is_refused(draws):
    buffer = filled(8)
    with pytest.raises(ValueError, match="draws is"):
        buffer.draws = draws
    assert buffer.draws == 0


def test_a_draw_that_does_not_come_about_takes_no_place_in_the_stream():
    buffers = [tr.ReplayBuffer(SPEC, N, limiter=tr.MinSize(2), seed=9) for _ in range(2)]
    buffers[0].handle()  # somebody else could write
    for _ in range(3):
        with pytest.raises(tr.ReplayTimeout):
            buffers[0].sample(4, timeout=0)
    for buffer in buffers:
        buffer.extend(x=np.arange(N))
    assert keys_of(buffers[0]) == keys_of(buffers[1])


# Several learners of one buffer


def learn(buffer, share, of, rounds):
    """Draws, and sets the priorities of its share of the rows again and again, at last to key + 1."""
    chance = torch.Generator().manual_seed(share)
    keys = torch.arange(share, N, of)
    for _ in range(rounds):
        batch = buffer.sample(64)
        assert torch.equal(batch["x"], batch["key"])
        assert bool((batch["probability"] > 0).all() & (batch["weight"] > 0).all() & (batch["weight"] <= 1).all())
        mine = batch["key"][batch["key"] % of == share]
        buffer.update_priorities(mine, torch.rand(len(mine), generator=chance))
    buffer.update_priorities(keys, keys + 1)


def assert_the_priorities_are_key_plus_one(buffer, batches):
    stats = buffer.stats()
    leaves = torch.arange(1, N + 1).double() ** 0.6
    assert stats.priority_total == pytest.approx(float(leaves.sum()), rel=1e-6)
    assert (stats.draws, stats.sampled, stats.stale_updates) == (batches, 64 * batches, 0)
    batch = buffer.sample(4096)
    torch.testing.assert_close(batch["probability"].double(), leaves[batch["key"]] / leaves.sum(), rtol=2e-6, atol=0.0)


def test_learners_in_threads_draw_and_update_at_the_same_time():
    buffer = filled(10)
    in_threads(lambda share: learn(buffer, share, 3, 150), 3)
    assert_the_priorities_are_key_plus_one(buffer, batches=3 * 150)


def test_learners_in_processes_draw_and_update_at_the_same_time():
    buffer = filled(11)
    with Forked(learn, buffer, 0, 3, 2000) as first, Forked(learn, buffer, 1, 3, 2000) as second:
        learn(buffer, 2, 3, 2000)
        assert (first.wait(), second.wait()) == (0, 0)
    assert buffer.stats().learners == 1
    assert_the_priorities_are_key_plus_one(buffer, batches=3 * 2000)

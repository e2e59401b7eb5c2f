"""Rows that were written in one segment and are written again in another: what remote writers are made of."""

import numpy as np
import pytest
import torch

import torchreplay as tr

SPEC = {
    "obs": tr.Field((3,)),
    "image": tr.Field((40, 40), torch.uint8),
    "action": tr.Field((), torch.bfloat16),
    "reward": tr.Field(),
    "terminated": tr.Field((), torch.bool),
    "truncated": tr.Field((), torch.bool),
}
LANES = 3


def make(view, capacity=200):
    # Not "max_held": what is held when an item comes is not the same where rows come in other pieces.
    return tr.ReplayBuffer(SPEC, capacity, sampler=tr.Prioritized(initial="max_seen"), view=view, seed=0)


def values(rng, n):
    return {
        "obs": rng.random((n, 3), np.float32),
        "image": rng.integers(0, 255, (n, 40, 40), np.uint8),
        "action": torch.from_numpy(rng.random(n, np.float32)).bfloat16(),
        "reward": rng.random(n, np.float32),
        "terminated": rng.random(n) < 0.2,
        "truncated": rng.random(n) < 0.1,
    }


def write_steps(writer, rng, steps):
    """A vector environment's steps, with priorities here and there."""
    over = np.zeros(LANES, bool)
    for step in range(steps):
        v = values(rng, LANES)
        v["reward"][over] = v["terminated"][over] = v["truncated"][over] = 0  # the step after an end only begins
        over = (v["terminated"] | v["truncated"]) & (step > 0)
        if step == 0:
            writer.reset(obs=v["obs"], image=v["image"])
        else:
            writer.step(**v, priority=rng.random(LANES) if step % 3 else None)


def runs():
    """Room for where the last rows have their values of any length."""
    return np.zeros(2, np.int64)


class Relay:
    """Writes rows of `there` to `here`, linked by what it knows of the streams."""

    def __init__(self, there, here):
        self.there, self.here = there, here
        self.writer = tr.Writer(here._segment, here._config)
        self.keys = {0: 0}  # key + 1 there to key + 1 here

    def relay(self, first, n):
        block, links_at = self.there._segment.copy_run(first, n)
        before = block[links_at : links_at + 8 * n].view(torch.int64).numpy() >> 16
        known = np.array([self.keys.get(int(b), first - int(b)) for b in before])
        keys = np.full(n, -1)
        self.writer._relay(block, n, known, keys, runs(), 0)
        self.keys.update({first + i + 1: int(k) + 1 for i, k in enumerate(keys)})


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_relayed_streams_give_the_items_of_those_that_were_written(chunk):
    view = tr.Transitions(n_step=2, stack={"image": 2}, observation=("obs", "image"))
    there, here, plain = make(view), make(view), make(view)
    for buffer in (there, plain):
        with buffer.writer(LANES) as writer:
            write_steps(writer, np.random.default_rng(1), 40)
    here.extend(**{k: v[1:] if k not in ("obs", "image") else v for k, v in episode(5).items()})  # keys differ
    relay = Relay(there, here)
    rows = there._segment.run_length(0, 1000)
    assert rows == plain.stats().rows_written
    for first in range(0, rows, chunk):
        relay.relay(first, min(chunk, rows - first))
    shift = here.stats().rows_written - rows
    expected = plain.gather(torch.arange(rows))
    found = here.gather(torch.arange(rows) + shift)
    assert len(expected["key"]) > rows / 2
    assert torch.equal(found["key"] - shift, expected["key"])
    for name in expected.keys() - {"key", "weight", "probability"}:
        assert torch.equal(found[name], expected[name]), name
    priorities = (b["probability"] * buffer.stats().priority_total for b, buffer in ((found, here), (expected, plain)))
    torch.testing.assert_close(*priorities)


def episode(n):
    v = values(np.random.default_rng(5), n + 1)
    v["terminated"][:] = False
    v["truncated"][:] = False
    v["terminated"][-1] = True
    return v


def test_rows_that_are_not_done_end_a_run_and_rows_overwritten_are_none():
    buffer = make(tr.Rows(), capacity=10)
    assert buffer._segment.run_length(0, 10) == 0
    buffer.extend(**values(np.random.default_rng(0), 4))
    assert buffer._segment.run_length(0, 10) == 4
    assert buffer._segment.run_length(2, 3) == 1
    buffer.extend(**values(np.random.default_rng(0), 8))
    assert buffer._segment.run_length(0, 10) == 0, "rows 0 and 1 are overwritten"
    assert buffer._segment.run_length(2, 20) == 10


def test_only_what_is_admitted_is_written():
    class Impatient(tr.Writer):
        def _look(self, stalled, waited):
            raise tr.ReplayTimeout

    buffer = make(tr.Rows())
    assert buffer._segment.admit(5) == 0
    writer = Impatient(buffer._segment, buffer._config)
    for n in range(5):
        writer.append(**{k: v[0] for k, v in values(np.random.default_rng(n), 1).items()})
    with pytest.raises(tr.ReplayTimeout):
        writer.append(**{k: v[0] for k, v in values(np.random.default_rng(9), 1).items()})
    assert buffer._segment.admit(6) == 5


@pytest.mark.parametrize("before", [[0, -3, 0], [-1, 0, 0], [0, 0, 1 << 50]])
def test_a_link_to_a_row_that_cannot_be_there_is_refused(before):
    there, here = make(tr.Rows()), make(tr.Rows())
    there.extend(**values(np.random.default_rng(0), 3))
    block, _ = there._segment.copy_run(0, 3)
    with pytest.raises(ValueError, match="linked with nothing"):
        tr.Writer(here._segment, here._config)._relay(block, 3, np.array(before), np.full(3, -1), runs(), 0)
    with pytest.raises(ValueError, match="block"):
        tr.Writer(here._segment, here._config)._relay(block[:-1], 3, np.zeros(3, int), np.full(3, -1), runs(), 0)
    assert here.stats().rows_written == 0


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_rows_with_steps_that_do_not_follow_on_those_before_are_refused(wrong):
    view = tr.Transitions(stack={"image": 3}, observation=("obs", "image"))
    there, here = make(view), make(view)
    there.extend(**{k: v[1:] if k not in ("obs", "image") else v for k, v in episode(3).items()})
    block, links_at = there._segment.copy_run(0, 4)
    steps = block[links_at + 64 : links_at + 64 + 16].view(torch.int32)  # columns begin at lines of 64 bytes
    assert steps.tolist() == [0, 1, 2, 3]
    before, keys = np.array([0, -1, -2, -3]), np.full(4, -1)
    writer = tr.Writer(here._segment, here._config)
    steps[wrong] += 1
    with pytest.raises(ValueError, match=r"row \d of the block does not go on where its episode is"):
        writer._relay(block, 4, before, keys, runs(), 0)
    assert here.stats().rows_written == 0
    steps[wrong] -= 1
    writer._relay(block, 4, before, keys, runs(), 0)
    assert len(here.sample(8)["key"]) == 8


@pytest.mark.parametrize(
    ("key1", "step", "good"), [(1, 1, True), (1, 2, False), (2, 2, False), (0, 1, False), (99, 7, True)]
)
def test_a_row_goes_on_where_the_row_before_it_in_the_buffer_is(key1, step, good):
    """Key 1 ends the episode that key 0 begins; of key 98 nothing is known any more."""
    view = tr.Transitions(observation=("obs", "image"))
    there, here = make(view), make(view)
    ended = {k: v[1:] if k not in ("obs", "image") else v for k, v in episode(1).items()}
    there.extend(**ended)
    here.extend(**ended)
    block, links_at = there._segment.copy_run(1, 1)
    block[links_at + 64 : links_at + 68].view(torch.int32)[0] = step
    writer = tr.Writer(here._segment, here._config)
    if good:
        writer._relay(block, 1, np.array([key1]), np.full(1, -1), runs(), 0)
        assert here.stats().rows_written == 3
    else:
        with pytest.raises(ValueError, match="does not go on where its episode is"):
            writer._relay(block, 1, np.array([key1]), np.full(1, -1), runs(), 0)


def test_a_relay_that_was_interrupted_goes_on_where_it_was():
    class Interrupted(tr.Writer):
        def _look(self, stalled, waited):
            raise tr.ReplayTimeout

    there, here = make(tr.Rows()), make(tr.Rows())
    given = values(np.random.default_rng(0), 6)
    there.extend(**given)
    block, _ = there._segment.copy_run(0, 6)
    keys = np.full(6, -1)
    here._segment.admit(0)
    writer = Interrupted(here._segment, here._config)
    with pytest.raises(tr.ReplayTimeout):
        writer._relay(block, 6, np.zeros(6, int), keys, runs(), 0)
    assert (keys == -1).all()
    assert len(here) == 0
    here._segment.admit(100)
    writer._relay(block, 6, np.zeros(6, int), keys, runs(), 4)  # as if rows 0 to 3 were there
    assert keys.tolist() == [-1] * 4 + [0, 1]
    assert torch.equal(here.storage["obs"][:2], torch.from_numpy(given["obs"][4:]))


def test_an_end_by_hand_admits_no_more_rows_than_before():
    # Of the rows that a remote writer collects those beyond would overwrite what nobody has taken yet.
    spec = {
        "obs": tr.Field(),
        "reward": tr.Field(),
        "terminated": tr.Field((), torch.bool),
        "truncated": tr.Field((), torch.bool),
    }
    buffer = tr.ReplayBuffer(spec, 100, view=tr.Transitions())
    buffer._segment.admit(3)
    writer = buffer.writer()
    writer.reset(obs=0.0)
    for at in range(2):
        writer.step(obs=at, reward=0.0, terminated=False, truncated=False)
    assert not writer._admitted()
    writer.end_episode()
    len(buffer)
    assert not writer._admitted()


TOKENS = {
    "tokens": tr.Ragged(torch.int32),
    "logprob": tr.Ragged(torch.float64, like="tokens"),
    "points": tr.Ragged(torch.uint8, (3,)),
    "number": tr.Field((), torch.int64),
}


def ragged_row(random, number, most=60):
    length = 0 if random.random() < 0.2 else int(random.integers(0, most))
    return {
        "tokens": random.integers(-(2**31), 2**31, length).astype(np.int32),
        "logprob": random.random(length),
        "points": random.integers(0, 256, (int(random.integers(0, 9)), 3)).astype(np.uint8),
        "number": number,
    }


@pytest.mark.parametrize("seed", range(3))
def test_values_of_any_length_are_the_same_in_a_ring_of_other_pages(seed):
    """Beside a list of arrays, over several turns of both rings."""
    random, rows = np.random.default_rng(seed), []
    there = tr.ReplayBuffer(TOKENS, 40, ragged_bytes=1 << 15)
    here = tr.ReplayBuffer(TOKENS, 1000, ragged_bytes=1 << 20)
    writer, taken = tr.Writer(there._segment, there._config), 0
    relayed = tr.Writer(here._segment, here._config)
    while len(rows) < 300:
        new = [ragged_row(random, len(rows) + i) for i in range(int(random.integers(1, 8)))]
        writer.extend(**{name: [row[name] for row in new] for name in TOKENS})
        rows += new
        n, _ = there._segment.measure_run(taken, len(rows), int(random.integers(1, 4000)))
        assert n > 0
        while n:
            keys = np.full(n, -1)
            relayed._relay(there._segment.copy_run(taken, n)[0], n, np.zeros(n, int), keys, runs(), 0)
            assert keys.tolist() == list(range(taken, taken + n))
            taken += n
            n = there._segment.measure_run(taken, len(rows), 1 << 40)[0]
    batch = here.gather(np.arange(len(rows)))
    assert batch["number"].tolist() == list(range(len(rows)))
    for name in ("tokens", "logprob", "points"):
        assert batch.lengths(name).tolist() == [len(row[name]) for row in rows]
        assert np.array_equal(batch[name].numpy(), np.concatenate([row[name] for row in rows]))


def test_a_run_is_measured_up_to_the_row_with_which_its_values_are_so_many_bytes():
    buffer = tr.ReplayBuffer({"text": tr.Ragged(torch.uint8), "n": tr.Field()}, 10, ragged_bytes=1 << 14)
    buffer.extend(text=[b"x" * 80, b"", b"y" * 17, b"z"], n=[0, 1, 2, 3])
    sizes = [80, 0, 24, 8]  # values lie at multiples of 8
    for most, expected in ((1, 1), (80, 1), (81, 3), (104, 3), (105, 4), (10**6, 4)):
        assert buffer._segment.measure_run(0, 10, most) == (expected, sum(sizes[:expected]))
    assert buffer._segment.measure_run(1, 3, 10**6) == (2, 24)
    assert buffer._segment.measure_run(4, 10, 10**6) == (0, 0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda block, lengths: lengths.__setitem__(1, 11), "says that row 2 has 40 bytes, expected 16 at most"),
        (lambda block, lengths: lengths.__setitem__(2, 5), "has values of 96 bytes, expected 88 by the rows' lengths"),
        (lambda block, lengths: lengths.__setitem__(0, -(2**31)), "row 0 whose values take more than a quarter"),
        (lambda block, lengths: lengths.__setitem__(1, 600), "row 1 whose values take more than a quarter of ragged_b"),
        (lambda block, lengths: block[:-8], "says that row 2 has 40 bytes, expected 32 at most"),
        (lambda block, lengths: torch.cat([block, block[:8]]), "has values of 104 bytes, expected 96 by the rows'"),
        (lambda block, lengths: block[:100], "of 3 relayed rows has 100 bytes, expected 256"),
    ],
)
def test_a_block_whose_lengths_do_not_fit_is_refused_before_a_row_is_written(spoil, message):
    spec = {"tokens": tr.Ragged(torch.int32), "like": tr.Ragged(torch.uint8, like="tokens")}
    there, here = (tr.ReplayBuffer(spec, 10, ragged_bytes=8192) for _ in range(2))
    there.extend(tokens=[[1], range(2, 10), range(7)], like=[[1], [2] * 8, [3] * 7])
    # 4 + 1, 32 + 8 and 28 + 7 bytes, each at a multiple of 8: 16, 40 and 40. The lengths are the first column.
    block, _ = there._segment.copy_run(0, 3)
    lengths = block[:12].view(torch.int32)
    assert lengths.tolist() == [1, 8, 7]
    spoilt = spoil(block, lengths)
    writer, keys = tr.Writer(here._segment, here._config), np.full(3, -1)
    with pytest.raises(ValueError, match=message):
        writer._relay(block if spoilt is None else spoilt, 3, np.zeros(3, int), keys, runs(), 0)
    assert (here.stats().rows_written, keys.tolist()) == (0, [-1] * 3)

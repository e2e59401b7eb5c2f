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
        self.writer._relay(block, n, known, keys, 0)
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
        tr.Writer(here._segment, here._config)._relay(block, 3, np.array(before), np.full(3, -1), 0)
    with pytest.raises(ValueError, match="block"):
        tr.Writer(here._segment, here._config)._relay(block[:-1], 3, np.zeros(3, int), np.full(3, -1), 0)
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
        writer._relay(block, 4, before, keys, 0)
    assert here.stats().rows_written == 0
    steps[wrong] -= 1
    writer._relay(block, 4, before, keys, 0)
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
        writer._relay(block, 1, np.array([key1]), np.full(1, -1), 0)
        assert here.stats().rows_written == 3
    else:
        with pytest.raises(ValueError, match="does not go on where its episode is"):
            writer._relay(block, 1, np.array([key1]), np.full(1, -1), 0)


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
        writer._relay(block, 6, np.zeros(6, int), keys, 0)
    assert (keys == -1).all()
    assert len(here) == 0
    here._segment.admit(100)
    writer._relay(block, 6, np.zeros(6, int), keys, 4)  # as if rows 0 to 3 were there
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

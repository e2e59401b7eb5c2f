"""`sample(out=batch)`: into tensors that the caller has."""

import threading

import numpy as np
import pytest
import torch
from forked import eventually
from numbered_episodes import spec, write_calls
from numbered_items import VIEWS

import torchreplay as tr

SPEC = {"obs": {"image": tr.Field((3, 5), torch.uint8), "speed": tr.Field((), torch.float16)}, "action": tr.Field()}
N = 12


def filled(rows=100, **arguments):
    buffer = tr.ReplayBuffer(SPEC, 128, sampler=tr.Prioritized(alpha=1.0), seed=5, **arguments)
    if rows:
        fill(buffer, rows)
    return buffer


def fill(buffer, rows):
    numbers = torch.arange(rows)
    image = (numbers[:, None, None] + torch.arange(15).view(3, 5)).to(torch.uint8)
    buffer.extend(obs={"image": image, "speed": numbers}, action=numbers, priority=numbers % 7 + 1.0)


def tensors(batch):
    for value in batch.values():
        if isinstance(value, dict):
            yield from tensors(value)
        else:
            yield value


def test_the_tensors_are_filled_with_what_would_have_been_drawn():
    buffer, twin = filled(), filled()
    out = buffer.sample(N)
    before = [tensor.data_ptr() for tensor in tensors(out)]
    twin.sample(N)
    for k in range(20):
        assert buffer.sample(N, out=out) is out
        expected = twin.sample(N)
        torch.testing.assert_close(dict(out), dict(expected), rtol=0, atol=0)
        td = np.random.default_rng(k).exponential(size=N)
        buffer.update_priorities(out, td)
        twin.update_priorities(expected, td)
    assert [tensor.data_ptr() for tensor in tensors(out)] == before


@pytest.mark.parametrize("name", VIEWS)
def test_items_of_every_view_go_there_too(name):
    def make():
        buffer = tr.ReplayBuffer(spec(), 512, sampler=tr.Prioritized(), view=VIEWS[name].view, seed=3)
        write_calls(buffer, 0, 400)
        return buffer

    buffer, twin = make(), make()
    out = buffer.sample(N)
    twin.sample(N)
    torch.testing.assert_close(dict(buffer.sample(N, out=out)), dict(twin.sample(N)), rtol=0, atol=0)


def test_a_batch_of_the_callers_own_making_is_one_to_feed_back():
    buffer = filled()
    out = tr.ReplayBatch(
        obs={"image": torch.empty(N, 3, 5, dtype=torch.uint8), "speed": torch.empty(N, dtype=torch.float16)},
        action=torch.empty(N),
        key=torch.empty(N, dtype=torch.int64),
        weight=torch.empty(N),
        probability=torch.empty(N),
    )
    buffer.sample(N, out=out)
    assert torch.equal(out["action"].long(), out["key"])
    buffer.update_priorities(out, torch.ones(N))
    with pytest.raises(ValueError, match="drawn from another buffer"):
        filled().update_priorities(out, torch.ones(N))


def test_a_draw_that_waits_goes_there_too():
    buffer, out = filled(0), filled().sample(N)

    def write():
        eventually(lambda: buffer.stats().sample_wait > 0)
        fill(buffer, 100)

    with buffer.expect_writers():
        writer = threading.Thread(target=write)
        writer.start()
        assert buffer.sample(N, out=out) is out
        writer.join()
    assert torch.equal(out["action"].long(), out["key"])


def without(batch, name):
    del batch[name]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: without(b, "action"), "'action' is missing"),
        (lambda b: without(b, "weight"), "'weight' is missing"),
        (lambda b: without(b["obs"], "speed"), "'obs/speed' is missing"),
        (lambda b: without(b, "obs"), "'obs' is missing"),
        (lambda b: b.update(obs=torch.zeros(N)), "'obs' is no dict"),
        (lambda b: b.update(action=np.zeros(N, np.float32)), "'action' is a ndarray"),
        (lambda b: b.update(action=torch.zeros(N + 1)), r"'action' is not float32 of shape \(12,\)"),
        (lambda b: b.update(action=torch.zeros(N, dtype=torch.float64)), r"'action' is not float32 of shape \(12,\)"),
        (lambda b: b.update(action=torch.zeros(N, 2)[:, 0]), "'action' is not contiguous"),
        (lambda b: b.update(action=torch.zeros(N, device="meta")), "'action' is a tensor whose memory cannot be read"),
        (lambda b: b.update(weight=b["probability"]), "two of its tensors share memory"),
        (lambda b: b.update(key=torch.zeros(N)), r"'key' is not int64 of shape \(12,\)"),
        (
            lambda b: b["obs"].update(image=torch.zeros(N, 5, 3, dtype=torch.uint8)),
            r"'obs/image' is not uint8 of shape \(12, 3, 5\)",
        ),
    ],
)
def test_a_batch_that_cannot_take_it_is_refused_and_nothing_is_drawn(spoil, message):
    buffer = filled()
    out = buffer.sample(N)
    spoil(out)
    with pytest.raises(ValueError, match=message):
        buffer.sample(N, out=out)
    assert buffer.draws == 1


def test_something_else_than_a_batch_is_refused():
    with pytest.raises(TypeError, match=r"out is \{\}: expected torchreplay.ReplayBatch"):
        filled().sample(N, out={})

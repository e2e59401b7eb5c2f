"""Weights in a mixture are those of the draw, also when feedback comes between the draw and the handing out."""

import io

import numpy as np
import pytest
import torch
from forked import eventually
from mixed_buffers import take

import torchreplay as tr

EPS = 1e-6
CAPACITY = 1 << 15


def flat(step):
    return 0.5


def late(step):
    return 0.0 if step < 4 else 1.0


class Known:
    """A buffer with known leaves; alpha = 1."""

    def __init__(self, beta, weights, priorities, seed):
        sampler = tr.Prioritized(1.0, beta, EPS, weights)
        self.buffer = tr.ReplayBuffer({"x": tr.Field()}, CAPACITY, sampler=sampler, seed=seed)
        self.leaves = np.empty(0)
        self.write(priorities)

    def write(self, priorities):
        self.buffer.extend(x=np.zeros(len(priorities)), priority=priorities)
        self.leaves = np.append(self.leaves, np.asarray(priorities) + EPS)


def inverse_chances(leaves):
    """1 / (N P) of each."""
    return leaves.sum() / (len(leaves) * leaves)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("weights", ["buffer", "batch", "none"])
@pytest.mark.parametrize("beta", [flat, late, tr.LinearSchedule(0.4, 1.0, 50)], ids=["flat", "late", "linear"])
def test_weights_are_on_the_scale_of_their_draw(beta, weights, prefetch):
    pair = [
        Known(beta, weights, np.linspace(1.0, 2.0, 60), seed=1),
        Known(beta, weights, np.geomspace(0.1, 5.0, 30), seed=2),
    ]
    then = []  # what was in the buffers at each call
    iterator = iter(tr.MixedDataset({known.buffer: 1 for known in pair}, 32, prefetch=prefetch))
    for step in range(9):
        then.append([inverse_chances(known.leaves) for known in pair])
        batch = next(iterator)
        inverse = then[max(step - prefetch, 0)]  # this batch was drawn when that one was asked for
        sides = batch["buffer"].tolist(), batch["key"].tolist()
        raw = np.array([inverse[which][key] ** beta(step) for which, key in zip(*sides, strict=True)])
        largest = {"buffer": max(side.max() for side in inverse) ** beta(step), "batch": raw.max(), "none": 1.0}
        np.testing.assert_allclose(batch["weight"].numpy(), raw / largest[weights], rtol=2e-5)
        pair[0].write(np.geomspace(0.01 / 4**step, 3.0, 200))
        pair[1].write(np.full(10, 0.5))


def test_weights_are_on_the_scale_of_their_own_draw_when_others_draw_from_the_buffer_meanwhile():
    first = Known(flat, "buffer", np.linspace(1.0, 2.0, 60), seed=1)

    def meddling(step):
        """The exponent of the second buffer's draw, which follows on that of the first one."""
        first.write(np.geomspace(1e-4, 3.0, 200))
        first.buffer.sample(8)
        first.buffer.gather([0, 1])
        return 0.5

    second = Known(meddling, "buffer", np.geomspace(0.1, 5.0, 30), seed=2)
    for _ in range(3):
        inverse = [inverse_chances(first.leaves), inverse_chances(second.leaves)]
        batch = next(iter(tr.MixedDataset({first.buffer: 1, second.buffer: 1}, 32, prefetch=0)))
        sides = batch["buffer"].tolist(), batch["key"].tolist()
        raw = np.array([inverse[which][key] ** 0.5 for which, key in zip(*sides, strict=True)])
        np.testing.assert_allclose(batch["weight"].numpy(), raw / max(side.max() for side in inverse) ** 0.5, rtol=2e-5)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_equal_priorities_weigh_the_same_whatever_comes_into_one_of_the_buffers(prefetch):
    pair = [Known(0.5, "buffer", np.ones(100), seed) for seed in range(2)]
    dataset = tr.MixedDataset({known.buffer: 1 for known in pair}, 8, prefetch=prefetch)
    iterator = iter(dataset)
    assert next(iterator)["weight"].eq(1).all()
    eventually(lambda: dataset.ready == prefetch)
    pair[0].write(np.ones(20_000))
    assert all(batch["weight"].eq(1).all() for batch in take(iterator, 4))


@pytest.mark.parametrize("weights", ["buffer", "batch", "none"])
def test_a_state_knows_the_scale_of_what_was_drawn_ahead(weights):
    pair = [Known(tr.LinearSchedule(0.4, 1.0, 50), weights, np.geomspace(low, 2.0, 50), seed=3) for low in (0.1, 0.5)]
    dataset = tr.MixedDataset({known.buffer: 1 for known in pair}, 32)
    iterator = iter(dataset)
    take(iterator, 2)
    file = io.BytesIO()
    torch.save(dataset.state_dict(), file)
    file.seek(0)
    expected = [batch["weight"] for batch in take(iterator, 2)]
    iterator.close()
    pair[0].write(np.geomspace(0.001, 1.0, 1000))
    dataset.load_state_dict(torch.load(file, weights_only=True))
    again = dataset.state_dict()["parts"][0]["drawn"]
    assert [entry["drawn_from"][1] for entry in again] == [50, 50]
    assert all(torch.equal(a["weight"], b) for a, b in zip(take(dataset, 2), expected, strict=True))


def test_a_state_that_does_not_know_the_scale_has_that_of_the_buffer_as_it_is():
    pair = [Known(0.5, "buffer", np.geomspace(low, 2.0, 50), seed=3) for low in (0.1, 0.5)]
    dataset = tr.MixedDataset({known.buffer: 1 for known in pair}, 32)
    iterator = iter(dataset)
    take(iterator, 2)
    state = dataset.state_dict()
    expected = [batch["weight"] for batch in take(iterator, 2)]
    iterator.close()
    for part in state["parts"]:
        for entry in part["drawn"]:
            del entry["drawn_from"]
    dataset.load_state_dict(state)
    for batch, weight in zip(take(dataset, 2), expected, strict=True):
        torch.testing.assert_close(batch["weight"], weight, rtol=1e-6, atol=0)


def test_weights_too_small_for_their_own_scale_do_not_move_that_of_the_others():
    # The smallest leaf of the first is 1e-6 and the exponent 8: its weights underflow, but the largest possible one is
    # (N P)^-8 of that leaf all the same, before which those of the second are nothing.
    first = Known(8.0, "buffer", np.append(np.full(99, 1000.0), 0.0), seed=1)
    second = Known(8.0, "buffer", np.ones(10), seed=2)
    (batch,) = take(tr.MixedDataset({first.buffer: 1, second.buffer: 1}, 64), 1)
    assert batch["key"][:32].lt(99).all()
    assert batch["weight"].eq(0).all()

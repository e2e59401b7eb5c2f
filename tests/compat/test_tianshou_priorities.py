"""`compat.tianshou`: what TD errors do to draws and weights."""

import numpy as np
import pytest
import tianshou.data as theirs
import torch
from tianshou_steps import equal, filled

from torchreplay.compat.tianshou import (
    PrioritizedReplayBuffer,
    PrioritizedVectorReplayBuffer,
)


def test_td_errors_decide_what_is_drawn_and_weighs():
    ours = PrioritizedReplayBuffer(8, alpha=1.0, beta=0.5, random_seed=0)
    filled(8, ours)
    td = np.arange(1.0, 9.0)
    ours.update_weight(np.arange(8), td)
    drawn = np.concatenate([ours.sample(1000)[1] for _ in range(20)])
    counts = np.bincount(drawn, minlength=8)
    expected = 20_000 * td / td.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # chi-square with 7 degrees: 1 in 1,000 at most
    batch, indices = ours.sample(64)
    assert batch.weight == pytest.approx((td[indices] / td[indices].min()) ** -0.5, rel=1e-4)
    assert ours[indices].weight == pytest.approx(batch.weight, rel=1e-6)
    ours.set_beta(1.0)
    batch, indices = ours.sample(64)
    assert batch.weight == pytest.approx(td[indices].min() / td[indices], rel=1e-4)


@pytest.mark.slow  # Tianshou compiles its functions
def test_prioritized_rows_are_read_as_tianshous_are():
    options = {"alpha": 0.6, "beta": 0.4, "stack_num": 3}
    ours, own = PrioritizedReplayBuffer(20, **options), theirs.PrioritizedReplayBuffer(20, **options)
    filled(33, ours, own)
    for buffer in (ours, own):
        buffer.update_weight(np.arange(20), np.linspace(0.5, 4, 20))
    for index in (np.array([3, 9, 9]), slice(None), slice(2, 7), 4):
        mine, its = ours[index], own[index]
        assert np.allclose(mine.pop("weight"), its.pop("weight"), rtol=1e-4)
        assert equal(mine, its)
    assert ours.get_weight(3) / ours.get_weight(4) == pytest.approx(own.get_weight(3) / own.get_weight(4), rel=1e-4)


def test_weights_without_norm_are_relative_to_the_whole_buffer():
    ours = PrioritizedReplayBuffer(8, alpha=1.0, beta=1.0, weight_norm=False)
    filled(8, ours)
    ours.update_weight(np.arange(8), torch.arange(1.0, 9.0).unsqueeze(1))
    batch, indices = ours.sample(3)
    assert batch.weight == pytest.approx(1 / (indices + 1.0), rel=1e-4)


def test_one_td_error_stands_for_all():
    ours = PrioritizedReplayBuffer(8, alpha=1.0, beta=0.5)
    filled(8, ours)
    ours.update_weight(np.array([2, 5]), 3.0)
    assert ours.replay.priorities(ours.replay.keys()).tolist() == pytest.approx([1, 1, 3, 1, 1, 3, 1, 1], rel=1e-3)


def test_td_errors_of_rows_that_were_overwritten_reach_nobody():
    ours = PrioritizedVectorReplayBuffer(20, 2, alpha=1.0, beta=0.4)
    filled(10, ours, n=2)
    _, indices = ours.sample(16)
    filled(10, ours, n=2, seed=1)
    ours.update_weight(indices, torch.full((16,), 9.0))
    assert ours.replay.priorities(ours.replay.keys()).max() == pytest.approx(1, abs=1e-3)
    ours.update_weight(np.array([3, 4]), np.array([5.0, 6.0]))  # plain numbers name what is there now
    assert np.sort(ours.replay.priorities(ours.replay.keys()))[-2:] == pytest.approx([5, 6], rel=1e-3)

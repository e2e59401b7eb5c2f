"""Steps for Tianshou's buffers and ours."""

import copy

import numpy as np
from tianshou.data import Batch


def step(rng, n=None, obs=lambda rng, shape: rng.random((*shape, 4), np.float32), **others):
    """One step of `n` environments; without a leading dimension where it is None."""
    shape = () if n is None else (n,)
    return Batch(
        obs=obs(rng, shape),
        act=rng.integers(0, 2, shape),
        rew=rng.random(shape),
        terminated=rng.random(shape) < 0.1,
        truncated=rng.random(shape) < 0.1,
        obs_next=obs(rng, shape),
        info={},
        policy=Batch(),
        **others,
    )


def filled(count, *buffers, n=None, seed=0, **how):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        given = step(rng, n, **how)
        added = [buffer.add(copy.deepcopy(given)) for buffer in buffers]
    return added


def equal(a, b):
    """Whether two batches have the same entries with the same values, or two arrays the same values."""
    if isinstance(a, Batch):
        return set(a.get_keys()) == set(b.get_keys()) and all(equal(a[name], b[name]) for name in a.get_keys())
    return np.array_equal(a, b)

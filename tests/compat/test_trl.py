"""`compat.trl`: the calls that TRL 1.16 makes of a rollout worker's `rollout_buffer`.

TRL needs transformers, accelerate and datasets, so its own dataclass is not imported. `Sample` has the names
that TRL's `RolloutSample` has.
"""

import multiprocessing
import queue
import time
from dataclasses import fields, make_dataclass

import numpy as np
import pytest

import torchreplay as tr
from torchreplay.compat.trl import SPEC, RolloutQueue, RolloutSample

NAMES = ("prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage", "model_version")
NAMES += ("group_id", "metrics")
Sample = make_dataclass("Sample", [*NAMES, ("enqueued_at", float | None, None)], slots=True)


def sample(number, kind=Sample, **others):
    rng = np.random.default_rng(number)
    length = int(rng.integers(1, 400))
    values = {
        "prompt": [{"role": "user", "content": f"¿{number}?"}],
        "completion": [{"role": "assistant", "content": "", "tool_calls": [{"id": number}]}],
        "input_ids": rng.integers(0, 150_000, length),
        "completion_mask": rng.integers(0, 2, length),
        "old_log_probs": -rng.random(length, np.float32),
        "advantage": float(rng.normal()),
        "model_version": number // 3,
        "group_id": number // 8,
        "metrics": {"reward": float(rng.random()), "rewards/right": 1.0},
    }
    return kind(**values | others)


def make(capacity=100, **sampler):
    return tr.ReplayBuffer(SPEC, capacity, sampler=tr.Fifo(**sampler), ragged_bytes=1 << 20)


def assert_same(found, given):
    for field in fields(given):
        mine, own = getattr(found, field.name), getattr(given, field.name)
        if isinstance(own, np.ndarray):
            np.testing.assert_array_equal(mine, own)
            assert mine.dtype == own.dtype
        else:
            assert mine == own
            assert type(mine) is type(own)


def test_what_is_put_comes_out_as_it_was_in_order():
    rollouts = RolloutQueue(make())
    given = [sample(i, enqueued_at=time.time() if i % 2 else None) for i in range(50)]
    for one in given:
        rollouts.put_nowait(one)
    assert rollouts.qsize() == 50
    for one in given:
        assert_same(rollouts.get(timeout=5.0), one)
    assert rollouts.qsize() == 0


def test_its_own_sample_has_the_names_of_trl_s():
    assert [field.name for field in fields(RolloutSample)] == [field.name for field in fields(Sample)]
    rollouts = RolloutQueue(make())
    rollouts.put_nowait(sample(1, RolloutSample))
    assert_same(rollouts.get(), sample(1, RolloutSample))


def test_a_full_queue_says_so_at_once_and_takes_samples_again_when_it_has_room():
    rollouts = RolloutQueue(make(4))
    for i in range(4):
        rollouts.put_nowait(sample(i))
    began = time.monotonic()
    with pytest.raises(queue.Full, match="4 items wait to be drawn"):
        rollouts.put_nowait(sample(4))
    assert time.monotonic() - began < 1
    rollouts.get(), rollouts.get()  # with the second, the first one is done
    rollouts.put_nowait(sample(4))
    assert [rollouts.get().group_id for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("arguments", [{"timeout": 0.05}, {"block": False}, {"block": False, "timeout": 9.0}])
def test_an_empty_queue_says_so_when_the_timeout_has_passed(arguments):
    rollouts = RolloutQueue(make())
    began = time.monotonic()
    with pytest.raises(queue.Empty):
        rollouts.get(**arguments)
    assert arguments.get("timeout", 0) % 9 <= time.monotonic() - began < 5


def put(rollouts, numbers):
    for number in numbers:
        rollouts.put_nowait(sample(number))


def test_a_worker_in_a_process_of_its_own_puts_and_its_death_loses_nothing():
    rollouts = RolloutQueue(make())
    worker = multiprocessing.get_context("fork").Process(target=put, args=(rollouts, range(20)))
    worker.start()
    assert_same(rollouts.get(timeout=60), sample(0))
    worker.join()
    for number in range(1, 20):
        assert_same(rollouts.get(timeout=0.0), sample(number))
    with pytest.raises(queue.Empty):
        rollouts.get(timeout=0.0)


def test_a_trainer_that_goes_on_from_a_saved_model_gets_what_came_after_it(tmp_path):
    path = tmp_path / "rollouts"
    with tr.ReplayBuffer(SPEC, 100, sampler=tr.Fifo(commit="manual"), ragged_bytes=1 << 20, path=path) as buffer:
        rollouts = RolloutQueue(buffer)
        put(rollouts, range(10))
        for _ in range(4):
            rollouts.get()
        buffer.commit()  # the model is saved
        for _ in range(3):
            rollouts.get()
    with tr.ReplayBuffer.open(path) as buffer:
        rollouts = RolloutQueue(buffer)
        for number in range(4, 10):
            assert_same(rollouts.get(timeout=5.0), sample(number))


def test_what_is_older_than_the_bound_never_comes():
    buffer = make(max_age=1)
    rollouts = RolloutQueue(buffer)
    put(rollouts, range(9))  # versions 0 to 2
    buffer.policy_version = 2
    assert [rollouts.get().model_version for _ in range(6)] == [1, 1, 1, 2, 2, 2]


def test_what_cannot_be_stored_is_refused_with_the_reason():
    rollouts = RolloutQueue(make())
    with pytest.raises(ValueError, match="no JSON: Object of type ndarray"):
        rollouts.put_nowait(sample(0, prompt=[{"role": "user", "content": np.zeros(3)}]))
    for told in ({"metrics": {7: 0.5}}, {"prompt": [{"role": "user", "content": ({None: "x"},)}]}):
        with pytest.raises(ValueError, match=r"no JSON: the name (7|None) is (int|NoneType), not text"):
            rollouts.put_nowait(sample(0, **told))  # which json would make text of
    with pytest.raises(ValueError, match="old_log_probs"):
        rollouts.put_nowait(sample(0, old_log_probs=np.zeros(999, np.float32)))
    assert rollouts.qsize() == 0


def test_another_buffer_is_refused_with_what_is_expected():
    with pytest.raises(ValueError, match=r"Uniform.*expected sampler=tr.Fifo\(\)"):
        RolloutQueue(tr.ReplayBuffer(SPEC, 10, ragged_bytes=1 << 16))
    with pytest.raises(ValueError, match=r"'input_ids'.*make it of torchreplay.compat.trl.SPEC"):
        RolloutQueue(tr.ReplayBuffer({"x": tr.Field()}, 10, sampler=tr.Fifo()))
    with pytest.raises(TypeError, match="ReplayBuffer"):
        RolloutQueue([])

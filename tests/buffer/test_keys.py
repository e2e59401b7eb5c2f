"""`keys`, `next_key`, `num_items` and `priorities`: what is in a buffer, by name."""

import numpy as np
import pytest
import torch
from scalar_steps import STEPS

import torchreplay as tr

SPEC = {"x": tr.Field((), torch.int64)}


def episode(writer, steps, ends=True):
    writer.reset(obs=0)
    for i in range(1, steps + 1):
        writer.step(obs=i, action=i, reward=1.0, terminated=ends and i == steps, truncated=False)


@pytest.mark.parametrize("written", [0, 3, 7, 25])
def test_keys_are_those_of_the_newest_rows_oldest_first_and_gather_gives_them_all(written):
    with tr.ReplayBuffer(SPEC, 7) as buffer:
        buffer.extend(x=np.arange(written) * 10)
        expected = list(range(max(0, written - 7), written))
        assert buffer.keys().dtype == torch.int64
        assert buffer.keys().tolist() == buffer.keys(rows=True).tolist() == expected
        assert buffer.gather(buffer.keys())["x"].tolist() == [10 * key for key in expected]
        assert (buffer.next_key, buffer.num_items) == (written, len(expected))


def test_items_of_a_linked_view_are_fewer_than_its_rows():
    with tr.ReplayBuffer(STEPS, 100, view=tr.Transitions()) as buffer, buffer.writer() as writer:
        episode(writer, 5)
        episode(writer, 3, ends=False)
        assert buffer.keys(rows=True).tolist() == list(range(10))
        assert buffer.keys().tolist() == [0, 1, 2, 3, 4, 6, 7, 8]  # not the rows that episodes end with
        assert (buffer.num_items, len(buffer)) == (8, 10)


def test_priorities_are_the_td_errors_fed_back():
    with tr.ReplayBuffer(SPEC, 50, sampler=tr.Prioritized(alpha=0.6)) as buffer:
        keys = buffer.extend(x=np.arange(50))
        td = torch.linspace(-3, 7, 50)
        buffer.update_priorities(keys, td)
        torch.testing.assert_close(buffer.priorities(keys), td.abs(), rtol=1e-4, atol=1e-5)
        batch = buffer.sample(16)
        torch.testing.assert_close(buffer.priorities(batch), td.abs()[batch["key"]], rtol=1e-4, atol=1e-5)


def test_items_that_are_gone_have_no_priority():
    with tr.ReplayBuffer(SPEC, 4, sampler=tr.Prioritized()) as buffer:
        buffer.extend(x=np.arange(6))
        found = buffer.priorities(torch.arange(6))
        assert found.dtype == torch.float32
        assert found.isnan().tolist() == [True, True, False, False, False, False]
        with pytest.raises(ValueError, match="never issued"):
            buffer.priorities([6])


def test_under_uniform_every_item_has_priority_1():
    with tr.ReplayBuffer(SPEC, 4) as buffer:
        assert buffer.priorities(buffer.extend(x=np.arange(3))).tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64])
def test_keys_may_have_any_integer_dtype(dtype):
    with tr.ReplayBuffer(SPEC, 10, sampler=tr.Prioritized(alpha=1.0)) as buffer:
        buffer.extend(x=np.arange(10))
        keys = np.array([2, 5], dtype)
        buffer.update_priorities(keys, [3.0, 4.0])
        assert buffer.priorities(keys) == pytest.approx([3, 4], abs=1e-4)
        assert buffer.gather(keys)["x"].tolist() == [2, 5]
        buffer.update_priorities(np.repeat(keys, 2)[::2], [5.0, 6.0])  # not dense
        assert buffer.priorities(keys) == pytest.approx([5, 6], abs=1e-4)


def test_sample_puts_a_batch_on_a_device():
    with tr.ReplayBuffer(SPEC, 10) as buffer:
        buffer.extend(x=np.arange(10))
        assert buffer.sample(4, device="cpu")["x"].device.type == "cpu"
        batch = buffer.sample(4, device="meta")
        assert batch["x"].device.type == "meta"
        assert batch["key"].device.type == "cpu"


def test_a_dataset_feeds_back_to_its_buffer():
    with tr.ReplayBuffer(SPEC, 10, sampler=tr.Prioritized(alpha=1.0)) as buffer:
        buffer.extend(x=np.arange(10))
        dataset = tr.ReplayDataset(buffer, 4, steps=1)
        for batch in dataset:
            dataset.update_priorities(batch, torch.full((4,), 2.5))
            buffer.flush()
            assert buffer.priorities(batch) == pytest.approx([2.5] * 4, abs=1e-4)

"""Buffers that have issued so many keys that nobody counts them: near 2^31, 2^32 and the last key, 2^47 - 1."""

import numpy as np
import pytest
import torch

import torchreplay as tr
from torchreplay.checkpoint.description import Description
from torchreplay.checkpoint.directory import NAME, sealed

CAPACITY = 8
LAST = 2**47


@pytest.fixture
def started_at(tmp_path):
    """Makes buffers whose next key is the one given."""

    def make(spec, head, **options):
        with tr.ReplayBuffer(spec, CAPACITY, seed=0, **options) as buffer:
            buffer.save(tmp_path)
        saved = Description.read(tmp_path)
        counted = saved._replace(counts=(head, *saved.counts[1:]))
        (tmp_path / NAME).write_bytes(sealed(counted.as_data()))
        return tr.ReplayBuffer.load(tmp_path)

    return make


@pytest.mark.parametrize("boundary", [2**31, 2**32, LAST])
def test_rows_keep_their_keys_and_priorities_over_the_boundary(started_at, boundary, tmp_path):
    start = boundary - 3 * CAPACITY
    buffer = started_at({"x": tr.Field((), torch.int64)}, start, sampler=tr.Prioritized(alpha=1, eps=1e-9))
    rows, td = {}, {}
    for key in range(start, min(start + 6 * CAPACITY, LAST)):
        assert buffer.extend(x=np.array([key]), priority=1.0).tolist() == [key]
        rows[key], td[key] = key, 1.0
        rows = {k: rows[k] for k in rows if k > key - CAPACITY}
        batch = buffer.sample(4)
        assert batch["x"].tolist() == [rows[k] for k in batch["key"].tolist()]
        total = sum(td[k] for k in rows)
        assert batch["probability"].tolist() == pytest.approx([td[k] / total for k in batch["key"].tolist()])
        old = max(start, key - CAPACITY)
        buffer.update_priorities([key, old], [0.5 + key % 3, 9.0])
        td[key] = 0.5 + key % 3
        if old in rows:
            td[old] = 9.0
    assert buffer.stats().stale_updates == len(range(start, min(start + 6 * CAPACITY, LAST))) - CAPACITY
    assert buffer.gather(sorted(rows))["key"].tolist() == sorted(rows)
    buffer.save(tmp_path)
    loaded = tr.ReplayBuffer.load(tmp_path)
    assert loaded.gather(sorted(rows))["x"].tolist() == sorted(rows)
    assert loaded.stats().priority_total == pytest.approx(sum(td[k] for k in rows))


@pytest.mark.parametrize("boundary", [2**31, 2**32, LAST])
def test_trajectories_run_on_over_the_boundary(started_at, boundary):
    spec = {
        "obs": tr.Field((), torch.int64),
        "reward": tr.Field((), torch.float64),
        "terminated": tr.Field((), torch.bool),
        "truncated": tr.Field((), torch.bool),
    }
    start = boundary - 4
    buffer = started_at(spec, start, view=tr.Transitions(n_step=2, gamma=0.5, stack={"obs": 2}))
    writer = buffer.writer()
    rows = min(9, LAST - start)
    assert writer.reset(obs=0) == start
    for step in range(1, rows):
        assert writer.step(obs=step, reward=step, terminated=False, truncated=False) == start + step
    batch = buffer.gather(range(start, start + rows))
    anchors = np.arange(max(0, rows - CAPACITY + 1 if rows > CAPACITY else 0), rows - 2)
    assert batch["key"].tolist() == (start + anchors).tolist()
    assert batch["obs"].tolist() == [[max(a - 1, 0), a] for a in anchors]
    assert batch["next_obs"].tolist() == [[a + 1, a + 2] for a in anchors]
    assert batch["reward"].tolist() == [a + 1 + 0.5 * (a + 2) for a in anchors]


def test_a_buffer_that_has_issued_all_keys_says_so(started_at):
    buffer = started_at({"x": tr.Field()}, LAST - 2)
    assert buffer.extend(x=np.ones(2)).tolist() == [LAST - 2, LAST - 1]
    for write in (buffer.extend, buffer.writer().extend):
        with pytest.raises(RuntimeError, match="issued all its 140737488355328 keys"):
            write(x=np.ones(1))
    assert sorted(set(buffer.sample(32)["key"].tolist())) == [LAST - 2, LAST - 1]


@pytest.mark.parametrize("left", [8, 7])  # 7: the last key is issued together with one beyond
def test_a_file_closed_at_the_last_key_opens_and_its_checkpoint_loads(started_at, left, tmp_path):
    started_at({"x": tr.Field((), torch.int64)}, LAST - left).close()
    path = tmp_path / "ring"
    with tr.ReplayBuffer.load(tmp_path, path=path) as buffer:
        keys = buffer.extend(x=np.arange(8))
        assert keys.tolist() == list(range(LAST - left, LAST - left + 8))
        with pytest.raises(RuntimeError, match="issued all"):
            buffer.extend(x=np.arange(1))
        buffer.save(tmp_path)
    for again in (tr.ReplayBuffer.open(path), tr.ReplayBuffer.load(tmp_path)):
        assert again.gather(keys)["x"].tolist() == list(range(8))


@pytest.mark.parametrize("head", [2 * LAST, 2**63])
def test_a_checkpoint_with_more_keys_than_there_are_is_refused(started_at, head):
    with pytest.raises(tr.CheckpointError, match=r"a counter is \d+: expected an int from 0 to 281474976710655"):
        started_at({"x": tr.Field()}, head)


@pytest.mark.parametrize("call", ["update_priorities", "gather"])
def test_more_keys_in_one_call_than_are_counted_in_31_bits_are_refused(call):
    with tr.ReplayBuffer({"x": tr.Field()}, CAPACITY, sampler=tr.Prioritized()) as buffer:
        buffer.extend(x=np.zeros(CAPACITY))
        keys = np.broadcast_to(np.int64(0), (2**31,))  # which needs no memory
        arguments = (keys, np.broadcast_to(np.float32(1), (2**31,))) if call == "update_priorities" else (keys,)
        with pytest.raises(ValueError, match="got 2147483648 keys, expected at most 2147483647: give them in parts"):
            getattr(buffer, call)(*arguments)
        assert buffer.stats().updated == 0

"""What a buffer has counted goes on, in checkpoints and in copies."""

import pytest
import torch
from saved_rows import tell, told_by

import torchreplay as tr

SPEC = {"x": tr.Field((), torch.int64), "text": tr.Ragged(torch.uint8), "policy_version": tr.Field((), torch.int64)}
OF_PROCESSES = {"nbytes", "writers", "learners", "last_write_age", "oldest_age", "stopped", "ragged_fill"}
OF_PROCESSES |= {"insert_wait", "sample_wait", "insert_wait_share", "sample_wait_share"}
"""What `stats` says of who has the buffer open, and of its memory."""
LATER = ("dropped_items", "expired_items", "evicted_by_pages", "redraws", "staleness", "age_mean", "age_max")
"""What formats before 8 do not tell."""


def write(buffer, first, n, version, length=1):
    numbers = torch.arange(first, first + n)
    texts = [bytes(length)] * n
    buffer.extend(x=numbers, text=texts, policy_version=torch.full((n,), version))
    return buffer.stats()  # it looks: so each item counts


def used_queue():
    """Of 20 items 4 were overwritten, 8 drawn, 2 became too old, and 6 are there."""
    queue = tr.ReplayBuffer(SPEC, 8, sampler=tr.Fifo(when_full="drop_oldest", max_age=1), ragged_bytes=1 << 16)
    write(queue, 0, 8, 0)
    write(queue, 8, 4, 1)
    queue.policy_version = 1
    assert queue.sample(4)["age"].tolist() == [1] * 4
    assert queue.sample(4)["age"].tolist() == [0] * 4
    write(queue, 12, 2, 1)
    write(queue, 14, 6, 3)
    queue.policy_version = 3
    queue.commit()
    return queue


def again(way, buffer, directory):
    """What goes on in another buffer."""
    if way == "copied":
        return buffer.copy()
    buffer.save(directory)
    if way == "loaded":
        return tr.ReplayBuffer.load(directory)
    restored = tr.ReplayBuffer(buffer.spec, buffer.capacity, sampler=buffer.sampler, ragged_bytes=1 << 16)
    restored.restore(directory)
    return restored


@pytest.mark.parametrize("way", ["loaded", "restored", "copied"])
def test_what_became_of_each_item_adds_up_in_what_goes_on(way, tmp_path):
    with used_queue() as queue, again(way, queue, tmp_path) as later:
        for buffer in (queue, later):
            stats = buffer.stats()
            assert (stats.inserted, stats.sampled, stats.drawable) == (20, 8, 6)
            assert (stats.dropped_items, stats.expired_items) == (4, 2)
            assert (stats.age_mean, stats.age_max) == (0.5, 1)
        write(later, 20, 4, 3)
        assert later.sample(8)["x"].tolist() == list(range(16, 24))
        stats = later.stats()
        assert (stats.inserted, stats.sampled, stats.dropped_items, stats.expired_items) == (24, 16, 6, 2)
        assert (stats.age_mean, stats.age_max) == (0.25, 1)


@pytest.mark.parametrize("way", ["loaded", "restored", "copied"])
def test_every_figure_but_those_of_processes_and_memory_goes_on(way, tmp_path):
    with tr.ReplayBuffer(SPEC, 64, sampler=tr.Prioritized(max_age=3), ragged_bytes=1 << 16) as buffer:
        for turn in range(4):
            write(buffer, 30 * turn, 30, turn, length=1500)
        buffer.policy_version = 6
        dataset = tr.ReplayDataset(buffer, 4, steps=6, prefetch=2)
        for batch in dataset:
            buffer.update_priorities(batch, torch.arange(4.0))
        with again(way, buffer, tmp_path) as later:
            before, after = buffer.stats().as_dict(), later.stats().as_dict()
            assert all(before[name] for name in ("expired_items", "evicted_by_pages", "age_max", "staleness"))
            assert {name: after[name] for name in before if name not in OF_PROCESSES} == {
                name: value for name, value in before.items() if name not in OF_PROCESSES
            }


def test_checkpoints_of_format_7_are_read_and_begin_to_count_what_they_do_not_tell(tmp_path):
    with used_queue() as queue:
        queue.save(tmp_path)
    told = told_by(tmp_path)
    tell(tmp_path, told | {"format": 7, "counts": told["counts"][:16]})
    with tr.ReplayBuffer.load(tmp_path) as later:
        stats = later.stats()
        assert (stats.inserted, stats.sampled, stats.drawable) == (20, 8, 6)
        assert [getattr(stats, name) for name in LATER] == [0] * len(LATER)


@pytest.mark.parametrize("versions", [[-(2**63)] * 3, [2**63 - 1] * 3, [-(2**63), 0, 2**63 - 1]])
def test_ages_of_made_up_versions_are_saved_as_far_as_a_counter_goes(versions, tmp_path):
    spec = {"x": tr.Field((), torch.int64), "policy_version": tr.Field((), torch.int64)}
    with tr.ReplayBuffer(spec, 8) as buffer:
        buffer.policy_version = 2**62
        buffer.extend(x=[0, 1, 2], policy_version=versions)
        for _ in range(4):
            buffer.sample(3)
        buffer.save(tmp_path)
        with tr.ReplayBuffer.load(tmp_path) as later:
            assert later.stats().sampled == 12
            assert 0 <= later.stats().age_max <= 2**62


@pytest.mark.parametrize("place", range(16, 25))
def test_a_counter_out_of_range_is_a_checkpoint_error(place, tmp_path):
    with used_queue() as queue:
        queue.save(tmp_path)
    told = told_by(tmp_path)
    for count in (2**62 + 1, -(2**62) - 1, 0.5, "1"):
        counts = [*told["counts"]]
        counts[place] = count
        tell(tmp_path, told | {"counts": counts})
        with pytest.raises(tr.CheckpointError, match="counter"):
            tr.ReplayBuffer.load(tmp_path)

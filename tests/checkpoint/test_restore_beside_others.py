"""Restores while others write, draw, save or close: they see all rows of a checkpoint or none, and lose nothing."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from restores import TIMES, leaves_of, restore_beside, save, saved_counts
from saved_rows import assert_rows_are_those_of_their_keys, filled, rows

import torchreplay as tr
from torchreplay.checkpoint import buffer_checkpoint

pytestmark = pytest.mark.usefixtures("small_files")


@pytest.mark.parametrize("number", TIMES)
@pytest.mark.parametrize("capacity", [90, 300, 1000])
def test_what_explorers_write_beside_a_restore_is_newer_than_what_was_saved(capacity, number, tmp_path, monkeypatch):
    saved, keys, unready = save(tmp_path), [], []

    def write():
        keys.extend(buffer.extend(**rows(500, 40)).tolist())
        buffer.update_priorities(keys, torch.full((40,), 50.0))  # too early: nobody can have drawn them
        unready.append(buffer.stats().unready_updates)

    with filled(0, capacity) as alone, filled(0, capacity) as buffer:
        alone.restore(tmp_path)
        with monkeypatch.context() as patch:
            restore_beside(patch, number, write)
            buffer.restore(tmp_path)
        assert keys == list(range(300, 340))
        assert unready == [40]
        before, after = alone.stats(), buffer.stats()
        assert (after.sampled, after.updated, after.unready_updates) == (before.sampled, before.updated, 40)
        assert (after.inserted, after.size) == (saved.inserted + 40, min(capacity, 340))
        first = (saved.priority_max + 1e-6) ** 0.7
        due = leaves_of(alone) | dict.fromkeys(keys, pytest.approx(first, rel=1e-5))
        assert leaves_of(buffer) == {key: due[key] for key in sorted(due)[-capacity:]}
        assert torch.equal(buffer.gather(keys)["reward"], torch.arange(500.0, 540.0))
        kept = [key for key in sorted(due)[-capacity:] if key < 300]
        assert_rows_are_those_of_their_keys(buffer.gather(kept))
        assert len(buffer.gather(kept)["key"]) == len(kept)


def test_nobody_sees_or_saves_rows_of_a_restore_before_its_end(tmp_path, monkeypatch):
    saved, seen = save(tmp_path), []
    with filled(0, 300) as buffer, tr.ReplayBuffer.attach(buffer.handle()) as other:
        other.save(tmp_path / "before")

        def look():
            for again in (buffer, other):
                with pytest.raises(tr.CheckpointError, match="being restored already"):
                    again.restore(tmp_path)
                with pytest.raises(tr.CheckpointError, match="being restored: save it when"):
                    again.save(tmp_path / "before")
                assert (len(again), again.stats().drawable, again.stats().inserted, again.stats().sampled) == (0,) * 4
                assert len(again.gather(torch.arange(300))["key"]) == 0
                again.update_priorities(torch.arange(300), torch.full((300,), 9.0))
                assert int(again.histograms(8)["priority"].sum()) == int(again.histograms(8)["age"].sum()) == 0
                with pytest.raises(tr.ReplayTimeout):
                    again.sample(1, timeout=0)
            seen.append(True)

        for number in (2, -1):
            with filled(0, 300) as fresh, monkeypatch.context() as patch:
                buffer, other = fresh, tr.ReplayBuffer.attach(fresh.handle())
                restore_beside(patch, number, look)
                buffer.restore(tmp_path)
                assert saved_counts(other.stats()) == saved_counts(saved)
                assert other.stats().priority_total == pytest.approx(saved.priority_total, rel=1e-6)
                other.close()
        assert len(seen) == 2
    with tr.ReplayBuffer.load(tmp_path / "before") as loaded:
        assert len(loaded) == 0


def test_another_threads_close_does_not_leave_the_buffer_to_nobody(tmp_path, monkeypatch):
    save(tmp_path)
    with filled(0, 300) as buffer, tr.ReplayBuffer.attach(buffer.handle()) as other:
        writer = other.writer()  # which keeps what it is attached to
        restore_beside(monkeypatch, 2, other.close)
        other.restore(tmp_path)
        assert len(buffer) == buffer.stats().drawable == 300
        writer.close()


def test_what_others_set_meanwhile_stays(tmp_path, monkeypatch):
    save(tmp_path)
    limiter = tr.SamplesPerInsert(2.0, min_size=10, tolerance=0.5)
    with filled(0, 300) as buffer, attached(buffer) as early, attached(buffer) as other, attached(buffer) as late:
        with pytest.raises(tr.ReplayTimeout):
            early.sample(1, timeout=0)  # which takes a stream of draws
        buffer._segment.raise_largest(70.0)

        def change():
            other.limiter = limiter

        restore_beside(monkeypatch, 1, change)
        buffer.restore(tmp_path)
        assert buffer.limiter == limiter
        assert buffer.stats().priority_max == 70.0
        batches = [each.sample(5, timeout=0) for each in (other, late)]  # as if 10 items had been inserted before
        assert len({early.stream, other.stream, late.stream, buffer.stream}) == 4
        assert not torch.equal(*(batch["key"] for batch in batches))


def attached(buffer):
    return tr.ReplayBuffer.attach(buffer.handle())


def test_learners_wait_for_a_restore_under_way(tmp_path, monkeypatch):
    save(tmp_path)
    begun = threading.Event()

    def take_long():
        begun.set()
        time.sleep(1.0)  # longer than anybody waits for nobody

    restore_beside(monkeypatch, 2, take_long)
    with filled(0, 300) as buffer, ThreadPoolExecutor(1) as other:
        restored = other.submit(buffer.restore, tmp_path)
        assert begun.wait(60)
        assert len(buffer.sample(4, timeout=60)["key"]) == 4
        restored.result(60)


def test_a_save_in_whose_midst_the_buffer_is_restored_is_refused(tmp_path, monkeypatch):
    save(tmp_path)
    write_shards = buffer_checkpoint._write_shards
    with filled(0, 300) as buffer:
        buffer.save(tmp_path / "own")

        def write_and_restore(*args):
            shards = write_shards(*args)
            buffer.restore(tmp_path)
            return shards

        with monkeypatch.context() as patch:
            patch.setattr(buffer_checkpoint, "_write_shards", write_and_restore)
            with pytest.raises(tr.CheckpointError, match="was restored meanwhile"):
                buffer.save(tmp_path / "own")
        with tr.ReplayBuffer.load(tmp_path / "own") as loaded:
            assert (len(loaded), loaded.stats().rows_written) == (0, 0)
        buffer.save(tmp_path / "own")
        with tr.ReplayBuffer.load(tmp_path / "own") as loaded:
            assert len(loaded) == 300

"""`explain` counts what a batch is made of: compared with what the rows themselves say."""

from collections import Counter

import numpy as np
import pytest
import torch

import torchreplay as tr

FLAGS = {"reward": tr.Field(), "terminated": tr.Field((), bool), "truncated": tr.Field((), bool)}


@pytest.fixture
def written():
    """Three writers of 30, 20 and 10 rows, which say who wrote them."""
    spec = {"who": tr.Field((), torch.int64), "x": tr.Field()}
    with tr.ReplayBuffer(spec, 100, sampler=tr.Prioritized(), seed=1) as buffer:
        writers = [buffer.writer() for _ in range(3)]
        for who, (writer, rows) in enumerate(zip(writers, (30, 20, 10), strict=True)):
            for _ in range(rows):
                writer.append(who=who, x=0.0)
        yield buffer


def test_ages_are_the_rows_written_since(written):
    batch = written.sample(64)
    ages = 59 - batch["key"]
    report = tr.explain(batch, written)
    assert (report.ages.least, report.ages.largest) == (ages.min(), ages.max())
    assert report.ages.median == np.median(ages)
    assert report.gone == 0


def test_the_share_of_each_writer_is_that_of_the_rows_which_it_wrote(written):
    batch = written.sample(64)
    expected = Counter(batch["who"].tolist())
    report = tr.explain(batch, written, by=["who"])
    assert sorted(report.shares["writer"].values()) == sorted(expected.values())
    assert report.shares["who"] == dict(expected)


def test_duplicates_are_counted():
    report = tr.explain({"key": torch.tensor([5, 7, 5, 5, 9])})
    assert (report.items, report.distinct, report.most_often) == (5, 3, 3)
    assert (report.ages, report.weights, report.shares) == (None, None, {})


@pytest.mark.parametrize(("weights", "expected"), [([1.0] * 8, 8.0), ([1.0, *[0.0] * 7], 1.0), ([1.0, 3.0] * 4, 6.4)])
def test_the_effective_sample_size_is_kishs(weights, expected):
    report = tr.explain({"key": torch.arange(8), "weight": torch.tensor(weights)})
    assert report.effective_size == pytest.approx(expected)


@pytest.mark.parametrize("capacity", [200, 40])
def test_the_share_of_each_episode_is_that_of_its_rows(capacity):
    """Twelve episodes of seven steps; the small ring has lost the first ones, and the first rows of one."""
    spec = {"obs": tr.Field((), torch.int64), **FLAGS}
    with tr.ReplayBuffer(spec, capacity, view=tr.Transitions(), seed=2) as buffer:
        last = torch.arange(1, 8) == 7
        for number in range(12):
            ends = {"terminated": last, "truncated": torch.zeros(7, dtype=bool)}
            buffer.extend(obs=torch.full((8,), number), reward=torch.zeros(7), **ends)
        batch = buffer.sample(128)
        report = tr.explain(batch, buffer)
    expected = Counter(batch["obs"].tolist())
    assert sorted(report.shares["episode"].values()) == sorted(expected.values())
    oldest_held = max(0, 96 - capacity)
    starts = {max(8 * number, oldest_held): count for number, count in expected.items()}
    assert report.shares["episode"] == starts


def test_episodes_of_environments_that_step_together_are_kept_apart():
    spec = {"obs": tr.Field((), torch.int64), **FLAGS}
    with tr.ReplayBuffer(spec, 100, view=tr.Transitions(), seed=2) as buffer:
        writer = buffer.writer(num_envs=3)
        writer.reset(obs=np.arange(3))
        none = np.zeros(3, bool)
        for _ in range(9):
            writer.step(obs=np.arange(3), reward=np.zeros(3), terminated=none, truncated=none)
        batch = buffer.sample(60)
        report = tr.explain(batch, buffer)
    expected = Counter(batch["obs"].tolist())  # environment i began with key i
    assert report.shares["episode"] == dict(expected)


def test_rows_that_are_overwritten_by_now_are_told_with_what_to_do(written):
    batch = written.sample(32)
    written.extend(who=torch.full((90,), 3), x=torch.zeros(90))
    report = tr.explain(batch, written)
    assert report.gone == int((batch["key"] < 50).sum()) > 3
    assert "Lower prefetch, or enlarge the buffer" in str(report)


def test_a_batch_of_few_items_is_told_with_what_to_do(written):
    td = torch.full((60,), 1e-6)
    td[4] = 1.0
    written.update_priorities(torch.arange(60), td)
    report = tr.explain(written.sample(64), written)
    assert report.distinct < 48
    assert any("A lower alpha spreads the draws" in text for text in report.remarks)


def test_one_writer_of_several_is_told():
    with tr.ReplayBuffer({"x": tr.Field()}, 100, seed=0) as buffer:
        busy, idle = buffer.writer(), buffer.writer()
        idle.append(x=0.0)
        for _ in range(60):
            busy.append(x=0.0)
        report = tr.explain(buffer.sample(32), buffer)
        assert any("though 2 are alive" in text for text in report.remarks)


def test_a_healthy_batch_has_no_remarks(written):
    report = tr.explain(written.sample(16), written)
    assert report.remarks == ()
    assert "look at" not in str(report)


def test_the_text_has_every_part(written):
    text = str(tr.explain(written.sample(64), written))
    for part in ("64 items", "different", "ages", "weights", "effective sample size", "probabilities", "writers"):
        assert part in text


def test_a_batch_of_several_buffers_is_told_by_buffer(written):
    with tr.ReplayBuffer(written.spec, 50, seed=3) as other:
        other.extend(who=torch.zeros(20, dtype=torch.int64), x=torch.zeros(20))
        batch = next(iter(tr.MixedDataset({written: 0.75, other: 0.25}, 40)))
        report = tr.explain(batch)
    pairs = Counter(zip(batch["buffer"].tolist(), batch["key"].tolist(), strict=True))
    assert report.shares["buffer"] == {0: 30, 1: 10}
    assert (report.distinct, report.most_often) == (len(pairs), max(pairs.values()))


def test_what_is_no_batch_of_the_buffer_is_refused(written):
    with tr.ReplayBuffer(written.spec, 10, seed=3) as other:
        other.extend(who=torch.zeros(5, dtype=torch.int64), x=torch.zeros(5))
        with pytest.raises(ValueError, match="another buffer"):
            tr.explain(written.sample(4), other)
        with pytest.raises(ValueError, match="never issued"):
            tr.explain({"key": torch.tensor([55])}, other)
    with pytest.raises(TypeError, match="expected a batch"):
        tr.explain([1, 2])
    with pytest.raises(ValueError, match="has no items"):
        tr.explain({"x": torch.zeros(3)})
    with pytest.raises(ValueError, match="by names 'y'"):
        tr.explain(written.sample(4), by=["y"])


def test_the_lengths_of_values_are_told_of_each_length_once():
    spec = {"tokens": tr.Ragged(torch.int32), "logprob": tr.Ragged(torch.float32, like="tokens")}
    with tr.ReplayBuffer(spec, 10, ragged_bytes=1 << 16) as buffer:
        keys = buffer.extend(tokens=[[1] * n for n in (2, 9, 4)], logprob=[[0.5] * n for n in (2, 9, 4)])
        report = tr.explain(buffer.gather(keys), buffer)
    assert {name: (of.least, of.median, of.largest) for name, of in report.lengths.items()} == {"tokens": (2, 4, 9)}
    assert "tokens        2 to 9, median 4 elements" in str(report)
    assert report.remarks == ()


def test_bytes_that_are_used_up_before_the_rows_are_told_with_both_measures():
    with tr.ReplayBuffer({"tokens": tr.Ragged(torch.uint8)}, 1000, ragged_bytes=1 << 14) as buffer:
        for _ in range(200):
            keys = buffer.extend(tokens=[b"x" * 640])
        (remark,) = tr.explain(buffer.gather(keys), buffer).remarks
        held = len(buffer)
    assert f"values take all of ragged_bytes, 16,384, with {held} of 1,000 rows" in remark

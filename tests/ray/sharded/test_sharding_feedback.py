"""TD errors that are fed back to a `ShardedReplay` of two nodes: those that are refused, and those from a device."""

import warnings

import pytest
import torch
from late_copies import OnDevice, send_late
from sharded_rows import SPEC, rows_of
from unequal_shards import ALPHA, EPS, prioritize

import torchreplay as tr
from torchreplay.ray import ShardedReplay
from torchreplay.ray.sharded import shard_feedback
from torchreplay.ray.sharded.shard_keys import KEY_BITS

pytestmark = pytest.mark.slow


def test_of_equal_keys_the_last_wins_also_where_shards_mix(filled):
    replay, keys = filled
    first, second = keys[0, 0][0], keys[1, 1][0]
    replay.update_priorities(
        torch.tensor([first, second, first, second, first]), torch.tensor([1.0, 2.0, -3.0, 4.0, 500.0])
    )
    batch = replay.sample(512)
    found = dict(zip(batch["key"].tolist(), batch["probability"].tolist(), strict=True))
    total = replay.stats().priority_total
    assert found[first] * total == pytest.approx((500 + EPS) ** ALPHA, rel=1e-5)
    assert second not in found or found[second] * total == pytest.approx((4 + EPS) ** ALPHA, rel=1e-5)


def test_td_errors_of_a_uniform_buffer_are_warned_of_once_and_its_stats_are_printed_by_subject(cluster):
    with ShardedReplay(SPEC, 100, nodes=cluster.node_ids[:1]) as replay, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replay.extend(**rows_of(0, 9))
        for _ in range(3):
            batch = replay.sample(4)
            replay.update_priorities(batch, torch.ones(4))
        replay.flush()
        texts = [str(warning.message) for warning in caught if "TD errors" in str(warning.message)]
        assert len(texts) == 1
        assert "sampler=tr.Prioritized()" in texts[0]
        lines = str(replay.stats()).splitlines()
    assert len(lines) == 9
    assert lines[-1] == "shards      shards_missing 0, rows_lost 0, lost_updates 0, round_trips 0, wire_bytes 0"


def test_bad_feedback_is_refused_before_anything_is_applied(filled):
    replay, keys = filled
    before = replay.stats()
    batch = replay.sample(8)
    good = torch.tensor([keys[0, 0][0], keys[1, 0][0]])
    foreign = tr.ReplayBuffer(SPEC, 16)
    foreign.extend(**rows_of(0, 1))
    for given, td, message in [
        (good, [1.0, float("nan")], "1 of 2 .* NaN or infinite, the first at index 1"),
        (good, [float("inf"), 1.0], "the first at index 0"),
        (good, [1.0], r"expected \[2\]"),
        (good.float(), [1.0, 1.0], r"expected int64 \[n\]"),
        (good[None], [[1.0, 1.0]], r"expected int64 \[n\]"),
        (good + 10_000, [1.0, 1.0], "never issued"),
        (torch.stack([good[0], good[1] + (9 << KEY_BITS)]), [1.0, 1.0], "index 1 was never issued"),
        (torch.tensor([-1, 0]), [1.0, 1.0], "never issued"),
        (foreign.sample(2), [1.0, 1.0], "another buffer"),
        ("keys", [1.0, 1.0], "expected int64"),
    ]:
        with pytest.raises(ValueError, match=message):
            replay.update_priorities(given, torch.tensor(td))
    with pytest.raises(ValueError, match="another buffer"):
        replay.gather(foreign.sample(2))
    assert replay.gather(batch)["key"].tolist() == replay.gather(batch, missing="raise")["key"].tolist()
    assert replay.gather(batch)["key"].tolist() == batch["key"].tolist()
    partly = torch.stack([good[1], good[0] + 10_000, good[0], good[1] + 10_000])
    assert replay.gather(partly)["key"].tolist() == good.flip(0).tolist()
    with pytest.raises(tr.MissingItems, match=f"2 of 4 items cannot be drawn, the first under key {partly[1]}"):
        replay.gather(partly, missing="raise")
    with pytest.raises(ValueError, match="missing is None"):
        replay.gather(partly, missing=None)
    replay.update_priorities([], torch.empty(0))
    assert replay.gather([]).batch_size == 0
    with pytest.raises(ValueError, match="another buffer"):
        foreign.update_priorities(batch, torch.ones(8))
    after = replay.stats()
    assert (after.updated, after.priority_total) == (before.updated, before.priority_total)
    for wrong in (0, -1, 1 << 25, 2.5):
        with pytest.raises(ValueError, match="batch_size"):
            replay.sample(wrong)
    with pytest.raises(ValueError, match="beta"):
        replay.sample(8, beta=-1.0)


@pytest.fixture
def sent(monkeypatch):
    """The TD errors that went on their way, in order, and have not arrived."""
    return send_late(monkeypatch, shard_feedback)


def on_device(*values):
    return torch.tensor(values).as_subclass(OnDevice)


def test_td_errors_on_a_device_go_home_when_they_have_come_by_the_next_call(filled, sent):
    replay, keys = filled
    two = torch.tensor([keys[0, 0][0], keys[1, 1][0]])
    stream = iter(tr.ReplayDataset(replay, 8, prefetch=0))
    for comes_by in (
        lambda: replay.sample(8),
        lambda: next(stream),
        replay.stats,
        replay.histograms,
        lambda: replay.gather(two),
        lambda: replay.update_priorities(two, on_device(1.0, 1.0)),
        lambda: replay.update_priorities(two, torch.ones(2)),
    ):
        before, given = replay.stats().updated, len(sent)
        replay.update_priorities(two, on_device(7.0, -8.0))
        assert replay.stats().updated == before
        sent[given].arrive()
        comes_by()
        replay._feedback.hear(0)
        assert sum(shard.stats.updated for shard in replay.stats().shards) >= before + 2
        assert not sent[given].waited
        replay.flush()
    stream.close()


def test_td_errors_on_a_device_are_applied_in_order_and_flush_waits_for_them(filled, sent):
    replay, keys = filled
    prioritize(filled, 4)
    two = torch.tensor([keys[0, 0][0], keys[1, 1][0]])

    def td():
        leaves = replay.gather(two)["probability"].double() * replay.stats().priority_total
        return [round(x, 2) for x in (leaves ** (1 / ALPHA) - EPS).tolist()]

    replay.update_priorities(two, [1.0, 2.0])
    for values in ((3.0, 4.0), (5.0, 6.0), (7.0, -8.0)):
        replay.update_priorities(two, on_device(*values))
    two_given, two[:] = two.clone(), 0  # the keys are those of the call
    two = two_given
    sent[1].arrive()
    assert td() == [1, 2]
    sent[0].arrive()
    assert td() == [5, 6]
    replay.flush()
    assert sent[2].waited
    assert td() == [7, 8]
    replay.update_priorities(two, on_device(9.0, 9.0))
    replay.update_priorities(two, torch.tensor([1.5, 2.5]))  # of the CPU: those before come first
    assert sent[3].waited
    assert td() == [1.5, 2.5]


def test_td_errors_on_a_device_that_are_wrong_are_refused_at_once_or_told_by_the_next_call(filled, sent):
    replay, keys = filled
    two = torch.tensor([keys[0, 0][0], keys[1, 1][0]])
    for wrong, td, message in (
        (two, on_device(1.0), r"shape \(1,\), expected one real number for each key: shape \(2,\)"),
        (two[:1], on_device(1j), "complex64"),
        (two + 10_000, on_device(1.0, 1.0), "never issued"),
        (tr.ReplayBatch(key=two, buffer=two), on_device(1.0, 1.0), "mixes items"),
    ):
        with pytest.raises(ValueError, match=message):
            replay.update_priorities(wrong, td)
    assert sent == []
    before = replay.stats().updated
    for value in (2.0, float("nan"), 4.0):
        replay.update_priorities(two, on_device(1.0, value))
    for arrival in sent:
        arrival.arrive()
    with pytest.raises(ValueError, match=r"of 2 items: 1 of 2 of the TD errors are NaN .* first at index 1"):
        replay.sample(8)
    replay.flush()
    assert replay.stats().updated == before + 4

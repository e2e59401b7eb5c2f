"""What is known of items that are gone: whether they were ever drawn."""

import random

import numpy as np
import pytest
import torch

import torchreplay as tr

SPEC = {"obs": tr.Field(), "terminated": tr.Field((), torch.bool), "truncated": tr.Field((), torch.bool)}
VIEWS = [tr.Transitions(n_step=3), tr.Transitions(n_step=1, stack={"obs": 2}), tr.Sequences(length=4, burn_in=1)]


def drawable(buffer):
    """The keys of all items that could be drawn now, by what `gather` finds."""
    return set(buffer.gather(torch.arange(buffer.stats().rows_written))["key"].tolist())


@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_items_of_several_rows_count_once_when_they_go_and_only_if_they_were_never_drawn(view, seed):
    chance = random.Random(seed)
    fields = {"reward": tr.Field()} if isinstance(view, tr.Transitions) else {}
    buffer = tr.ReplayBuffer(SPEC | fields, 40, view=view, seed=seed)
    others = dict.fromkeys(fields, 1.0)
    writers = [buffer.writer() for _ in range(2)]
    running = [False] * len(writers)
    held, drawn, gone = set(), set(), 0
    for number in range(400):
        k = chance.randrange(len(writers))
        if running[k]:
            end = chance.random() < 0.1
            writers[k].step(obs=float(number), terminated=end, truncated=False, **others)
            running[k] = not end
        else:
            writers[k].reset(obs=float(number))
            running[k] = True
        now = drawable(buffer)
        gone += len(held - now - drawn)
        held = now
        assert buffer.stats().evicted_unsampled == gone
        if held and chance.random() < 0.2:
            drawn |= set(buffer.sample(2)["key"].tolist())
    assert 0 < gone < buffer.stats().inserted - len(held)


def test_a_slot_forgets_that_its_last_item_was_drawn():
    buffer = tr.ReplayBuffer({"x": tr.Field()}, 4, seed=0)
    for turn in range(5):
        buffer.extend(x=np.zeros(4, np.float32))
        if turn % 2 == 0:
            assert set(buffer.sample(64)["key"].tolist()) == set(range(4 * turn, 4 * turn + 4))
        assert buffer.stats().evicted_unsampled == 4 * (turn // 2)


def test_rows_overwritten_before_anybody_looked_are_in_the_tickets_alone():
    buffer = tr.ReplayBuffer({"x": tr.Field()}, 100, seed=0)
    for turn in range(1, 4):
        buffer.extend(x=np.zeros(1000, np.float32))
        stats = buffer.stats()
        assert (stats.rows_written, stats.inserted) == (1000 * turn, 100 * turn)
        assert stats.evicted_unsampled == 100 * (turn - 1)


def test_what_a_checkpoint_brought_is_not_counted_and_what_it_counted_is_kept(tmp_path):
    buffer = tr.ReplayBuffer({"x": tr.Field()}, 4, sampler=tr.Prioritized(alpha=1.0, eps=1e-9), seed=0)
    buffer.extend(x=np.zeros(4, np.float32))
    assert len(buffer) == 4
    keys = buffer.extend(x=np.zeros(4, np.float32))
    buffer.update_priorities(keys, torch.tensor([1.5, 1.0, 0.5, 0.0]))  # from the 1 of new rows
    buffer.save(tmp_path)
    loaded = tr.ReplayBuffer.load(tmp_path)
    loaded.extend(x=np.zeros(4, np.float32))
    stats = loaded.stats()
    assert stats.evicted_unsampled == 4  # those before the save
    assert stats.priority_change == pytest.approx((0.5 + 0.0 + 0.5 + 1.0) / 4, rel=1e-5)

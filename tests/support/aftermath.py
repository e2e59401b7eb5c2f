"""What must hold of a buffer of numbered rows after deaths at any instruction."""

import pytest
import torch
from numbered_episodes import EPISODES, LANES, STEPS, writing
from numbered_items import assert_exactly_the_complete_items_can_be_drawn, held_codes

ALPHA = 0.6
BATCH = 16


def learn(buffer, items, streams, timeout=60):
    """Draws a batch, checks every value, and feeds TD errors back."""
    batch = buffer.sample(BATCH, timeout=timeout)
    items.assert_exact(batch, streams)
    buffer.update_priorities(batch, torch.rand(BATCH))


def assert_the_survivor_can_use_all_of_it(buffer, items, streams, write=writing):
    """What is left can be drawn; then one more turn of the ring leaves no slot, no item and no leaf of the dead."""
    assert buffer.stats().writers == 0, "a dead writer counts as alive"
    assert_exactly_the_complete_items_can_be_drawn(buffer, items, streams)
    index = streams // LANES
    write_rows(buffer, write(buffer, index), buffer.capacity)
    assert len(buffer) == buffer.capacity, "lost slot"
    assert (held_codes(buffer) // STEPS // EPISODES // LANES == index).all(), "lost slot"
    keys = assert_exactly_the_complete_items_can_be_drawn(buffer, items, (index + 1) * LANES)
    assert_priorities_are_sound(buffer, keys)


def write_rows(buffer, calls, rows):
    """Makes calls until so many rows are written, and draws where the limiter asks for it."""
    with buffer.writer() as probe:
        while rows > 0:
            while not probe._admitted():
                buffer.sample(BATCH, timeout=30)
            rows -= next(calls)


def assert_priorities_are_sound(buffer, keys):
    """New TD errors for all items lead to the sum of equation 1 of Schaul et al. 2016, to the last item."""
    td = torch.linspace(0.5, 4.0, len(keys))
    buffer.update_priorities(keys, td)
    stats = buffer.stats()
    expected = (td.double() + 1e-6) ** ALPHA
    assert stats.priority_total == pytest.approx(float(expected.sum()), rel=1e-6)
    assert stats.priority_min == pytest.approx(0.5, rel=1e-6)

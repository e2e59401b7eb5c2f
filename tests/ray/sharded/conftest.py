"""What several files about sharded buffers draw from and look at."""

import pytest
from unequal_shards import filled_shards


@pytest.fixture(scope="module")
def filled(cluster):
    """A buffer of two very unequal shards, and its keys by (node, explorer)."""
    with filled_shards(cluster) as filled:
        yield filled

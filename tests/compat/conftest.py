"""Buffers of cpprb and of its adapter, for the same calls."""

import cpprb
import pytest
from cpprb_transitions import ENV

from torchreplay.compat import cpprb as adapter


@pytest.fixture(params=["ReplayBuffer", "PrioritizedReplayBuffer"])
def both(request):
    return [getattr(library, request.param)(12, ENV) for library in (adapter, cpprb)]

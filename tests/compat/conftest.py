"""Buffers of cpprb and of its adapter, for the same calls."""

from importlib import import_module

import pytest


@pytest.fixture(params=["ReplayBuffer", "PrioritizedReplayBuffer"])
def both(request):
    transitions = import_module("cpprb_transitions")  # not before: tests of other adapters need no cpprb
    libraries = (import_module("torchreplay.compat.cpprb"), import_module("cpprb"))
    return [getattr(library, request.param)(12, transitions.ENV) for library in libraries]

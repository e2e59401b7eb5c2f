"""Which peers take part: those that are installed, torchreplay first."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec

from benchmarks.peers import Peer
from benchmarks.workload import Workload

CLASSES = {
    "torchreplay": "TorchreplayPeer",
    "cpprb": "CpprbPeer",
    "tianshou": "TianshouPeer",
    "stable_baselines3": "StableBaselines3Peer",
}
"""Class of each peer in the module of the same name. A module is imported only when its package is installed."""


def installed() -> Sequence[str]:
    """Returns the names of the peers whose package can be imported."""
    return [name for name in CLASSES if find_spec(name) is not None]


def peer_class(name: str) -> Callable[..., Peer]:
    """Returns the adapter of one peer, by the name of its package."""
    adapter: Callable[..., Peer] = getattr(import_module(f"benchmarks.peers.{name}"), CLASSES[name])
    return adapter


def make_peers(workload: Workload, capacity: int) -> Sequence[Callable[[], Peer]]:
    """Returns a constructor for each installed peer, so that the caller sees what each one allocates."""
    return [partial(peer_class(name), workload, capacity) for name in installed()]

"""Which peers take part: those that are installed, torchreplay first.

A peer's adapter is imported only when one is made, as its package need not be installed.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from benchmarks.line import OURS
from benchmarks.peers import Peer, PrioritizedPeer, SharedPeer
from benchmarks.workload import Workload


def _torchreplay(workload: Workload, capacity: int) -> SharedPeer:
    from benchmarks.peers.torchreplay import TorchreplayPeer

    return TorchreplayPeer(workload, capacity)


def cpprb(workload: Workload, capacity: int, n_step: int = 1) -> PrioritizedPeer:
    """Returns cpprb's buffer of one process; with ``n_step`` above 1 its rows are n-step transitions."""
    from benchmarks.peers.cpprb import CpprbPeer

    return CpprbPeer(workload, capacity, n_step)


def _shared_cpprb(workload: Workload, capacity: int) -> SharedPeer:
    from benchmarks.peers.cpprb import SharedCpprbPeer

    return SharedCpprbPeer(workload, capacity)


def _tianshou(workload: Workload, capacity: int) -> PrioritizedPeer:
    from benchmarks.peers.tianshou import TianshouPeer

    return TianshouPeer(workload, capacity)


def _stable_baselines3(workload: Workload, capacity: int) -> Peer:
    from benchmarks.peers.stable_baselines3 import StableBaselines3Peer

    return StableBaselines3Peer(workload, capacity)


def _torchrl(workload: Workload, capacity: int) -> PrioritizedPeer:
    from benchmarks.peers.torchrl import TorchRLPeer

    return TorchRLPeer(workload, capacity)


PEERS: Mapping[str, Callable[[Workload, int], Peer]] = {
    OURS: _torchreplay,
    "cpprb": cpprb,
    "tianshou": _tianshou,
    "torchrl": _torchrl,
    "stable_baselines3": _stable_baselines3,
}
"""Makes an empty buffer of a workload and a capacity, by the name of its package."""

SHARED: Mapping[str, Callable[[Workload, int], SharedPeer]] = {OURS: _torchreplay, "cpprb": _shared_cpprb}
"""The same for those that have a prioritized buffer which several processes can write; torchreplay's always is one."""


def installed() -> Sequence[str]:
    """Returns the names of the peers whose package can be imported."""
    return [name for name in PEERS if find_spec(name) is not None]

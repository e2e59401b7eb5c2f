"""One buffer, or the weights, seen from another node. `attach_remote` finds the classes here by name."""

from torchreplay.ray.remote.remote_buffer import RemoteBuffer, RemoteWriter
from torchreplay.ray.remote.remote_weights import RemoteWeights

__all__ = ["RemoteBuffer", "RemoteWeights", "RemoteWriter"]

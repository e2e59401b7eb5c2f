"""One buffer, or the weights, seen from another node."""

from torchreplay.ray.remote.remote_buffer import RemoteBuffer, RemoteWriter
from torchreplay.ray.remote.remote_weights import RemoteWeights

__all__ = ["RemoteBuffer", "RemoteWeights", "RemoteWriter"]

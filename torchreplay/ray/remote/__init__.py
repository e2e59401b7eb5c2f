"""One buffer, or the weights, seen from another node. Handles of another node are attached as these."""

from torchreplay.ray.remote.remote_buffer import RemoteBuffer, RemoteWriter
from torchreplay.ray.remote.remote_weights import RemoteWeights

__all__ = ["RemoteBuffer", "RemoteWeights", "RemoteWriter"]

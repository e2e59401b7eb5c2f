"""The calls of other libraries' buffers, over torchreplay's. Each module imports its library, and nobody else does."""

__all__ = ["cpprb", "footprints", "minari", "sb3", "torchrl"]

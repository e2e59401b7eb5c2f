"""The calls of other libraries' buffers, over torchreplay's. Each module imports its library, and nobody else does."""

__all__ = ["cpprb", "footprints", "indexes", "minari", "pettingzoo", "rllib", "sb3", "tianshou", "torchrl", "trl"]

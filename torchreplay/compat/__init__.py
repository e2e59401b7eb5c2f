"""Other libraries' replay buffers, by their own names and arguments, over torchreplay's shared memory."""

__all__ = ["cpprb"]

"""Batches on their way to a CUDA device, and TD errors on their way back."""

__all__ = ["copies", "packing", "pinned_memory", "staging"]

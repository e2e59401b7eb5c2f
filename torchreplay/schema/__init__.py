"""What rows, items and batches are: specs, views, samplers, limiters, and the text that describes a buffer."""

__all__ = [
    "batch",
    "batch_plan",
    "casting",
    "config",
    "hindsight",
    "limiters",
    "samplers",
    "sequence_priority",
    "spaces",
    "spec",
    "tensor_info",
    "views",
]

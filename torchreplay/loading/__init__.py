"""Datasets: a buffer, or several, as a stream of batches."""

__all__ = [
    "dataset",
    "destination",
    "group_dataset",
    "laber",
    "mixed_dataset",
    "mixture",
    "queue_loader",
    "reverse",
    "stepped_dataset",
]

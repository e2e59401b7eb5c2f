"""What rows, items and batches are: specs, views, samplers, limiters, and the text that describes a buffer."""

"""Datasets: a buffer, or several, as a stream of batches."""

"""One buffer over many nodes of the Ray cluster."""

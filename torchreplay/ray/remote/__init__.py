"""One buffer, or weights, seen from another node of the Ray cluster."""

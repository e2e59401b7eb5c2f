"""Registered torch operators: the ring and the priority tree under `torch.compile`."""

"""Shared memory: how it is reserved, found by its handle, and waited for."""

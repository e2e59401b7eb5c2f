"""Explorers: workers that run a user's function and fill a buffer."""

__all__ = ["explorer_context", "explorer_pool"]

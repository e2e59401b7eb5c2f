"""Explorers over Ray: as actors, on any node of a cluster."""

__all__ = ["explorer_pool"]

"""Connections between processes of several nodes, beside Ray's calls."""

__all__ = ["connection", "server", "way"]

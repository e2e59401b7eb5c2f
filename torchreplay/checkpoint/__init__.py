"""Saving a buffer's rows to files, and loading them again."""

__all__ = ["buffer_checkpoint", "directory"]

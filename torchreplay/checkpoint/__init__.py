"""Saving a buffer's rows to files, and loading them again."""

__all__ = ["archive", "buffer_checkpoint", "description", "directory", "joined_rows", "lost_items", "safetensors_io"]

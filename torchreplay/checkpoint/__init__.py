"""Saving a buffer's rows to files, and loading them again."""

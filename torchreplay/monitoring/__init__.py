"""A buffer's figures over time, for those who watch."""

__all__ = ["metrics", "monitor"]

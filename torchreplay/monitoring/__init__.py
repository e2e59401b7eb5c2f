"""A buffer's figures over time, for those who watch."""

__all__ = ["batch_report", "metrics", "monitor"]

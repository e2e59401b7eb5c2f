"""Buffers watched while they run: found and read from outside, their figures over time, judged in plain words."""

__all__ = [
    "advice",
    "batch_report",
    "discovery",
    "metrics",
    "monitor",
    "pictures",
    "recording",
    "slots",
    "snapshot",
    "survey",
    "timeline",
]

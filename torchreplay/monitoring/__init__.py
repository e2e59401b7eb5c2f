"""Looking at live buffers from outside: found through the kernel, read without taking part, judged in plain words."""

__all__ = ["advice", "discovery", "pictures", "recording", "slots", "snapshot", "survey", "timeline"]

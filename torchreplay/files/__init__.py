"""Files with rows, looked into where they lie: checkpoints, archives of them, buffers in files. Nothing is changed."""

__all__ = ["buffer_rows", "card", "checkpoint_rows", "export", "images", "rows", "source", "verify"]

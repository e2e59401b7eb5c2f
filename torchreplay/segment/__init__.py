"""Shared memory: how it is reserved, found by its handle, waited for, and closed."""

__all__ = [
    "closeable",
    "delivery_log",
    "file_lock",
    "handle",
    "process_hooks",
    "process_state",
    "progress",
    "ray_node",
    "regular_file",
    "reservation",
    "segment_file",
    "thread_pool",
    "transient",
    "waits",
    "writer_lease",
]

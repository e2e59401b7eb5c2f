"""Supervised worker processes: Ray actors or plain processes that are started, watched and restarted."""

__all__ = [
    "explorer_stats",
    "named",
    "placement",
    "resources",
    "supervisor",
    "table_replica",
    "worker_pool",
    "worker_process",
    "worker_table",
]

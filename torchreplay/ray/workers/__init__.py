"""Supervised worker processes: Ray actors or plain processes that are started, watched and restarted."""

__all__ = [
    "explorer_stats",
    "named",
    "placement",
    "resources",
    "shared_state",
    "state_replica",
    "supervisor",
    "worker_pool",
    "worker_process",
    "worker_table",
]

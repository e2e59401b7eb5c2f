"""Supervised processes: started, watched, restarted, ended. What runs them is a backend; Ray's lives with Ray."""

__all__ = [
    "backend",
    "explorer_stats",
    "process_backend",
    "supervisor",
    "worker_pool",
    "worker_process",
    "worker_table",
]

"""What the kernel says of another process, in words."""

from __future__ import annotations

from pathlib import Path


def state_of(pid: int) -> str:
    """Returns the state of a process by /proc, such as "R", "S" or "T" (stopped); "" when it has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return "" if state in ("Z", "X") else state  # it has ended, and its parent has not asked how


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped, by a signal or a debugger."""
    return state_of(pid) in ("T", "t")


def named(pid: int) -> str:
    """Returns what messages call a process, with what to do where it is stopped."""
    return f"process {pid}" + (f", which is stopped (continue it with `kill -CONT {pid}`)" if is_stopped(pid) else "")

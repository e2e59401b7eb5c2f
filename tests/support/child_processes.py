"""The processes that a program has started, looked up in /proc."""

from pathlib import Path


def children_of(pid):
    """The running processes that any thread of the process `pid` has started: {pid: command line}."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(child) for children in lists for child in children]
    return {child: Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in children}


def gone(pid):
    """Whether a process has ended: it is no longer there, or only its exit status is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def explorers_of(pid):
    """The plain explorers of the program `pid`, which its fork server has started."""
    (server,) = [child for child, command in children_of(pid).items() if "fork_server" in command]
    return list(children_of(server))

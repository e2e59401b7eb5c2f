"""Ranks of a real gloo run as forked processes: what each returned, or which error ended it."""

import json
import logging
import os
import socket
import traceback
from contextlib import ExitStack

import torch
import torch.distributed as dist
from forked import Forked, eventually


def run_ranks(directory, body, n=2):
    """Runs `body(rank)` on each of `n` ranks of a gloo group.

    Returns what each made of it: `{"pid": ..., "status": ...}` and the JSON-able `"value"` that it returned, or the
    `"error"` that ended it, with its `"text"` and `"notes"`; with neither if it was killed.
    """
    port = free_port()
    with ExitStack() as stack:
        running = [stack.enter_context(Forked(_run, directory, body, rank, n, port)) for rank in range(n)]
        return [
            {"pid": rank.pid, "status": rank.wait(timeout=60), **_outcome(directory, number)}
            for number, rank in enumerate(running)
        ]


def await_end_of(directory, rank):
    """Waits, in one rank's body, until another one has ended, or was killed."""
    pid = int((directory / f"{rank}.pid").read_text())
    eventually(lambda: (directory / f"{rank}.json").exists() or _is_gone(pid))


def _is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"  # its parent may not have waited for it yet
    except FileNotFoundError:
        return True


def free_port():
    """Returns a TCP port that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run(directory, body, rank, n, port):
    # As torchrun would set them: Lightning then takes these processes for its ranks instead of starting some.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(n))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    (directory / f"{rank}.pid").write_text(str(os.getpid()))
    logging.getLogger().handlers.clear()  # pytest's: what is logged here goes to standard error
    torch.cuda.is_available = torch.cuda.device_count = lambda: 0  # a CUDA that the parent uses does not survive a fork
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # or gloo asks for the address of this machine's name, which may take long
    dist.init_process_group("gloo", init_method=f"file://{directory}/store{port}", rank=rank, world_size=n)
    try:
        outcome = {"value": body(rank)}
    except BaseException as error:
        traceback.print_exc()
        notes = getattr(error, "__notes__", [])
        outcome = {"error": type(error).__name__, "text": str(error), "notes": notes}
    draft = directory / f"{rank}.draft"
    draft.write_text(json.dumps(outcome))
    draft.rename(directory / f"{rank}.json")


def _outcome(directory, rank):
    path = directory / f"{rank}.json"
    return json.loads(path.read_text()) if path.exists() else {}

"""Runs a part of the benchmarks in a process group of its own, with a time limit that nothing can outlive."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
"""Where ``benchmarks`` can be imported from."""


class ChildError(RuntimeError):
    """A child failed, or did not end within its limit and was killed with everything it had started."""


def run_module(module: str, options: Mapping[str, object], limit: float, environment: Mapping[str, str] = {}) -> Any:
    """Runs ``python -m module --key value ...`` and returns the JSON it printed last.

    Args:
        module: Module to run.
        options: Its options, by name. True is a flag alone, and False one that begins with `--no-`.
        limit: Seconds after which the child's process group is killed.
        environment: Variables added to this process's own.

    Raises:
        ChildError: The limit was exceeded, or the child failed; the text ends with its standard error.
    """
    command = [sys.executable, "-m", module]
    for name, value in options.items():
        flag = name.replace("_", "-")
        command += [f"--{flag if value else f'no-{flag}'}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    try:
        output, errors = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise ChildError(f"{' '.join(command[2:])} did not end within {limit:g} s") from None
    finally:
        _kill_group(child)
    if child.returncode != 0:
        raise ChildError(f"{' '.join(command[2:])} failed with status {child.returncode}:\n{errors[-2000:]}")
    return json.loads(output.splitlines()[-1])


def _kill_group(child: "subprocess.Popen[str]") -> None:
    """Kills what is left of the child's group; an empty group is the normal case."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()

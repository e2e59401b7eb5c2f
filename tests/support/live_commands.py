"""Commands in processes of their own, with their output in a file or on a terminal."""

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios

import pytest
from forked import Forked

from torchreplay.cli import main

PNG = b"\x89PNG\r\n\x1a\n"

each_signal = pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)


def run_command(arguments, out):
    """In a process of its own: the command, whose output goes to a descriptor."""
    for stream in (0, 1, 2):
        os.dup2(out, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have commands in the background ignore it
    for name in ("COLUMNS", "LINES"):  # pytest-xdist sets them, and they come before the terminal's own size
        os.environ.pop(name, None)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(end.code or 0)


class Command(Forked):
    """A command in a process of its own, whose output is in a file."""

    def __init__(self, path, *arguments):
        self._path = path
        with path.open("wb") as file:
            super().__init__(run_command, arguments, file.fileno())

    def output(self):
        return self._path.read_text()

    def lines(self, name):
        return [line for line in self.output().splitlines() if name in line]


class Terminal(Forked):
    """A command on a terminal of its own."""

    def __init__(self, *arguments, columns=120, lines=50):
        self._mine, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        os.set_blocking(self._mine, False)
        self._seen = b""
        os.environ["TERM"] = "xterm-256color"
        super().__init__(run_command, arguments, theirs)
        os.close(theirs)

    @property
    def text(self):
        return self._seen.decode(errors="replace")

    def shows(self, text):
        try:
            while data := os.read(self._mine, 1 << 16):
                self._seen += data
        except OSError:  # nothing there, or the command has ended
            pass
        return text in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.text)

    def is_running(self):
        self.shows("")  # a terminal that nobody reads takes some KB, and then its command waits
        return super().is_running()

    def close(self):
        os.close(self._mine)

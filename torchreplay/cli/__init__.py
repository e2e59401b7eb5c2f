"""The command line `torchreplay`: one module a command, imported when the command is called."""

from torchreplay.cli.main import main

__all__ = ["main"]

"""The group of commands, each imported when it is called: `torchreplay --help` needs no Ray and no Matplotlib."""

from difflib import get_close_matches
from importlib import import_module

import click

# The name of a command and its module, which has it as `command`; in the order of the help.
_COMMANDS: dict[str, str] = {
    "list": "torchreplay.cli.list_buffers",
    "watch": "torchreplay.cli.watch",
    "record": "torchreplay.cli.record",
    "plot": "torchreplay.cli.plot",
    "inspect": "torchreplay.cli.inspect",
    "peek": "torchreplay.cli.peek",
    "export": "torchreplay.cli.export",
    "plan": "torchreplay.cli.plan",
    "doctor": "torchreplay.cli.doctor",
    "bench": "torchreplay.cli.bench",
}


class _Commands(click.Group):
    """Finds a command in its module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            near = get_close_matches(args[0], _COMMANDS, n=1)
            if args[0] in _COMMANDS or not near:
                raise
            raise click.UsageError(f"there is no command {args[0]!r}: did you mean {near[0]}?", ctx) from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(_COMMANDS[cmd_name]).command
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="torchreplay")
def main() -> None:
    """Look at replay buffers from outside: those that live, and those in files."""

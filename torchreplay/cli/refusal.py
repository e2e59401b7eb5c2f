"""What a command says of a file, or a request, that it cannot do anything with: one sentence, and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from torchreplay.errors import CheckpointError


class Refused(click.ClickException):
    """A sentence for the user; the command ends with exit code 2."""

    exit_code = 2


@contextmanager
def refusals() -> Iterator[None]:
    """Makes a `Refused` of the errors that say what is wrong with a file or an argument."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        raise Refused(text) from None
    except (CheckpointError, ValueError, TypeError) as error:
        raise Refused(str(error)) from None

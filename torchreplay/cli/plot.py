"""`torchreplay plot`: a picture of a recording."""

from __future__ import annotations

from pathlib import Path

import click

from torchreplay.monitoring.recording import Recording


@click.command("plot")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="By default FILE with .png.")
@click.option("--dark", is_flag=True, help="Light lines on a dark ground.")
@click.option("--title", default="", help="By default the name of the buffer.")
def command(file: Path, output: Path | None, dark: bool, title: str) -> None:
    """Make a picture (.png, .pdf or .svg) of a FILE that `torchreplay record` has written."""
    target = file.with_suffix(".png") if output is None else output
    if target.exists() and target.samefile(file):
        raise click.ClickException(f"{target} is the recording itself: give the picture another name by -o")
    try:
        recording = Recording.read(file)
        from torchreplay.monitoring.pictures import draw_recording  # matplotlib takes a second

        draw_recording(recording, target, title or recording.name, dark)
    except ImportError:
        raise click.ClickException(
            "a picture needs matplotlib, which the extra [plot] has: pip install 'matplotlib>=3.8'"
        ) from None
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{target}")

"""`torchreplay export`: rows of a file as safetensors, NPZ or Minari-style HDF5."""

from __future__ import annotations

from pathlib import Path

import click

from torchreplay.cli.refusal import Refused, refusals
from torchreplay.files.export import safely, write_npz, write_safetensors
from torchreplay.files.rows import StoredRows
from torchreplay.files.source import stored_rows


@click.command("export", short_help="Such a file as safetensors, NPZ or HDF5.")
@click.argument("source", type=click.Path())
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace TARGET if it is there.")
@click.option("--unfinished", is_flag=True, help="HDF5: also episodes without an end, or without their first rows.")
def command(source: str, target: Path, force: bool, unfinished: bool) -> None:
    """Write the rows of SOURCE, oldest first, into the new file TARGET.

    SOURCE is a checkpoint, an archive of one, or the file of a buffer. The suffix of TARGET says the format:
    .safetensors and .npz hold an array for each field, and row.key and row.priority beside them. Views that link rows
    have row.previous and row.step, too. A ragged field has two arrays: NAME.values, one value after the other, and
    NAME.offsets, where each begins, and the last one ends. NumPy has no bfloat16: NPZ has float32 instead. .hdf5 or .h5
    holds episodes as Minari does, of fields of one shape.
    """
    with refusals():
        rows = stored_rows(source)
        if target.suffix in (".hdf5", ".h5"):
            count = safely(target, lambda path: _write_episodes(rows, path, unfinished), force)
            click.echo(f"{count:,} episodes in {target}")
            return
        writers = {".safetensors": write_safetensors, ".npz": write_npz}
        if target.suffix not in writers:
            raise Refused(f"{target} ends in {target.suffix!r}: expected .safetensors, .npz, .hdf5 or .h5")
        count = safely(target, lambda path: writers[target.suffix](rows, path), force)
    click.echo(f"{count:,} rows in {target}")


def _write_episodes(rows: StoredRows, path: Path, unfinished: bool) -> int:
    try:
        from torchreplay.compat.minari import write_episodes
    except ImportError:
        raise Refused("HDF5 needs h5py: pip install h5py") from None
    rows.config.fixed_fields("HDF5 as Minari has it")
    if not rows.linked:
        raise Refused(f"the view is {rows.config.view}: its rows belong to no episode; export .npz or .safetensors")
    return write_episodes(rows.episodes(unfinished), rows.config.view, path)

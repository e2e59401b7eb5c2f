"""`torchreplay plan`: the bytes of a buffer before anything is reserved."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from torchreplay.buffer.footprint import Footprint, footprint
from torchreplay.cli.refusal import Refused, refusals
from torchreplay.compat.footprints import PeerFootprint, Step, peer_footprints
from torchreplay.schema.config import LARGEST_SHARE, MIN_RAGGED_BYTES
from torchreplay.schema.samplers import Prioritized
from torchreplay.schema.spaces import spec_from_env
from torchreplay.schema.spec import Field, Ragged, flatten
from torchreplay.schema.views import Rows, Sequences, Transitions, View
from torchreplay.segment.reservation import available_memory, size_text


def as_count(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Returns a whole number, which may be written as 1e6 or 1_000_000."""
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 1 <= number < 1e18 or number != int(number):
        raise click.BadParameter(f"{value!r} is no whole number of at least 1", ctx, param)
    return int(number)


def as_optional_count(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Returns the same; None where nothing was given."""
    return None if value is None else as_count(ctx, param, value)


def as_fields(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Field]:
    """Returns fields by name, from NAME:DTYPE:SHAPE, such as obs:uint8:84x84; without a shape it is a scalar."""
    fields = {}
    for value in values:
        match = re.fullmatch(r"([^:]+):(\w+)(?::(\d+(?:x\d+)*))?", value)
        if not match:
            raise click.BadParameter(f"{value!r}: expected NAME:DTYPE:SHAPE, such as obs:uint8:84x84", ctx, param)
        name, dtype, shape = match.groups()
        try:
            fields[name] = Field(tuple(map(int, shape.split("x"))) if shape else (), dtype)
        except (ValueError, TypeError) as error:
            raise click.BadParameter(str(error), ctx, param) from None
    return fields


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long the values of a ragged field are: elements in the mean, and at most."""

    mean: float
    largest: int


def as_ragged(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, tuple[Ragged, Lengths | None]]:
    """Returns ragged fields by name, and their lengths; None: another field's.

    They come as NAME:DTYPE:SHAPE=MEAN,LARGEST, such as tokens:int32=800,32000, or with the name of another one behind
    the =.
    """
    found: dict[str, tuple[Ragged, Lengths | None]] = {}
    for value in values:
        match = re.fullmatch(r"([^:=]+):(\w+)(?::(\d+(?:x\d+)*))?=(?:([\d.e_]+),([\d.e_]+)|([^,]*[^,\d][^,]*))", value)
        if not match:
            raise click.BadParameter(
                f"{value!r}: expected NAME:DTYPE:SHAPE=MEAN,LARGEST, such as tokens:int32=800,32000; or the name of "
                f"another such field in the place of the lengths",
                ctx,
                param,
            )
        name, dtype, shape, mean, largest, like = match.groups()
        try:
            column = Ragged(dtype, tuple(map(int, shape.split("x"))) if shape else (), like)
            lengths = None if like else Lengths(float(mean), as_count(ctx, param, largest))
        except (ValueError, TypeError) as error:
            raise click.BadParameter(str(error), ctx, param) from None
        if lengths is not None and not 0 <= lengths.mean <= lengths.largest:
            raise click.BadParameter(f"{value!r}: expected a mean of 0 to the largest length", ctx, param)
        found[name] = column, lengths
    return found


def as_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Returns bytes, which may be written as 8GiB or 500MB."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", value, re.IGNORECASE)
    if not match:
        raise click.BadParameter(f"{value!r} is no size: expected bytes, such as 8GiB or 500MB", ctx, param)
    number, unit, binary = match.groups()
    power = " KMGT".index(unit.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


@click.command("plan", short_help="Bytes of a buffer before it is made.")
@click.option("--env", "env_id", help="A Gymnasium environment, whose spaces make the spec.")
@click.option(
    "--field", "fields", callback=as_fields, multiple=True, help="A field NAME:DTYPE:SHAPE; replaces the environment's."
)
@click.option(
    "--ragged",
    callback=as_ragged,
    multiple=True,
    help="A field of any length NAME:DTYPE:SHAPE=MEAN,LARGEST, or =NAME of another one that has its length.",
)
@click.option("--capacity", callback=as_optional_count, help="Rows, such as 1e6.")
@click.option("--memory", callback=as_size, help="In the place of --capacity: as many rows as fit, such as 8GiB.")
@click.option("--stack", type=click.IntRange(1), default=1, help="Frames that the agent sees of each observation.")
@click.option(
    "--view", type=click.Choice(["transitions", "sequences", "rows"]), default="transitions", show_default=True
)
@click.option("--n-step", type=click.IntRange(1), default=1, help="Steps of the return.")
@click.option("--length", type=click.IntRange(1), default=80, help="Steps of a sequence.", show_default=True)
@click.option("--num-envs", type=click.IntRange(1), default=1, help="Environments that step together.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(
    env_id: str | None,
    fields: dict[str, Field],
    ragged: dict[str, tuple[Ragged, Lengths | None]],
    capacity: int | None,
    memory: int | None,
    stack: int,
    view: str,
    n_step: int,
    length: int,
    num_envs: int,
    as_json: bool,
) -> None:
    """Say how many bytes a buffer takes, by field and by structure, beside other libraries' and this machine's memory.

    For example: torchreplay plan --env ALE/Pong-v5 --field obs:uint8:84x84 --capacity 1e6 --stack 4

    Values of any length need a mean and a largest length, from which ragged_bytes follows: torchreplay plan --view rows
    --ragged tokens:int32=800,32000 --ragged logprob:float32=tokens --field reward:float32 --memory 8GiB
    """
    with refusals():
        if (capacity is None) == (memory is None):
            raise Refused("give --capacity or --memory: the rows, or the bytes that they shall fit into")
        columns = fields | {name: column for name, (column, _) in ragged.items()}
        spec = _spec(env_id, columns, view, stack)
        made = _view(view, n_step, length, stack, spec)
        sizes = _value_sizes(spec, ragged)
        if capacity is None:
            assert memory is not None
            capacity = _most_rows(spec, made, sizes, memory)
        room = None if sizes is None else _room(*sizes, capacity)
        planned = footprint(spec, capacity, view=made, sampler=Prioritized(), ragged_bytes=room)
        peers = _peers(spec, capacity, 1 if view == "rows" else stack, num_envs)
    free = available_memory()
    if as_json:
        told = {"footprint": asdict(planned), "peers": [asdict(peer) for peer in peers], "available": free}
        click.echo(json.dumps(told | {"view": str(made), "fits": planned.nbytes <= free, "ragged_bytes": room}))
        return
    _show(Console(highlight=False), planned, peers, made, num_envs, free, room)


def _value_sizes(
    spec: Mapping[str, Any], given: Mapping[str, tuple[Ragged, Lengths | None]]
) -> tuple[float, int] | None:
    """Returns the bytes of a row's values of any length, in the mean and at most; None: there are none."""
    columns = {"/".join(path): column for path, column in flatten(spec).items() if isinstance(column, Ragged)}
    if not columns:
        return None
    lengths = {name: own for name, (_, own) in given.items() if own is not None}
    mean, largest = 0.0, 0
    for name, column in columns.items():
        leader = (column.like or name).removeprefix("next_")
        if leader not in lengths:
            raise Refused(
                f"{leader!r} has values of any length: say how long they are, --ragged {leader}:"
                f"{str(column.dtype).removeprefix('torch.')}=MEAN,LARGEST"
            )
        mean += lengths[leader].mean * column.nbytes + 4  # values begin at multiples of 8
        largest += lengths[leader].largest * column.nbytes + 8
    return mean, largest


def _room(mean: float, largest: int, capacity: int) -> int:
    """Returns ragged_bytes for so many rows: what they take, half a page of each, and what one skips at the end."""
    # A page is a sixteenth of the mean at most, or the smallest, of 64 bytes.
    rows = capacity * (mean + max(mean / 32, 32))
    return max(int(rows) + largest, LARGEST_SHARE * (largest + 64), MIN_RAGGED_BYTES)


def _most_rows(spec: dict[str, Any], view: View, sizes: tuple[float, int] | None, memory: int) -> int:
    """Returns how many rows fit into so much memory, with their values."""

    def fits(rows: int) -> bool:
        room = None if sizes is None else _room(*sizes, rows)
        return footprint(spec, rows, view=view, sampler=Prioritized(), ragged_bytes=room).nbytes <= memory

    least = view.rows_of_an_item
    if not fits(least):
        raise Refused(f"not even the {least:,} rows of one item fit into {size_text(memory)}: give more")
    most = 2 * least
    while fits(most):
        most *= 2
    found = most // 2
    while most - found > 1:
        middle = (found + most) // 2
        found, most = (middle, most) if fits(middle) else (found, middle)
    return found


def _spec(env_id: str | None, fields: Mapping[str, Field | Ragged], view: str, stack: int) -> dict[str, Any]:
    """Returns the environment's spec with `fields` in the place of its own. Rows by themselves hold whole stacks."""
    if env_id is None and not fields:
        raise Refused("there is nothing to plan: give --env, or a --field NAME:DTYPE:SHAPE for each field")
    of_steps = {"reward": Field(), "terminated": Field((), bool), "truncated": Field((), bool)}
    spec = _of_env(env_id) if env_id is not None else {} if view == "rows" else of_steps
    spec = {**fields, **{name: field for name, field in spec.items() if name not in fields}}
    if view == "rows" and stack > 1 and isinstance(spec.get("obs"), Field):
        spec["obs"] = Field((stack, *spec["obs"].shape), spec["obs"].dtype)
    return spec


def _of_env(env_id: str) -> dict[str, Any]:
    try:
        import gymnasium
    except ImportError:
        raise Refused("--env needs Gymnasium: pip install gymnasium, or give each --field") from None
    if env_id.startswith("ALE/"):
        try:
            import ale_py
        except ImportError:
            raise Refused(f"{env_id} needs ale-py: pip install ale-py") from None
        gymnasium.register_envs(ale_py)
    try:
        env = gymnasium.make(env_id)
    except (gymnasium.error.Error, ImportError) as error:
        raise Refused(f"{env_id} cannot be made: {error}") from None
    spec = spec_from_env(env)
    env.close()
    return spec


def _view(name: str, n_step: int, length: int, stack: int, spec: dict[str, Any]) -> View:
    if name == "rows":
        if "obs" in spec:  # each row needs what it led to
            spec.setdefault("next_obs", spec["obs"])
        return Rows()
    if "obs" not in spec:
        raise Refused(f"{name} need a field 'obs': the fields are {', '.join(spec)}; or give --view rows")
    if name == "sequences":
        if n_step > 1 or stack > 1:
            raise Refused("--n-step and --stack are of transitions: sequences hold each step as it is")
        return Sequences(length)
    return Transitions(n_step, stack={"obs": stack} if stack > 1 else None)


def _peers(spec: Mapping[str, Any], capacity: int, stack: int, num_envs: int) -> list[PeerFootprint]:
    """Returns what others take; nothing where the spec has no `obs` and `action`, or values of any length."""
    fixed = not any(isinstance(column, Ragged) for column in flatten(spec).values())
    if "obs" not in spec or "action" not in spec or not fixed:
        return []
    return peer_footprints(Step(_nbytes(spec["obs"]), _nbytes(spec["action"]), stack), capacity, num_envs)


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Field) else sum(_nbytes(inner) for inner in value.values())


def _show(
    console: Console,
    planned: Footprint,
    peers: list[PeerFootprint],
    view: View,
    num_envs: int,
    free: int,
    room: int | None,
) -> None:
    each = f", {planned.capacity // num_envs:,} of each of {num_envs} environments" if num_envs > 1 else ""
    console.print(f"[bold]{size_text(planned.nbytes)}[/bold] for {planned.capacity:,} rows{each}")
    console.print(f"[dim]{view}[/dim]", soft_wrap=True)
    if room is not None:
        console.print(f"for values of any length: [bold]ragged_bytes={room:_}[/bold]")
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold")
    for name in ("part", "bytes", "a row", "share"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for name, size in (planned.fields | planned.structures).items():
        label = f"field {name}" if name in planned.fields else name
        table.add_row(label, f"{size:,}", f"{size / planned.capacity:,.1f}", f"{100 * size / planned.nbytes:.1f} %")
    console.print(table)
    if peers:
        console.print()
        console.print(_peer_table(planned, peers))
    fits = planned.nbytes <= free
    share = 100 * planned.nbytes / max(free, 1)
    verdict = f"[green]{share:.0f} % of it[/green]" if fits else "[red]it does not fit[/red]: path=FILE may be larger"
    console.print(f"\nThis machine has {size_text(free)} to give (free memory and cgroup limits): {verdict}")


def _peer_table(planned: Footprint, peers: list[PeerFootprint]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold")
    table.add_column("the same steps in", overflow="fold")
    table.add_column("takes", justify="right", no_wrap=True)
    table.add_column("times", justify="right", no_wrap=True)
    table.add_column("which stores")
    for peer in peers:
        table.add_row(peer.name, size_text(peer.nbytes), f"{peer.nbytes / planned.nbytes:.1f}", peer.stores)
    return table

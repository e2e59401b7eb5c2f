"""`torchreplay plan`: the bytes of a buffer before anything is reserved."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from torchreplay.buffer.footprint import Footprint, footprint
from torchreplay.cli.refusal import Refused, refusals
from torchreplay.compat.footprints import PeerFootprint, Step, peer_footprints
from torchreplay.schema.samplers import Prioritized
from torchreplay.schema.spaces import spec_from_env
from torchreplay.schema.spec import Field
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


@click.command("plan", short_help="Bytes of a buffer before it is made.")
@click.option("--env", "env_id", help="A Gymnasium environment, whose spaces make the spec.")
@click.option(
    "--field", "fields", callback=as_fields, multiple=True, help="A field NAME:DTYPE:SHAPE; replaces the environment's."
)
@click.option("--capacity", callback=as_count, required=True, help="Rows, such as 1e6.")
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
    capacity: int,
    stack: int,
    view: str,
    n_step: int,
    length: int,
    num_envs: int,
    as_json: bool,
) -> None:
    """Say how many bytes a buffer takes, by field and by structure, beside other libraries' and this machine's memory.

    For example: torchreplay plan --env ALE/Pong-v5 --field obs:uint8:84x84 --capacity 1e6 --stack 4
    """
    with refusals():
        spec = _spec(env_id, fields, view, stack)
        made = _view(view, n_step, length, stack, spec)
        planned = footprint(spec, capacity, view=made, sampler=Prioritized())
        peers = _peers(spec, capacity, 1 if view == "rows" else stack, num_envs)
    free = available_memory()
    if as_json:
        told = {"footprint": asdict(planned), "peers": [asdict(peer) for peer in peers], "available": free}
        click.echo(json.dumps(told | {"view": str(made), "fits": planned.nbytes <= free}))
        return
    _show(Console(highlight=False), planned, peers, made, num_envs, free)


def _spec(env_id: str | None, fields: dict[str, Field], view: str, stack: int) -> dict[str, Any]:
    """Returns the environment's spec with `fields` in the place of its own. Rows by themselves hold whole stacks."""
    if env_id is None and not fields:
        raise Refused("there is nothing to plan: give --env, or a --field NAME:DTYPE:SHAPE for each field")
    of_steps = {"reward": Field(), "terminated": Field((), bool), "truncated": Field((), bool)}
    spec = _of_env(env_id) if env_id is not None else {} if view == "rows" else of_steps
    spec = fields | {name: field for name, field in spec.items() if name not in fields}
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
    """Returns what others take; nothing where the spec has no `obs` and `action` that they could store."""
    if "obs" not in spec or "action" not in spec:
        return []
    return peer_footprints(Step(_nbytes(spec["obs"]), _nbytes(spec["action"]), stack), capacity, num_envs)


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Field) else sum(_nbytes(inner) for inner in value.values())


def _show(
    console: Console, planned: Footprint, peers: list[PeerFootprint], view: View, num_envs: int, free: int
) -> None:
    each = f", {planned.capacity // num_envs:,} of each of {num_envs} environments" if num_envs > 1 else ""
    console.print(f"[bold]{size_text(planned.nbytes)}[/bold] for {planned.capacity:,} rows{each}")
    console.print(f"[dim]{view}[/dim]", soft_wrap=True)
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

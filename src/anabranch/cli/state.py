"""``anabranch state``: look into the checkpoints of a query, running or not."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress
from rich.table import Table

from anabranch.errors import CheckpointNotFound, PlanError
from anabranch.state.groups import KeyGroups
from anabranch.stores import (
    BackupStore,
    Manifest,
    OperatorManifest,
    open_checkpoints,
    open_manifests,
    read_state,
    state_schema,
    whereabouts,
)
from anabranch.units import Version

_AT_ONCE = 256 * 2**20  # bytes of checkpoint files read at a time, so that any state fits

_folder = click.argument("folder")
_operator = click.option("--operator", help="Its name; not needed if there is only one.")
_version = click.option("--version", type=int, help="A retained version; the newest by default.")


@click.group()
def state() -> None:
    """List, show and export the state in the checkpoint FOLDER of a query.

    FOLDER is what was given to start().
    """


@state.command("list")
@_folder
def list_state(folder: str) -> None:
    """List versions, operators, columns and sizes, and the nodes that have the files, if any."""
    console = Console()
    manifests = open_manifests(folder)
    versions = manifests.versions()
    if not versions:
        raise CheckpointNotFound(f"there is no checkpoint in {folder}")
    table = Table("version", "operator", "key", "state", "files", "size", box=None)
    at_nodes: dict[str, str] = {}
    for version in versions:
        for name, operator in manifests.get(version).operators.items():
            at_nodes[f"version {version} of {name}"] = whereabouts(operator.parts)
            schema = operator.schema
            keys = [field.name for field in schema.keys] + list(schema.sub)
            values = [field.name for field in schema.values]
            size = decimal(sum(part.bytes for part in operator.parts))
            table.add_row(
                str(version), name, ", ".join(keys), ", ".join(values), _files(operator), size
            )
    console.print(table)
    for what, where in at_nodes.items():
        if where:
            console.print(f"The files of {what} are at {where}.", soft_wrap=True)


@state.command()
@_folder
@_operator
@_version
@click.option("--limit", default=20, show_default=True, help="Rows to show.")
def show(folder: str, operator: str | None, version: int | None, limit: int) -> None:
    """Show the first rows of an operator's state."""
    console = Console()
    store, manifest, name = _find(folder, operator, version)
    with console.status("reading the checkpoint"):
        rows = read_state(store, manifest, name)
    table = Table(*rows.schema.names, box=None)
    for row in rows.slice(0, limit).to_pylist():
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table)
    shown = min(limit, rows.num_rows)
    console.print(f"{shown:,} of {rows.num_rows:,} rows of {name} at version {manifest.version}")


@state.command()
@_folder
@_operator
@_version
@click.option(
    "--to", "target", required=True, type=click.Path(path_type=Path), help="A .parquet file."
)
def export(folder: str, operator: str | None, version: int | None, target: Path) -> None:
    """Write an operator's state to a Parquet file."""
    console = Console()
    if target.suffix != ".parquet":
        raise PlanError(f"--to {target}: state is exported as Parquet; name a .parquet file")
    store, manifest, name = _find(folder, operator, version)
    found = manifest.operators[name]
    rows = 0
    partial = target.with_name(target.name + ".partial")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            Progress(console=console) as progress,
            pq.ParquetWriter(partial, state_schema(found.schema)) as writer,
        ):
            for groups in progress.track(_portions(found), description=f"exporting {name}"):
                part: pa.Table = read_state(store, manifest, name, groups)
                writer.write_table(part)
                rows += part.num_rows
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    console.print(f"{rows:,} rows of {name} at version {manifest.version} -> {target}")


def _find(
    folder: str, operator: str | None, version: int | None
) -> tuple[BackupStore, Manifest, str]:
    manifests, store = open_checkpoints(folder)
    manifest = manifests.latest() if version is None else manifests.get(Version(version))
    if manifest is None:
        raise CheckpointNotFound(f"there is no checkpoint in {folder}")
    names = sorted(manifest.operators)
    if operator is None and len(names) == 1:
        return store, manifest, names[0]
    if operator not in names:
        what = "name one with --operator" if operator is None else f"no operator {operator!r}"
        raise PlanError(f"{folder}: {what}; version {manifest.version} has {', '.join(names)}")
    return store, manifest, operator


def _files(operator: OperatorManifest) -> str:
    full = sum(part.base is None for part in operator.parts)
    changes = len(operator.parts) - full
    return f"{full} full" + (f", {changes} of changes" if changes else "")


def _portions(operator: OperatorManifest) -> list[KeyGroups]:
    """All key groups, in portions that fit into memory."""
    groups = operator.schema.key_groups
    size = sum(part.bytes for part in operator.parts)
    portions = min(groups, max(1, -(-size // _AT_ONCE)))
    bounds = [groups * i // portions for i in range(portions + 1)]
    return [KeyGroups(((low, high),)) for low, high in pairwise(bounds)]

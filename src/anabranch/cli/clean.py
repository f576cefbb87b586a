"""``anabranch clean``: remove what dead queries have left on this machine."""

from __future__ import annotations

import click
from rich.filesize import decimal

from anabranch.nodes.folders import backup_folder, state_folder
from anabranch.nodes.sweep import leftovers, old_backups, remove_backups, size, sweep
from anabranch.units import microseconds


@click.command()
@click.option(
    "--state-folder",
    "given",
    metavar="FOLDER",
    help="The folder of live state, if not the default.",
)
@click.option("--backups", metavar="FOLDER", help="The folder of backups, if not the default.")
@click.option("--kept", is_flag=True, help="Also the state of queries without checkpoints.")
@click.option("--older", default="7 days", show_default=True, help="Least age of unused backups.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
def clean(given: str | None, backups: str | None, kept: bool, older: str, dry_run: bool) -> None:
    """Remove what dead queries of this user have left on this machine.

    This removes state in memory, and old backups of other nodes. Running queries and checkpoint
    folders are not touched. The state of a query without checkpoints has no copy elsewhere, and is
    removed only with --kept.
    """
    base = state_folder(given)
    found = {folder: size(folder) for folder in leftovers(base, kept=kept)}
    old = {
        folder: size(folder)
        for folder in old_backups(backup_folder(backups), microseconds(older, what="older") / 1e6)
    }
    if not dry_run:
        gone = sweep(base, kept=kept)
        found = {folder: found.get(folder, 0) for folder in gone}
        for folder in old:
            remove_backups(folder)
        old = {folder: bytes_ for folder, bytes_ in old.items() if not folder.exists()}
    verb = "Would remove" if dry_run else "Removed"
    for folder, bytes_ in (found | old).items():
        click.echo(f"{verb} {folder} ({decimal(bytes_)})")
    total = sum(found.values()) + sum(old.values())
    click.echo(f"{verb} {len(found) + len(old)} folders, {decimal(total)} in all.")

"""The command group of the command line, and its error output."""

from __future__ import annotations

from importlib.metadata import entry_points, version
from typing import Any

import click

from anabranch.cli.clean import clean
from anabranch.cli.cluster import cluster
from anabranch.cli.demo import demo
from anabranch.cli.node import node
from anabranch.cli.ring import ring
from anabranch.cli.state import state
from anabranch.errors import AnabranchError

_ADDED = "anabranch.commands"
"""The entry points with which other packages add commands."""
_BENCHMARKS = ("bench", "report")


class _Commands(click.Group):
    """The commands of the library and of other packages.

    An error of the library is one line and exit status 1. A traceback is only for bugs.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group=_ADDED).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        for added in entry_points(group=_ADDED, name=cmd_name):
            command: click.Command = added.load()
            return command
        if cmd_name in _BENCHMARKS:
            raise AnabranchError(
                "the benchmarks are in another package: pip install anabranch-bench"
            )
        return None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AnabranchError as error:
            message = " ".join(str(error).split())
            raise _Failed(message) from error


class _Failed(click.ClickException):
    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", err=True, file=file)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("anabranch"), prog_name="anabranch", message="%(prog)s %(version)s")
def main() -> None:
    """Elastic, fault-tolerant, vectorised keyed state for PySpark Structured Streaming."""


main.add_command(demo)
main.add_command(state)
main.add_command(cluster)
main.add_command(clean)
main.add_command(ring)
main.add_command(node)

"""The top of the command line, and how errors look there."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import click

from anabranch.cli.bench import bench
from anabranch.cli.clean import clean
from anabranch.cli.cluster import cluster
from anabranch.cli.demo import demo
from anabranch.cli.report import report
from anabranch.cli.state import state
from anabranch.errors import AnabranchError


class _OneLineErrors(click.Group):
    """An error of ours is one line and exit status 1; a traceback is only for bugs."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AnabranchError as error:
            message = " ".join(str(error).split())
            raise _Failed(message) from error


class _Failed(click.ClickException):
    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", err=True, file=file)


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("anabranch"), prog_name="anabranch", message="%(prog)s %(version)s")
def main() -> None:
    """Elastic, fault-tolerant, vectorised keyed state for PySpark Structured Streaming."""


main.add_command(demo)
main.add_command(state)
main.add_command(bench)
main.add_command(cluster)
main.add_command(report)
main.add_command(clean)

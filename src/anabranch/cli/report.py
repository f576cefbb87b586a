"""``anabranch report``: the results of benchmarks as one page."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "--results",
    default="results",
    show_default=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The folder with the JSON files of benchmarks, and their pictures.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: report.html in it."
)
def report(results: Path, out: Path | None) -> None:
    """Gather the results of benchmarks into one HTML page."""
    from anabranch.bench.report import write

    target = out or results / "report.html"
    count = write(results, target)
    click.echo(f"written: {target}, {count} benchmarks")

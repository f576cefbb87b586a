"""``anabranch bench``: Spark's side and ours over the same input."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

if TYPE_CHECKING:
    from anabranch.bench.harness import Result

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def bench() -> None:
    """Measure this machine; Spark's own engines run over the same input in the same run."""


@bench.command("state")
@click.option("--quick", is_flag=True, help="A few minutes instead of about twenty; less exact.")
@click.option("--json", "json_file", type=_FILE, help="Write everything that was measured here.")
@click.option("--plot", type=_FILE, help="Draw the result as a PNG here.")
@click.option("--seed", default=7, show_default=True, help="Of the generated input.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["keyed", "words", "growth", "overhead"]),
    help="Run only this benchmark; can be repeated.",
)
def bench_state(
    quick: bool, json_file: Path | None, plot: Path | None, seed: int, only: tuple[str, ...]
) -> None:
    """Keyed state: throughput, windows, growth of the state, cost of checkpoints."""
    from anabranch.bench import plot as plots
    from anabranch.bench import state, tables

    if plot is not None:
        plots.check()
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file has room for whole tables
    result = state.run(quick=quick, seed=seed, only=only, console=console)
    tables.show(result, console)
    if json_file is not None:
        result.write_json(json_file)
        console.print(f"written: {json_file}")
    if plot is not None:
        plots.write(result, plot)
        console.print(f"written: {plot}")


@bench.command("recovery")
@click.option("--quick", is_flag=True, help="Fewer cases.")
@click.option("--json", "json_file", type=_FILE, help="Write everything that was measured here.")
@click.option("--plot", type=_FILE, help="Draw the result as a PNG here.")
@click.option("--seed", default=7, show_default=True, help="Of the generated input.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["rate", "interval", "parallelism", "latency", "state", "cost"]),
    help="Run only this benchmark; can be repeated.",
)
def bench_recovery(
    quick: bool, json_file: Path | None, plot: Path | None, seed: int, only: tuple[str, ...]
) -> None:
    """A node is killed: how long until batches are committed again; what checkpoints cost."""
    from anabranch.bench import recovery

    console = Console()
    result = recovery.measure(quick=quick, seed=seed, only=only, console=console)
    tails = (recovery.LATENCY, recovery.TRADE)
    _publish(result, recovery.TITLES, console, json_file, plot, tails)


@bench.command("scaling")
@click.option("--quick", is_flag=True, help="Fewer cases.")
@click.option("--json", "json_file", type=_FILE, help="Write everything that was measured here.")
@click.option("--plot", type=_FILE, help="Draw the result as a PNG here.")
@click.option("--seed", default=7, show_default=True, help="Of the generated input.")
def bench_scaling(quick: bool, json_file: Path | None, plot: Path | None, seed: int) -> None:
    """An operator grows from 2 to 4 instances: how long the stream is held up."""
    from anabranch.bench import scaling

    console = Console()
    result = scaling.measure(quick=quick, seed=seed, console=console)
    _publish(result, scaling.TITLES, console, json_file, plot)


def _publish(
    result: Result,
    titles: Mapping[str, str],
    console: Console,
    json_file: Path | None,
    plot: Path | None,
    tails: Collection[str] = (),
) -> None:
    from anabranch.bench import panels

    panels.show(result, titles, console, tails)
    if json_file is not None:
        result.write_json(json_file)
        console.print(f"written: {json_file}")
    if plot is not None:
        panels.draw(result, titles, plot, tails)
        console.print(f"written: {plot}")

"""``anabranch bench`` and ``anabranch report``, which the library's command line finds.

Benchmarks are imported when they run, so that the other commands start without loading Spark.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

if TYPE_CHECKING:
    from anabranch_bench.harness import Result

_FILE = click.Path(dir_okay=False, path_type=Path)
_PATH = click.Path(path_type=Path)


@click.group()
def bench() -> None:
    """Measure this machine; Spark's own engines run over the same input in the same run."""


def _measured(command: Callable[..., None]) -> Callable[..., None]:
    """The options that all benchmarks have."""
    for option in (
        click.option("--seed", default=7, show_default=True, help="Of the generated input."),
        click.option("--plot", type=_FILE, help="Draw the result as a PNG here."),
        click.option("--json", "json_file", type=_FILE, help="Write all that was measured here."),
        click.option("--quick", is_flag=True, help="Fewer or shorter cases; less exact."),
    ):
        command = option(command)
    return command


def _only(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--only",
        multiple=True,
        type=click.Choice(names),
        help="Run only this benchmark; can be repeated.",
    )


@bench.command("state")
@_measured
@_only("keyed", "words", "growth", "overhead")
def bench_state(
    quick: bool, json_file: Path | None, plot: Path | None, seed: int, only: tuple[str, ...]
) -> None:
    """Keyed state: throughput, windows, growth of the state, cost of checkpoints."""
    from anabranch_bench import plot as plots
    from anabranch_bench import state, tables

    console = _console()
    result = state.run(quick=quick, seed=seed, only=only, console=console)
    tables.show(result, console)
    _written(result, console, json_file)
    if plot is not None:
        plots.write(result, plot)
        console.print(f"written: {plot}")


@bench.command("recovery")
@_measured
@_only("rate", "interval", "parallelism", "latency", "state", "cost")
def bench_recovery(
    quick: bool, json_file: Path | None, plot: Path | None, seed: int, only: tuple[str, ...]
) -> None:
    """A node is killed: how long until batches are committed again; what checkpoints cost."""
    from anabranch_bench import recovery

    console = _console()
    result = recovery.measure(quick=quick, seed=seed, only=only, console=console)
    tails = (recovery.LATENCY, recovery.TRADE)
    _publish(result, recovery.TITLES, console, json_file, plot, tails)


@bench.command("scaling")
@_measured
@_only("pause", "moved")
def bench_scaling(
    quick: bool, json_file: Path | None, plot: Path | None, seed: int, only: tuple[str, ...]
) -> None:
    """An operator grows: how long the stream is held up, and what is read and written for it."""
    from anabranch_bench import scaling

    console = _console()
    result = scaling.measure(quick=quick, seed=seed, only=only, console=console)
    _publish(result, scaling.TITLES, console, json_file, plot)


@bench.command("fragments")
@_measured
@_only("coding", "recovery", "models", "reliability", "many", "ring", "live")
def bench_fragments(
    quick: bool, json_file: Path | None, plot: Path | None, seed: int, only: tuple[str, ...]
) -> None:
    """Backups as fragments: coding, saving and recovering against a shared store, models, rings."""
    from anabranch_bench.fragments import measure, picture

    console = _console()
    result = measure.measure(quick=quick, seed=seed, only=only, console=console)
    measure.show(result, console)
    _written(result, console, json_file)
    if plot is not None and result.curves:
        picture.draw(result, plot)
        console.print(f"written: {plot}")


@bench.command("topk")
@_measured
@click.option("--rate", multiple=True, type=int, help="Views a second; can be repeated.")
def bench_topk(
    quick: bool, json_file: Path | None, plot: Path | None, seed: int, rate: tuple[int, ...]
) -> None:
    """Rankings of languages every 30 s, from 18 sources that do not wait."""
    from anabranch_bench import topk

    console = _console()
    result = topk.measure(quick=quick, seed=seed, rates=rate, console=console)
    _publish(result, topk.TITLES, console, json_file, plot)


@bench.command("lrb")
@_measured
@click.option("--xways", default=1, show_default=True, help="How many expressways: L.")
@click.option(
    "--from",
    "since",
    metavar="MINUTE",
    help="Where the clock starts; 10200s is in seconds. [default: 170, or 0 with --input]",
)
@click.option("--to", "until", default="180", show_default=True, metavar="MINUTE")
@click.option("--warm", metavar="MINUTES", help="Warm-up before --from. Default: from minute 0.")
@click.option("--pace", default=1.0, show_default=True, help="0: as fast as possible.")
@click.option("--search", is_flag=True, help="Find the greatest L that holds all limits.")
@click.option("--check", is_flag=True, help="Compare all answers with those of the reference.")
@click.option("--nodes", type=int, help="Run on a cluster with this many nodes.")
@click.option("--faults", is_flag=True, help="Scale operators, kill a node, scale back.")
@click.option("--input", "input_", type=_PATH, help="An input instead of generated traffic.")
@click.option("--history", type=_PATH, help="The history of that input.")
@click.option(
    "--expected", type=_PATH, help="The folder of the reference's answers; made if missing."
)
@click.option("--output", type=_PATH, help="Write the answers into this folder.")
def bench_lrb(
    xways: int,
    since: str | None,
    until: str,
    warm: str | None,
    pace: float,
    search: bool,
    check: bool,
    nodes: int | None,
    faults: bool,
    input_: Path | None,
    history: Path | None,
    expected: Path | None,
    output: Path | None,
    seed: int,
    quick: bool,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Linear Road: tolls on expressways, at the pace of the clock."""
    from anabranch_bench.lrb.measure import Order, measure
    from anabranch_bench.lrb.run import Window

    if faults and nodes is None:
        raise click.UsageError("--faults kills a node; give the number of nodes with --nodes")
    if faults and not pace:
        raise click.UsageError("--faults need a clock, so --pace must not be 0")
    end = _seconds(until)
    if since is None:
        since = f"{end - 60}s" if quick else "170" if input_ is None else "0"
    paced_from = _seconds(since)
    before = "6" if quick and warm is None else warm
    # At a full minute, so that no minute is known in part.
    start = 0 if before is None else max(0, paced_from - _seconds(before)) // 60 * 60
    if not 0 <= start <= paced_from < end:
        raise click.UsageError(f"--from {since} --to {until}: the interval is empty")
    console = _console()
    result = measure(
        Order(
            xways,
            Window(start, paced_from, end, pace),
            seed=seed,
            quick=quick,
            search=search,
            check=check,
            nodes=nodes,
            faults=faults,
            input=input_,
            history=history,
            expected=expected,
            output=output,
            plot=plot,
        ),
        console,
    )
    _written(result, console, json_file)
    if plot is not None:
        console.print(f"written: {plot}")


def _seconds(text: str) -> int:
    """Seconds of the stream from text: ``170`` and ``170m`` are minutes, ``10200s`` is seconds.

    >>> _seconds("170"), _seconds("10200s")
    (10200, 10200)
    """
    if text.endswith("s"):
        return int(text[:-1])
    return round(float(text.removesuffix("m")) * 60)


@bench.command("soak")
@click.option("--minutes", default=120.0, show_default=True, help="Duration.")
@click.option("--seed", type=int, help="Of input and faults; drawn and printed if not given.")
@click.option("--rate", default=2_500, show_default=True, help="Rows a second.")
@click.option("--compare", default=10.0, show_default=True, help="Minutes between comparisons.")
@click.option("--folder", type=_PATH, help="A new working folder, which is kept.")
@click.option("--plot", type=_FILE, help="Draw the samples into this PNG file.")
@click.option("--json", "json_file", type=_FILE, help="Write all measurements into this file.")
def bench_soak(
    minutes: float,
    seed: int | None,
    rate: int,
    compare: float,
    folder: Path | None,
    plot: Path | None,
    json_file: Path | None,
) -> None:
    """A cluster under faults for hours, compared with a batch computation by DuckDB."""
    from anabranch_bench.soak.run import Plan, soak

    console = _console()
    chosen = random.SystemRandom().randrange(10**6) if seed is None else seed
    plan = Plan(minutes, chosen, rate, compare, folder=folder)
    if not soak(plan, console, json_file, plot):
        raise SystemExit(1)


@click.command()
@click.option(
    "--results",
    default="results",
    show_default=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The folder with the JSON files of benchmarks, and their pictures.",
)
@click.option("--out", type=_FILE, help="Default: report.html in it.")
def report(results: Path, out: Path | None) -> None:
    """Gather the results of benchmarks into one HTML page."""
    from anabranch_bench.report import write

    target = out or results / "report.html"
    count = write(results, target)
    click.echo(f"written: {target}, {count} benchmarks")


def _console() -> Console:
    console = Console()
    # A file has room for whole tables.
    return console if console.is_terminal else Console(width=140)


def _publish(
    result: Result,
    titles: Mapping[str, str],
    console: Console,
    json_file: Path | None,
    plot: Path | None,
    tails: Collection[str] = (),
) -> None:
    from anabranch_bench import panels

    panels.show(result, titles, console, tails)
    _written(result, console, json_file)
    if plot is not None and result.measures:
        panels.draw(result, titles, plot, tails)
        console.print(f"written: {plot}")


def _written(result: Result, console: Console, json_file: Path | None) -> None:
    if json_file is not None:
        result.write_json(json_file)
        console.print(f"written: {json_file}")

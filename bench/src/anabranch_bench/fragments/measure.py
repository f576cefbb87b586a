"""The parts of the benchmark of fragments, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from rich.console import Console
from rich.table import Table

from anabranch_bench.fragments import (
    against_models,
    coding,
    live,
    many,
    recovery,
    reliability,
    rings,
)
from anabranch_bench.fragments.nodes import LINK, Nodes, nodes
from anabranch_bench.fragments.result import Bench, FragmentsResult
from anabranch_bench.harness import Grid

ALONE: dict[str, Callable[[Bench], None]] = {
    coding.NAME: coding.run,
    rings.NAME: rings.run,
    live.NAME: live.run,
}
"""Parts that need no agents."""
AT_NODES: dict[str, Callable[[Bench, Nodes], None]] = {
    recovery.NAME: recovery.run,
    against_models.NAME: against_models.run,
    reliability.NAME: reliability.run,
    many.NAME: many.run,
}
CHOICES = (
    coding.NAME,
    recovery.NAME,
    against_models.NAME,
    reliability.NAME,
    many.NAME,
    rings.NAME,
    live.NAME,
)
"""The parts, in the order in which they run."""
PANELS = {
    name: panel
    for part in (coding, recovery, against_models, reliability, many, rings, live)
    for name, panel in part.PANELS.items()
}


def measure(
    *, quick: bool = False, seed: int = 7, only: Sequence[str] = (), console: Console | None = None
) -> FragmentsResult:
    """Run the parts, or only some of them. The agents are the same for all that need them."""
    console = console or Console()
    result = FragmentsResult("fragments", seed, quick, panels=PANELS)
    bench = Bench(result, console)
    with ExitStack() as stack:
        started: Nodes | None = None
        for name in only or CHOICES:
            if name in ALONE:
                ALONE[name](bench)
                continue
            if started is None:
                started = stack.enter_context(nodes())
                if not started.linked:
                    bench.note(
                        f"links of {LINK} are not permitted here: figures are of links without a "
                        "limit, and bars that depend on them are left out"
                    )
            AT_NODES[name](bench, started)
    return result


def show(result: FragmentsResult, console: Console) -> None:
    """Print tables of all curves, and the bars."""
    for grid in result.grids():
        console.print(_table(grid))
    bars = [
        (
            bar.name,
            f"{bar.value:.3f}",
            f"{'at least' if bar.at_least else 'at most'} {bar.bar:g}",
            "yes" if bar.holds else "no",
        )
        for bar in result.bars
    ]
    console.print(_table(Grid("Bars", ("bar", "value", "has to be", "holds"), bars)))
    for note in result.notes:
        console.print(note, highlight=False)


def _table(grid: Grid) -> Table:
    table = Table(*grid.heads, title=grid.title, title_justify="left")
    for row in grid.rows:
        table.add_row(*row)
    return table

"""Results with several cases and sides, as tables and as one picture."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from anabranch_bench import plot
from anabranch_bench.harness import Result, Timing, in_order

_COLOURS = ("#0b6e99", "#d9822b", "#8a8f98", "#b5493c")


def show(
    result: Result, titles: Mapping[str, str], console: Console, tails: Collection[str] = ()
) -> None:
    """Print a table for each benchmark, and the bars. ``tails`` are judged by their slowest."""
    for benchmark, title in titles.items():
        measures = result.pick(benchmark)
        if not measures:
            continue
        table = Table("case", "side", "seconds", title=title, title_justify="left")
        for each in measures:
            seconds = _figure(each.timing, tail=benchmark in tails)
            table.add_row(each.case, each.side, f"{seconds:.3f}")
        console.print(table)
    bars = Table("bar", "value", "has to be", "holds", title="Bars", title_justify="left")
    for bar in result.bars:
        sense = "at least" if bar.at_least else "at most"
        holds = "yes" if bar.holds else "no"
        bars.add_row(bar.name, f"{bar.value:.3f}", f"{sense} {bar.bar:g}", holds)
    console.print(bars)
    for note in result.notes:
        console.print(note, highlight=False)


def draw(
    result: Result, titles: Mapping[str, str], path: Path, tails: Collection[str] = ()
) -> None:
    """Draw every benchmark that was run into a PNG: cases along, a bar for each side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [benchmark for benchmark in titles if result.pick(benchmark)]
    with pyplot.rc_context(plot.STYLE):
        figure, axes = pyplot.subplots(len(shown), 1, figsize=(7, 2.6 * len(shown)), squeeze=False)
        for axis, benchmark in zip(axes[:, 0], shown, strict=True):
            measures = result.pick(benchmark)
            names = in_order(each.case for each in measures)
            sides = in_order(each.side for each in measures)
            width = 0.8 / len(sides)
            for number, side in enumerate(sides):
                mine = [each for each in measures if each.side == side]
                places = [names.index(each.case) + number * width for each in mine]
                heights = [_figure(each.timing, tail=benchmark in tails) for each in mine]
                axis.bar(places, heights, width, label=side, color=_COLOURS[number])
            middle = (len(sides) - 1) * width / 2
            labels = [name.replace(", ", "\n") for name in names]
            axis.set_xticks([n + middle for n in range(len(names))], labels)
            axis.set_title(titles[benchmark])
            axis.set_ylabel("seconds")
            axis.set_ylim(bottom=0)
            if len(sides) > 1:
                # Beside the axes: bars may be anywhere within.
                axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _figure(timing: Timing, *, tail: bool) -> float:
    return timing.percentile(95) if tail else timing.median

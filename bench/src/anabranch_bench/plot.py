"""The result of the state benchmarks as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anabranch_bench import growth, keyed, overhead, words
from anabranch_bench.harness import Result, in_order
from anabranch_bench.plan import Checkpoints, Engine
from anabranch_bench.tables import pooled

STYLE: Any = {
    "axes.grid": True,
    "axes.grid.axis": "both",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
"""The look that all of our pictures share."""

COLOURS = {
    Engine.ANABRANCH: "#0b6e99",
    Engine.ROCKSDB: "#d9822b",
    Engine.HDFS: "#8a8f98",
    Engine.PANDAS: "#b5493c",
    Checkpoints.NEVER: "#8a8f98",
    Checkpoints.FULL: "#d9822b",
    Checkpoints.INCREMENTAL: "#0b6e99",
}


def write(result: Result, path: Path) -> None:
    """Draw whatever benchmarks were run into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        keyed.NAME: _keyed,
        words.NAME: _words,
        growth.NAME: _growth,
        overhead.NAME: _overhead,
    }
    drawn = [name for name in panels if result.pick(name)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        columns = min(2, len(drawn))
        rows = -(-len(drawn) // columns)
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(5.6 * columns, 3.8 * rows), squeeze=False
        )
        for axis, name in zip(axes.flat, drawn, strict=False):
            panels[name](axis, result)
        for axis in axes.flat[len(drawn) :]:
            axis.remove()
        kind = ", quick run" if result.quick else ""
        figure.suptitle(
            f"anabranch {result.versions['anabranch']} and Spark {result.versions['pyspark']}: "
            f"{result.machine['cores']} cores, {result.machine['cpu']}{kind}",
            fontsize=8,
        )
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _bars(axis: Any, result: Result, benchmark: str, case: str) -> None:
    measures = result.pick(benchmark, case)
    for at, measure in enumerate(measures):
        speed = measure.timing.rows_per_second
        rates = [measure.timing.rows / second for second in measure.timing.seconds]
        spread = [[max(0, speed - min(rates))], [max(0, max(rates) - speed)]]
        axis.barh(at, speed, color=COLOURS[Engine(measure.side)], xerr=spread, ecolor="#444444")
        axis.annotate(f"{speed:,.0f}", (speed, at), (4, 8), textcoords="offset points", fontsize=8)
    axis.set_yticks(range(len(measures)), [measure.side for measure in measures])
    axis.invert_yaxis()
    axis.margins(x=0.15)


def _keyed(axis: Any, result: Result) -> None:
    _bars(axis, result, keyed.NAME, keyed.LARGE)
    axis.set(title="Count and sum, 1e6 keys, 1e6 rows a batch", xlabel="rows/s")


def _words(axis: Any, result: Result) -> None:
    _bars(axis, result, words.NAME, words.CASE)
    axis.set(title="Word frequency in windows of 30 s", xlabel="sentences/s (140 bytes)")


def _growth(axis: Any, result: Result) -> None:
    for side in in_order(measure.side for measure in result.pick(growth.NAME)):
        timings = [result.timing(growth.NAME, growth.case(size), side) for size in growth.SIZES]
        medians = [timing.median * 1000 for timing in timings]
        low = [min(timing.seconds) * 1000 for timing in timings]
        high = [max(timing.seconds) * 1000 for timing in timings]
        colour = COLOURS[Engine(side)]
        axis.plot(growth.SIZES, medians, "o-", color=colour, label=side)
        axis.fill_between(growth.SIZES, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.legend()
    axis.set(title="A batch of 1e5 rows", xlabel="rows in the state", ylabel="ms a batch")


def _overhead(axis: Any, result: Result) -> None:
    policies = list(Checkpoints)
    for at, policy in enumerate(policies):
        measures = [measure for measure in result.pick(overhead.NAME) if measure.side == policy]
        speeds = [measure.timing.rows_per_second for measure in measures]
        mean = pooled(measures).rows_per_second
        axis.bar(at, mean, color=COLOURS[policy], alpha=0.85)
        axis.plot([at] * len(speeds), speeds, ".", color="#222222", markersize=5)
        lost = overhead.cost(result, policy)
        axis.annotate(
            f"{-lost:+.1%}" if lost else "",
            (at, 0),
            (0, 6),
            textcoords="offset points",
            ha="center",
            color="white",
        )
    axis.set_xticks(range(len(policies)), [str(policy) for policy in policies])
    axis.set(title="Checkpoints every 5 s", ylabel="rows/s")

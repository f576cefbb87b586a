"""A run of Linear Road as a picture: input rate, throughput and delay over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch_bench import plot
from anabranch_bench.lrb.run import Outcome
from anabranch_linearroad.answers import Delays
from anabranch_linearroad.clock import SLICES
from anabranch_linearroad.copies import rows_before

_OURS, _INPUT, _TAIL = "#0b6e99", "#8a8f98", "#d9822b"
_BIN = 1.0  # seconds


def write(outcome: Outcome, delays: Delays, input_: Path, path: Path) -> None:
    """Draw the paced part of a run into a PNG, in the form of the paper's figures 6 and 7."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(plot.STYLE):
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(7.5, 5.6), sharex=True)
        _rates(above, outcome, input_)
        _delays(below, outcome, delays)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _rates(axis: Any, outcome: Outcome, input_: Path) -> None:
    first, last = outcome.window.paced_from, outcome.window.end
    before = rows_before(str(input_)) * outcome.xways
    edges = np.arange(first, last + 1)
    fed = np.diff(before[np.minimum(edges * SLICES, len(before) - 1)]) * outcome.clock.pace
    axis.plot((edges[:-1] - first) / 60, fed, color=_INPUT, label="input")
    ends = np.array([outcome.clock.second_at(batch.at) for batch in outcome.paced])
    rows = np.array([batch.rows for batch in outcome.paced], float)
    width = 5 * _BIN
    bins = np.arange(first, max(last, ends.max(initial=first)) + width, width)
    done, _ = np.histogram(ends, bins, weights=rows)
    axis.plot((bins[:-1] + width / 2 - first) / 60, done / width, color=_OURS, label="throughput")
    axis.set_ylim(bottom=0)
    axis.set(title=f"Linear Road, L = {outcome.xways}", ylabel="rows/s")
    axis.legend(loc="lower right")


def _delays(axis: Any, outcome: Outcome, delays: Delays) -> None:
    at = delays.slice / SLICES - outcome.window.paced_from
    which = (at // _BIN).astype(int)
    middle, tail, times = [], [], []
    for number in np.unique(which):
        some = _part(delays, which == number)
        times.append(number * _BIN / 60)
        middle.append(some.percentile(50) * 1000)
        tail.append(some.percentile(99) * 1000)
    axis.plot(times, tail, color=_TAIL, label="99th percentile", linewidth=0.9)
    axis.plot(times, middle, color=_OURS, label="median", linewidth=0.9)
    for limit in (700, 1459):
        axis.axhline(limit, color="#b5493c", linestyle=":", linewidth=0.8)
    axis.set_ylim(bottom=0)
    axis.set(xlabel="minutes", ylabel="ms from arrival to commit")
    axis.legend(loc="upper right")


def _part(delays: Delays, some: npt.NDArray[np.bool_]) -> Delays:
    return Delays(
        delays.kind[some],
        delays.slice[some],
        delays.seconds[some],
        delays.taken[some],
        delays.count[some],
    )

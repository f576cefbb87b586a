"""The curves of a result as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabranch_bench import plot
from anabranch_bench.fragments.result import FragmentsResult, Panel
from anabranch_bench.harness import in_order

_COLOURS = ("#0b6e99", "#d9822b", "#8a8f98", "#b5493c", "#4c8c4a", "#7a5195")
_CROWDED = 30
"""Axes that span more than so many times their least value have labels at powers of ten alone."""
_MODEL = "model"
"""Curves with this in their names were computed, and are dashed."""


def draw(result: FragmentsResult, path: Path) -> None:
    """Draw every panel that has a curve into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [name for name in result.panels if name in result.curves]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(plot.STYLE):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(4.6 * columns, 3.4 * rows), squeeze=False
        )
        for axis, name in zip(axes.flat, shown, strict=False):
            _draw(axis, result.panels[name], result.curves[name])
        for axis in axes.flat[len(shown) :]:
            axis.remove()
        kind = ", quick run" if result.quick else ""
        figure.suptitle(
            f"anabranch {result.versions['anabranch']}: {result.machine['cores']} cores, "
            f"{result.machine['cpu']}{kind}",
            fontsize=8,
        )
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def _draw(axis: Any, panel: Panel, curves: Mapping[str, Mapping[float, float]]) -> None:
    families = in_order(_family(curve) for curve in curves)
    for curve, points in curves.items():
        family = [each for each in curves if _family(each) == _family(curve)]
        xs = sorted(points)
        axis.plot(
            xs,
            [points[x] for x in xs],
            "--" if _MODEL in curve else "o-",
            color=_COLOURS[families.index(_family(curve)) % len(_COLOURS)],
            # The last of a family, which is that of most instances, is the strongest.
            alpha=(1 + family.index(curve)) / len(family),
            label=curve,
            markersize=3.5,
            linewidth=1.4,
        )
    axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    if panel.logarithmic:
        axis.set(xscale="log", yscale="log")
        for each in (axis.xaxis, axis.yaxis):
            for form in (each.set_major_formatter, each.set_minor_formatter):
                form(lambda value, _: f"{value:g}")
            each.set_tick_params(which="both", labelsize=7)
        axis.set_xticks(sorted(next(iter(curves.values()))), minor=False)
        axis.set_xticks([], minor=True)
        low, high = axis.get_ylim()
        if high > _CROWDED * low:
            axis.tick_params(axis="y", which="minor", labelleft=False)
    else:
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axis.legend(fontsize=7)


def _family(curve: str) -> str:
    """Curves with the same colour: those that differ in a number, and a model and its trials."""
    return curve.removesuffix(f", {_MODEL}").rstrip("0123456789").removesuffix(", ")

"""What the parts of the benchmark of fragments find: curves, and the tables that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console

from anabranch_bench.harness import Bar, Grid, Measure, Result, Timing, in_order


@dataclass(frozen=True)
class Panel:
    """A picture of some curves over the same axes."""

    title: str
    x: str
    y: str
    logarithmic: bool = False
    """Whether both axes are."""


@dataclass
class FragmentsResult(Result):
    """A result with curves: by panel, and by the name of the curve."""

    panels: Mapping[str, Panel] = field(default_factory=dict)
    curves: dict[str, dict[str, dict[float, float]]] = field(default_factory=dict)
    more: list[Grid] = field(default_factory=list)
    """Tables that have no picture."""

    def grids(self) -> list[Grid]:
        """A table for each panel that has a curve, and the others."""
        return [
            _grid(self.panels[name], self.curves[name])
            for name in self.panels
            if name in self.curves
        ] + self.more

    def to_json(self) -> dict[str, Any]:
        """The whole result, with its tables."""
        return super().to_json() | {"tables": [grid.to_json() for grid in self.grids()]}


@dataclass
class Bench:
    """Where a part writes what it finds."""

    result: FragmentsResult
    console: Console

    @property
    def quick(self) -> bool:
        """Whether to be done in a few minutes rather than to be exact."""
        return self.result.quick

    def point(self, panel: str, curve: str, x: float, y: float) -> None:
        """Keep a point of a curve."""
        self.result.curves.setdefault(panel, {}).setdefault(curve, {})[x] = y

    def timed(self, panel: str, curve: str, x: float, seconds: Sequence[float], size: int) -> float:
        """Keep how long some bytes took. The median is a point of a curve, and is returned."""
        case = f"{self.result.panels[panel].x} {x:g}"
        timing = Timing(size, tuple(seconds))
        self.result.measures.append(Measure(panel, case, curve, timing))
        self.point(panel, curve, x, median(seconds))
        return median(seconds)

    def at_least(self, name: str, value: float, bar: float) -> None:
        """Keep a figure that has to reach a bar."""
        self.result.bars.append(Bar(name, value, bar, at_least=True))

    def at_most(self, name: str, value: float, bar: float) -> None:
        """Keep a figure that must not pass a bar."""
        self.result.bars.append(Bar(name, value, bar, at_least=False))

    def note(self, text: str) -> None:
        """Keep a sentence about the figures."""
        self.result.notes.append(text)

    def say(self, text: str) -> None:
        """Tell whoever waits what is measured now."""
        self.console.print(text, style="dim", highlight=False)


def _grid(panel: Panel, curves: Mapping[str, Mapping[float, float]]) -> Grid:
    xs = sorted({x for points in curves.values() for x in points})
    rows = [
        (f"{x:g}", *(f"{points[x]:.4g}" if x in points else "" for points in curves.values()))
        for x in xs
    ]
    return Grid(f"{panel.title}: {panel.y}", (panel.x, *in_order(curves)), rows)

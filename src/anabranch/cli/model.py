"""What the models say of fragments: a table, a picture, and what would be chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from anabranch.errors import PlanError
from anabranch.fragments import Adapt, Choice, Measured, choose, models
from anabranch.fragments.adapt import Expected, expect

_M = (1, 2, 4, 10, 16)
_K = (1, 2, 4, 10, 20)


@dataclass(frozen=True)
class Modelled:
    """What was given, what would be chosen for it, and what else there is."""

    measured: Measured
    adapt: Adapt
    choice: Choice
    options: tuple[Expected, ...]

    @classmethod
    def of(
        cls, measured: Measured, adapt: Adapt, data: Sequence[int], parity: Sequence[int]
    ) -> Modelled:
        """Of these m and k, or some usual ones, those that fit on the nodes; and of the choice."""
        choice = choose(measured, adapt)
        shapes = {(m, k) for m in data or _M for k in parity or _K if m + k <= measured.nodes}
        if (data or parity) and not shapes:
            raise PlanError(
                f"none of the m and k fits on {measured.nodes} nodes; give smaller ones, or more "
                "--nodes"
            )
        shapes.add((choice.data, choice.parity))
        options = tuple(expect(measured, m, k) for m, k in sorted(shapes))
        return cls(measured, adapt, choice, options)

    @property
    def fastest_store(self) -> float:
        """Equation 4: a shared store that gives more in a second recovers faster than the choice.

        It has one link for all states that are recovered at once.
        """
        return self.measured.at_once * self.measured.size / self.choice.expected.recovery

    def retrieval(self, one: Expected) -> float:
        """Seconds to retrieve a state, of those to recover it."""
        measured = self.measured
        return models.retrieval(
            measured.size,
            one.data,
            one.parity,
            up=measured.up,
            down=measured.down,
            at_once=measured.at_once,
        )


def show(found: Modelled) -> None:
    """Print the table, the choice and its reason."""
    console = Console(highlight=False)
    table = Table("m + k", "retrieval", "recovery", "saving", "overhead", "lost", "", box=None)
    for column in table.columns[:-1]:
        column.justify = "right"
    chosen = (found.choice.data, found.choice.parity)
    for one in found.options:
        table.add_row(
            f"{one.data} + {one.parity}",
            f"{found.retrieval(one):.3g} s",
            f"{one.recovery:.3g} s",
            f"{one.saving:.3g} s",
            f"{100 * one.overhead:.0f} %",
            f"{one.unreliability:.1g}",
            "chosen" if (one.data, one.parity) == chosen else "",
        )
    console.print(table)
    console.print()
    console.print(found.choice.reason, soft_wrap=True)
    console.print(
        f"Stripes of {decimal(found.choice.stripe)}. A shared store recovers faster if its link "
        f"gives more than {decimal(round(found.fastest_store))} in a second.",
        soft_wrap=True,
    )


def draw(found: Modelled, path: Path) -> None:
    """Draw retrieval, saving, losses and storage by k, with a line for each m."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlanError(
            "--plot needs matplotlib; install it with 'pip install anabranch-bench'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7))
    panels: dict[str, Callable[[Expected], float]] = {
        "retrieval, s": found.retrieval,
        "saving, s": lambda one: one.saving,
        "probability of loss": lambda one: max(one.unreliability, 1e-18),
        "stored on top of the state": lambda one: one.overhead,
    }
    for axis, (name, value) in zip(axes.flat, panels.items(), strict=True):
        for m, line in _by_m(found.options):
            axis.plot([one.parity for one in line], list(map(value, line)), "o-", label=f"m = {m}")
        best = found.choice.expected
        axis.plot([best.parity], [value(best)], "k*", markersize=12, label="chosen")
        axis.set_xlabel("k")
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes.flat[2].set_yscale("log")
    axes.flat[0].legend(fontsize="small")
    measured = found.measured
    figure.suptitle(f"{decimal(measured.size)} on {measured.nodes} nodes, p = {measured.p:.2g}")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    click.echo(f"The picture is in {path}.", err=True)


def _by_m(options: Iterable[Expected]) -> list[tuple[int, list[Expected]]]:
    lines: dict[int, list[Expected]] = {}
    for one in options:
        lines.setdefault(one.data, []).append(one)
    return sorted(lines.items())

"""The output of the demo: a panel in a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Snapshot:
    """The demo at one moment."""

    seconds: float
    version: int
    words: int
    words_per_second: float
    history: Sequence[float]
    """Words per second of the last batches."""
    latency: tuple[float, float, float]
    """Seconds a batch took: median, 95th and 99th percentile."""
    state_rows: int
    state_bytes: int
    checkpoint: int
    top: Sequence[tuple[str, int]]


def line(now: Snapshot) -> str:
    """Everything in one line of text."""
    p50, p95, p99 = (f"{seconds * 1000:.0f}" for seconds in now.latency)
    top = " ".join(f"{word}={count:,}" for word, count in now.top[:5])
    return (
        f"{now.seconds:5.1f} s  batch {now.version}  {now.words_per_second:,.0f} words/s  "
        f"p50/p95/p99 {p50}/{p95}/{p99} ms  state {now.state_rows:,} words, "
        f"{decimal(now.state_bytes)}  {top}"
    )


def panel(now: Snapshot) -> RenderableType:
    """The live view."""
    figures = Table.grid(padding=(0, 2))
    figures.add_column(style="dim")
    figures.add_column(justify="right", style="bold")
    p50, p95, p99 = (f"{seconds * 1000:,.0f} ms" for seconds in now.latency)
    stored = str(now.checkpoint) if now.checkpoint >= 0 else "none yet"
    for name, value in (
        ("throughput", f"{now.words_per_second:,.0f} words/s"),
        ("counted", f"{now.words:,} words"),
        ("batch latency p50", p50),
        ("p95", p95),
        ("p99", p99),
        ("state", f"{now.state_rows:,} words"),
        ("state size", decimal(now.state_bytes)),
        ("batch", str(now.version)),
        ("last checkpoint", stored),
    ):
        figures.add_row(name, value)
    sides = Table.grid(padding=(0, 4))
    sides.add_row(Group(figures, Text(), Text(sparkline(now.history), style="cyan")), _top(now))
    return Panel(sides, title="anabranch: live word count", subtitle=f"{now.seconds:.0f} s")


def _top(now: Snapshot) -> Table:
    table = Table("word", "count", "", box=None, header_style="dim")
    most = now.top[0][1] if now.top else 1
    for word, count in now.top:
        table.add_row(word, f"{count:,}", ProgressBar(total=most, completed=count, width=24))
    return table


def sparkline(values: Sequence[float]) -> str:
    """Numbers as a row of little bars.

    >>> sparkline([0, 1, 2, 4])
    '▁▂▄█'
    """
    most = max(values, default=0) or 1
    return "".join(_BLOCKS[min(7, int(value / most * 7.99))] for value in values)

"""The state benchmarks: ``anabranch bench state``."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from anabranch_bench import growth, keyed, overhead, words
from anabranch_bench.harness import Result
from anabranch_bench.runner import Runner

BENCHMARKS: dict[str, Callable[[Runner], None]] = {
    keyed.NAME: keyed.run,
    words.NAME: words.run,
    growth.NAME: growth.run,
    overhead.NAME: overhead.run,
}
"""The benchmarks of the suite by name, in the order in which they run."""


def run(
    *,
    quick: bool = False,
    seed: int = 7,
    only: Sequence[str] = (),
    console: Console | None = None,
) -> Result:
    """Run the benchmarks, or only some of them; every side alone, one after the other."""
    result = Result("state", seed, quick)
    folder = Path(tempfile.mkdtemp(prefix="anabranch-bench-"))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches"),
        TimeElapsedColumn(),
    )
    try:
        console = console or Console()
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            for name in only or BENCHMARKS:
                BENCHMARKS[name](Runner(result, folder, progress))
                shutil.rmtree(folder, ignore_errors=True)  # the next one brings its own input
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result

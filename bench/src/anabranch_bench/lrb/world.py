"""What a run of Linear Road is over: the input, its history, and what is expected."""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import Progress

from anabranch_linearroad import (
    Expected,
    Replicas,
    Traffic,
    Verdict,
    check,
    history_table,
    make_history,
    read_history,
    read_input,
    reference,
    replicate,
    write_history,
    write_input,
)
from anabranch_linearroad.answers import Answers
from anabranch_linearroad.clock import SLICES
from anabranch_linearroad.copies import rows_before
from anabranch_linearroad.feeder import Feed
from anabranch_linearroad.ledger import Ledger
from anabranch_linearroad.rows import Answer

_MINUTES_BACK = 5
"""What is told in a minute depends on so many before it."""
_AT_ONCE = 10_000_000
"""Answers that are checked together: those of hundreds of expressways do not fit into memory."""


@dataclass(frozen=True)
class World:
    """An input of one or more expressways, which can be taken many times."""

    input: Path
    history: pa.Table
    kept: Path
    """A folder for what is worked out from the input."""

    @classmethod
    def generated(cls, seed: int, seconds: int, progress: Progress) -> World:
        """The traffic of a seed; made once and kept for other runs."""
        folder = _cache() / f"seed-{seed}-{seconds}"
        if not (folder / "history.parquet").exists():
            task = progress.add_task("traffic", total=seconds)
            write_input(
                folder / "input",
                Traffic(seed, seconds=seconds).minutes(),
                tick=lambda second: progress.update(task, completed=second),
            )
            write_history(
                folder / "history.parquet", make_history(read_input(folder / "input"), seed)
            )
        return cls(folder / "input", read_history(folder / "history.parquet"), folder)

    @classmethod
    def given(cls, source: Path, history: Path | None, folder: Path) -> World:
        """Any input in the format of the specification, Parquet or CSV."""
        paid = history_table() if history is None else read_history(history)
        # In one form, whose minutes can be read one by one.
        write_input(folder / "input", read_input(source))
        return cls(folder / "input", paid, folder)

    @property
    def seconds(self) -> int:
        """How long the stream is."""
        return (len(rows_before(str(self.input))) - 1) // SLICES

    def replicas(self, copies: int) -> Replicas:
        """The input many times over."""
        return replicate(self.input, copies)

    def ledger(self, copies: int, folder: Path) -> Ledger:
        """The history of all copies, to be looked up."""
        spans = self.replicas(copies).spans
        return Ledger.write(self.history, folder, vehicles=spans["VID"], expressways=spans["XWay"])

    def feed(self, copies: int) -> Feed:
        """What feeds all copies."""
        spans = self.replicas(copies).spans
        return Feed(
            str(self.input),
            copies=copies,
            vehicles=spans["VID"],
            requests=spans["QID"],
            expressways=spans["XWay"],
        )

    def expected(self, folder: Path | None, progress: Progress) -> Expected:
        """The answers to one copy; worked out once, which takes minutes."""
        place = folder or self.kept / "expected"
        if not (place / "requests.parquet").exists():
            task = progress.add_task("reference", total=None)
            reference(read_input(self.input), self.history).write(place)
            progress.remove_task(task)
        return Expected.read(place)

    def verdict(
        self, answers: Answers, expected: Expected, copies: int, start: int, end: int
    ) -> Verdict:
        """Judge a run from ``start`` to ``end``.

        One that did not start at 0 knows nothing of what was before: it is judged from when that
        no longer matters, and balances, for which it always does, are left out.
        """
        wanted = pc.scalar(True)
        if start > 0:
            timely = pc.field("Time") >= start + 60 * _MINUTES_BACK
            wanted = timely & (pc.field("Type") != int(Answer.BALANCE))
        due = expected.answers.filter(wanted & (pc.field("Time") < end))
        replicas = self.replicas(copies)
        verdicts = [
            check(answers.during(seconds, wanted), replicas.expected(piece))
            for seconds, piece in replace(expected, answers=due).pieces(_AT_ONCE // copies or 1)
        ]
        return reduce(operator.add, verdicts)


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "anabranch" / "linearroad"

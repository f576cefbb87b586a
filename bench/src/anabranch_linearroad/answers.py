"""The answers of a run in the folder that it wrote, and when each of them was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anabranch_linearroad.clock import ALWAYS, SLICES, Clock, Seconds
from anabranch_linearroad.files import shaped, write_answers
from anabranch_linearroad.rows import ANSWERS, Answer
from anabranch_linearroad.verdict import LIMITS

Array = npt.NDArray[Any]

_FIRST_TYPE = 8  # types are below


@dataclass(frozen=True)
class Answers:
    """A folder of answers, the times at which versions were committed, and the clock of the feeder.

    An answer is given when the batch is committed that has it.
    """

    folder: Path
    commits: Mapping[int, float]
    clock: Clock

    def parts(self) -> Iterator[tuple[int, Path]]:
        """The version and the file of each part."""
        for file in sorted(self.folder.glob("part-*.parquet")):
            yield int(file.stem.split("-")[-2]), file

    def delays(self) -> Delays:
        """How long every answer took to a row that came while the clock was running."""
        groups = []
        for version, file in self.parts():
            table = pq.read_table(file, columns=["Type", "Slice"])
            kind, slice_ = (table[name].to_numpy().astype(np.int64) for name in table.column_names)
            code, count = np.unique(slice_ * _FIRST_TYPE + kind, return_counts=True)
            groups.append((code, np.full(len(code), self.commits.get(version, np.nan)), count))
        code, commit, count = (
            np.concatenate([np.empty(0), *(group[i] for group in groups)]) for i in range(3)
        )
        slice_, kind = np.divmod(code.astype(np.int64), _FIRST_TYPE)
        paced = (slice_ >= self.clock.second * SLICES) & ~np.isnan(commit)
        kind, slice_, commit, count = (each[paced] for each in (kind, slice_, commit, count))
        taken = self.clock.second_at(commit) - slice_ // SLICES
        return Delays(
            kind, slice_, commit - self.clock.arrival(slice_), taken, count.astype(np.int64)
        )

    def timed(self, seconds: Seconds = ALWAYS) -> Iterator[pa.Table]:
        """The answers of each part with ``Emit``, or of those with some from given seconds.

        What came before the clock was started has none.
        """
        for version, file in self.parts():
            first, last = self._times.get(file, (None, None))
            if first is not None and last is not None and not seconds.overlaps(first, last):
                continue
            table = pq.read_table(file)
            at = self.commits.get(version, np.nan)
            unpaced = table["Slice"].to_numpy() < self.clock.second * SLICES
            emit = np.full(len(table), self.clock.second_at(at))
            times = pa.array(emit, mask=unpaced | np.isnan(emit))
            yield shaped(table.append_column("Emit", times), ANSWERS, file)

    def during(self, seconds: Seconds, where: pc.Expression | None = None) -> pa.Table:
        """The answers to what was in some seconds of the stream, or some of them."""
        wanted = seconds.of("Time") if where is None else seconds.of("Time") & where
        tables = [table.filter(wanted) for table in self.timed(seconds)]
        return pa.concat_tables([ANSWERS.empty_table(), *tables])

    @cached_property
    def _times(self) -> dict[Path, tuple[int, int]]:
        """The first and the last ``Time`` in each file, as far as that can be told."""
        found = {}
        for _, file in self.parts():
            described = pq.read_metadata(file)
            at = described.schema.names.index("Time")
            groups = [described.row_group(i).column(at) for i in range(described.num_row_groups)]
            of = [g.statistics for g in groups if g.is_stats_set]
            if len(of) == len(groups) and all(s.has_min_max and not s.null_count for s in of):
                found[file] = (min(s.min for s in of), max(s.max for s in of))
        return found

    def write(self, folder: Path) -> int:
        """Write the answers as the specification has them; returns how many."""
        total = 0
        for number, table in enumerate(self.timed()):
            write_answers(folder / f"part-{number:06d}.parquet", table)
            total += len(table)
        return total


@dataclass(frozen=True)
class Delays:
    """Answers in groups of the same type, slice and batch."""

    kind: Array
    slice: Array
    seconds: Array
    """From the arrival of the row to the commit of its answer, in the time of the world."""
    taken: Array
    """From the second of the row to that of its answer, in the time of the stream."""
    count: Array

    @property
    def total(self) -> int:
        """How many answers there are."""
        return int(self.count.sum())

    def of(self, kind: Answer) -> Delays:
        """Those of one type."""
        some = self.kind == kind
        return Delays(*(getattr(self, name)[some] for name in self.__dataclass_fields__))

    def percentile(self, percent: float) -> float:
        """The delay that this share of the answers stays within, in seconds."""
        if not self.total:
            return float("nan")
        order = np.argsort(self.seconds)
        upto = np.cumsum(self.count[order])
        at = int(np.searchsorted(upto, percent / 100 * self.total))
        return float(self.seconds[order][min(at, len(order) - 1)])

    @property
    def late(self) -> int:
        """How many answers were given after the limit of their type."""
        limits = np.array([LIMITS[kind] for kind in Answer])
        return int(self.count[self.taken > limits[self.kind]].sum())

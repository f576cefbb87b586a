"""Many expressways out of one: copies with numbers of their own.

Copy ``c`` of an input has all its vehicles, requests and expressways shifted by ``c`` times as many
as there are, so that nothing of two copies ever meets, and the answers are shifted alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.errors import PlanError
from anabranch_linearroad.expected import Expected
from anabranch_linearroad.files import read_columns, read_input
from anabranch_linearroad.rows import INPUT, UNUSED

Array = npt.NDArray[Any]

_SHIFTED = ("VID", "QID", "XWay")


@dataclass(frozen=True)
class Replicas:
    """Copies of an input, which are made as they are asked for; see :func:`replicate`."""

    source: pa.Table | Path
    copies: int
    spans: dict[str, int]
    """How far each copy is from the one before, per column that is shifted."""

    def seconds(
        self, start: int = 0, end: int | None = None, *, copies: range | None = None
    ) -> Iterator[tuple[int, pa.Table]]:
        """Each second from ``start`` up to, and without, ``end``, and its rows of all copies.

        Seconds in which nothing happens have a table without rows. Several feeders share the work
        by taking some of the ``copies`` each.
        """
        rows = self._window(start, end)
        columns = {name: rows[name].to_numpy() for name in INPUT.names}
        stop = int(columns["Time"][-1]) + 1 if len(rows) else start
        times = np.arange(start, (stop if end is None else end) + 1)
        cuts = np.searchsorted(columns["Time"], times).tolist()
        which = np.arange(self.copies) if copies is None else np.asarray(copies)
        for second, at, to in zip(times.tolist(), cuts, cuts[1:], strict=False):
            here = {name: column[at:to] for name, column in columns.items()}
            yield second, self._copied(here, which)

    def history(self, history: pa.Table) -> Iterator[pa.Table]:
        """The history of each copy in turn."""
        if (most := pc.max(history["VID"]).as_py() or 0) >= self.spans["VID"]:
            raise PlanError(f"history: VID {most} is not in the input, and would belong to a copy")
        for copy in range(self.copies):
            yield self._shifted(history, copy)

    def expected(self, expected: Expected) -> Expected:
        """What is expected of all copies, from what is expected of one."""
        return Expected(
            *(
                pa.concat_tables([self._shifted(table, copy) for copy in range(self.copies)])
                for table in (expected.answers, expected.charges, expected.requests)
            )
        )

    def _window(self, start: int, end: int | None) -> pa.Table:
        if isinstance(self.source, Path):
            return read_input(self.source, start, end).combine_chunks()
        times = self.source["Time"].to_numpy()
        at = int(np.searchsorted(times, start))
        to = len(times) if end is None else int(np.searchsorted(times, end))
        return self.source.slice(at, max(to - at, 0)).combine_chunks()

    def _copied(self, columns: dict[str, Array], copies: Array) -> pa.Table:
        arrays = []
        for field in INPUT:
            column = columns[field.name]
            if field.name in _SHIFTED:
                steps = (copies * self.spans[field.name]).astype(column.dtype)
                wide = np.where(column == UNUSED, 0, 1).astype(column.dtype) * steps[:, None]
                wide += column
            else:
                wide = np.broadcast_to(column, (len(copies), len(column)))
            arrays.append(pa.array(wide.reshape(-1)))
        return pa.table(arrays, schema=INPUT)

    def _shifted(self, table: pa.Table, copy: int) -> pa.Table:
        for at, field in enumerate(table.schema):
            if field.name in _SHIFTED:
                by = pa.scalar(copy * self.spans[field.name], field.type)
                # Nulls stay nulls, as in answers that have no such number.
                table = table.set_column(at, field, pc.add(table[field.name], by))
        return table


def replicate(source: pa.Table | Path | str, copies: int) -> Replicas:
    """Take an input, a table or where one is stored, ``copies`` times.

    >>> from anabranch_linearroad.rows import input_table
    >>> rows = input_table([{"Type": 2, "Time": 1, "VID": 3, "QID": 0}])
    >>> [(second, t["VID"].to_pylist()) for second, t in replicate(rows, 3).seconds()]
    [(0, []), (1, [3, 7, 11])]
    """
    base = Path(source) if isinstance(source, str | Path) else source
    rows = read_columns(base, _SHIFTED) if isinstance(base, Path) else base
    spans = {name: (pc.max(rows[name]).as_py() or 0) + 1 for name in _SHIFTED}
    for name, span in spans.items():
        most = np.iinfo(INPUT.field(name).type.to_pandas_dtype()).max
        if copies < 1 or span * copies > most:
            raise PlanError(f"{copies} copies: give 1 to {most // span}, {name} goes up to {most}")
    return Replicas(base, copies, spans)

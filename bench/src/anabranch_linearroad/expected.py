"""What a run is expected to answer: the answers, and what else it takes to judge others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anabranch_linearroad.clock import Seconds
from anabranch_linearroad.rows import Answer

CHARGES = pa.schema([("VID", pa.int32()), ("Time", pa.int32()), ("Toll", pa.int32())])
"""What each vehicle was charged, and when."""

REQUESTS = pa.schema([("QID", pa.int32()), ("VID", pa.int32()), ("Time", pa.int32())])
"""Who asked for a balance; an answer names only the request."""


@dataclass(frozen=True)
class Expected:
    """The right answers; of balances those of the second in which they were asked for."""

    answers: pa.Table
    charges: pa.Table
    """The charges to each vehicle, sorted by vehicle and time."""
    requests: pa.Table

    def pieces(self, most: int) -> Iterator[tuple[Seconds, Expected]]:
        """All of it, some seconds at a time, with about ``most`` answers to each.

        The first piece is of all time before it too, and the last one of all time after it, so that
        any answer at all belongs to one of them.
        """
        times = np.sort(self.answers["Time"].to_numpy())
        cuts = np.unique(times[most::most]).tolist()
        for since, until in pairwise([None, *cuts, None]):
            seconds = Seconds(since, until)
            yield seconds, self._of(seconds)

    def _of(self, seconds: Seconds) -> Expected:
        answers = self.answers.filter(seconds.of("Time"))
        balances = answers.filter(pc.field("Type") == int(Answer.BALANCE))
        asked = pc.field("QID").isin(balances["QID"].combine_chunks())
        requests = self.requests.filter(asked)
        # A balance takes all charges before it, but only to the vehicle that asks.
        theirs = pc.field("VID").isin(requests["VID"].combine_chunks())
        found = (answers, self.charges.filter(theirs), requests)
        # Filters leave a chunk, mostly an empty one, of every chunk; copies would multiply them.
        return Expected(*(table.combine_chunks() for table in found))

    def write(self, folder: Path | str) -> None:
        """Keep it in a folder, since it takes minutes to compute."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, table in vars(self).items():
            pq.write_table(table, Path(folder) / f"{name}.parquet", compression="zstd")

    @classmethod
    def read(cls, folder: Path | str) -> Expected:
        """What :meth:`write` has kept."""
        names = ("answers", "charges", "requests")
        return cls(*(pq.read_table(Path(folder) / f"{name}.parquet") for name in names))

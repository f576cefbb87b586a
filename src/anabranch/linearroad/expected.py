"""What a run is expected to answer: the answers, and what else it takes to judge others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

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

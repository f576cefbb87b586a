"""A Delta table that holds every batch exactly once.

Each commit has the query's id and the version as Delta's own application transaction. A batch that
is already in the table is recognised by it and skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.errors import PlanError
from anabranch.spark.sinks.sink import Delivery
from anabranch.spark.types import arrow_schema

try:
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
except ImportError as error:
    raise PlanError(
        "to_delta() needs the deltalake package: pip install 'anabranch[delta]'"
    ) from error


@dataclass
class DeltaSink:
    """Appends to a Delta table; see :meth:`anabranch.Stream.to_delta`. The driver writes."""

    uri: str
    _pending: pa.Table | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"delta {self.uri}"

    def check(self, schema: StructType) -> None:
        """Every column needs an Arrow type."""
        arrow_schema(schema, where=f"sink {self!r}")

    def write(self, frame: DataFrame, delivery: Delivery) -> None:
        """Collect the rows in the driver."""
        self._pending = frame.toArrow()

    def commit(self, delivery: Delivery) -> None:
        """Append the rows, unless the table has this batch already."""
        rows, self._pending = self._pending, None
        if rows is None or self._has(delivery):
            return
        mark = CommitProperties(app_transactions=[Transaction(delivery.query, delivery.version)])
        write_deltalake(self.uri, rows, mode="append", commit_properties=mark)

    def _has(self, delivery: Delivery) -> bool:
        if not DeltaTable.is_deltatable(self.uri):
            return False
        last = DeltaTable(self.uri).transaction_version(delivery.query)
        return last is not None and last >= delivery.version

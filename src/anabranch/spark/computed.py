"""Rows that are computed before anything reads them, and never again."""

from __future__ import annotations

from pyspark import StorageLevel
from pyspark.sql import DataFrame


class Computed:
    """The rows of a DataFrame, computed now, partition by partition.

    They have no lineage. If some are lost with their node, the job that reads them fails. With
    :meth:`DataFrame.persist` Spark would compute them again, in the task that reads them.
    """

    def __init__(self, frame: DataFrame) -> None:
        self.frame = frame.localCheckpoint(True, StorageLevel.MEMORY_AND_DISK)
        """The rows, in the same partitions."""

    def release(self) -> None:
        """Release the rows. Nothing may read them afterwards."""
        self.frame._jdf.queryExecution().analyzed().rdd().unpersist(False)

"""Rows that were computed before anything reads them, and are never computed again."""

from __future__ import annotations

from pyspark import StorageLevel
from pyspark.sql import DataFrame


class Computed:
    """The rows of a DataFrame, computed now, partition by partition.

    They are cut off from what they were computed from. Would some be lost with their node, the job
    that reads them fails; with :meth:`DataFrame.persist` Spark would compute them again, inside
    whatever task reads them.
    """

    def __init__(self, frame: DataFrame) -> None:
        self.frame = frame.localCheckpoint(True, StorageLevel.MEMORY_AND_DISK)
        """The rows, in the same partitions."""

    def release(self) -> None:
        """Let go of the rows; nothing may read them any more."""
        self.frame._jdf.queryExecution().analyzed().rdd().unpersist(False)

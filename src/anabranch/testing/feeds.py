"""Streams for tests: every list of rows is one file, and every file is one batch."""

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from anabranch.spark.types import spark_schema


class Feed:
    """A folder that a file source reads, one file per micro-batch.

    Add batches before or while the query runs; rows are given as dictionaries or as a table.
    """

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.folder = folder
        self.schema = schema
        self.count = 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, *batches: pa.Table | Sequence[dict[str, object]]) -> None:
        """Add batches, in this order."""
        for batch in batches:
            table = (
                batch
                if isinstance(batch, pa.Table)
                else pa.Table.from_pylist(list(batch), schema=self.schema)
            )
            path = self.folder / f"{self.count:06d}.parquet"
            hidden = self.folder / f".{path.name}"
            pq.write_table(table.cast(self.schema), hidden)
            # The source takes files in the order of their times.
            os.utime(hidden, (1_700_000_000 + self.count, 1_700_000_000 + self.count))
            hidden.rename(path)
            self.count += 1

    def frame(self, spark: SparkSession) -> DataFrame:
        """The streaming DataFrame over the folder."""
        return (
            spark.readStream.schema(spark_schema(self.schema))
            .option("maxFilesPerTrigger", 1)
            .parquet(str(self.folder))
        )

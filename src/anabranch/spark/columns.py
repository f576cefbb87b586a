"""Columns by their exact names, which may have dots, stars and backticks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from pyspark import SparkContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import pandas_udf
from pyspark.sql.types import StructType
from pyspark.util import PythonEvalType

from anabranch.worker.packing import Batches


def column(name: str) -> Column:
    """The column of exactly this name."""
    return _column(name, SparkContext._jvm)


@lru_cache(1024)
def _column(name: str, jvm: object) -> Column:
    # Kept, because py4j calls a JVM eight times to make one, and every batch needs all columns.
    return F.col("`" + name.replace("`", "``") + "`")


def map_in_arrow(
    frame: DataFrame, function: Callable[[Batches], Batches], schema: StructType
) -> DataFrame:
    """``frame.mapInArrow(function, schema)``, which fails for columns with a dot in their name."""
    udf = pandas_udf(  # type: ignore[call-overload]
        function, returnType=schema, functionType=PythonEvalType.SQL_MAP_ARROW_ITER_UDF
    )
    arguments = udf(*[column(name) for name in frame.columns])
    return DataFrame(frame._jdf.mapInArrow(arguments._jc, False, None), frame.sparkSession)

"""Spark schemas as Arrow schemas and back, in the one form that state uses."""

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from anabranch.errors import PlanError


def arrow_schema(schema: StructType, *, where: str) -> pa.Schema:
    """The Arrow form of a Spark schema, timestamps in UTC whatever the session's time zone."""
    fields = []
    for field in schema.fields:
        try:
            fields.extend(to_arrow_schema(StructType([field]), timezone="UTC"))
        except (PySparkException, TypeError, NotImplementedError) as error:
            raise PlanError(
                f"{where}: column {field.name!r} has type {field.dataType.simpleString()}, "
                "which cannot be handed to Python; cast or drop it in a transform"
            ) from error
    return pa.schema(fields)


def spark_schema(schema: pa.Schema) -> StructType:
    """The Spark form of an Arrow schema, with every column nullable."""
    converted = from_arrow_schema(schema)
    for field in converted.fields:
        field.nullable = True
    return converted

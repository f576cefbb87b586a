"""Converting Spark schemas to Arrow schemas and back, in the form that state uses."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from anabranch.errors import PlanError

_SIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
}
_LONG = np.iinfo(np.int64)


def arrow_schema(schema: StructType, *, where: str) -> pa.Schema:
    """The Arrow form of a Spark schema, timestamps in UTC whatever the session's time zone."""
    fields = []
    for field in schema.fields:
        try:
            fields.extend(to_arrow_schema(StructType([field]), timezone="UTC"))
        except (PySparkException, TypeError, NotImplementedError) as error:
            raise PlanError(
                f"{where}: column {field.name!r} has type {field.dataType.simpleString()}, "
                "which Python workers cannot read; cast or drop it in a transform"
            ) from error
    return pa.schema(fields)


def spark_form(schema: pa.Schema) -> pa.Schema:
    """The Arrow schema with the nearest types that Spark has.

    Spark has no unsigned numbers: they become the next wider signed ones, 64 bits a decimal.
    """
    return pa.schema([field.with_type(_spark_type(field.type)) for field in schema])


def spark_schema(schema: pa.Schema) -> StructType:
    """The Spark form of an Arrow schema, with every column nullable."""
    fields = []
    for field in _nullable(spark_form(schema)):
        try:
            fields.extend(from_arrow_schema(pa.schema([field])).fields)
        except (PySparkException, TypeError, NotImplementedError) as error:
            raise PlanError(
                f"column {field.name!r} has the Arrow type {field.type}, which Spark does not "
                "have; give it another type"
            ) from error
    return StructType(fields)


def spark_rows(rows: pa.Table) -> pa.Table:
    """Rows of state in Spark's types, see :func:`spark_form`, with every column nullable.

    A time that means never, the least or greatest one, becomes null: neither Python nor SQL can
    show it.
    """
    form = _nullable(spark_form(rows.schema))
    columns = [
        _without_never(column) if types.is_timestamp(kind) else column.cast(kind)
        for column, kind in zip(rows.columns, form.types, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=form)


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])


def _spark_type(kind: pa.DataType) -> pa.DataType:
    if types.is_timestamp(kind):
        return pa.timestamp("us", tz=kind.tz)
    if types.is_dictionary(kind):
        return _spark_type(kind.value_type)
    if types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_fixed_size_list(kind):
        return pa.list_(_spark_type(kind.value_type))
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_spark_type(kind.value_type)))
    if types.is_struct(kind):
        return pa.struct([field.with_type(_spark_type(field.type)) for field in kind.fields])
    if types.is_map(kind):
        return pa.map_(_spark_type(kind.key_type), _spark_type(kind.item_type))
    return _SIGNED.get(kind, kind)


def _without_never(column: pa.ChunkedArray) -> pa.ChunkedArray:
    exact = column.cast(pa.timestamp("us", tz=column.type.tz))
    ticks = exact.cast(pa.int64())
    never = pc.or_(pc.equal(ticks, int(_LONG.min)), pc.equal(ticks, int(_LONG.max)))
    return pc.if_else(never, pa.scalar(None, exact.type), exact)

"""Keys in Spark: the normal form of each key, and its 64-bit hash.

Spark groups 0.0 with -0.0, every NaN with every other, and maps with the same entries in any
order. :class:`KeyHash` gives such values one form. They are one key here as well, and operators and
sinks get them as from Spark's own ``groupBy``.
"""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    CalendarIntervalType,
    DataType,
    DoubleType,
    FloatType,
    GeographyType,
    GeometryType,
    MapType,
    StringType,
    StructType,
    UserDefinedType,
    VariantType,
    YearMonthIntervalType,
)

from anabranch.errors import PlanError
from anabranch.spark.columns import column
from anabranch.spark.types import arrow_schema
from anabranch.state.hashing import can_hash


class KeyHash:
    """The normal form and the hash of the keys of frames with one schema, made once for all.

    Types that cannot be keys are refused with a :class:`~anabranch.errors.PlanError`.
    """

    def __init__(self, schema: StructType, keys: Sequence[str]) -> None:
        kinds = {name: _type(schema, name) for name in keys}
        for name, kind in kinds.items():
            _check(name, kind, kind)
        self._forms = {
            name: _normalised(column(name), kind)
            for name, kind in kinds.items()
            if _contains(kind, (FloatType, DoubleType, MapType))
        }
        self.column = F.xxhash64(*[_hashable(column(name), kinds[name]) for name in keys])
        """Spark's xxhash64 over the key columns of a :meth:`normalised` frame, as a signed long.

        Equal keys have equal hashes. Different keys may share one, and some always do, because
        Spark leaves nulls out: ``(null, 'a')`` and ``('a', null)``. State tables compare the keys
        themselves.
        """
        keyed = arrow_schema(StructType([schema[name] for name in keys]), where="the key")
        self.travels = not all(can_hash(field.type) for field in keyed)
        """Whether rows must carry their hash: it is a type that only Spark can hash."""
        self.plain = not self.travels and not self._forms
        """Whether keys can be hashed as they are, without Spark."""

    def normalised(self, frame: DataFrame) -> DataFrame:
        """The frame with key values that are equal to Spark in one form."""
        return frame.withColumns(self._forms) if self._forms else frame


def _type(schema: StructType, name: str) -> DataType:
    for field in schema.fields:
        if field.name == name:
            return field.dataType
    raise PlanError(f"no column {name!r} to key by; there are {schema.names}")


def _inner(kind: DataType) -> list[DataType]:
    if isinstance(kind, ArrayType):
        return [kind.elementType]
    if isinstance(kind, MapType):
        return [kind.keyType, kind.valueType]
    if isinstance(kind, StructType):
        return [field.dataType for field in kind.fields]
    return []


def _contains(kind: DataType, wanted: tuple[type[DataType], ...]) -> bool:
    return isinstance(kind, wanted) or any(_contains(inner, wanted) for inner in _inner(kind))


def _check(name: str, whole: DataType, kind: DataType) -> None:
    why = _refusal(kind)
    if why is not None:
        raise PlanError(f"cannot key by {name!r} of type {whole.simpleString()}: {why}")
    for inner in _inner(kind):
        _check(name, whole, inner)


def _refusal(kind: DataType) -> str | None:
    text = kind.simpleString()
    if isinstance(kind, StringType) and not kind.isUTF8BinaryCollation():
        return (
            f"strings that are equal under the collation {kind.collation} differ in their bytes; "
            "key by collation_key(...), or by the string collated UTF8_BINARY"
        )
    if isinstance(kind, VariantType | GeometryType | GeographyType):
        return f"Spark cannot group by {text}; key by what you extract from it"
    if isinstance(kind, YearMonthIntervalType | CalendarIntervalType):
        return f"Spark cannot hand {text} to Python; cast it to a number or a string"
    if isinstance(kind, UserDefinedType):
        return f"{text} is a user-defined type; key by the fields that it is made of"
    return None


def _normalised(column: Column, kind: DataType) -> Column:
    if isinstance(kind, FloatType | DoubleType):
        zero, nan = F.lit(0.0).cast(kind), F.lit(float("nan")).cast(kind)
        return F.when(column == zero, zero).when(F.isnan(column), nan).otherwise(column)
    if not _contains(kind, (FloatType, DoubleType, MapType)):
        return column
    if isinstance(kind, ArrayType):
        of = kind.elementType
        return F.transform(column, lambda element: _normalised(element, of))
    if isinstance(kind, MapType):
        return F.map_from_entries(_sorted_entries(column, kind))
    assert isinstance(kind, StructType)
    fields = [
        _normalised(column.getField(field.name), field.dataType).alias(field.name)
        for field in kind.fields
    ]
    return F.when(column.isNotNull(), F.struct(*fields))


def _sorted_entries(column: Column, kind: MapType) -> Column:
    entries = F.map_entries(column)

    def place(entry: Column, i: Column) -> Column:
        return F.struct(_normalised(entry["key"], kind.keyType).alias("key"), i.alias("i"))

    def entry_at(place: Column) -> Column:
        value = F.get(entries, place["i"])["value"]
        return F.struct(place["key"], _normalised(value, kind.valueType).alias("value"))

    # Values may be maps, which have no order: what is sorted are keys with their positions.
    return F.transform(F.array_sort(F.transform(entries, place)), entry_at)


def _hashable(column: Column, kind: DataType) -> Column:
    """The column with maps as lists of entries, because Spark cannot hash maps."""
    if not _contains(kind, (MapType,)):
        return column
    if isinstance(kind, ArrayType):
        of = kind.elementType
        return F.transform(column, lambda element: _hashable(element, of))
    if isinstance(kind, MapType):
        value = kind.valueType
        return F.transform(
            F.map_entries(column),
            lambda entry: F.struct(entry["key"], _hashable(entry["value"], value)),
        )
    assert isinstance(kind, StructType)
    return F.struct(*[_hashable(column.getField(f.name), f.dataType) for f in kind.fields])

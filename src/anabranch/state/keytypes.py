"""The Arrow types that can be key columns, and whether two types have the same keys."""

import pyarrow as pa
from pyarrow import types

from anabranch.errors import PlanError


def signature(column: str, kind: pa.DataType) -> str:
    """A text that is equal for types whose equal values are equal keys.

    The unit of a time counts; its time zone does not, nor do nullability, the width of string
    offsets, dictionaries, or the names that writers give to list elements.
    """
    return _signature(column, kind, kind)


def plain(kind: pa.DataType) -> pa.DataType:
    """The type of the same values without dictionaries and string views."""
    if types.is_dictionary(kind):
        return plain(kind.value_type)
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind.fields])
    if types.is_map(kind):
        return pa.map_(
            _plain_field(kind.key_field), _plain_field(kind.item_field), kind.keys_sorted
        )
    return kind


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values are strings of bytes or characters, of any length."""
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def has_long_offsets(kind: pa.DataType) -> bool:
    """Whether the Arrow arrays of a variable-length type have 64-bit offsets."""
    return bool(
        types.is_large_string(kind) or types.is_large_binary(kind) or types.is_large_list(kind)
    )


def is_fixed(kind: pa.DataType) -> bool:
    """Whether every value fits the same number of 64-bit words."""
    return bool(
        types.is_integer(kind)
        or types.is_boolean(kind)
        or types.is_float32(kind)
        or types.is_float64(kind)
        or types.is_temporal(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
    )


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain(field.type))


def _signature(column: str, whole: pa.DataType, kind: pa.DataType) -> str:
    kind = plain(kind)
    if types.is_string(kind) or types.is_large_string(kind):
        return "string"
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "binary"
    if types.is_timestamp(kind):
        return f"timestamp[{kind.unit}{', UTC' if kind.tz else ''}]"
    if types.is_list(kind) or types.is_large_list(kind):
        return f"list<{_signature(column, whole, kind.value_type)}>"
    if types.is_map(kind):
        key = _signature(column, whole, kind.key_type)
        return f"map<{key}, {_signature(column, whole, kind.item_type)}>"
    if types.is_struct(kind):
        parts = [f"{f.name!r}: {_signature(column, whole, f.type)}" for f in kind.fields]
        return f"struct<{', '.join(parts)}>"
    if is_fixed(kind):
        return str(kind)
    inside = "" if kind is whole or kind == whole else f" (in it: {kind})"
    raise PlanError(
        f"key column {column!r} has type {whole}{inside}, which cannot be a key; "
        "cast it to a string, binary, number or time, or to lists, structs and maps of those"
    )

"""The layout of a table as JSON, with which another process can make the same tables."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from anabranch.state import schema
from anabranch.state.capture import CheckpointSchema
from anabranch.state.schema import Column, StateSchema, StateType
from anabranch.state.table import TableLayout

_TYPES = schema.NUMBERS | {kind.arrow: kind for kind in (schema.string, schema.binary)}


def to_json(layout: TableLayout) -> dict[str, Any]:
    """A value for :mod:`json`, read back by :func:`from_json`."""
    return {
        "columns": CheckpointSchema.of(layout).to_json(),
        "defaults": [column.default for column in layout.values],
    }


def from_json(value: dict[str, Any]) -> TableLayout:
    """The layout that :func:`to_json` wrote; ValueError if it is none."""
    columns = CheckpointSchema.from_json(value["columns"])
    values = StateSchema(
        tuple(
            Column(field.name, _state_type(field.type), default)
            for field, default in zip(columns.values, value["defaults"], strict=True)
        )
    )
    return TableLayout(columns.key_layout(), values, columns.timers)


def _state_type(kind: pa.DataType) -> StateType:
    if pa.types.is_fixed_size_list(kind):
        return schema.vector(_state_type(kind.value_type), kind.list_size)
    if kind not in _TYPES:
        raise ValueError(f"{kind} is no type of a state column")
    return _TYPES[kind]

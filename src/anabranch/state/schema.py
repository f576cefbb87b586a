"""The columns of a state table, as an operator declares them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.errors import PlanError

RESERVED = "__"


@dataclass(frozen=True)
class StateType:
    """The type of a state column: a numpy number type, a string, or bytes.

    ``width`` is the number of values in a row; only :func:`vector` sets it.
    """

    name: str
    arrow: pa.DataType
    dtype: np.dtype[Any] | None
    width: int = 1

    @property
    def variable(self) -> bool:
        """Whether values have no fixed size and live in a heap."""
        return self.dtype is None

    def __repr__(self) -> str:
        return self.name if self.width == 1 else f"vector({self.name}, {self.width})"


def _fixed(name: str, arrow: pa.DataType, dtype: str) -> StateType:
    return StateType(name, arrow, np.dtype(dtype))


int8 = _fixed("int8", pa.int8(), "int8")
int16 = _fixed("int16", pa.int16(), "int16")
int32 = _fixed("int32", pa.int32(), "int32")
int64 = _fixed("int64", pa.int64(), "int64")
uint8 = _fixed("uint8", pa.uint8(), "uint8")
uint16 = _fixed("uint16", pa.uint16(), "uint16")
uint32 = _fixed("uint32", pa.uint32(), "uint32")
uint64 = _fixed("uint64", pa.uint64(), "uint64")
float32 = _fixed("float32", pa.float32(), "float32")
float64 = _fixed("float64", pa.float64(), "float64")
bool_ = _fixed("bool", pa.bool_(), "bool")
timestamp = _fixed("timestamp", pa.timestamp("us", tz="UTC"), "int64")
string = StateType("string", pa.string(), None)
binary = StateType("binary", pa.binary(), None)

NUMBERS = {
    kind.arrow: kind
    for kind in (
        int8,
        int16,
        int32,
        int64,
        uint8,
        uint16,
        uint32,
        uint64,
        float32,
        float64,
        bool_,
        timestamp,
    )
}
"""The types of fixed width by their Arrow types."""


def vector(of: StateType, width: int) -> StateType:
    """A fixed number of numbers in every row, such as the registers of a sketch."""
    if of.variable or of.width != 1 or width < 1:
        raise PlanError(f"vector({of!r}, {width}): needs a number type and a width of at least 1")
    return StateType(of.name, pa.list_(of.arrow, width), of.dtype, width)


@dataclass(frozen=True)
class Column:
    """One named state column. New rows start at ``default`` (null for strings and bytes)."""

    name: str
    type: StateType
    default: float | bool = 0


@dataclass(frozen=True)
class StateSchema:
    """The columns that an operator keeps for each key."""

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for column in self.columns:
            if column.name in seen:
                raise PlanError(f"state column {column.name!r} is declared twice")
            if column.name.startswith(RESERVED):
                raise PlanError(f"state column {column.name!r}: names with '__' are reserved")
            seen.add(column.name)

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns)

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(f"no state column {name!r}; there are {[c.name for c in self.columns]}")

    def __contains__(self, name: object) -> bool:
        return any(column.name == name for column in self.columns)

    def __repr__(self) -> str:
        return "StateSchema(" + ", ".join(f"{c.name} {c.type!r}" for c in self.columns) + ")"

    def arrow(self) -> list[pa.Field]:
        """The columns as Arrow fields, as they appear in checkpoints and state DataFrames."""
        return [pa.field(c.name, c.type.arrow, nullable=c.type.variable) for c in self.columns]

    def fingerprint(self) -> str:
        """A short text that differs when names, order or types differ."""
        text = ",".join(f"{c.name}:{c.type!r}" for c in self.columns)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def schema(**columns: StateType | Column) -> StateSchema:
    """Declare state columns by name.

    >>> schema(last=timestamp, times=int32)
    StateSchema(last timestamp, times int32)
    """
    return StateSchema(
        tuple(
            Column(name, given) if isinstance(given, StateType) else given
            for name, given in columns.items()
        )
    )

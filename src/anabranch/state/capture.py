"""The short, synchronous part of a checkpoint: rows copied out of a table at a version.

A :class:`TableCapture` copies them into a file, some at a time. Neither that nor a :class:`Capture`
shares memory with the table, so that the next batch can change it while they are stored.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import StateError
from anabranch.state.groups import KeyGroups
from anabranch.state.keys import KeyLayout
from anabranch.state.schema import StateType
from anabranch.units import Version

if TYPE_CHECKING:  # captures are read where there is no table, and need not load its kernels
    from anabranch.state.table import StateTable, TableLayout

Array = npt.NDArray[Any]

HASH, GROUP, DELETED, TIMER = "__hash", "__group", "__deleted", "__timer"

_CHUNK_ROWS, _CHUNK_BYTES = 1 << 18, 1 << 25
"""Rows gathered at a time: so few that memory for them, once used, is used again each time."""


@dataclass(frozen=True)
class CheckpointSchema:
    """The columns of an operator's checkpoints, which can be known without the operator.

    In a capture they are the key columns, the sub-key columns, those of ``bookkeeping``, and the
    value columns, in this order; a key column and a value column may have the same name.
    """

    keys: tuple[pa.Field, ...]
    sub: tuple[str, ...]
    values: tuple[pa.Field, ...]
    timers: bool
    key_groups: int

    @classmethod
    def of(cls, layout: TableLayout) -> CheckpointSchema:
        """The columns of the checkpoints of tables with this layout."""
        key = layout.key
        return cls(
            tuple(key.fields),
            tuple(key.sub),
            tuple(layout.values.arrow()),
            layout.timers,
            key.key_groups,
        )

    @property
    def bookkeeping(self) -> tuple[pa.Field, ...]:
        """The columns that are neither key nor value."""
        fields = [
            pa.field(HASH, pa.uint64(), nullable=False),
            pa.field(GROUP, pa.uint16(), nullable=False),
            pa.field(DELETED, pa.bool_(), nullable=False),
        ]
        return (*fields, pa.field(TIMER, pa.int64())) if self.timers else tuple(fields)

    @property
    def key_count(self) -> int:
        """How many columns a state key has, sub-keys included."""
        return len(self.keys) + len(self.sub)

    def arrow(self) -> pa.Schema:
        """The columns of a capture."""
        sub = [pa.field(name, pa.int64(), nullable=False) for name in self.sub]
        return pa.schema([*self.keys, *sub, *self.bookkeeping, *self.values])

    def key_layout(self) -> KeyLayout:
        """The layout of the keys in memory."""
        return KeyLayout(self.keys, self.sub, self.key_groups)

    def fingerprint(self) -> str:
        """A short text that differs when a checkpoint could not be read with these columns."""
        values = [(field.name, str(field.type)) for field in self.values]
        text = repr((self.key_layout().fingerprint(), values, self.timers))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def __str__(self) -> str:
        columns = [f"{field.name} {field.type}" for field in self.arrow()]
        return f"{', '.join(columns)} ({self.key_groups} key groups)"

    def to_json(self) -> dict[str, Any]:
        """A value for :mod:`json`, read back by :meth:`from_json`."""
        return {
            "arrow": base64.b64encode(self.arrow().serialize()).decode(),
            "keys": len(self.keys),
            "sub": len(self.sub),
            "timers": self.timers,
            "key_groups": self.key_groups,
            "fingerprint": self.fingerprint(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> CheckpointSchema:
        """The schema that :meth:`to_json` wrote; ValueError if it is none."""
        try:
            fields = list(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(value["arrow"]))))
            keys, sub = int(value["keys"]), int(value["sub"])
            timers, key_groups = bool(value["timers"]), int(value["key_groups"])
            names = tuple(field.name for field in fields[keys : keys + sub])
            values = tuple(fields[keys + sub + (4 if timers else 3) :])
            schema = cls(tuple(fields[:keys]), names, values, timers, key_groups)
        except (KeyError, TypeError, pa.ArrowException, OSError) as error:
            raise ValueError(f"not the schema of a checkpoint: {error}") from error
        if schema.fingerprint() != value.get("fingerprint"):
            raise ValueError(f"the schema of the checkpoint does not fit its fingerprint: {schema}")
        return schema


@dataclass(frozen=True)
class CaptureInfo:
    """All of a capture but its rows.

    ``base`` is None for a full capture. Otherwise the rows are those that changed since that
    version, deleted ones included: they have only a key, and their ``__deleted`` is set.
    ``groups`` are the groups captured, also those without rows.
    """

    operator: str
    instance: int
    version: Version
    base: Version | None
    groups: KeyGroups
    schema: CheckpointSchema


@dataclass(frozen=True)
class Capture(CaptureInfo):
    """The state of some key groups of an operator at a version, in full or what changed."""

    rows: pa.Table

    def __repr__(self) -> str:
        kind = "full" if self.base is None else f"since {self.base}"
        return (
            f"Capture({self.operator}[{self.instance}] at {self.version}, {kind}, "
            f"groups {self.groups}, {self.rows.num_rows} rows)"
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, some at a time."""
        yield from self.rows.to_batches()

    def select(self, groups: KeyGroups) -> Capture:
        """The same capture without the groups that are not in the set."""
        wanted = self.groups & groups
        if wanted == self.groups:
            return self
        of_rows = self.rows.column(self.schema.key_count + 1).to_numpy()
        return replace(self, groups=wanted, rows=self.rows.filter(pa.array(wanted.mask(of_rows))))

    def deleted(self) -> Array:
        """Which rows are deleted ones (bool)."""
        return cast(Array, self.rows.column(self.schema.key_count + 2).to_numpy())


@dataclass(frozen=True)
class TableCapture(CaptureInfo):
    """A capture whose rows are copied from a table while they are written, some at a time.

    They are in the order of the table: to gather them in that of their groups would take three
    times as long, in the one part of a checkpoint that a batch waits for.
    """

    table: StateTable = field(repr=False)
    whole: bool
    """Whether the table has rows of no other groups, apart from those that it sheds."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as they are in the table now, some at a time."""
        if self.base is None:
            yield from self._of(self.table.live_pieces(_CHUNK_ROWS), deleted=False)
            return
        changed, gone = self.table.dirty()
        yield from self._of([changed], deleted=False)
        yield from self._of([gone], deleted=True)

    def _of(self, pieces: Iterable[Array], *, deleted: bool) -> Iterator[pa.RecordBatch]:
        row = self.table.bytes // max(1, self.table.count)
        most = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // max(1, row)))
        held = np.empty(0, np.int64)
        for piece in pieces:
            some = piece
            if not self.whole or self.table.mixed:
                some = self.table.of_groups(piece, self.groups)
            held = np.concatenate([held, some]) if len(held) else some
            while len(held) >= most:
                yield from self._copied(held[:most], deleted)
                held = held[most:]
        if len(held):
            yield from self._copied(held, deleted)

    def _copied(self, rows: Array, deleted: bool) -> Iterator[pa.RecordBatch]:
        """Rows of the usual size in one batch, and in several if some are much longer."""
        for some in [rows] if deleted else _cut(rows, self.table.text_bytes(rows)):
            yield _gather(self.table, self.schema, some, deleted)


def capturing(
    table: StateTable,
    operator: str,
    instance: int,
    *,
    groups: KeyGroups,
    base: Version | None,
    whole: bool = False,
) -> TableCapture:
    """The rows of some groups at the version a table is in, or those changed since ``base``.

    ``base`` must be the version at which the table was last marked clean, or None for all rows;
    :class:`~anabranch.errors.StateError` otherwise. ``whole`` says that the table has rows of no
    other groups, apart from those that it sheds. The table is not marked clean by this, and must
    not change until the rows are copied.
    """
    if base is not None and table.clean_since != base:
        raise StateError(
            f"what changed since version {base} cannot be captured: the state table in "
            f"{table.folder} knows only what changed since version {table.clean_since}"
        )
    version = table.version if table.unfinished is None else table.unfinished
    schema = CheckpointSchema.of(table.layout)
    return TableCapture(operator, instance, version, base, groups, schema, table, whole)


def capture(
    table: StateTable,
    operator: str,
    instance: int,
    *,
    groups: KeyGroups,
    base: Version | None,
    whole: bool = False,
) -> Capture:
    """Copy the rows of :func:`capturing` into memory."""
    of = capturing(table, operator, instance, groups=groups, base=base, whole=whole)
    rows = pa.Table.from_batches(list(of.batches()), of.schema.arrow())
    return Capture(operator, instance, of.version, base, groups, of.schema, rows)


def _cut(rows: Array, sizes: Array) -> list[Array]:
    """The rows in pieces that have not many more bytes than are gathered at a time."""
    ends = np.cumsum(sizes)
    if len(ends) == 0 or ends[-1] <= 2 * _CHUNK_BYTES:
        return [rows]
    return np.split(rows, np.flatnonzero(np.diff(ends // _CHUNK_BYTES)) + 1)


def _gather(
    table: StateTable, schema: CheckpointSchema, rows: Array, deleted: bool
) -> pa.RecordBatch:
    hashes, groups, keys = table.records(rows)
    columns = [*keys, pa.array(hashes), pa.array(groups), pa.array(np.full(len(rows), deleted))]
    if schema.timers:
        columns.append(pa.nulls(len(rows), pa.int64()) if deleted else table.timers(rows))
    for column in table.layout.values:
        found = _nothing(column.type, len(rows)) if deleted else table.get(column.name, rows)
        columns.append(to_arrow(column.type, found))
    return pa.RecordBatch.from_arrays(columns, schema=schema.arrow())


def _nothing(kind: StateType, count: int) -> Any:
    """Values for rows that have none, for a column that may not have nulls."""
    if kind.variable:
        return pa.nulls(count, kind.arrow)
    return np.zeros((count, kind.width), kind.dtype)


def to_arrow(kind: StateType, values: Any) -> pa.Array:
    """Values of a state column, as the table gives them, as the Arrow array of a capture."""
    if kind.variable:
        return values
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if kind.width == 1:
        return flat if flat.type == kind.arrow else flat.view(kind.arrow)
    of = kind.arrow.value_type
    return pa.FixedSizeListArray.from_arrays(flat if flat.type == of else flat.view(of), kind.width)


def to_values(kind: StateType, values: pa.Array) -> Any:
    """The inverse of :func:`to_arrow`."""
    if kind.variable:
        return values
    flat = values if kind.width == 1 else values.flatten()
    if pa.types.is_timestamp(flat.type):
        flat = flat.view(pa.int64())
    numbers = flat.to_numpy(zero_copy_only=False)
    return numbers if kind.width == 1 else numbers.reshape(-1, kind.width)

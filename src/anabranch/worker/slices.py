"""The slices of an instance during a batch: their rows and their tables."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from anabranch.errors import StateFull, StateMissing
from anabranch.nodes.captures import write_capture
from anabranch.nodes.local import TABLES
from anabranch.nodes.requests import TableName
from anabranch.operators.context import Context
from anabranch.operators.rows import Rows
from anabranch.state.capture import capturing
from anabranch.state.groups import KeyGroups
from anabranch.state.keytypes import is_bytes
from anabranch.state.table import StateTable, TableLayout
from anabranch.state.view import State
from anabranch.units import Version
from anabranch.worker.open_tables import OpenTables
from anabranch.worker.reports import TableReport

Array = npt.NDArray[Any]

NO_GROUPS = KeyGroups()
PIECE_ROWS, PIECE_BYTES = 65_536, 1 << 24
"""So much is worth an operator's while. More at once does not fit into the processor's caches."""
_WINDOW_BYTES = 1 << 25
"""So much is gathered for all slices of an instance together."""
_LOCK_SECONDS = 60.0
_SHED_ROWS = 1 << 16
_LEAST_SHED_ROWS = 1 << 10

_open = OpenTables()


@dataclass(frozen=True)
class CaptureOrder:
    """The order to capture rows of a slice with a batch."""

    groups: KeyGroups
    base: Version | None
    """The version since which changes are wanted, or None for all rows. It has to be the one of
    the last clean capture."""
    clean: bool = True
    """Whether the changes of the next capture are to be those since this one. Then all groups of
    the slice are captured, and all of their rows if most have changed."""


@dataclass(frozen=True)
class SliceOrder:
    """The order to run one slice of an instance."""

    table: TableName
    """The folder of its table below that of all tables of the query."""
    groups: KeyGroups
    """The key groups that it serves."""
    shed: KeyGroups = NO_GROUPS
    """The groups that have left it, whose rows may still be in its table."""
    capture: CaptureOrder | None = None

    def __post_init__(self) -> None:
        wanted = self.capture
        if wanted is None:
            return
        if not wanted.groups <= self.groups or (wanted.clean and wanted.groups != self.groups):
            raise ValueError(
                f"{self.table} serves the groups {self.groups}; groups {wanted.groups} cannot be "
                f"captured {'as all of its changes' if wanted.clean else 'from it'}"
            )


def by_lowest_group(orders: Sequence[SliceOrder]) -> list[SliceOrder]:
    """The slices in the order in which they run, which fixes the order of their results."""
    return sorted(orders, key=lambda order: (order.groups.ranges[:1], order.table))


def groups_of(orders: Sequence[SliceOrder]) -> KeyGroups:
    """The groups that some slices serve together."""
    return KeyGroups(tuple(bounds for order in orders for bounds in order.groups.ranges))


class Slice:
    """One slice of an instance in a batch. Its table is locked, and the batch's version begun."""

    def __init__(
        self, order: SliceOrder, table: StateTable, state: State, context: Context
    ) -> None:
        self.order = order
        self.table = table
        self.state = state
        self.context = context
        self.rows = 0
        """How many rows of the batch it has taken."""

    def end(self, operator: str, root: Path, most_shed: int) -> TableReport:
        """Shed and capture as ordered. This does not finish the version."""
        left = self._shed(most_shed)
        changed = self.table.dirty_count
        captured, base, why_not = self._capture(operator, root)
        return TableReport(
            self.order.table,
            self.rows,
            self.table.count,
            self.table.bytes,
            changed,
            captured,
            base,
            why_not,
            left,
            self.table.upkeep,
        )

    def _shed(self, most: int) -> int:
        return self.table.shed(self.order.shed, most) if self.order.shed else 0

    def _capture(self, operator: str, root: Path) -> tuple[str | None, Version | None, str | None]:
        """The file of the ordered capture and its base, or why there is none."""
        order, table = self.order.capture, self.table
        if order is None:
            return None, None, None
        base = order.base
        if order.clean and base is not None and 2 * table.dirty_count > table.count:
            # All rows take hardly longer than most of them, and spare the reader a chain.
            base = None
        whole = order.groups == self.order.groups
        instance = self.context.instance
        taken = capturing(table, operator, instance, groups=order.groups, base=base, whole=whole)
        leaf = self.order.table.rpartition("/")[2]
        try:
            what = f"{operator}-{self.context.version}-{leaf}"
            path = write_capture(taken, root, what, table.fence)
        except StateFull as error:
            # The rows stay marked as changed, and the batch goes on without the checkpoint.
            return None, None, str(error)
        if order.clean:
            table.mark_clean()
        return str(path), base, None


def end(slices: Sequence[Slice], operator: str, root: Path) -> tuple[TableReport, ...]:
    """Shed and capture as ordered in all slices of an instance. This does not finish a version."""
    shedding = sum(1 for each in slices if each.order.shed)
    most = max(_LEAST_SHED_ROWS, _SHED_ROWS // max(1, shedding))
    return tuple(each.end(operator, root, most) for each in slices)


class Attempt(NamedTuple):
    """The version that a task begins in all tables of an instance, and its fencing token."""

    version: Version
    fence: int
    task: int
    """Spark's number of the attempt of the task."""
    track_changes: bool


@contextmanager
def begun(
    orders: Sequence[SliceOrder], root: Path, layout: TableLayout, attempt: Attempt
) -> Iterator[list[StateTable]]:
    """Lock the tables of all slices, and begin a version in each, before the first row comes.

    :class:`~anabranch.errors.StateMissing` names every table that is missing. The others are then
    unchanged.
    """
    tables = _opened(orders, root, layout)
    deadline = time.monotonic() + _LOCK_SECONDS
    with ExitStack() as locks:
        # By name, so that two tasks never wait for each other.
        for _, table in sorted(zip(orders, tables, strict=True), key=lambda pair: pair[0].table):
            locks.enter_context(table.lock(max(0.0, deadline - time.monotonic())))
        _begin(orders, tables, attempt)
        yield tables


def _begin(orders: Sequence[SliceOrder], tables: Sequence[StateTable], attempt: Attempt) -> None:
    able = [_can_begin(table, attempt.version) for table in tables]
    missing: dict[TableName, StateMissing] = {}
    # To roll back a table that was begun in vain takes long, so the doubtful ones are first.
    for at in sorted(range(len(tables)), key=able.__getitem__):
        if missing and able[at]:
            break
        try:
            tables[at].begin(
                attempt.version, attempt.fence, attempt.task, track_dirty=attempt.track_changes
            )
        except StateMissing as error:
            missing[orders[at].table] = error
    if missing:
        raise _all_missing(missing)


def _opened(orders: Sequence[SliceOrder], root: Path, layout: TableLayout) -> list[StateTable]:
    tables = root / TABLES
    folders = [tables / order.table for order in orders]
    beside = {str(folder) for folder in folders}
    found: list[StateTable] = []
    missing: dict[TableName, StateMissing] = {}
    for order, folder in zip(orders, folders, strict=True):
        try:
            found.append(_open.get(folder, layout, beside=beside))
        except StateMissing as error:
            missing[order.table] = error
    if missing:
        raise _all_missing(missing)
    return found


def _can_begin(table: StateTable, version: Version) -> bool:
    now = table.version
    return now == version - 1 or (now == version and table.previous == version - 1)


def _all_missing(missing: dict[TableName, StateMissing]) -> StateMissing:
    first, *others = missing.values()
    more = f", and {len(others)} more tables of the instance are missing" if others else ""
    return StateMissing.of(f"{first}{more}", sorted(missing))


class Division:
    """Maps each row to its slice."""

    def __init__(self, orders: Sequence[SliceOrder], key_groups: int) -> None:
        self.slices = len(orders)
        self._of_group = np.full(key_groups, -1, np.int16)
        """The number of the slice of each group; -1 where it is none of this instance."""
        for number, order in enumerate(orders):
            for start, stop in order.groups.ranges:
                self._of_group[start:stop] = number
        served = sum(len(order.groups) for order in orders)
        if served != np.count_nonzero(self._of_group >= 0):
            raise ValueError(f"two slices serve the same key group: {[*map(str, orders)]}")

    def numbers(self, groups: Array) -> Array:
        """The number of the slice of each group, -1 if no slice here has the group."""
        found: Array = self._of_group[groups]
        return found

    def windows(
        self, batches: Iterator[pa.RecordBatch], *, whole: bool
    ) -> Iterator[pa.RecordBatch]:
        """The input combined into windows that are large enough for every slice.

        ``whole``: in one window.
        """
        batches = (batch for batch in batches if batch.num_rows)
        if whole:
            parts = list(batches)
            return iter([_joined(parts)] if parts else [])
        return pieces(batches) if self.slices == 1 else _windows(batches)

    def divided(self, rows: Rows, numbers: Array, *, whole: bool) -> Iterator[tuple[int, Rows]]:
        """Rows with the number of their slice, in their order, in pieces of sufficient size."""
        if self.slices == 1:
            yield 0, rows
            return
        counts = np.bincount(numbers, minlength=self.slices).tolist()
        if max(counts) < len(rows):
            # Numbers of 16 bits are sorted in two passes.
            rows = rows.take(np.argsort(numbers, kind="stable"))
        most = len(rows) if whole else _piece_rows(rows)
        stop = 0
        for number, count in enumerate(counts):
            start, stop = stop, stop + count
            for first in range(start, stop, most):
                yield number, _between(rows, first, min(first + most, stop))


def pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches combined until a piece has sufficient size."""
    parts: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        parts.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= PIECE_ROWS or size >= PIECE_BYTES:
            yield _joined(parts)
            parts, rows, size = [], 0, 0
    if parts:
        yield _joined(parts)


def _windows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Windows of as many rows as fit into a number of bytes.

    Slices run in turn for every window, so the windows do not depend on how the input was divided.
    """
    parts: list[pa.RecordBatch] = []
    room = _WINDOW_BYTES
    for batch in batches:
        while (size := _bytes(batch)) > room:
            fitting = _fitting(batch, room, least=0 if parts else 1)
            yield _joined([*parts, batch.slice(0, fitting)])
            batch, parts, room = batch.slice(fitting), [], _WINDOW_BYTES
        parts.append(batch)
        room -= size
    if parts:
        yield _joined(parts)


def _fitting(batch: pa.RecordBatch, room: int, *, least: int) -> int:
    """How many of the first rows fit into a number of bytes."""
    too_many = batch.num_rows + 1
    while too_many - least > 1:
        middle = (least + too_many) // 2
        if _bytes(batch.slice(0, middle)) <= room:
            least = middle
        else:
            too_many = middle
    return least


def _bytes(batch: pa.RecordBatch) -> int:
    """The size of rows. It is additive over any division of the rows."""
    return sum(map(_bytes_of, batch.columns))


def _bytes_of(array: pa.Array) -> int:
    kind, size = array.type, 8 * len(array)
    if is_bytes(kind):
        size += int(pc.sum(pc.binary_length(array)).as_py() or 0)
    elif types.is_struct(kind):
        size += sum(map(_bytes_of, array.flatten()))
    elif types.is_nested(kind):
        size += _bytes_of(array.flatten())
    return size


def _joined(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _piece_rows(rows: Rows) -> int:
    per_row = 1 + int(rows.batch.nbytes) // len(rows)
    return max(1, min(PIECE_ROWS, PIECE_BYTES // per_row))


def _between(rows: Rows, start: int, stop: int) -> Rows:
    assert rows.hashes is not None
    return Rows(rows.batch.slice(start, stop - start), rows.hashes[start:stop])

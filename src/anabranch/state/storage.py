"""All arrays of one table, and their invariants."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import StateError, StateMissing
from anabranch.kernels import rows as kernels
from anabranch.state.files import HEADER_BYTES, PAGE, Arena, Region
from anabranch.state.groups import KeyGroups
from anabranch.state.header import Counters, Header, HeapCounters, Limits
from anabranch.state.heap import RING_BYTES, Heap, Owner
from anabranch.state.index import FREE, Index
from anabranch.state.journal import Journal, UndoLog
from anabranch.state.keys import KeyLayout
from anabranch.state.schema import Column, StateSchema
from anabranch.state.timers import LINKS, NEVER, TIMES, Timers

Array = npt.NDArray[Any]

FILE = "table"
_HEAD, _MARKS, _KEY_HEAP = "head", "marks", "key heap"
_FREE, _DIRTY, _QUEUE = "free rows", "changed rows", "dead rows"
_MOST_ROWS = (1 << 31) - 2
_ADDRESS_SPACE = 1 << 40
_LEAST_ROWS, _LEAST_RING = 1 << 16, 1 << 20
_SCAN_BELOW = 32
"""Reading this many marks takes as long as sorting one row number."""


@dataclass(frozen=True)
class TableLayout:
    """The columns of a table: those of its keys, and those of its values."""

    key: KeyLayout
    values: StateSchema
    timers: bool = False
    """Whether rows can have a timer."""

    def fingerprint(self) -> str:
        """A short text that differs when a table could not be read with this layout."""
        timers = "-timers" if self.timers else ""
        return f"{self.key.fingerprint()}-{self.values.fingerprint()}{timers}"

    def __str__(self) -> str:
        timers = " with timers" if self.timers else ""
        return f"{self.key!r} -> {self.values!r}{timers}"


def _value_region(column: Column, items: int) -> Region:
    if column.type.dtype is None:
        return Region(f"value {column.name}", np.dtype(np.uint64), items, 2)
    return Region(f"value {column.name}", column.type.dtype, items, column.type.width)


class RowList:
    """A list of row numbers. The counters have its length."""

    def __init__(self, arena: Arena, name: str) -> None:
        self._arena, self._name = arena, name
        self.rows = arena.array(name)

    def write(self, at: int, rows: Array) -> int:
        """Write rows from this position on. Returns the position behind them."""
        end = at + len(rows)
        self._arena.ensure(self._name, end)
        self.rows[at:end] = rows
        return end

    def trim(self, count: int) -> None:
        """Free memory if this number of rows leaves much of it unused."""
        self._arena.trim(self._name, count)


class Storage:
    """The open file of a table: arrays and counters, without versions."""

    def __init__(self, folder: Path, layout: TableLayout, *, create_as: Path | None = None) -> None:
        self.folder, self.layout = folder, layout
        key = layout.key
        self.width = 2 + key.words + (1 + key.parts if key.parts else 0)
        variable = [column for column in layout.values if column.type.variable]
        journaled = [_value_region(column, 1) for column in layout.values]
        if layout.timers:
            journaled.append(Region(TIMES, np.dtype(np.int64), 1))
        if create_as is None:
            limits = _check(folder, layout, 1 + len(variable))
        else:
            limits = _limits(create_as.parent, self.width, journaled)
        self._limits, most = limits, limits.rows
        columns = [Region(c.name, c.dtype, most, c.width) for c in journaled]
        grown = [
            Region(_HEAD, np.dtype(np.uint64), most, self.width),
            Region(_MARKS, np.dtype(np.int32), most),
            *columns,
        ]
        if layout.timers:
            grown.append(Region(LINKS, np.dtype(np.int32), most, 2))
        self._grown = [region.name for region in grown]
        rings = {_KEY_HEAP: limits.ring if key.parts else 4096}
        rings |= {f"heap {column.name}": limits.ring for column in variable}
        regions = [
            *grown,
            *Journal.regions(most, columns),
            UndoLog.region(most, len(rings)),
            *Index.regions(most),
            *(Region(name, np.dtype(np.int32), 4 * most) for name in (_FREE, _DIRTY, _QUEUE)),
            *(Heap.region(name, ring) for name, ring in rings.items()),
            *(Timers.regions() if layout.timers else []),
        ]
        self.arena = Arena(create_as or folder / FILE, regions, create=create_as is not None)
        self.header = Header(self.arena.header, len(rings))
        self.head = self.arena.array(_HEAD)
        self.marks = self.arena.array(_MARKS)
        self._columns = {region.name: self._shaped(region) for region in columns}
        self.free = RowList(self.arena, _FREE)
        self.dirty = RowList(self.arena, _DIRTY)
        self.queue = RowList(self.arena, _QUEUE)
        owners = [Owner(self.head, self.width if key.parts else 0, 2 + key.words, True)]
        owners += [Owner(self.column(c.name).reshape(-1), 2, 0, False) for c in variable]
        self.heaps = [
            Heap(self.arena, name, owner, ring)
            for (name, ring), owner in zip(rings.items(), owners, strict=True)
        ]
        self.heap_of = {column.name: i for i, column in enumerate(variable, start=1)}
        self.index = Index(self.arena, self.head, self.width, self.heaps[0])
        self.timers = Timers(self.arena, self.head, self.width) if layout.timers else None
        self.journal = Journal(self.arena, self.header, self.head, self.width, self._columns)
        undone = [owner.words for owner in owners] + [heap.words for heap in self.heaps]
        self.undo = UndoLog(self.arena, self.header, undone)

    def _shaped(self, region: Region) -> Array:
        flat = self.arena.array(region.name)
        return flat.reshape(-1, region.width) if region.width > 1 else flat

    def initialise(self, version: int) -> None:
        """Initialise a sparse file as an empty table."""
        self.index.allocate()
        if self.timers is not None:
            self.timers.allocate()
        heaps = [HeapCounters() for _ in self.heaps]
        self.header.flip(Counters(version, clean_since=version, heaps=heaps))
        self.header.write_layout(self.layout.fingerprint(), str(self.layout), self._limits)

    def column(self, name: str) -> Array:
        """A value column, or the two words per row of a variable one."""
        try:
            return self._columns[f"value {name}"]
        except KeyError:
            known = [column.name for column in self.layout.values]
            raise KeyError(f"no state column {name!r}; there are {known}") from None

    def capacity(self) -> int:
        """The number of rows that fit."""
        return self.arena.least_allocated(self._grown)

    def reserve_rows(self, rows: int) -> None:
        """Make room for a number of rows."""
        for name in self._grown:
            self.arena.ensure(name, rows)

    def shrink_rows(self, rows: int) -> None:
        """Free the memory beyond this number of rows."""
        for name in self._grown:
            self.arena.shrink(name, rows)

    def states(self, rows: Array) -> Array:
        """The state of each row."""
        return self.infos(rows) & np.uint64(3)

    def infos(self, rows: Array) -> Array:
        """Group << 2 | state of each row."""
        out = np.empty(len(rows), np.uint64)
        kernels.states(self.head, self.width, rows, out)
        return out

    def dirty_rows(self, counters: Counters) -> tuple[Array, Array]:
        """The rows in the list of changed ones: those that live, and those that are dead.

        In the order of their numbers, in which they are read faster than in that of their changes.
        """
        count = counters.dirty_to - counters.dirty_from
        if count > counters.rows // _SCAN_BELOW:
            rows = np.empty(count + 1, np.int64)
            rows = rows[: kernels.marked(self.marks, counters.rows, counters.clean, rows)]
        else:
            rows = np.sort(self.dirty.rows[counters.dirty_from : counters.dirty_to])
            rows = rows.astype(np.int64)
        live, dead = np.empty((2, len(rows)), np.int64)
        living, gone = kernels.by_state(self.head, self.width, rows, live, dead)
        return live[:living], dead[:gone]

    def records(self, rows: Array) -> tuple[Array, Array, list[pa.Array]]:
        """The hash and the group of each row, and the key columns."""
        key = self.layout.key
        hashes, groups = np.empty(len(rows), np.uint64), np.empty(len(rows), np.uint16)
        rest = np.empty((len(rows), self.width - 2), np.uint64)
        kernels.records(self.head, self.width, rows, hashes, groups, rest)
        words = rest if key.words == self.width - 2 else np.ascontiguousarray(rest[:, : key.words])
        lens = rest[:, key.words + 1 :].astype(np.int64) - 1
        sizes = np.maximum(lens, 0)
        # The parts of a key follow each other in one record, behind its first word.
        starts = np.cumsum(sizes, axis=1) - sizes + 8
        if key.parts:
            starts += rest[:, key.words : key.words + 1].astype(np.int64)
        decoded = key.decode(words, starts, lens.astype(np.int32), self.heaps[0].data)
        return hashes, groups, decoded

    def in_state(self, state: int, first: int, last: int) -> Array:
        """The rows of a range that are in a state."""
        out = np.empty(max(0, last - first), np.int64)
        count = kernels.in_state(self.head, self.width, first, last, state, out)
        return out[:count]

    def of_groups(self, rows: Array, groups: KeyGroups) -> Array:
        """Those of the rows that are in some groups, in their order."""
        out = np.empty(len(rows) + 1, np.int64)
        count = kernels.of_groups(self.head, self.width, rows, self._member(groups), out)
        return out[:count]

    def last_of_groups(
        self, first: int, last: int, groups: KeyGroups, most: int
    ) -> tuple[Array, int]:
        """The last live rows of a range that are in some groups, and the row before which the
        others are, if there are any."""
        out = np.empty(most, np.int64)
        member = self._member(groups)
        count, at = kernels.last_of_groups(self.head, self.width, first, last, member, out)
        return out[:count], at

    def _member(self, groups: KeyGroups) -> Array:
        return groups.mask(np.arange(self.layout.key.key_groups))

    def change(self, rows: Array, old: int, new: int) -> Array:
        """Bring rows from one state to another; returns those that were in it, each once."""
        done = np.empty(len(rows), np.int64)
        count = kernels.change(self.head, self.width, rows, old, new, done)
        return done[:count]

    def reset(self, rows: Array | slice) -> None:
        """Give rows the values that a new row has."""
        for column in self.layout.values:
            values = self.column(column.name)
            values[rows] = 0 if column.type.variable else column.default
        if self.timers is not None:
            self.timers.times[rows] = NEVER

    def copy_rows(self, source: Array, target: Array) -> None:
        """Copy everything of source rows but the timer links to target rows."""
        kernels.copy(self.head, self.width, source, target)
        self.marks[target] = self.marks[source]
        for column in self._columns.values():
            column[target] = column[source]

    def settle(self, counters: Counters, *, from_states: bool = False) -> None:
        """Rebuild all derived data for these counters.

        The free stack is right, and says which rows are free; or else the states of rows are
        (``from_states``), and the stack is made from them.
        """
        if from_states:
            found = self.in_state(FREE, 0, counters.rows)
            counters.free = self.free.write(0, found)
        kernels.settle(
            self.head,
            self.width,
            self.marks,
            counters.rows,
            self.free.rows[: counters.free],
            self.dirty.rows[counters.dirty_from : counters.dirty_to],
            counters.clean,
        )
        self.index.rebuild(counters.rows)
        if self.timers is not None:
            self.timers.rebuild(counters.rows)


def _limits(folder: Path, width: int, columns: list[Region]) -> Limits:
    """The capacity of a table, limited by its file system and by its address space."""
    values = sum(column.item_bytes for column in columns)
    in_journal = values + 12
    row = 8 * width + 4 + 8 + in_journal + 128 + 48
    most = min(_MOST_ROWS, _ADDRESS_SPACE // (row + in_journal))
    found = os.statvfs(folder)
    room = found.f_blocks * found.f_frsize
    if room == 0:  # a file system that does not say
        return Limits(most, RING_BYTES)
    # A row takes at least its record, its mark, its values and a slot of the index.
    rows = min(most, max(_LEAST_ROWS, room // (8 * width + 4 + values + 8)))
    return Limits(rows, min(RING_BYTES, max(_LEAST_RING, room // PAGE * PAGE + PAGE)))


def _check(folder: Path, layout: TableLayout, heaps: int) -> Limits:
    """Check the header alone, which determines the size of the rest."""
    try:
        with (folder / FILE).open("rb") as file:
            data = file.read(HEADER_BYTES)
    except FileNotFoundError as error:
        raise StateMissing(f"there is no state table in {folder}") from error
    if len(data) < HEADER_BYTES:
        raise StateMissing(f"{folder / FILE} is too short to be a state table")
    header = Header(np.frombuffer(data, np.int64), heaps)
    header.check_layout(folder, layout.fingerprint(), str(layout))
    return header.limits


def remove(folder: Path) -> None:
    """Delete the table of a folder, and the folder if nothing else is in it."""
    for path in (folder / FILE, folder / "lock"):
        path.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if any(folder.iterdir()):
            return
        raise StateError(f"cannot remove {folder}: {error}") from error

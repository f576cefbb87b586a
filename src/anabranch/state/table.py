"""The state table: rows by key, columns of values, and roll-back of every version."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import StateError, StateMissing
from anabranch.private import private_folder
from anabranch.state import storage as storage_module
from anabranch.state import versions
from anabranch.state.changes import Changes
from anabranch.state.groups import KeyGroups
from anabranch.state.header import NONE, Counters
from anabranch.state.index import LIVE
from anabranch.state.keys import KeyBatch
from anabranch.state.lock import locked
from anabranch.state.maintenance import NO_UPKEEP
from anabranch.state.storage import FILE, Storage, TableLayout
from anabranch.state.strings import strings_of
from anabranch.state.timers import NEVER, Timers
from anabranch.state.validation import validate
from anabranch.units import NO_VERSION, Version

__all__ = ["StateTable", "TableLayout"]

Array = npt.NDArray[Any]

_SCAN_ROWS = 1 << 18


class StateTable:
    """The rows of one slice of an operator, in one memory-mapped file.

    Row numbers are valid until the end of the version. All methods that change something must be
    called between :meth:`begin` and :meth:`finish`, under :meth:`lock`.
    """

    def __init__(self, storage: Storage) -> None:
        self._open: Storage | None = storage
        self._changes: Changes | None = None
        self.upkeep = NO_UPKEEP
        """What was done to the table at the beginning of the version that was begun last."""
        self.layout = storage.layout
        self.folder = storage.folder
        self._file = storage.folder / FILE

    @classmethod
    def create(
        cls, folder: Path, layout: TableLayout, *, version: Version = NO_VERSION
    ) -> StateTable:
        """Make an empty table at ``version``. Refuses an existing one."""
        private_folder(folder)
        made = folder / f"{FILE}.{uuid.uuid4().hex}"
        try:
            storage = Storage(folder, layout, create_as=made)
            storage.initialise(version)
            # Complete under another name first: a table is there as a whole or not at all.
            os.link(made, folder / FILE)
        except FileExistsError as error:
            raise StateError(f"there already is a state table in {folder}") from error
        except BaseException:
            made.unlink(missing_ok=True)
            with suppress(OSError):  # something else is in it
                folder.rmdir()
            raise
        finally:
            made.unlink(missing_ok=True)
        return cls(storage)

    @classmethod
    def open(cls, folder: Path, layout: TableLayout) -> StateTable:
        """Open the table of a folder; the layout must be the one it was created with."""
        return cls(Storage(folder, layout))

    def close(self) -> None:
        """Close the file. Arrays that were returned stay readable."""
        if self._open is not None:
            self._open.arena.close()
        # The memory is unmapped with the last array that is in use.
        self._open = self._changes = None

    def replaced(self) -> bool:
        """Whether the folder now has another table, or none."""
        return not self._storage.arena.is_at(self._file)

    @property
    def addresses(self) -> int:
        """The mapped size of the open table, in bytes."""
        return self._storage.arena.addresses

    @property
    def closed(self) -> bool:
        """Whether the table was closed."""
        return self._open is None

    def destroy(self) -> None:
        """Close the table and delete it."""
        self.close()
        storage_module.remove(self.folder)

    def lock(self, timeout: float) -> AbstractContextManager[None]:
        """Lock the table against other tasks. :class:`StateLocked` after ``timeout`` seconds."""
        return locked(self.folder, timeout)

    # Versions

    @property
    def version(self) -> Version:
        """The last version that finished."""
        return Version(self._storage.header.load().version)

    @property
    def previous(self) -> Version | None:
        """The version that :meth:`rollback` returns to, if the last one finished."""
        return _optional(self._storage.header.load().previous)

    @property
    def unfinished(self) -> Version | None:
        """The version that was begun and not finished."""
        return _optional(self._storage.header.load().unfinished)

    @property
    def fence(self) -> int:
        """The fence of the last attempt that began a version."""
        return self._storage.header.load().fence

    def begin(
        self,
        version: Version,
        fence: int,
        attempt: int = versions.NO_TASK,
        *,
        track_dirty: bool = True,
        since: Version | None = None,
    ) -> None:
        """Start a version, on top of the one before it, or of the version ``since``.

        ``fence`` and ``attempt`` are the fencing token: ``fence`` grows with every attempt of a
        batch, and ``attempt`` with every attempt of a task in it. A pair lower than the greatest
        one that the table has seen is refused with :class:`Fenced`, before anything changes. An
        unfinished version is rolled back, and so is a finished version that is begun again. A task
        that begins its own version again is refused with :class:`Reshaped`. :class:`StateMissing`
        if the table is then not at the version to start from. ``track_dirty=False`` is for tables
        without incremental checkpoints: deleted rows are then free at once.
        """
        if self.replaced():
            raise StateMissing(f"the state table in {self.folder} was removed; open it again")
        self._changes = None
        base = version - 1 if since is None else since
        counters, self.upkeep = versions.begin(self._storage, version, base, fence, attempt)
        self._changes = Changes(self._storage, counters, track_dirty=track_dirty)

    def finish(self) -> None:
        """Finish the version. It can be rolled back until the next one begins."""
        versions.finish(self._storage, self._writing().complete())
        self._changes = None

    def rollback(self) -> None:
        """Roll back the unfinished version, or else the last finished one."""
        self._changes = None
        if self._storage.header.load().maintaining:
            versions.recover(self._storage)
        else:
            versions.roll_back(self._storage)

    def forget_previous(self) -> None:
        """Drop the journal, so that the last finished version cannot be rolled back."""
        versions.forget(self._storage, self._storage.header.load())

    # Rows

    def rows(self, keys: KeyBatch) -> Array:
        """The row of each key (int64), made where the key is new."""
        changes = self._writing()
        out = np.empty(len(keys), np.int64)
        missing = self._storage.index.find(keys, out)
        if len(missing):
            changes.insert(keys, missing, out)
        return out

    def append(self, keys: KeyBatch) -> Array:
        """Make rows for keys of which none is in the table and no two are the same.

        Much faster than :meth:`rows`, and for loading only: nothing is checked, and nothing can be
        looked up before :meth:`reindex`.
        """
        return self._writing().append(keys)

    def reindex(self) -> None:
        """Add all rows that :meth:`append` has made to the index."""
        self._storage.index.rebuild(self._writing().counters.rows)

    def find(self, keys: KeyBatch) -> Array:
        """The row of each key (int64), -1 where there is none."""
        out = np.empty(len(keys), np.int64)
        self._storage.index.find(keys, out)
        return out

    def touch(self, rows: Array) -> None:
        """Declare that rows are about to change, before writing to them through :meth:`column`."""
        self._writing().touch(self._checked(rows))

    def delete(self, rows: Array) -> None:
        """Delete rows. A row may occur several times."""
        self._writing().delete(self._checked(rows))

    def column(self, name: str) -> Array:
        """A fixed-width column by row number, live: call :meth:`touch` before writing to it.

        Rows made after the call may lie beyond its end: take it after :meth:`rows`.
        """
        if self.layout.values[name].type.variable:
            raise StateError(f"state column {name!r} is of variable length: use get and set")
        return self._storage.column(name)[: self._storage.capacity()]

    def get(self, name: str, rows: Array) -> Any:
        """The values of rows: an Arrow array for strings and bytes, a numpy array otherwise."""
        column = self._storage.column(name)
        rows = self._checked(rows)
        which = self._storage.heap_of.get(name)
        if which is None:
            return np.take(column, rows, axis=0, mode="clip")
        return self._storage.heaps[which].get(rows, self.layout.values[name].type.arrow)

    def text_bytes(self, rows: Array) -> Array:
        """How many bytes the strings and bytes of each row have, without those of its key."""
        rows = self._checked(rows)
        found = np.zeros(len(rows), np.int64)
        for which in self._storage.heap_of.values():
            found += self._storage.heaps[which].lengths(rows)
        return found

    def set(self, name: str, rows: Array, values: Any) -> None:
        """Set values of rows. The last one counts where a row occurs twice.

        Strings and bytes are an Arrow array, or anything Arrow makes one of.
        """
        changes = self._writing()
        column = self._storage.column(name)
        rows = self._checked(rows)
        if name in self._storage.heap_of:
            kind = self.layout.values[name].type.arrow
            changes.store(name, rows, strings_of(_arrow(values, kind, len(rows))))
        else:
            changes.touch(rows)
            column[rows] = values

    def changed(self) -> Array:
        """The live rows touched in this version, in the order of their first changes."""
        rows = self._writing().rows()
        live: Array = rows[self._storage.states(rows) == LIVE]
        return live

    def live(self) -> Array:
        """All live rows."""
        return self._storage.in_state(LIVE, 0, self._counters().rows)

    def live_pieces(self, most: int) -> Iterator[Array]:
        """All live rows, those among ``most`` rows of the table at a time."""
        total = self._counters().rows
        for first in range(0, total, most):
            yield self._storage.in_state(LIVE, first, min(first + most, total))

    def part(self, number: int, parts: int) -> Array:
        """The live rows in one of several equal parts of the table."""
        total = self._counters().rows
        return self._storage.in_state(LIVE, total * number // parts, total * (number + 1) // parts)

    def scan(self, predicate: Callable[[Mapping[str, Array]], Array]) -> Array:
        """The live rows for which a function of the fixed-width columns is true.

        It gets a part of the rows at a time and returns one boolean for each.
        """
        fixed = [c.name for c in self.layout.values if not c.type.variable]
        found = []
        for rows in self.live_pieces(_SCAN_ROWS):
            if len(rows):
                chosen = predicate({name: self.get(name, rows) for name in fixed})
                found.append(rows[np.asarray(chosen, dtype=np.bool_)])
        return np.concatenate([*found, np.empty(0, np.int64)])

    def keys(self, rows: Array) -> list[pa.Array]:
        """The key columns of rows, followed by the sub-key columns; of deleted rows too."""
        return self.records(rows)[2]

    def records(self, rows: Array) -> tuple[Array, Array, list[pa.Array]]:
        """:meth:`hashes`, :meth:`groups` and :meth:`keys` of rows, in one pass."""
        return self._storage.records(self._checked(rows))

    def hashes(self, rows: Array) -> Array:
        """The hash of each row's key (uint64)."""
        storage = self._storage
        return np.asarray(storage.head[self._checked(rows) * storage.width])

    def groups(self, rows: Array) -> Array:
        """The key group of each row (uint16)."""
        return (self._storage.infos(self._checked(rows)) >> np.uint64(2)).astype(np.uint16)

    def groups_count(self) -> Array:
        """The number of live rows of each key group. Reads every row."""
        return np.bincount(self.groups(self.live()), minlength=self.layout.key.key_groups)

    @property
    def count(self) -> int:
        """The number of live rows."""
        return self._counters().live

    @property
    def bytes(self) -> int:
        """The allocated memory of the table in bytes."""
        return self._storage.arena.allocated_bytes()

    # Timers

    def set_timer(self, rows: Array, times: Array) -> None:
        """Set the timers of rows, in place of earlier ones."""
        rows = self._checked(rows)
        self._writing().touch(rows)
        self._timers().put(rows, np.require(times, np.int64, ["C", "W"]))

    def clear_timer(self, rows: Array) -> None:
        """Remove the timers of rows."""
        rows = self._checked(rows)
        self._writing().touch(rows)
        self._timers().clear(rows)

    def timers(self, rows: Array) -> pa.Array:
        """The times of rows as an int64 array, null where there is none."""
        times = self._timers().times[self._checked(rows)]
        return pa.array(times, mask=times == NEVER)

    def due(self, upto: int) -> Array:
        """The rows whose time is at most ``upto``, ordered by time, then by hash.

        They stay due until their timer is set again or cleared, or they are deleted.
        """
        rows = self._timers().due(upto, self._counters().rows)
        found: Array = rows[_by_time(self._timers().times[rows], self.hashes(rows))]
        return found

    # Checkpoints

    def dirty(self) -> tuple[Array, Array]:
        """The live rows changed, and the rows deleted, since the last :meth:`mark_clean`.

        Each row occurs once. A key that was deleted and inserted again is a changed row.
        """
        if self._changes is not None:
            return self._changes.dirty()
        return self._storage.dirty_rows(self._counters())

    @property
    def dirty_count(self) -> int:
        """The number of rows in :meth:`dirty`, including deleted rows and excluding shed rows."""
        counters = self._counters()
        return counters.dirty_to - counters.dirty_from - counters.shed

    @property
    def clean_since(self) -> Version:
        """The version since which :meth:`dirty` has the changes: that of the last
        :meth:`mark_clean`, or the one that the table was made at."""
        return Version(self._counters().clean_since)

    def mark_clean(self) -> None:
        """Start a new list for :meth:`dirty`, after a checkpoint was captured.

        Only inside a version, and rolled back with it.
        """
        self._writing().mark_clean()

    def of_groups(self, rows: Array, groups: KeyGroups) -> Array:
        """Those of the rows that are in some key groups, in their order."""
        return self._storage.of_groups(self._checked(rows), groups)

    @property
    def mixed(self) -> bool:
        """Whether :meth:`live` or :meth:`dirty` may have rows of groups that were, or are, shed."""
        return bool(self._counters().mixed)

    def shed(self, groups: KeyGroups, most: int) -> int:
        """Remove at most ``most`` rows of key groups that the table does not serve any more.

        Returns how many rows are left to check: 0 if there is no row of these groups any more. Each
        call continues where the last one stopped, in this version or in an earlier one, so that all
        calls together check every row once. A call with other groups starts again. A checkpoint of
        the groups that stay does not have shed rows as deletions. They are free when the next
        version begins. No row of these groups may be made meanwhile.
        """
        if most < 1:
            raise ValueError(f"most={most}: at least one row must be shed at a time")
        return self._writing().shed(groups, most)

    def validate(self) -> None:
        """Check the invariants of the table. AssertionError if one is violated. Reads every row."""
        validate(self._storage, self._counters())

    # What the methods above are made of

    @property
    def _storage(self) -> Storage:
        if self._open is None:
            raise StateError(f"the state table in {self.folder} was closed")
        return self._open

    def _counters(self) -> Counters:
        return self._changes.counters if self._changes else self._storage.header.load()

    def _writing(self) -> Changes:
        if self._changes is None:
            raise StateError(
                f"the state table in {self.folder} has no open version; begin one first"
            )
        if self._changes.broken:
            raise StateError(
                f"a change to the state table in {self.folder} failed half way: roll it back"
            )
        return self._changes

    def _checked(self, rows: Array) -> Array:
        """Row numbers for kernels, checked, as a wrong one could touch any memory."""
        given = np.require(rows, np.int64, ["C", "W"])
        if len(given):
            least, most = given.min(), given.max()
            if least < 0 or most >= self._counters().rows:
                raise IndexError(
                    f"there is no row {least if least < 0 else most} in the state table in "
                    f"{self.folder}; it has {self._counters().rows}"
                )
        return given

    def _timers(self) -> Timers:
        if self._storage.timers is None:
            raise StateError("this state has no timers: set timers = True on the operator")
        return self._storage.timers


def _optional(version: int) -> Version | None:
    return None if version == NONE else Version(version)


def _by_time(times: Array, hashes: Array) -> Array:
    """The order by time, then by hash. Times are often few, and few values sort much faster."""
    distinct = np.unique(times)
    if len(distinct) > 1 << 16:
        return np.lexsort((hashes, times))
    order = np.argsort(hashes)
    ranks = np.searchsorted(distinct, times[order]).astype(np.uint16)
    found: Array = order[np.argsort(ranks, kind="stable")]
    return found


def _arrow(values: Any, kind: pa.DataType, count: int) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not isinstance(values, pa.Array):
        values = pa.array(values, kind)
    if values.type != kind:
        values = values.cast(kind)
    if len(values) != count:
        raise StateError(f"{len(values)} values for {count} rows")
    return values

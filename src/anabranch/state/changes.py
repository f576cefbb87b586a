"""The changes of one version to a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from anabranch.kernels import rows as kernels
from anabranch.state.groups import KeyGroups
from anabranch.state.header import NONE, Counters
from anabranch.state.heap import record_bytes
from anabranch.state.index import DEAD, LIVE
from anabranch.state.keys import KeyBatch
from anabranch.state.storage import Storage
from anabranch.state.strings import Strings

Array = npt.NDArray[Any]

_LOOK_AT = 16
"""The number of rows that are read for each row that may be shed, as reading is far cheaper."""


class Changes:
    """The changes of the unfinished version, and its counters.

    The first change of a row in the version writes its image to the journal. The first change since
    a checkpoint adds it to the list of changed rows. Row numbers must be valid.
    """

    def __init__(self, storage: Storage, counters: Counters, *, track_dirty: bool) -> None:
        self.counters = counters
        self.broken = False
        """Set when a change failed in the middle; there is only the way back then."""
        self._storage = storage
        self._track_dirty = track_dirty
        self._begun = counters.tick
        self._rows: list[Array | range] = []
        self._dirty: tuple[Array, Array] | None = None
        """What :meth:`dirty` found, as long as that is so."""

    def rows(self) -> Array:
        """The touched rows, in the order of their first changes."""
        return _joined(self._rows)

    def touch(self, rows: Array) -> None:
        """Write the before-images of these rows, and mark them as changed."""
        counters = self.counters
        self._dirty = None
        first, dirty = np.empty((2, len(rows)), np.int64)
        images, fresh = kernels.touch(
            self._storage.marks, rows, self._begun, counters.tick, counters.clean, first, dirty
        )
        if images or fresh:
            with self._whole():
                self._storage.journal.keep(first[:images])
                self._rows.append(first[:images])
                self._add_dirty(dirty[:fresh])

    def insert(self, keys: KeyBatch, missing: Array, out: Array) -> None:
        """Give rows to the keys at the positions in ``missing``, and put them into ``out``."""
        known = self.counters.rows
        with self._whole():
            born, revived, reused = self._enter(keys, missing, out)
            if len(born):
                last = self.counters.rows
                made = born if reused else slice(last - len(born), last)
                self._storage.reset(made)
                self._rows.append(born)
                listed = reused and self.counters.shed
                self._add_dirty(self._unlisted(born, known) if listed else born)
                self._storage.marks[made] = self.counters.tick
                self.counters.live += len(born)
            if len(revived):
                before = len(self._rows) - (len(born) > 0)
                self._revive(revived)
                self._rows[before:] = [_in_order(self._rows[before:], out[missing])]

    def append(self, keys: KeyBatch) -> Array:
        """Give rows to keys that the table does not have; only a rebuilt index knows them."""
        storage, counters = self._storage, self.counters
        first, its = counters.rows, counters.heaps[0]
        with self._whole():
            storage.reserve_rows(first + len(keys))
            place = self._reserve_parts(keys.lens)
            added = storage.index.append(keys, first, place) - place
            its.tail += added
            its.live += added
            counters.appended += added
            counters.rows += len(keys)
            counters.live += len(keys)
            storage.reset(slice(first, counters.rows))
            storage.marks[first : counters.rows] = counters.tick
            rows = np.arange(first, counters.rows)
            self._rows.append(range(first, counters.rows))  # there may be very many
            self._add_dirty(rows)
        return rows

    def _revive(self, rows: Array) -> None:
        self.touch(rows)
        back = self._storage.change(rows, DEAD, LIVE)
        self._storage.reset(back)
        self.counters.live += len(back)
        self.counters.dead -= len(back)

    def _unlisted(self, born: Array, known: int) -> Array:
        """Those of new rows, of which the first ``known`` are reused, that are not in the list yet.

        A row that was shed is free before the list of changed rows starts anew.
        """
        listed = (born < known) & (self._storage.marks[born] > self.counters.clean)
        self.counters.shed -= int(np.count_nonzero(listed))
        return born[~listed]

    def shed(self, groups: KeyGroups, most: int) -> int:
        """Drop rows of some groups; see :meth:`StateTable.shed`."""
        counters = self.counters
        number = _number_of(groups)
        if counters.shedding != number:
            counters.shedding, counters.unshed, counters.mixed = number, counters.rows, 1
        # From the last row down to the first: housekeeping moves the last rows of the table into
        # free ones before them. So a row that was not looked at yet only ever moves to where it
        # still will be, and all rows behind the cursor stay looked at.
        last = min(counters.unshed, counters.rows)
        first = max(0, last - _LOOK_AT * most)
        rows, counters.unshed = self._storage.last_of_groups(first, last, groups, most)
        if len(rows):
            self.delete(rows)
            # No checkpoint needs to know: they are free again when the next version begins.
            with self._whole():
                counters.queue_to = self._storage.queue.write(counters.queue_to, -1 - rows)
            counters.shed += len(rows)
        if counters.unshed == 0:
            # Should these groups come back and leave again, they are looked for from the beginning.
            counters.shedding = NONE
        return counters.unshed

    def delete(self, rows: Array) -> None:
        """Mark rows as deleted."""
        self.touch(rows)
        gone = self._storage.change(rows, LIVE, DEAD)
        self.counters.live -= len(gone)
        self.counters.dead += len(gone)
        for which in self._storage.heap_of.values():
            self._storage.heaps[which].drop(self.counters.heaps[which], gone)
        if self._storage.timers is not None:
            self._storage.timers.clear(gone)

    def store(self, name: str, rows: Array, strings: Strings) -> None:
        """Put values into a column of variable length."""
        self.touch(rows)
        which = self._storage.heap_of[name]
        with self._whole():
            its = self.counters.heaps[which]
            self.counters.appended += self._storage.heaps[which].append(its, rows, strings)

    def mark_clean(self) -> None:
        """Start a new list of changed rows. Rows that were deleted before can be freed."""
        counters = self.counters
        if counters.dead:
            _, gone = self.dirty()
            counters.queue_to = self._storage.queue.write(counters.queue_to, gone)
        counters.clean = counters.tick
        counters.clean_since = counters.unfinished
        counters.shed = 0
        counters.mixed = int(counters.shedding != NONE)
        counters.tick += 1
        counters.dirty_from = counters.dirty_to
        self._dirty = None

    def dirty(self) -> tuple[Array, Array]:
        """The live rows changed, and the rows deleted, since the list was started."""
        if self._dirty is None:
            self._dirty = self._storage.dirty_rows(self.counters)
        return self._dirty

    def complete(self) -> Counters:
        """The counters of the finished version."""
        if not self._track_dirty:
            self.mark_clean()
        self.counters.changed = sum(map(len, self._rows))
        return self.counters

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def _add_dirty(self, rows: Array) -> None:
        self._dirty = None
        self.counters.dirty_to = self._storage.dirty.write(self.counters.dirty_to, rows)

    def _enter(self, keys: KeyBatch, missing: Array, out: Array) -> tuple[Array, Array, int]:
        """Enter keys into the index: rows made, dead rows found, how many made were free ones."""
        storage, counters = self._storage, self.counters
        storage.reserve_rows(counters.rows + max(0, len(missing) - counters.free))
        its = counters.heaps[0]
        place = self._reserve_parts(keys.lens[missing])
        cursor = np.array([counters.rows, counters.free, place], np.int64)
        born, revived = storage.index.insert(keys, missing, out, storage.free.rows, cursor)
        reused = counters.free - int(cursor[1])
        added = int(cursor[2]) - place
        counters.rows, counters.free = int(cursor[0]), int(cursor[1])
        its.tail += added
        its.live += added
        counters.appended += added
        return born, revived, reused

    def _reserve_parts(self, lens: Array) -> int:
        """Make room in the key heap for the parts of keys; the place where it is."""
        if not self._storage.layout.key.parts:
            return 0
        sizes = record_bytes(np.maximum(lens, 0).sum(axis=1, dtype=np.int64))
        return self._storage.heaps[0].reserve(self.counters.heaps[0], sizes)


def _number_of(groups: KeyGroups) -> int:
    return xxhash.xxh3_64_intdigest(str(groups).encode()) >> 1


def _joined(parts: Sequence[Array | range]) -> Array:
    return np.concatenate([*map(np.asarray, parts), np.empty(0, np.int64)])


def _in_order(parts: Sequence[Array | range], of_keys: Array) -> Array:
    """Rows in the order in which their keys came: whether a row was dead before is of no account,
    as it may be dead in one table and not there at all in one that was restored."""
    rows = _joined(parts)
    met, at = np.unique(of_keys, return_index=True)
    order = np.argsort(at[np.searchsorted(met, rows)])
    found: Array = rows[order]
    return found

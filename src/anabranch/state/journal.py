"""Undo logs: before-images of rows for a version, before-images of words for maintenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.kernels import rows as kernels
from anabranch.state.files import Arena, Region
from anabranch.state.header import Header

Array = npt.NDArray[Any]

_ROWS, _STATES, _UNDO = "journal rows", "journal states", "undo"


class Journal:
    """The before-images of rows that a version has changed: their state and their value columns.

    Keys need no image, as they are only ever written to rows that were free. The count of images in
    the header grows before the row changes.
    """

    def __init__(
        self, arena: Arena, header: Header, head: Array, width: int, columns: Mapping[str, Array]
    ) -> None:
        self._arena, self._header = arena, header
        self._head, self._width = head, width
        self._rows = arena.array(_ROWS)
        self._states = arena.array(_STATES)
        self._columns = [
            (f"journal {name}", column, arena.array(f"journal {name}").reshape(column.shape))
            for name, column in columns.items()
        ]

    @staticmethod
    def regions(max_rows: int, columns: Sequence[Region]) -> list[Region]:
        """The arrays of a journal for a number of rows with these columns."""
        return [
            Region(_ROWS, np.dtype(np.int32), max_rows),
            Region(_STATES, np.dtype(np.uint64), max_rows),
            *(Region(f"journal {c.name}", c.dtype, max_rows, c.width) for c in columns),
        ]

    def keep(self, rows: Array) -> None:
        """Add the images of rows that have none yet."""
        start = self._header.images
        stop = start + len(rows)
        for name in (_ROWS, _STATES):
            self._arena.ensure(name, stop)
        for name, column, images in self._columns:
            self._arena.ensure(name, stop)
            column.take(rows, axis=0, out=images[start:stop], mode="clip")
        kernels.states(self._head, self._width, rows, self._states[start:stop])
        self._rows[start:stop] = rows
        self._header.images = stop

    def restore(self) -> None:
        """Write all images back. Repeatable if the process was killed meanwhile."""
        count = self._header.images
        rows = self._rows[:count].astype(np.int64)
        for _, column, images in self._columns:
            column[rows] = images[:count]
        kernels.restore(self._head, self._width, rows, self._states[:count])

    def clear(self) -> None:
        """Drop all images, and free memory that the last version did not use."""
        used = self._header.images
        self._header.images = 0
        for name in (_ROWS, _STATES, *(name for name, _, _ in self._columns)):
            self._arena.trim(name, used)


class UndoLog:
    """The values of single words before maintenance changed them."""

    def __init__(self, arena: Arena, header: Header, arrays: Sequence[Array]) -> None:
        self._arena, self._header = arena, header
        self._arrays = arrays
        self._log = arena.array(_UNDO).reshape(-1, 3)

    @staticmethod
    def region(max_rows: int, heaps: int) -> Region:
        """The array of an undo log for a table with a number of rows and heaps."""
        most = (4 + 2 * heaps) * max_rows  # a row is released, moved, and its records moved
        return Region(_UNDO, np.dtype(np.uint64), min(1 << 28, most), 3)

    def keep(self, which: int, positions: Array) -> None:
        """Add words of one of the arrays, before they change."""
        start = self._header.undos
        stop = start + len(positions)
        self._arena.ensure(_UNDO, stop)
        self._log[start:stop, 0] = which
        self._log[start:stop, 1] = positions
        self._log[start:stop, 2] = self._arrays[which][positions]
        self._header.undos = stop

    def apply(self) -> None:
        """Put all words back, the last one first, so that the oldest value of a word stays."""
        log = self._log[: self._header.undos][::-1]
        for which, array in enumerate(self._arrays):
            some = log[log[:, 0] == which]
            array[some[:, 1].astype(np.int64)] = some[:, 2]

    def clear(self) -> None:
        """Clear the log."""
        self._arena.trim(_UNDO, self._header.undos)
        self._header.undos = 0

"""The tolls of earlier days, to be looked up: sorted once, then read from a mapped file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]

_KEYS, _SUMS = "keys.npy", "sums.npy"
_NO_SPAN = 1 << 31


@dataclass(frozen=True)
class Ledger:
    """What each vehicle has paid, by day and expressway.

    It is only a name of files, which every process opens for itself when it first looks something
    up. ``folder`` None is a ledger of nothing. With ``vehicles`` and ``expressways`` the ledger is
    that of one of many copies of an input, and stands for all of them: copy c has its numbers
    shifted by c times as many, see :func:`~anabranch_linearroad.replicate`.
    """

    folder: str | None = None
    vehicles: int = _NO_SPAN
    expressways: int = 0

    @classmethod
    def write(
        cls, history: pa.Table, folder: Path, *, vehicles: int = _NO_SPAN, expressways: int = 0
    ) -> Ledger:
        """Make the files of a ledger from a history, in a folder of their own."""
        folder.mkdir(parents=True, exist_ok=True)
        columns = (history[name].to_numpy() for name in ("VID", "Day", "XWay"))
        keys, which = np.unique(_keys(*columns), return_inverse=True)
        sums = np.zeros(len(keys), np.int64)
        np.add.at(sums, which, history["Toll"].to_numpy())
        np.save(folder / _KEYS, keys)
        np.save(folder / _SUMS, sums)
        return cls(str(folder), vehicles, expressways)

    def spent(self, vid: Array, day: Array, xway: Array) -> Array:
        """What vehicles have paid on those days on those expressways, 0 where nothing is known.

        >>> import tempfile
        >>> from anabranch_linearroad.rows import history_table
        >>> paid = history_table([{"VID": 7, "Day": 1, "XWay": 0, "Toll": 30}] * 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ledger = Ledger.write(paid, Path(folder), vehicles=10, expressways=1)
        ...     ledger.spent(np.array([7, 17, 17]), np.array([1, 1, 1]), np.array([0, 0, 1]))
        array([60,  0, 60])
        """
        if self.folder is None:
            return np.zeros(len(vid), np.int64)
        keys, sums = _opened(self.folder)
        if not len(keys) or not len(vid):
            return np.zeros(len(vid), np.int64)
        copy = vid.astype(np.int64) // self.vehicles
        own = xway - copy * self.expressways
        wanted = _keys(vid - copy * self.vehicles, day, np.maximum(own, 0))
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where((keys[at] == wanted) & (own >= 0), sums[at], 0)


def _keys(vid: Array, day: Array, xway: Array) -> Array:
    """One number for each vehicle, expressway and day."""
    keys: Array = vid.astype(np.int64) << 24 | xway.astype(np.int64) << 8 | day
    return keys


@lru_cache(maxsize=4)
def _opened(folder: str) -> tuple[Array, Array]:
    keys, sums = (np.load(Path(folder) / name, mmap_mode="r") for name in (_KEYS, _SUMS))
    return keys, sums

"""The tables that a Python worker keeps open from batch to batch."""

from __future__ import annotations

import gc
from collections.abc import Collection
from pathlib import Path

from anabranch.errors import StateFull
from anabranch.state.table import StateTable, TableLayout

_ADDRESSES = 1 << 46
"""A process has 2^47 bytes of addresses, and a table takes those of all it could ever hold."""
_TABLES = 256
"""Each takes a file descriptor."""


class OpenTables:
    """Open tables, so that their pages stay mapped. The least recently used are closed first."""

    def __init__(self, *, addresses: int = _ADDRESSES, tables: int = _TABLES) -> None:
        self._addresses, self._tables = addresses, tables
        self._open: dict[str, StateTable] = {}
        self._taken = 0
        """The addresses of all of them."""

    def __len__(self) -> int:
        return len(self._open)

    def get(self, folder: Path, layout: TableLayout, *, beside: Collection[str] = ()) -> StateTable:
        """The table in a folder. Tables in the folders ``beside`` are in use and stay open."""
        name = str(folder)
        table = self._open.get(name)
        if table is not None and table.replaced():
            self._close(name)
            table = None
        if table is None:
            self._close_replaced()
            table = self._opened(folder, layout, beside)
            self._taken += table.addresses
        else:
            del self._open[name]
        self._open[name] = table
        idle = (each for each in list(self._open) if each != name and each not in beside)
        while self._over() and (oldest := next(idle, None)) is not None:
            self._close(oldest)
        return table

    def close(self) -> None:
        """Close all of them."""
        self._close_all_but(())

    def _opened(self, folder: Path, layout: TableLayout, beside: Collection[str]) -> StateTable:
        try:
            return StateTable.open(folder, layout)
        except StateFull:
            if not self._close_all_but(beside):
                raise
        gc.collect()
        return StateTable.open(folder, layout)

    def _close_replaced(self) -> None:
        # What is mapped stays in memory, also the tables of queries that have long ended.
        for gone in [each for each, other in self._open.items() if other.replaced()]:
            self._close(gone)

    def _close_all_but(self, names: Collection[str]) -> bool:
        """Close the tables that are not in use. Whether there were any."""
        idle = [each for each in self._open if each not in names]
        for each in idle:
            self._close(each)
        return bool(idle)

    def _close(self, name: str) -> None:
        table = self._open.pop(name)
        self._taken -= table.addresses
        table.close()

    def _over(self) -> bool:
        return len(self._open) > self._tables or self._taken > self._addresses

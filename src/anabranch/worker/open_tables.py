"""The tables that a Python worker keeps open from batch to batch."""

from __future__ import annotations

import gc
from pathlib import Path

from anabranch.errors import StateFull
from anabranch.state.table import StateTable, TableLayout

_ADDRESSES = 1 << 44
"""A process has 2^47 bytes of addresses, and a table takes those of all it could ever hold."""
_TABLES = 256
"""Each takes a file descriptor."""


class OpenTables:
    """Open tables, so that their pages stay mapped; those used longest ago are closed first."""

    def __init__(self, *, addresses: int = _ADDRESSES, tables: int = _TABLES) -> None:
        self._addresses, self._tables = addresses, tables
        self._open: dict[str, StateTable] = {}

    def __len__(self) -> int:
        return len(self._open)

    def get(self, folder: Path, layout: TableLayout) -> StateTable:
        """The table in a folder."""
        name = str(folder)
        table = self._open.pop(name, None)
        if table is not None and table.replaced():
            table.close()
            table = None
        if table is None:
            self._close_replaced()
            table = self._opened(folder, layout)
        self._open[name] = table
        while len(self._open) > 1 and self._over():
            self._close_oldest()
        return table

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            self._close_oldest()

    def _opened(self, folder: Path, layout: TableLayout) -> StateTable:
        try:
            return StateTable.open(folder, layout)
        except StateFull:
            if not self._open:
                raise
        self.close()
        gc.collect()
        return StateTable.open(folder, layout)

    def _close_replaced(self) -> None:
        # What is mapped stays in memory, also the tables of queries that have long ended.
        for gone in [each for each, other in self._open.items() if other.replaced()]:
            self._open.pop(gone).close()

    def _close_oldest(self) -> None:
        self._open.pop(next(iter(self._open))).close()

    def _over(self) -> bool:
        total = sum(table.addresses for table in self._open.values())
        return len(self._open) > self._tables or total > self._addresses

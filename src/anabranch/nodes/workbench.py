"""What a node does with the state tables of one query that are on it.

The coordinator asks for these things by name. On one machine it calls them; on a cluster the
agents of the nodes do, see :mod:`anabranch.nodes.actions`.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from anabranch.backup.files import Files
from anabranch.backup.manifests import OperatorManifest, Part
from anabranch.backup.merging import merged, merged_apart
from anabranch.backup.parts import back_up, retrieve
from anabranch.backup.store import BackupStore
from anabranch.errors import StateError, StateMissing
from anabranch.nodes.captures import CAPTURES, write_capture
from anabranch.nodes.fields import check_table
from anabranch.nodes.tickets import Refused
from anabranch.state.capture import Capture, capture
from anabranch.state.checkpoint import read
from anabranch.state.groups import KeyGroups
from anabranch.state.partition import partition
from anabranch.state.restore import advance, restore
from anabranch.state.table import StateTable, TableLayout
from anabranch.units import Version

__all__ = ["CAPTURES", "TABLES", "Bench", "Workbench"]

TABLES = "tables"
_LOCK_SECONDS = 60.0
_AT_ONCE = threading.BoundedSemaphore(16)
"""Every table that is open takes addresses of this process, and there are only so many."""


class Bench(Protocol):
    """The tables of one query on one node. A table's name is ``operator@epoch/instance``."""

    def usable(self, table: str, layout: TableLayout, version: Version) -> bool:
        """Whether a table is there and is, or can be rolled back to, a committed version."""

    def create(self, table: str, layout: TableLayout, version: Version) -> None:
        """Make a table without any state, as if at a version, in place of what may be there."""

    def restore(
        self, table: str, layout: TableLayout, saved: OperatorManifest, groups: KeyGroups
    ) -> int:
        """Make a table with the saved state of some groups; returns the bytes of the files read."""

    def advance(
        self,
        table: str,
        layout: TableLayout,
        changes: OperatorManifest,
        groups: KeyGroups,
        since: Version,
        fence: int,
    ) -> None:
        """Bring a table from a version to a later one, by the changes of its groups in between.

        StateMissing if the table is not, and cannot be rolled back to, the earlier version.
        """

    def capture(
        self,
        table: str,
        layout: TableLayout,
        operator: str,
        instance: int,
        groups: KeyGroups,
        version: Version,
        base: Version | None = None,
    ) -> str:
        """Write the rows of a table, as they are at a committed version, to a capture file.

        All of them, or those that changed since ``base``, where its last checkpoint was taken.
        StateMissing if the table is not, and cannot be rolled back to, that version.
        """

    def fetch(self, file: str) -> pa.Buffer:
        """The bytes of a capture file of this node, which is removed."""

    def store(self, file: str, under: str) -> Part:
        """Put a capture file of this node into the backup store, and remove it."""

    def shorten(self, saved: OperatorManifest, under: str, stopped: threading.Event) -> Part:
        """Merge a chain of stored files into one full file, and store that.

        Nobody wants it any more once ``stopped`` is set.
        """

    def rename(self, table: str, to: str) -> None:
        """Give a table another name. Nothing happens if that is done already."""

    def keep_only(self, tables: Collection[str]) -> None:
        """Remove all other tables."""


class Workbench:
    """The tables below a folder of this machine, and the store that they are saved in.

    With ``files``, where that store is, long work on what is stored is done by another process.
    """

    def __init__(self, root: Path, store: BackupStore, files: Files | None = None) -> None:
        self._root = root
        self._store = store
        self._files = files

    def path(self, table: str) -> Path:
        """Where a table is; Refused if that is not a name, or a link leads elsewhere."""
        folder = self._root / TABLES
        path = folder / check_table(table)
        if path.resolve() != folder.resolve() / table:
            raise Refused(f"a link leads from {path} out of the tables of this query")
        return path

    def usable(self, table: str, layout: TableLayout, version: Version) -> bool:
        """See :meth:`Bench.usable`."""
        try:
            with self._at(table, layout, version):
                return True
        except StateError:
            return False

    def create(self, table: str, layout: TableLayout, version: Version) -> None:
        """See :meth:`Bench.create`."""
        with _AT_ONCE:
            StateTable.create(self.cleared(table), layout, version=version).close()

    def restore(
        self, table: str, layout: TableLayout, saved: OperatorManifest, groups: KeyGroups
    ) -> int:
        """See :meth:`Bench.restore`."""
        captures = retrieve(self._store, saved, groups=groups)
        mine = partition(captures, {0: groups})[0]
        with _AT_ONCE:
            restore(self.cleared(table), layout, mine)
        return sum(part.bytes for part in saved.parts if part.groups & groups)

    def advance(
        self,
        table: str,
        layout: TableLayout,
        changes: OperatorManifest,
        groups: KeyGroups,
        since: Version,
        fence: int,
    ) -> None:
        """See :meth:`Bench.advance`."""
        captures = retrieve(self._store, changes, groups=groups)
        with self._at(table, layout, since) as opened:
            advance(opened, partition(captures, {0: groups})[0], fence)

    def capture(
        self,
        table: str,
        layout: TableLayout,
        operator: str,
        instance: int,
        groups: KeyGroups,
        version: Version,
        base: Version | None = None,
    ) -> str:
        """See :meth:`Bench.capture`."""
        with self._at(table, layout, version) as opened:
            taken = capture(opened, operator, instance, groups=groups, base=base)
        return str(write_capture(taken, self._root, f"{uuid.uuid4().hex}.arrow"))

    def read(self, file: str) -> Capture:
        """The capture in a file."""
        with pa.memory_map(file) as mapped:
            return read(mapped.read_buffer(), name=file)

    def fetch(self, file: str) -> pa.Buffer:
        """See :meth:`Bench.fetch`."""
        with pa.memory_map(file) as mapped:
            data = mapped.read_buffer()
        Path(file).unlink()
        return data

    def store(self, file: str, under: str) -> Part:
        """See :meth:`Bench.store`."""
        with pa.memory_map(file) as mapped:
            data = mapped.read_buffer()
            part = back_up(self._store, read(data, name=file), data, under=under)
        Path(file).unlink(missing_ok=True)
        return part

    def shorten(self, saved: OperatorManifest, under: str, stopped: threading.Event) -> Part:
        """See :meth:`Bench.shorten`."""
        if self._files is not None:
            return merged_apart(self._files, saved, under, stopped)
        return merged(self._store, saved, under)

    def rename(self, table: str, to: str) -> None:
        """See :meth:`Bench.rename`."""
        before, after = self.path(table), self.path(to)
        if before.exists():
            after.parent.mkdir(parents=True, exist_ok=True)
            before.rename(after)

    def keep_only(self, tables: Collection[str]) -> None:
        """See :meth:`Bench.keep_only`."""
        folder = self._root / TABLES
        wanted = {check_table(table) for table in tables}
        for found in _tables(folder):
            if found not in wanted:
                shutil.rmtree(folder / found, ignore_errors=True)
        for operator in _folders(folder):
            if not any(operator.iterdir()):
                operator.rmdir()

    @contextmanager
    def _at(self, table: str, layout: TableLayout, version: Version) -> Iterator[StateTable]:
        """A table, open and locked, at a version."""
        with _AT_ONCE:
            opened = StateTable.open(self.path(table), layout)
            try:
                with opened.lock(_LOCK_SECONDS):
                    if not _brought_to(opened, version):
                        raise StateMissing(f"{table} is at version {opened.version}, not {version}")
                    yield opened
            finally:
                opened.close()

    def cleared(self, table: str) -> Path:
        """Where a table is to be made, with nothing there."""
        path = self.path(table)
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _brought_to(table: StateTable, version: Version) -> bool:
    """Roll a table back if a batch after the version was begun; whether it then is at it."""
    if table.unfinished is not None or table.version == version + 1:
        table.rollback()
    return table.version == version


def _tables(folder: Path) -> list[str]:
    return [
        str(table.relative_to(folder))
        for operator in _folders(folder)
        for table in operator.iterdir()
    ]


def _folders(folder: Path) -> Sequence[Path]:
    """The folders in a folder; what is behind a link is not in it."""
    if not folder.is_dir():
        return []
    return [found for found in folder.iterdir() if found.is_dir() and not found.is_symlink()]

"""The node of this machine, which has state tables of one query and executes requests."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import pyarrow as pa

from anabranch.errors import CheckpointError, Fenced, Refused, StateError, StateLocked, StateMissing
from anabranch.fragments.cost import Cost
from anabranch.nodes.captures import captures_of, own_capture, write_capture
from anabranch.nodes.fence import EPOCH, Fence
from anabranch.nodes.node import Deadline
from anabranch.nodes.requests import (
    Advance,
    Backed,
    Capture,
    CaptureFile,
    Captures,
    Change,
    Drop,
    Fetch,
    Inspect,
    Make,
    Mend,
    Merge,
    Request,
    Store,
    Stored,
    TableName,
    check_table,
)
from anabranch.state import capture as rows_of
from anabranch.state.capture import CheckpointSchema, capturing
from anabranch.state.checkpoint import read
from anabranch.state.restore import (
    advance_in_pieces,
    half_made,
    name_of,
    restore_in_pieces,
)
from anabranch.state.table import StateTable, TableLayout
from anabranch.stores.address import StoreAddress
from anabranch.stores.manifests import OperatorManifest
from anabranch.stores.merging import Merging
from anabranch.stores.meter import Meter, metered
from anabranch.stores.parts import Destination, back_up
from anabranch.stores.retrieval import retrieve_in_pieces
from anabranch.stores.scattered import mended
from anabranch.stores.store import BackupStore
from anabranch.units import Version

A = TypeVar("A")

TABLES = "tables"
_LOCK_SECONDS = 60.0
_AT_ONCE = threading.BoundedSemaphore(16)
"""Limits how many tables are open at the same time, as each takes addresses of this process."""

Backups = Callable[[Backed[Any], Deadline], BackupStore]
"""Opens the backup store of the query for a request."""


class LocalNode:
    """The tables and captures below a folder of this machine.

    See :class:`~anabranch.nodes.node.Node`. With ``apart``, the address of the store, another
    process merges parts: in the driver a merge would hold the interpreter's lock, which batches
    need. With ``host``, the name of this node among its peers, it reads its own copies of parts
    first. ``keep`` keeps the files of parts that it has stored at others. ``below`` is a folder in
    the names of the parts that it stores.
    """

    def __init__(
        self,
        root: Path,
        backups: Backups,
        apart: StoreAddress | None = None,
        host: str = "",
        keep: Callable[[str, Path], bool] | None = None,
        below: str = "",
    ) -> None:
        self._root = root
        self._backups = backups
        self._apart = apart
        self._host = host
        self._keep = keep
        self._below = below
        self._fence = Fence(root / EPOCH)
        self._busy: set[TableName] = set()
        self._free = threading.Condition()
        self._verbs: dict[type[Request[Any]], Callable[[Any, Deadline], Any]] = {
            Make: self._make,
            Advance: self._advance,
            Capture: self._capture,
            Captures: self._captures,
            Inspect: self._inspect,
            Drop: self._drop,
            Fetch: self._fetch,
            Store: self._store,
            Mend: self._mend,
            Merge: self._merge,
        }

    def ask(self, request: Request[A], deadline: Deadline) -> A:
        """See :meth:`~anabranch.nodes.node.Node.ask`."""
        carry_out = self._verbs.get(type(request))
        if carry_out is None:
            raise Refused(f"the tables of a node have no request {request.verb!r}")
        admitted = (
            self._fence.admit(request.epoch, deadline)
            if isinstance(request, Change)
            else nullcontext()
        )
        with admitted:
            return cast(A, carry_out(request, deadline))

    def path(self, table: TableName) -> Path:
        """The path of a table. Refused if its name is invalid, or a link leads elsewhere."""
        folder = self._root / TABLES
        try:
            path = folder / check_table(table)
        except ValueError as error:
            raise Refused(str(error)) from error
        if path.resolve() != folder.resolve() / table:
            raise Refused(f"{path} is a symbolic link out of this query's folder of tables")
        return path

    def clear(self, table: TableName) -> Path:
        """The path of a new table, with an old one removed."""
        path = self.path(table)
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _make(self, request: Make, deadline: Deadline) -> Cost:
        table, layout = request.table, request.layout
        self.path(table)
        if not request.parts:
            with self._alone(deadline, table), _AT_ONCE:
                StateTable.create(self.clear(table), layout, version=request.version).close()
            return Cost()
        meter = Meter()
        store = metered(self._backups(request, deadline), meter)
        with self._alone(deadline, table), _AT_ONCE:
            deadline.check(f"make {table}")
            path = self.path(table)
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._retrieved(store, request, request.version, deadline) as pieces:
                restore_in_pieces(path, layout, request.version, pieces, replacing=True)
        return meter.cost

    def _advance(self, request: Advance, deadline: Deadline) -> None:
        table, layout = request.table, request.layout
        with self._alone(deadline, table), self._opened(table, layout, deadline) as opened:
            if _was_advanced(opened, request):
                return
            deadline.check(f"advance {table}")
            store = self._backups(request, deadline)
            with self._retrieved(
                store, request, request.upto, deadline, since=request.since
            ) as pieces:
                _bring_to(opened, table, request.since, request.fence)
                advance_in_pieces(opened, pieces, request.upto, request.fence)

    def _capture(self, request: Capture, deadline: Deadline) -> CaptureFile:
        table = request.table
        with self._alone(deadline, table), self._opened(table, request.layout, deadline) as opened:
            _bring_to(opened, table, request.version, request.fence)
            taken = capturing(
                opened,
                request.operator,
                request.instance,
                groups=request.groups,
                base=request.base,
            )
            path = write_capture(taken, self._root, uuid.uuid4().hex, request.fence)
        return CaptureFile(str(path))

    def _captures(self, request: Captures, deadline: Deadline) -> tuple[CaptureFile, ...]:
        return tuple(CaptureFile(str(path)) for path in sorted(captures_of(self._root)))

    def _inspect(
        self, request: Inspect, deadline: Deadline
    ) -> dict[TableName, tuple[Version, ...]]:
        found: dict[TableName, tuple[Version, ...]] = {}
        for table in self._tables():
            layout = request.layouts.get(table)
            found[table] = () if layout is None else self._versions(table, layout, deadline)
        return found

    def _drop(self, request: Drop, deadline: Deadline) -> None:
        paths = [self.path(table) for table in request.tables]
        files = [own_capture(self._root, file) for file in request.captures]
        with self._alone(deadline, *request.tables):
            for path in paths:
                shutil.rmtree(path, ignore_errors=True)
                shutil.rmtree(half_made(path), ignore_errors=True)
        for file in files:
            file.unlink(missing_ok=True)

    def _fetch(self, request: Fetch, deadline: Deadline) -> pa.Buffer:
        return _mapped(own_capture(self._root, request.file))

    def _store(self, request: Store, deadline: Deadline) -> Stored:
        file = own_capture(self._root, request.file)
        meter = Meter()
        store = metered(self._backups(request, deadline), meter)
        part = back_up(store, read(_mapped(file), name=str(file)), self._destination(request))
        file.unlink(missing_ok=True)
        return Stored(part, meter.cost)

    def _mend(self, request: Mend, deadline: Deadline) -> Stored:
        meter = Meter()
        store = metered(self._backups(request, deadline), meter)
        return Stored(mended(store, request.part, request.holders, self._host), meter.cost)

    def _merge(self, request: Merge, deadline: Deadline) -> Stored:
        chain = OperatorManifest(request.schema, request.parts)
        merging = Merging(chain, request.groups, request.version, self._destination(request))
        if self._apart is not None:
            return Stored(merging.run_apart(self._apart, deadline.wait), Cost())
        meter = Meter()
        store = metered(self._backups(request, deadline), meter)
        return Stored(merging.run(store), meter.cost)

    def _destination(self, request: Store | Merge) -> Destination:
        # The mark makes the name unique, so that deleting the part never deletes another one.
        mark = f"-{uuid.uuid4().hex[:12]}"
        return Destination(
            request.under + self._below,
            request.holders,
            request.needed,
            mark,
            self._host,
            request.row,
            self._keep,
            request.parity,
        )

    @contextmanager
    def _retrieved(
        self,
        store: BackupStore,
        request: Make | Advance,
        version: Version,
        deadline: Deadline,
        *,
        since: Version | None = None,
    ) -> Iterator[Iterator[list[rows_of.Capture]]]:
        """The captures that bring the groups of a request to a version, from the parts it names."""
        chain = OperatorManifest(CheckpointSchema.of(request.layout), request.parts)
        try:
            with closing(
                retrieve_in_pieces(
                    store,
                    chain,
                    groups=request.groups,
                    version=version,
                    since=since,
                    near=self._host,
                )
            ) as pieces:
                yield _until(deadline, str(request), pieces)
        except CheckpointError as error:
            raise type(error)(f"{request}: {error}", part=error.part) from error

    def _versions(
        self, table: TableName, layout: TableLayout, deadline: Deadline
    ) -> tuple[Version, ...]:
        """The versions at which a table can be used."""
        try:
            with self._alone(deadline, table), self._opened(table, layout, deadline) as opened:
                back = opened.previous if opened.unfinished is None else None
                return (opened.version,) if back is None else (opened.version, back)
        except StateError:
            return ()

    @contextmanager
    def _opened(
        self, table: TableName, layout: TableLayout, deadline: Deadline
    ) -> Iterator[StateTable]:
        """A table, open and locked."""
        path = self.path(table)
        with _AT_ONCE:
            opened = StateTable.open(path, layout)
            try:
                with opened.lock(min(_LOCK_SECONDS, deadline.left())):
                    yield opened
            finally:
                opened.close()

    @contextmanager
    def _alone(self, deadline: Deadline, *tables: TableName) -> Iterator[None]:
        """Keep other requests from these tables, as one that was given up may still use them."""
        wanted, patience = set(tables), min(_LOCK_SECONDS, deadline.left())
        with self._free:
            if not self._free.wait_for(lambda: not self._busy & wanted, patience):
                raise StateLocked(
                    f"another request is changing the tables {sorted(self._busy & wanted)}"
                )
            self._busy |= wanted
        try:
            yield
        finally:
            with self._free:
                self._busy -= wanted
                self._free.notify_all()

    def _tables(self) -> list[TableName]:
        """All existing tables, incomplete ones too. Symbolic links are not followed."""
        found = [path for of in _folders(self._root / TABLES) for path in _folders(of)]
        names = {f"{path.parent.name}/{name_of(path)}" for path in found}
        return [TableName(name) for name in sorted(names) if _is_table(name)]


def _until(deadline: Deadline, doing: str, pieces: Iterable[A]) -> Iterator[A]:
    """The pieces, and an error instead of the next one, or of the end, when nobody waits."""
    for piece in pieces:
        deadline.check(doing)
        yield piece
    deadline.check(doing)


def _was_advanced(opened: StateTable, request: Advance) -> bool:
    """Whether the answer to the same request was lost."""
    at = opened.version if opened.unfinished is None else None
    return (at, opened.fence) == (request.upto, request.fence)


def _bring_to(opened: StateTable, table: TableName, version: Version, fence: int) -> None:
    """Roll a table back to a version. StateMissing if it is at another one."""
    if opened.fence > fence:
        raise Fenced(
            f"{table} is at version {opened.version} with fencing token {opened.fence}; a request "
            f"for version {version} came too late, with fencing token {fence}"
        )
    if opened.unfinished is not None:
        opened.rollback()
    if opened.version != version and opened.previous == version:
        opened.rollback()
    if opened.version != version:
        raise StateMissing(f"{table} is at version {opened.version}, not {version}")


def _mapped(file: Path) -> pa.Buffer:
    """The bytes of a file, which may be removed meanwhile."""
    try:
        with pa.memory_map(str(file)) as mapped:
            return mapped.read_buffer()
    except FileNotFoundError as error:
        raise StateMissing(f"there is no capture {file}") from error


def _is_table(name: str) -> bool:
    try:
        check_table(name)
    except ValueError:
        return False
    return True


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder. Symbolic links are not followed."""
    if not folder.is_dir():
        return []
    return [found for found in folder.iterdir() if found.is_dir() and not found.is_symlink()]

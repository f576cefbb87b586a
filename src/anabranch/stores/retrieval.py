"""Reading the parts of a chain: several at once, and some key groups at a time.

What is in memory is a piece of the state and the next one, however large the state is.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.errors import CheckpointError, StoreError
from anabranch.state import part_file
from anabranch.state.capture import Capture, CheckpointSchema
from anabranch.state.chains import leading_to
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part, peer_name
from anabranch.state.part_file import BufferSource, PartFile
from anabranch.stores.gathering import Gathered, Holders, threads
from anabranch.stores.manifests import OperatorManifest
from anabranch.stores.meter import Metered
from anabranch.stores.scattered import held, meter_of
from anabranch.stores.store import BackupStore
from anabranch.units import NO_VERSION, Version

Array = npt.NDArray[Any]
T = TypeVar("T")

_log = logging.getLogger(__name__)

PIECE = 16 << 20
"""About how many bytes of parts are read at a time, and how many while these are in use."""
_PARTS_AT_ONCE = 4


def retrieve(
    store: BackupStore,
    operator: OperatorManifest,
    *,
    schema: CheckpointSchema | None = None,
    groups: KeyGroups | None = None,
    version: Version | None = None,
    since: Version | None = None,
    near: str = "",
) -> list[Capture]:
    """The captures with an operator's state, or that of some groups, oldest first.

    They bring the groups to ``version``, by default that of the newest part. With ``since`` they
    are the changes from that version on. Each capture has only the groups that need it. Only what
    is needed is read of the files, and all of that is verified before anything is returned.
    :class:`~anabranch.errors.CheckpointError` names the groups that do not reach the version.
    ``schema`` is the expected schema; :class:`~anabranch.errors.SchemaChanged` if the checkpoint
    was written with other columns. Of a part with several copies one is read, if possible that of
    the host ``near``.
    """
    with _Chain(store, operator, schema, groups, version, since, near) as chain:
        return chain.read(chain.groups, whole=True)


def retrieve_in_pieces(
    store: BackupStore,
    operator: OperatorManifest,
    *,
    schema: CheckpointSchema | None = None,
    groups: KeyGroups | None = None,
    version: Version | None = None,
    since: Version | None = None,
    near: str = "",
    piece: int = PIECE,
) -> Generator[list[Capture], None, None]:
    """The same captures, a piece of the key groups at a time, in their order.

    Each piece is a chain of its own, with about so many bytes, or those of one group. While one is
    in use, the next one is read. That the parts lead to the version is checked at once.
    """
    return _in_pieces(_Chain(store, operator, schema, groups, version, since, near), piece)


def _in_pieces(chain: _Chain, piece: int) -> Generator[list[Capture], None, None]:
    with chain:
        if chain.bytes <= piece:
            yield chain.read(chain.groups, whole=True)
            return
        coming = None
        for some in chain.pieces(piece):
            before, coming = coming, chain.start(some)
            if before is not None:
                yield [each.result() for each in before]
        if coming is not None:
            yield [each.result() for each in coming]


class _Chain:
    """The parts that lead some groups to a version."""

    def __init__(
        self,
        store: BackupStore,
        operator: OperatorManifest,
        schema: CheckpointSchema | None,
        groups: KeyGroups | None,
        version: Version | None,
        since: Version | None,
        near: str,
    ) -> None:
        self._key_groups = operator.schema.key_groups
        every = KeyGroups.all(self._key_groups)
        self.groups = every if groups is None else groups & every
        if version is None:
            version = max((part.version for part in operator.parts), default=NO_VERSION)
        self._steps = leading_to(operator.parts, self.groups, version, since=since)
        self._pool = ThreadPoolExecutor(_PARTS_AT_ONCE, "anabranch-retrieve")
        self._reading = threads()
        holders = Holders(self._reading, near, meter_of(store))
        self._parts: list[_Copies | _Fragments] = [
            _Fragments(store, part, schema or operator.schema, near, holders)
            if part.needed > 1
            else _Copies(store, part, schema or operator.schema, near)
            for part, _ in self._steps
        ]

    @property
    def bytes(self) -> int:
        """About how many bytes the wanted groups have in all parts."""
        return sum(part.bytes * len(of) // len(part.groups) for part, of in self._steps)

    def pieces(self, most: int) -> Iterator[KeyGroups]:
        """The groups, in pieces with about so many bytes."""
        opening = [self._pool.submit(part.sizes) for part in self._parts]
        every = np.arange(self._key_groups)
        sizes = np.zeros(self._key_groups, np.int64)
        for (_, of), opened in zip(self._steps, opening, strict=True):
            sizes += np.where(of.mask(every), opened.result(), 0)
        piece: list[int] = []
        held = 0
        for group in self.groups:
            if piece and held + sizes[group] > most:
                yield KeyGroups.of(piece)
                piece, held = [], 0
            piece.append(group)
            held += int(sizes[group])
        if piece:
            yield KeyGroups.of(piece)

    def start(self, groups: KeyGroups, *, whole: bool = False) -> list[Future[Capture]]:
        """Begin to read some of the groups. ``whole``: all of them, and nothing after that."""
        return [
            self._pool.submit(part.read, of & groups, whole)
            for part, (_, of) in zip(self._parts, self._steps, strict=True)
            if of & groups
        ]

    def read(self, groups: KeyGroups, *, whole: bool) -> list[Capture]:
        """Read some of the groups."""
        return [each.result() for each in self.start(groups, whole=whole)]

    def __enter__(self) -> _Chain:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        # A silent holder is not waited for.
        self._reading.shutdown(wait=False, cancel_futures=True)


class _Reading(ABC):
    """A part that is read, from the file that its owner keeps if that is the node ``near``."""

    def __init__(self, store: BackupStore, part: Part, schema: CheckpointSchema, near: str) -> None:
        self._store = store
        self._part = part
        self._schema = schema
        self._own = peer_name(near, part.own_name) if near and part.owner == near else None
        self._opened: PartFile | None = None
        self._lock = threading.Lock()

    def sizes(self) -> Array:
        """About how many bytes the rows of each key group have."""
        return self._use(lambda file: file.sizes(), whole=False)

    def read(self, groups: KeyGroups, whole: bool) -> Capture:
        """The rows of some groups."""
        whole = whole and self._part.groups <= groups
        return self._use(lambda file: file.read(groups), whole=whole)

    def _use(self, use: Callable[[PartFile], T], *, whole: bool) -> T:
        with self._lock:
            if self._own is not None:
                try:
                    if self._opened is None:
                        here = self._store
                        if isinstance(here, Metered):
                            here = here.unmetered
                        self._opened = self._file(here, self._own, whole=whole)
                    return use(self._opened)
                except (CheckpointError, StoreError) as error:
                    _log.info("Reading %s from others: %s", self._part.name, error)
                    self._own = self._opened = None
            return self._use_others(use, whole=whole)

    @abstractmethod
    def _use_others(self, use: Callable[[PartFile], T], *, whole: bool) -> T:
        """Use what the store, or holders, have of it."""

    def _file(self, store: BackupStore, copy: str, *, whole: bool) -> PartFile:
        """The file under a name, of which only parts are read, or the whole at once."""
        source: part_file.Source
        if whole:
            source = BufferSource(store.get(copy))
        else:
            source = _Stored(store, copy, self._part.bytes or store.size(copy))
        return part_file.opened(
            source, name=copy, schema=self._schema, expected=self._part.checksum
        )


class _Copies(_Reading):
    """A part of which each holder has a copy, or which is in a store that outlives all nodes."""

    def __init__(self, store: BackupStore, part: Part, schema: CheckpointSchema, near: str) -> None:
        super().__init__(store, part, schema, near)
        self._left = sorted(part.copies, key=lambda copy: copy != peer_name(near, part.name))
        self._failed: dict[str, CheckpointError | StoreError] = {}

    def _use_others(self, use: Callable[[PartFile], T], *, whole: bool) -> T:
        """Use the first copy that can be read."""
        while self._left:
            copy = self._left[0]
            try:
                if self._opened is None:
                    self._opened = self._file(self._store, copy, whole=whole)
                return use(self._opened)
            except (CheckpointError, StoreError) as error:
                self._failed[copy] = error
                self._left.remove(copy)
                self._opened = None
        raise self._failure()

    def _failure(self) -> CheckpointError | StoreError:
        # One that did not answer may have it: nothing is lost as long as there is such a one.
        holders = dict(zip(self._part.copies, self._part.holders or ("",), strict=True))
        damaged = [c for c, error in self._failed.items() if isinstance(error, CheckpointError)]
        for error in self._failed.values():
            if isinstance(error, StoreError):
                if damaged:
                    error.part = self._part.name
                    error.without = tuple(holders[copy] for copy in damaged)
                return error
        error = self._failed[damaged[0]]
        error.part = self._part.name
        return error


class _Fragments(_Reading):
    """A part of which each holder has a fragment."""

    def __init__(
        self,
        store: BackupStore,
        part: Part,
        schema: CheckpointSchema,
        near: str,
        holders: Holders,
    ) -> None:
        super().__init__(store, part, schema, near)
        self._holders = holders

    def _use_others(self, use: Callable[[PartFile], T], *, whole: bool) -> T:
        part = self._part
        try:
            if self._opened is None:
                source = Gathered(held(self._store, part), self._holders)
                self._opened = part_file.opened(
                    source, name=part.name, schema=self._schema, expected=part.checksum
                )
            return use(self._opened)
        except CheckpointError as error:
            error.part = error.part or part.name
            raise


@dataclass(frozen=True, slots=True)
class _Stored:
    """The file of a part in a store."""

    store: BackupStore
    name: str
    size: int

    def read(self, offset: int, length: int) -> pa.Buffer:
        return self.store.get(self.name, offset, length)

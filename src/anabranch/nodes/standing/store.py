"""States in fragments at standing nodes, as a store: a manifest names them, and no node."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from anabranch.errors import (
    AnabranchError,
    CheckpointError,
    CheckpointNotFound,
    DidNotHappen,
    MayHaveHappened,
    PlanError,
    StoreError,
)
from anabranch.fragments import Encoder
from anabranch.fragments.cost import Standing
from anabranch.nodes.remote import NodeStore
from anabranch.nodes.standing.client import Access, Ring
from anabranch.nodes.standing.file import RingFile
from anabranch.nodes.standing.names import FragmentName, owner_of, write_holder
from anabranch.nodes.standing.repair import PERIODS
from anabranch.nodes.standing.saving import Placing, Saving, Shape, candidates, withdraw
from anabranch.nodes.standing.survey import (
    Piece,
    Survey,
    delete,
    new_generation,
    survey,
    wanted,
    widen,
)
from anabranch.ring import Contact
from anabranch.stores.address import StoreAddress
from anabranch.stores.gathering import Gathered, Holders, threads
from anabranch.stores.meter import Meter, Metered, Stopwatch
from anabranch.stores.store import check_name
from anabranch.stores.together import at_once, check_all_stored

A = TypeVar("A")

_log = logging.getLogger("anabranch")

OPENER = "anabranch.nodes.standing.store:open_ring"
CHECKED = "check"
"""Whose key it is that looks whether there is a ring."""
_PAUSE = 0.5
_RECENT = 3.0
"""Seconds for which the holders of a state are remembered."""
_MOST_RECENT = 16


class RingStore:
    """See :class:`~anabranch.stores.BackupStore`. The bytes are at nodes of a ring, in fragments.

    Each is coded into ``data + parity`` fragments, any ``data`` of which give it again, and they
    are next to the place of the owner that the name tells of. A put counts once ``at_least`` are
    stored, by default one more than are needed. In a ring with fewer nodes ``data`` is less.
    :meth:`list` has each name of which any fragment was found.
    """

    def __init__(
        self,
        ring: Ring,
        data: int,
        parity: int,
        *,
        at_least: int | None = None,
        row: int | None = None,
    ) -> None:
        """``row``: the bytes of each fragment that are coded at a time."""
        self.ring = ring
        self._row = row
        self._shape = Shape(data, parity)
        self._at_least = at_least
        self._meter: Meter | None = None
        self._lowered: dict[Shape, Shape] = {}
        """What states are coded into instead, on few nodes."""
        self._threads = threads()
        self._recent = _Recent()

    def __repr__(self) -> str:
        shape = self._shape
        return f"RingStore({self.ring.access.query!r}, {shape.data} + {shape.parity})"

    def at(self, epoch: int) -> RingStore:
        """The same store, for the driver of another epoch."""
        data, parity = self._shape.data, self._shape.parity
        return RingStore(self.ring.at(epoch), data, parity, at_least=self._at_least, row=self._row)

    def coded(self, data: int, parity: int, row: int | None) -> RingStore:
        """See :meth:`anabranch.stores.meter.CodingStore.coded`."""
        store = copy(self)
        store._shape, store._row = Shape(data, parity), row
        return store

    def metered(self, meter: Meter) -> RingStore:
        """See :meth:`anabranch.stores.meter.CodingStore.metered`."""
        store = copy(self)
        store._meter, store._recent = meter, _Recent()
        return store

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`anabranch.stores.BackupStore.put`."""
        owner = self._owner(name)
        self._recent.forget(name)
        before = survey(self.ring, owner, name)
        nodes = candidates(before.near, owner)
        shape = self._shape.within(len(nodes))
        self._tell(shape, len(nodes))
        placing = Placing(nodes, shape)
        holders = placing.first(shape.total)
        encoder, meter = Encoder(shape.data, shape.parity, row=self._row), self._meter or Meter()
        meter.found(self._standing(before, shape, len(nodes)))
        folder = Path(tempfile.mkdtemp(prefix="anabranch-"))
        with ExitStack() as failed:
            failed.callback(shutil.rmtree, folder, ignore_errors=True)
            paths = [folder / str(index) for index in range(shape.total)]
            try:
                took = _encode(encoder, data, paths, name, owner, holders)
            except OSError as error:
                raise DidNotHappen(
                    f"{name}: cannot write its fragments to {folder}: {error}"
                ) from error
            failed.pop_all()
        meter.encoded((shape.data, shape.parity), memoryview(data).nbytes, took)
        generation = new_generation(before)

        def write(index: int, store: NodeStore) -> None:
            found = FragmentName(name, generation, index, shape.data, shape.total)
            with pa.memory_map(str(paths[index])) as mapped:
                Metered(store, meter).put(str(found), mapped.read_buffer())

        enough = min(self._at_least or shape.data + 1, shape.total)
        saving = Saving(self.ring, placing, name, shape.total)
        done = saving.store(
            dict(enumerate(holders)),
            write,
            enough,
            lambda: shutil.rmtree(folder, ignore_errors=True),
        )
        try:
            self._check(name, done, enough, shape)
        except StoreError:
            withdraw(self.ring, name, generation, shape, done)
            raise
        self._recent.forget(name)
        delete(self.ring, before.pieces)

    def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
        """See :meth:`anabranch.stores.BackupStore.put_all`."""
        for name in blocks:
            check_name(name)
        check_all_stored(at_once(blocks, lambda name: self.put(name, blocks[name])), len(blocks))

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """See :meth:`anabranch.stores.BackupStore.get`. No more than a few stripes beside the range
        are read."""

        def read(gathered: Gathered) -> pa.Buffer:
            start = min(offset, gathered.size)
            return gathered.read(start, gathered.size if length is None else length)

        return self._read(name, read)

    def list(self, prefix: str = "") -> Sequence[str]:
        """The names at all nodes of the ring that answer."""
        nodes = {view.me.id: view.me.address for view in self.ring.everyone()}
        names: set[str] = set()
        errors: list[AnabranchError] = []
        answers = self.ring.at_all(nodes, lambda ring, address: ring.store(address).list(prefix))
        for answer in answers.values():
            if isinstance(answer, AnabranchError):
                errors.append(answer)
                continue
            found = map(FragmentName.parse, answer)
            names |= {each.state for each in found if each is not None}
        if len(errors) == len(nodes):
            raise errors[0]
        return sorted(name for name in names if name.startswith(prefix))

    def delete(self, name: str) -> None:
        """See :meth:`anabranch.stores.BackupStore.delete`.

        A node that does not answer keeps its fragment, and too few have one then. MayHaveHappened
        if so many do not answer that they could give the bytes again.
        """
        self._recent.forget(name)
        found = survey(self.ring, self._owner(name), name)
        if found.pieces and not found.complete:
            widen(self.ring, found)
        left = delete(self.ring, found.pieces)
        if left and len({piece.name.index for piece in left}) >= left[0].name.data:
            raise MayHaveHappened(
                f"{name}: {len(left)} of its fragments could not be deleted, and give it again"
            )

    def delete_all(self, names: Collection[str]) -> None:
        """See :meth:`anabranch.stores.BackupStore.delete_all`."""
        for name in names:
            check_name(name)
        for error in at_once(names, self.delete):
            raise error

    def size(self, name: str) -> int:
        """See :meth:`anabranch.stores.BackupStore.size`."""

        return self._read(name, lambda gathered: gathered.size)

    def _owner(self, name: str) -> str:
        return owner_of(check_name(name), self.ring.access.query)

    def _read(self, name: str, read: Callable[[Gathered], A]) -> A:
        """Read a state, and wait for a while if its holders are away."""
        opened = self._recent.get(name)
        if opened is not None:
            try:
                return read(opened)
            except (CheckpointError, StoreError) as error:
                _log.info("%s: looking again for its fragments: %s", name, error)
                self._recent.forget(name)
        deadline = time.monotonic() + self.ring.patience
        while True:
            found = survey(self.ring, self._owner(name), name)
            try:
                if not found.complete:
                    widen(self.ring, found)
                state = wanted(self.ring, self._pieces(found), self._meter)
                opened = Gathered(state, Holders(self._threads, meter=self._meter))
                answer = read(opened)
            except (CheckpointNotFound, StoreError) as error:
                if not self._may_return(found) or time.monotonic() > deadline:
                    # Another version may be there. The query does not know the holders of this one.
                    error.part = name
                    if isinstance(error, StoreError):
                        error.host, error.without = None, ()
                    raise
                _log.info("%s: waiting for nodes that may return: %s", name, error)
                self.ring.forget()
                time.sleep(_PAUSE)
            else:
                self._recent.add(name, opened)
                return answer

    def _pieces(self, found: Survey) -> Sequence[Piece]:
        pieces = found.newest()
        if pieces is not None:
            return pieces
        best = max(found.generations().values(), key=len, default=[])
        if not best:
            message = f"{found.name}: none of the {len(found.asked)} nodes near its place has it"
        else:
            message = (
                f"{found.name}: {len(best)} of its {best[0].name.total} fragments are there, and "
                f"{best[0].name.data} are needed"
            )
        if found.silent:
            id, error = next(iter(found.silent.items()))
            host = found.asked[id].host
            raise DidNotHappen(f"{message}; {host} does not answer: {error}", part=found.name)
        raise CheckpointNotFound(message, part=found.name)

    def _may_return(self, found: Survey) -> bool:
        """Whether nodes are away that may have what is missing."""
        if found.silent or found.pieces:
            return True
        return len(found.near.members) < len({_host(node) for node in self.ring.access.nodes})

    def _tell(self, shape: Shape, nodes: int) -> None:
        """Say once that states are coded in another way than was asked for."""
        if shape != self._lowered.get(self._shape, self._shape):
            _log.warning(
                "The ring has %d nodes for %d fragments: states are coded into %d + %d fragments, "
                "and survive the loss of %d nodes. Start more nodes to have %d + %d.",
                nodes,
                self._shape.total,
                shape.data,
                shape.parity,
                shape.parity,
                self._shape.data,
                self._shape.parity,
            )
        self._lowered[self._shape] = shape

    def _standing(self, before: Survey, shape: Shape, nodes: int) -> Standing:
        settings = self.ring.access.settings
        return Standing(
            min(nodes, settings.leaves - 1),
            len(before.near.members),
            shape.data,
            shape.parity,
            (settings.missed + PERIODS) * settings.period,
        )

    def _check(
        self, name: str, done: dict[int, Contact | StoreError], enough: int, shape: Shape
    ) -> None:
        errors = [each for each in done.values() if not isinstance(each, Contact)]
        stored = len(done) - len(errors)
        if stored < enough:
            kind = DidNotHappen if stored < shape.data else MayHaveHappened
            raise kind(
                f"{name}: {stored} of its {shape.total} fragments were stored, and {enough} are "
                f"needed: {'; '.join(dict.fromkeys(map(str, errors)))}",
                part=name,
            )
        if errors:
            _log.warning(
                "%s: %d of its %d fragments were not stored, and no other node was left: %s",
                name,
                len(errors),
                shape.total,
                errors[0],
            )


class _Recent:
    """States that are being read, so that the next range of one need not be searched again.

    What another process stores under their names is seen after a few seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: dict[str, tuple[float, Gathered]] = {}

    def get(self, name: str) -> Gathered | None:
        """The state under a name, if it was opened lately."""
        with self._lock:
            at, found = self._opened.get(name, (0.0, None))
            return found if time.monotonic() - at < _RECENT else None

    def add(self, name: str, opened: Gathered) -> None:
        """A state was opened."""
        with self._lock:
            self._opened[name] = time.monotonic(), opened
            while len(self._opened) > _MOST_RECENT:
                del self._opened[next(iter(self._opened))]

    def forget(self, name: str) -> None:
        """The name has another state now, or its holders have gone."""
        with self._lock:
            self._opened.pop(name, None)


def _encode(
    encoder: Encoder,
    data: pa.Buffer | bytes,
    paths: Sequence[Path],
    name: str,
    owner: str,
    holders: Sequence[Contact],
) -> float:
    """Write the fragments of a state to files. The seconds that coding took."""
    noted, watch = tuple(map(write_holder, holders)), Stopwatch()
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for stripe in watch.over(encoder.stripes([data])):
            for file, row in zip(files, stripe.rows, strict=True):
                file.write(row)
        for index, file in enumerate(files):
            label = encoder.label(index, name=name, version=0, owner=owner, holders=noted)
            file.write(label.to_bytes())
    return watch.seconds


def where(file: str, data: int, parity: int, row: int | None = None) -> StoreAddress:
    """The address of states in a ring, for whoever has the file of the ring.

    ``row``: the bytes of a fragment that are coded at a time, if it is not left to the library.
    """
    arguments = {"file": file, "data": data, "parity": parity}
    return StoreAddress(OPENER, arguments if row is None else {**arguments, "row": row})


def is_in_ring(address: StoreAddress) -> bool:
    """Whether an address is one of a ring."""
    return address.opener == OPENER


def encrypts(address: StoreAddress) -> bool:
    """Whether the nodes of the ring at an address encrypt. PlanError if its file cannot be read."""
    return bool(RingFile.read(Path(address.arguments["file"])).root)


def of_query(address: StoreAddress, query: str) -> StoreAddress:
    """The address of the states of one query, if they are in a ring; otherwise the same address."""
    if not is_in_ring(address):
        return address
    return StoreAddress(OPENER, {**address.arguments, "query": query})


def with_key(address: StoreAddress, epoch: int, silence: float) -> StoreAddress:
    """The address for nodes, which do not have the file of the ring: it has the query's key.

    The driver of the epoch changes what is there. An address that is not in a ring stays the same.
    """
    if not is_in_ring(address):
        return address
    given = dict(address.arguments)
    access = Access.of(RingFile.read(Path(given.pop("file"))), given.pop("query"))
    more = {"access": access.to_json(), "epoch": epoch, "silence": silence}
    return StoreAddress(OPENER, {**given, **more})


def check(address: StoreAddress) -> None:
    """PlanError if a query cannot store its state at this address in a ring.

    Nothing is changed. Addresses that are not in a ring are not looked at.
    """
    if not is_in_ring(address):
        return
    given = address.arguments
    shape = Shape(given["data"], given["parity"])
    file = RingFile.read(Path(given["file"]))
    file.settings.check(shape.total)
    with Ring(Access.of(file, CHECKED)) as ring:
        try:
            candidates(ring.find(CHECKED), CHECKED)
        except StoreError as error:
            raise PlanError(f"Fragments: ring={given['file']!r}: {error}") from error


def open_ring(
    *,
    data: int,
    parity: int,
    row: int | None = None,
    file: str = "",
    query: str = "",
    access: Any = None,
    epoch: int = 0,
    silence: float = 30.0,
) -> RingStore:
    """Open the store at an address. PlanError if the file of the ring cannot be used."""
    if access is None:
        given = Access.of(RingFile.read(Path(file)), query)
    else:
        given = Access.from_json(access)
    return RingStore(Ring(given, epoch=epoch, silence=silence), data, parity, row=row)


def _host(address: str) -> str:
    return address.rpartition(":")[0]

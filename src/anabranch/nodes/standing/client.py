"""A ring of standing nodes, for its clients: where a state belongs, and who is there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from anabranch.errors import AnabranchError, DidNotHappen, PlanError, StoreError
from anabranch.nodes.node import Deadline
from anabranch.nodes.remote import NodeStore, RemoteNode
from anabranch.nodes.requests import Epoch, Request
from anabranch.nodes.standing.file import RingFile
from anabranch.nodes.standing.requests import Describe, Find, Neighbour, View
from anabranch.nodes.tickets import Secret, Signer
from anabranch.nodes.wire import check_signer
from anabranch.ring import Contact, NodeId, Settings, distance
from anabranch.state.part import OWN

A = TypeVar("A")
K = TypeVar("K")

_log = logging.getLogger("anabranch")

QUERY = "states"
"""Whose states they are, if a ring is opened without a query."""
SILENCE = 30.0
ASKED = 5.0
"""Seconds for a question about the ring."""
_AT_ONCE = 32
_FIRST = 4
"""So many nodes are asked at once where one answer is enough."""
_MOST_KNOWN = 256
_MOST_CONNECTED = 1024
"""Addresses to which connections are kept."""
_PAUSE = 0.3
_REMEMBERED = 1.0


@dataclass(frozen=True)
class Access:
    """What it takes to use a ring: some of its nodes, a key, and whom to trust.

    The key is that of a query, and opens nothing else; or, with no query, the ring's own.
    """

    nodes: tuple[str, ...]
    key: Secret = field(repr=False)
    query: str
    settings: Settings
    root: str = field(default="", repr=False)
    """See :attr:`RingFile.root`."""

    @classmethod
    def of(cls, file: RingFile, query: str) -> Access:
        """That of a query, for whoever has the file of the ring."""
        if f"{query}/" == OWN:
            raise PlanError(
                f"{query!r} cannot be the id of a query: nodes keep their own files there"
            )
        try:
            key = file.secret.of_query(check_signer(query)) if query else file.secret
        except ValueError as error:
            raise PlanError(str(error)) from error
        return cls(file.nodes, key, query, file.settings, file.root)

    @property
    def trusted(self) -> bytes | None:
        """The certificate that clients trust. None: nothing is encrypted."""
        return self.root.encode() if self.root else None

    def to_json(self) -> dict[str, Any]:
        """For another process. It has the key in it."""
        return {
            "nodes": list(self.nodes),
            "key": self.key.to_hex(),
            "query": self.query,
            "leaves": self.settings.leaves,
            "period": self.settings.period,
            "root": self.root,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Access:
        """Read :meth:`to_json`."""
        settings = Settings(leaves=int(value["leaves"]), period=float(value["period"]))
        nodes = tuple(map(str, value["nodes"]))
        key, query, root = Secret.from_hex(value["key"]), str(value["query"]), str(value["root"])
        return cls(nodes, key, query, settings, root)


@dataclass(frozen=True)
class Neighbourhood:
    """The nodes where the fragments of an owner's states are."""

    root: Contact
    """The node that is closest to the owner's place."""
    members: tuple[Neighbour, ...]
    """It and its leaf set, closest first."""
    hops: int


class Ring:
    """A ring of standing nodes, opened by its file. May be used from several threads.

    >>> Ring.open("missing.json")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    anabranch.errors.PlanError: cannot read missing.json, the file of a ring: ...
    """

    def __init__(
        self,
        access: Access,
        *,
        epoch: int = 0,
        silence: float = SILENCE,
        patience: float = SILENCE,
    ) -> None:
        """``silence``: the seconds that a node may be silent, or a transfer stall. ``patience``:
        those for which a state is waited for whose holders are away."""
        self.access = access
        self.epoch = Epoch(epoch)
        self.silence = silence
        self.patience = patience
        self._signer = Signer(access.key, by=access.query)
        self._lock = threading.Lock()
        self._known = list(dict.fromkeys(access.nodes))
        self._nodes: dict[str, RemoteNode] = {}
        self._found: dict[int, tuple[float, Neighbourhood]] = {}

    @classmethod
    def open(cls, file: str | Path, query: str = QUERY) -> Ring:
        """The ring whose file this is, for the states of a query, or of whatever has that name.

        PlanError if the file cannot be used.
        """
        return cls(Access.of(RingFile.read(Path(file)), query))

    def at(self, epoch: int) -> Ring:
        """The same ring, for the driver of another epoch."""
        return Ring(
            replace(self.access, nodes=self.known),
            epoch=epoch,
            silence=self.silence,
            patience=self.patience,
        )

    def of_query(self, query: str) -> Ring:
        """The same ring for a query, if this one was opened with the ring's own key."""
        access = replace(
            self.access, key=self.access.key.of_query(query), query=query, nodes=self.known
        )
        return Ring(access, silence=self.silence, patience=self.patience)

    @property
    def known(self) -> tuple[str, ...]:
        """Addresses of nodes, the ones that answered last first."""
        with self._lock:
            return tuple(self._known)

    def find(self, owner: str) -> Neighbourhood:
        """The nodes that are closest to the place of an owner."""
        return self.find_place(NodeId.of(owner))

    def find_place(self, place: NodeId) -> Neighbourhood:
        """The nodes that are closest to a place. DidNotHappen if no node of the ring answers."""
        with self._lock:
            at, found = self._found.get(place, (-_REMEMBERED, None))
        if found is not None and time.monotonic() - at < _REMEMBERED:
            return found
        deadline = time.monotonic() + max(ASKED, min(self.silence, 2 * ASKED))
        while True:
            try:
                found = self._find(place)
            except StoreError:
                # A node that has just failed may have been the closest one.
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
                continue
            with self._lock:
                self._found[place] = time.monotonic(), found
                if len(self._found) > _MOST_KNOWN:
                    del self._found[next(iter(self._found))]
            return found

    def forget(self) -> None:
        """Look again where states are, as a node was not there."""
        with self._lock:
            self._found.clear()

    def look(self, address: str) -> View:
        """What a node knows of the ring."""
        return self.ask(address, Describe(), ASKED)

    def everyone(self) -> Iterator[View]:
        """All nodes of the ring, clockwise, as far as they answer."""
        first = self._first(lambda address: self.look(address), self.known)
        seen: dict[NodeId, Contact] = {}
        todo = {first.me.id: first.me, **{each.contact.id: each.contact for each in first.leaves}}
        views = {first.me.id: first}
        while todo:
            seen |= todo
            asked = [id for id in todo if id not in views]
            addresses = {id: todo[id].address for id in asked}
            for id, answer in self.at_all(addresses, _view, seconds=ASKED).items():
                if isinstance(answer, View):
                    views[id] = answer
            named = (each.contact for id in todo if id in views for each in views[id].leaves)
            todo = {each.id: each for each in named if each.id not in seen}
        self._remember([view.me.address for view in views.values()])
        for id in sorted(views):
            yield views[id]

    def ask(self, address: str, request: Request[A], seconds: float | None = None) -> A:
        """Ask the node at an address."""
        return self.node(address).ask(request, Deadline(seconds or self.silence))

    def store(self, address: str) -> NodeStore:
        """The backups of this query at a node."""
        return NodeStore(self.node(address), self.epoch, lambda: Deadline(_transfer(self.silence)))

    def node(self, address: str) -> RemoteNode:
        """The node at an address."""
        with self._lock:
            if address not in self._nodes:
                if len(self._nodes) >= _MOST_CONNECTED:
                    # Nodes return at other ports: what is open to the former ones is closed.
                    self._nodes.pop(next(iter(self._nodes))).close()
                self._nodes[address] = RemoteNode(
                    address, self._signer, silence=self.silence, tls_root=self.access.trusted
                )
            return self._nodes[address]

    def at_all(
        self,
        addresses: Mapping[K, str],
        ask: Callable[[Ring, str], A],
        *,
        seconds: float | None = None,
    ) -> dict[K, A | AnabranchError]:
        """Ask several nodes at once. What each has answered, or the error.

        Those that have not answered in so many seconds are not waited for any longer.
        """
        if not addresses:
            return {}

        def one(address: str) -> A | AnabranchError:
            try:
                return ask(self, address)
            except AnabranchError as error:
                return error

        rounds = -(-len(addresses) // _AT_ONCE)
        pool = ThreadPoolExecutor(min(len(addresses), _AT_ONCE), "anabranch-ring")
        try:
            doing = {key: pool.submit(one, address) for key, address in addresses.items()}
            _, late = wait(doing.values(), None if seconds is None else seconds * rounds)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return {
            key: DidNotHappen(f"node {addresses[key]} has not answered within {seconds:g} s")
            if each in late
            else each.result()
            for key, each in doing.items()
        }

    def close(self) -> None:
        """Close the connections. The next call opens others."""
        with self._lock:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, place: NodeId) -> Neighbourhood:
        def ask(address: str) -> Neighbourhood:
            found = self.ask(address, Find(key=place), ASKED)
            view = self.look(found.root.address)
            members = (Neighbour(view.me, view.load), *view.leaves)
            near = sorted(members, key=lambda each: distance(place, each.contact.id))
            return Neighbourhood(view.me, tuple(near), found.hops)

        found = self._first(ask, self.known)
        self._remember(each.contact.address for each in found.members)
        return found

    def _first(self, ask: Callable[[str], A], addresses: Sequence[str]) -> A:
        """The first answer of some nodes, a few of which are asked at once."""
        errors: list[str] = []
        for start in range(0, len(addresses), _FIRST):
            some = addresses[start : start + _FIRST]
            pool = ThreadPoolExecutor(len(some), "anabranch-ring")
            try:
                for done in as_completed([pool.submit(ask, address) for address in some]):
                    try:
                        return done.result()
                    except AnabranchError as error:
                        errors.append(str(error))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # silent ones are not waited for
        raise DidNotHappen(
            f"no node of the ring answers: {'; '.join(errors[:_FIRST]) or 'none is known'}; start "
            "its nodes with 'anabranch node --ring FILE', or copy the file of the ring again from "
            "one of them"
        )

    def _remember(self, addresses: Iterable[str]) -> None:
        with self._lock:
            self._known = list(dict.fromkeys([*addresses, *self._known]))[:_MOST_KNOWN]


def _view(ring: Ring, address: str) -> View:
    return ring.look(address)


def _transfer(silence: float) -> float:
    """Seconds for a transfer that goes on: it fails long before, if it stalls."""
    return max(600.0, 20 * silence)

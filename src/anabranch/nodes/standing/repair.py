"""Making fragments again that failed nodes had: the first holder of a state that is left does it.

Nobody is asked who does what. The holders of a state look at the same names, and the one with the
smallest index acts. Two that both do it, as they see different nodes, make the same fragments.

They look some periods after a node has failed; after a start, as nodes may have failed that this
one has never heard; and now and then, as fragments get lost in other ways too. A holder that is
away for a moment, or does not say what it has, is not taken for one that lost its fragments.
"""

from __future__ import annotations

import logging
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from anabranch.errors import AnabranchError, CheckpointError, CheckpointNotFound, StoreError
from anabranch.fragments import Label
from anabranch.nodes.standing.client import ASKED, Neighbourhood, Ring
from anabranch.nodes.standing.names import FragmentName, read_holder, write_holder
from anabranch.nodes.standing.requests import Reigning
from anabranch.nodes.standing.saving import Placing, Shape, candidates
from anabranch.nodes.standing.survey import Piece, delete, wanted
from anabranch.nodes.vault import Vault
from anabranch.ring import Came, Contact, NodeId, Settings, Went
from anabranch.stores.gathering import Gathered, Holders, threads

_log = logging.getLogger(__name__)

PERIODS = 10
"""A node that is back within so many periods after it failed has its fragments: none are made."""
AFTER_START, BETWEEN = 30, 720
"""Periods until a node looks for lost fragments after its start, and then after the last look. All
nodes of a ring may start together, some of them later. They do not look together: each asks all of
its neighbours for all names."""
_SPREAD = 0.5


@dataclass(frozen=True)
class _Own:
    """A fragment of this node."""

    query: str
    name: FragmentName


@dataclass
class _Seen:
    """What the nodes have, each asked once in an audit."""

    names: dict[NodeId, frozenset[str] | None] = field(default_factory=dict)
    """None: it did not answer."""
    near: dict[str, Neighbourhood] = field(default_factory=dict)
    at: dict[NodeId, Contact | None] = field(default_factory=dict)
    """The nodes with these ids; None: it is not in the ring."""

    @property
    def silent(self) -> set[NodeId]:
        """The nodes that did not say what they have."""
        return {id for id, names in self.names.items() if names is None}


class Repair:
    """The thread of a node that makes lost fragments again.

    ``ring`` is opened with the ring's own key.
    """

    def __init__(
        self,
        ring: Ring,
        me: Contact,
        vault: Vault,
        settings: Settings,
    ) -> None:
        self.made = 0
        """How many fragments were made again."""
        self._ring = ring
        self._me = me
        self._vault = vault
        self._wait = PERIODS * settings.period
        self._between = BETWEEN * settings.period
        self._again = time.monotonic() + _some(AFTER_START * settings.period)
        self._due: dict[NodeId, float] = {}
        """When nodes that went away, or were started again, are looked at."""
        self._away: dict[NodeId, Contact] = {}
        self._silent: set[NodeId] = set()
        """The nodes that did not say what they have when they were asked last."""
        self._over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="repair", daemon=True)

    def begin(self) -> None:
        """Begin to act on the news."""
        self._thread.start()

    def news(self, news: Came | Went) -> None:
        """A node has come to the leaf set, or left it."""
        with self._changed:
            match news:
                case Went(node, failed=True):
                    self._away[node.id] = node
                    self._due.setdefault(node.id, time.monotonic() + self._wait)
                    self._changed.notify_all()
                case Came(node):
                    # Another process of this node may have lost the disk of the one before.
                    if self._away.pop(node.id, node) == node:
                        self._due.pop(node.id, None)

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _run(self) -> None:
        pause = self._wait
        while self._is_due():
            try:
                whole = self._audit()
            except Exception:
                _log.exception("Looking for lost fragments has failed; trying again later.")
                whole = False
            self._again = time.monotonic() + _some(self._between if whole else pause)
            # One state that cannot be made whole does not have all of them looked at all the time.
            pause = self._wait if whole else min(2 * pause, self._between)

    def _is_due(self) -> bool:
        """Wait until nodes have been gone for long enough, or it is time. False: it is over."""
        with self._changed:
            while not self._over:
                now = time.monotonic()
                gone = [id for id, due in self._due.items() if due <= now]
                if gone or self._again <= now:
                    for id in gone:
                        del self._due[id]
                        self._away.pop(id, None)
                    return True
                self._changed.wait(min([self._again, *self._due.values()]) - now)
        return False

    def _audit(self) -> bool:
        """Look at all states of which this node has a fragment. Whether all are whole now."""
        seen, whole = _Seen(), True
        for own in self._owned():
            if self._over:
                return True
            try:
                whole &= self._look_at(own, seen)
            except AnabranchError as error:
                _log.warning("%s was not made whole; trying again later: %s", own.name.state, error)
                whole = False
            except Exception:
                # Its query wrote it, or the disk is full: those of other queries are looked at.
                _log.exception("%s was not made whole; trying again later.", own.name.state)
                whole = False
        self._silent = seen.silent
        return whole

    def _owned(self) -> Iterator[_Own]:
        for text in self._vault.list():
            query, _, rest = text.partition("/")
            name = FragmentName.parse(rest)
            if name is not None:
                yield _Own(query, name)

    def _look_at(self, own: _Own, seen: _Seen) -> bool:
        """Make what is lost of a state again, if that is up to this node. False: not all was."""
        label = self._label(own)
        if label is None:
            return True
        owner = label.owner or own.query
        if owner not in seen.near:
            seen.near[owner] = self._ring.find(owner)
        near = seen.near[owner]
        nodes = {each.contact.id: each.contact for each in near.members} | {self._me.id: self._me}
        pieces = self._pieces(own, nodes, seen)
        if missing := _missing(own.name, pieces):
            # Nodes that have joined since may stand between the holders and the owner's place.
            nodes = self._noted(label, seen) | nodes
            pieces = self._pieces(own, nodes, seen)
            missing = _missing(own.name, pieces)
        if not missing or actor(pieces) != self._me.id:
            return True
        if self._may_have(label, nodes, seen):
            return False
        found = own.name.total - len(missing)
        if found < own.name.data:
            _log.warning(
                "%s: %d of its %d fragments are left, and %d are needed. They are kept for the "
                "nodes that may return.",
                own.name.state,
                found,
                own.name.total,
                own.name.data,
            )
            return True
        self._make(own, owner, near, pieces, missing)
        return True

    def _label(self, own: _Own) -> Label | None:
        name = f"{own.query}/{own.name}"

        def read(offset: int, size: int) -> pa.Buffer:
            return self._vault.get(name, offset, size)

        try:
            return Label.read(read, self._vault.size(name), name=name)
        except CheckpointNotFound:
            return None  # deleted meanwhile
        except CheckpointError as error:
            _log.warning("Deleting %s, so that it is made again: %s", name, error)
            self._vault.delete(name)
            raise

    def _noted(self, label: Label, seen: _Seen) -> dict[NodeId, Contact]:
        """The nodes in the label of a fragment that are in the ring."""
        found = {}
        for id, _ in filter(None, map(read_holder, label.holders)):
            if id not in seen.at:
                root = self._ring.find_place(id).root
                seen.at[id] = root if root.id == id else None
            if (node := seen.at[id]) is not None:
                found[id] = node
        return found

    def _may_have(self, label: Label, nodes: Mapping[NodeId, Contact], seen: _Seen) -> bool:
        """Whether a node that is away, or silent, may still have what is missing.

        One that was silent twice is not waited for any longer.
        """
        with self._changed:
            away = set(self._away)
        noted = {id for id, _ in filter(None, map(read_holder, label.holders))}
        return bool(away & noted or seen.silent & nodes.keys() - self._silent)

    def _pieces(self, own: _Own, nodes: Mapping[NodeId, Contact], seen: _Seen) -> list[Piece]:
        """The fragments of this state that are left, this node's own among them."""
        pieces = [Piece(self._me, own.name)]
        for index in range(own.name.total):
            name = FragmentName(
                own.name.state, own.name.generation, index, own.name.data, own.name.total
            )
            text = f"{own.query}/{name}"
            pieces += [
                Piece(node, name)
                for id, node in nodes.items()
                if id != self._me.id and text in self._names(node, seen)
            ]
        return pieces

    def _names(self, node: Contact, seen: _Seen) -> frozenset[str]:
        if node.id not in seen.names:
            try:
                seen.names[node.id] = frozenset(self._ring.store(node.address).list())
            except AnabranchError as error:
                _log.info("%s does not say what it has: %s", node, error)
                seen.names[node.id] = None
        return seen.names[node.id] or frozenset()

    def _make(
        self,
        own: _Own,
        owner: str,
        near: Neighbourhood,
        pieces: Sequence[Piece],
        missing: Sequence[int],
    ) -> None:
        name = own.name
        shape = Shape(name.data, name.total - name.data)
        holding = {piece.node.host for piece in pieces}
        placing = Placing(candidates(near, owner), shape, holding)
        holders = {piece.name.index: piece.node for piece in pieces}
        ring = self._ring.of_query(own.query).at(self._epoch(own.query, near))
        pool = threads()
        made: list[Piece] = []
        try:
            with tempfile.TemporaryDirectory(prefix="anabranch-") as folder:
                paths = {index: Path(folder) / str(index) for index in missing}
                labels = Gathered(wanted(ring, pieces), Holders(pool)).remake(paths)
                for index, path in paths.items():
                    again = FragmentName(name.state, name.generation, index, name.data, name.total)
                    node = _stored(ring, placing, holders, again, path, labels[index])
                    if node is not None:
                        made.append(Piece(node, again))
            if made and not self._has(own):
                # It was deleted while it was read: nobody else would delete what was made.
                delete(ring, made)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            ring.close()
            self.made += len(made)
        _log.info(
            "%s: made %d of %d lost fragments again, at %s.",
            name.state,
            len(made),
            len(missing),
            ", ".join(piece.node.host for piece in made) or "no node, as none has room",
        )

    def _has(self, own: _Own) -> bool:
        try:
            return self._vault.size(f"{own.query}/{own.name}") >= 0
        except CheckpointNotFound:
            return False

    def _epoch(self, query: str, near: Neighbourhood) -> int:
        """The greatest epoch of a query that any of the nodes has seen: they refuse lesser ones."""
        nodes = {each.contact.id: each.contact.address for each in near.members}
        nodes[self._me.id] = self._me.address
        seen = self._ring.at_all(
            nodes,
            lambda ring, address: ring.ask(address, Reigning(query=query), ASKED),
            seconds=ASKED,
        )
        return max((epoch for epoch in seen.values() if isinstance(epoch, int)), default=0)


def _some(seconds: float) -> float:
    return seconds * (1 + _SPREAD * random.random())


def _missing(name: FragmentName, pieces: Sequence[Piece]) -> list[int]:
    found = {piece.name.index for piece in pieces}
    return [index for index in range(name.total) if index not in found]


def _stored(
    ring: Ring,
    placing: Placing,
    holders: dict[int, Contact],
    name: FragmentName,
    path: Path,
    label: Label,
) -> Contact | None:
    """Store a fragment that was made again at one of the nodes. None if no node takes it.

    The label, with which the file ends, notes the node that takes it.
    """
    rows = path.stat().st_size - len(label.to_bytes())
    found = None
    while found is None and (node := placing.another()) is not None:
        holding = holders | {name.index: node}
        noted = [write_holder(holding[i]) if i in holding else "" for i in range(name.total)]
        with path.open("r+b") as file:
            file.truncate(rows)
            file.seek(rows)
            file.write(replace(label, holders=tuple(noted)).to_bytes())
        try:
            with pa.memory_map(str(path)) as mapped:
                ring.store(node.address).put(str(name), mapped.read_buffer())
        except StoreError as error:
            _log.info("%s is not made again at %s: %s", name, node.host, error)
        else:
            holders[name.index] = found = node
    path.unlink()
    return found


def actor(pieces: Sequence[Piece]) -> NodeId:
    """The holder that makes what is lost: that of the smallest index.

    Of two that have it, as they made it again apart from each other, it is the smaller one: if both
    acted, there would be more of them each time.
    """
    return min(pieces, key=lambda piece: (piece.name.index, piece.node.id)).node.id

"""Making fragments again that failed nodes had: the first holder of a state that is left does it.

Nobody is asked who does what. The holders of a state look at the same names, and the one with the
smallest index acts. Two that both do it, as they see different nodes, make the same fragments.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from anabranch.errors import AnabranchError, CheckpointError
from anabranch.fragments import Label
from anabranch.nodes.standing.client import Neighbourhood, Ring
from anabranch.nodes.standing.names import FragmentName, read_holder, write_holder
from anabranch.nodes.standing.saving import Placing, Shape, candidates
from anabranch.nodes.standing.survey import Piece, wanted
from anabranch.nodes.vault import Vault
from anabranch.ring import Came, Contact, NodeId, Settings, Went
from anabranch.stores.gathering import Gathered, Holders, threads

_log = logging.getLogger(__name__)

PERIODS = 10
"""A node that is back within so many periods after it failed has its fragments: none are made."""


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


class Repair:
    """The thread of a node that makes lost fragments again.

    ``ring`` is opened with the ring's own key. ``epoch`` gives the greatest of a query here.
    """

    def __init__(
        self,
        ring: Ring,
        me: Contact,
        vault: Vault,
        epoch: Callable[[str], int],
        settings: Settings,
    ) -> None:
        self.made = 0
        """How many fragments were made again."""
        self._ring = ring
        self._me = me
        self._vault = vault
        self._epoch = epoch
        self._wait = PERIODS * settings.period
        self._due: dict[NodeId, float] = {}
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
                    self._due.setdefault(node.id, time.monotonic() + self._wait)
                    self._changed.notify_all()
                case Came(node):
                    self._due.pop(node.id, None)

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (gone := self._next()) is not None:
            try:
                whole = self._audit()
            except Exception:
                _log.exception("Looking for lost fragments has failed; trying again later.")
                whole = False
            if not whole:
                with self._changed:
                    for id in gone:
                        self._due.setdefault(id, time.monotonic() + self._wait)

    def _next(self) -> list[NodeId] | None:
        """Wait until nodes have been gone for long enough. None: it is over."""
        with self._changed:
            while not self._over:
                now = time.monotonic()
                gone = [id for id, due in self._due.items() if due <= now]
                if gone:
                    for id in gone:
                        del self._due[id]
                    return gone
                self._changed.wait(min((due - now for due in self._due.values()), default=None))
        return None

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
        pieces = self._pieces(own, label, near, seen)
        found = {piece.name.index for piece in pieces}
        missing = [index for index in range(own.name.total) if index not in found]
        first = min(pieces, key=lambda piece: piece.name.index)
        if not missing or first.node.id != self._me.id:
            return True
        if len(found) < own.name.data:
            _log.warning(
                "%s: %d of its %d fragments are left, and %d are needed. They are kept for the "
                "nodes that may return.",
                own.name.state,
                len(found),
                own.name.total,
                own.name.data,
            )
            return True
        return self._make(own, owner, near, pieces, missing)

    def _label(self, own: _Own) -> Label | None:
        name = f"{own.query}/{own.name}"

        def read(offset: int, size: int) -> pa.Buffer:
            return self._vault.get(name, offset, size)

        try:
            return Label.read(read, self._vault.size(name), name=name)
        except CheckpointError as error:
            # Deleted meanwhile, or damaged: then others see that it is missing.
            _log.info("%s cannot be read: %s", name, error)
            return None

    def _pieces(self, own: _Own, label: Label, near: Neighbourhood, seen: _Seen) -> list[Piece]:
        """The fragments of this state that are left, this node's own among them."""
        nodes = {each.contact.id: each.contact for each in near.members}
        nodes[self._me.id] = self._me
        for id, _ in filter(None, map(read_holder, label.holders)):
            if id not in nodes:
                root = self._ring.find_place(id).root
                if root.id == id:
                    nodes[id] = root
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
    ) -> bool:
        name = own.name
        shape = Shape(name.data, name.total - name.data)
        holding = {piece.node.host for piece in pieces}
        placing = Placing(candidates(near, owner), shape, holding)
        chosen = dict(zip(missing, placing.first(len(missing)), strict=False))
        holders = {piece.name.index: piece.node for piece in pieces} | chosen
        noted = tuple(write_holder(holders[i]) if i in holders else "" for i in range(name.total))
        ring = self._ring.of_query(own.query).at(self._epoch(own.query))
        pool = threads()
        made = 0
        try:
            with tempfile.TemporaryDirectory(prefix="anabranch-") as folder:
                paths = {index: Path(folder) / str(index) for index in chosen}
                Gathered(wanted(ring, pieces), Holders(pool)).remake(paths, holders=noted)
                for index, node in chosen.items():
                    again = FragmentName(name.state, name.generation, index, name.data, name.total)
                    with pa.memory_map(str(paths[index])) as mapped:
                        ring.store(node.address).put(str(again), mapped.read_buffer())
                    paths[index].unlink()
                    made += 1
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            ring.close()
            self.made += made
        _log.info(
            "%s: made %d of %d lost fragments again, at %s.",
            name.state,
            made,
            len(missing),
            ", ".join(node.host for node in chosen.values()),
        )
        return True

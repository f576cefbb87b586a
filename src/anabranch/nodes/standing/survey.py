"""Finding the fragments of a state: near the place of its owner, and where their labels say."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from anabranch.errors import AnabranchError, CheckpointError, Deposed, Fenced, StoreError
from anabranch.fragments import Label
from anabranch.nodes.standing.client import ASKED, Neighbourhood, Ring
from anabranch.nodes.standing.names import (
    FragmentName,
    epoch_of,
    generation_of,
    prefix_of,
    read_holder,
)
from anabranch.ring import Contact, NodeId
from anabranch.stores.gathering import Held, Wanted
from anabranch.stores.meter import Meter, Metered

_log = logging.getLogger("anabranch")

_NONCE_BITS = 12
_WIDER = 2
"""How often the search is widened by the leaf sets beside those that were asked."""


@dataclass(frozen=True)
class Piece:
    """A fragment at a node."""

    node: Contact
    name: FragmentName


@dataclass
class Survey:
    """What was found of a state."""

    name: str
    near: Neighbourhood
    epoch: int = 0
    """That of the driver who asks."""
    pieces: list[Piece] = field(default_factory=list)
    asked: dict[NodeId, Contact] = field(default_factory=dict)
    silent: dict[NodeId, AnabranchError] = field(default_factory=dict)
    """The nodes that did not answer, and why."""

    def generations(self) -> dict[int, list[Piece]]:
        """The pieces of what was stored under the name, the newest first."""
        found: dict[int, list[Piece]] = {}
        for piece in sorted(self.pieces, key=lambda each: -each.name.generation):
            found.setdefault(piece.name.generation, []).append(piece)
        return found

    def newest(self) -> list[Piece] | None:
        """The pieces of the newest that can be computed. None if nothing can."""
        for pieces in self.generations().values():
            if len({each.name.index for each in pieces}) >= pieces[0].name.data:
                return pieces
        return None

    @property
    def complete(self) -> bool:
        """Whether all fragments of the newest are there."""
        pieces = next(iter(self.generations().values()), None)
        return pieces is not None and (
            len({each.name.index for each in pieces}) >= pieces[0].name.total
        )


def wanted(ring: Ring, pieces: Sequence[Piece], meter: Meter | None = None) -> Wanted:
    """The state of which these are the fragments, all of one coding, to be gathered."""

    def held(piece: Piece) -> Held:
        store = ring.store(piece.node.address)
        at = store if meter is None else Metered(store, meter)
        return Held(piece.node.host, at, str(piece.name))

    return Wanted(pieces[0].name.state, pieces[0].name.data, tuple(map(held, pieces)))


def delete(ring: Ring, pieces: Sequence[Piece]) -> list[Piece]:
    """Delete pieces. Those that may still be there, as their nodes did not answer."""
    left: list[Piece] = []
    by_node: dict[Contact, list[Piece]] = {}
    for piece in pieces:
        by_node.setdefault(piece.node, []).append(piece)

    def at(ring: Ring, address: str) -> None:
        for piece in of_address[address]:
            ring.store(address).delete(str(piece.name))

    of_address = {node.address: some for node, some in by_node.items()}
    for node, answer in ring.at_all({node: node.address for node in by_node}, at).items():
        if isinstance(answer, Fenced):
            raise answer
        if isinstance(answer, AnabranchError):
            _log.info("%s did not delete its fragments: %s", node.host, answer)
            left += by_node[node]
    return left


def survey(ring: Ring, owner: str, name: str) -> Survey:
    """The fragments of a state at the nodes next to its owner's place."""
    near = ring.find(owner)
    found = Survey(name, near, ring.epoch)
    _ask(ring, found, [each.contact for each in near.members])
    return found


def widen(ring: Ring, found: Survey) -> None:
    """Look for a state where its labels say that its holders are, and at the next neighbours.

    Nodes that have joined since may stand between the holders and the owner's place.
    """
    _ask(ring, found, _noted(ring, found))
    for _ in range(_WIDER):
        if found.complete:
            return
        before = len(found.asked)
        _ask(ring, found, _beside(ring, found))
        if len(found.asked) == before:
            return


def new_generation(before: Survey) -> int:
    """A number greater than those of what is stored under a name already.

    Deposed if the driver of a later epoch has stored it.
    """
    newest = max((piece.name.generation for piece in before.pieces), default=0)
    if epoch_of(newest) > before.epoch:
        raise Deposed(
            f"{before.name}: driver {epoch_of(newest)} has taken the query over and stored it; "
            f"driver {before.epoch} changes nothing any more"
        )
    now = generation_of(before.epoch, time.time_ns() // 1000 << _NONCE_BITS)
    return max(now, newest + (1 << _NONCE_BITS)) | secrets.randbits(_NONCE_BITS)


def _ask(ring: Ring, found: Survey, nodes: Iterable[Contact]) -> None:
    asked = {node.id: node for node in nodes if node.id not in found.asked}
    found.asked |= asked
    prefix = prefix_of(found.name)
    answers = ring.at_all(
        {id: node.address for id, node in asked.items()},
        lambda ring, address: ring.store(address).list(prefix),
        seconds=ASKED,
    )
    for id, answer in answers.items():
        if isinstance(answer, AnabranchError):
            found.silent[id] = answer
            continue
        names = map(FragmentName.parse, answer)
        found.pieces += [
            Piece(asked[id], name) for name in names if name and name.state == found.name
        ]


def _noted(ring: Ring, found: Survey) -> list[Contact]:
    """The nodes in the label of a piece that were not asked, as far as they are in the ring."""
    for pieces in found.generations().values():
        for piece in pieces:
            try:
                label = read_label(ring, piece)
            except (StoreError, CheckpointError) as error:
                _log.info("%s at %s cannot be read: %s", piece.name, piece.node.host, error)
                continue
            holders = filter(None, map(read_holder, label.holders))
            away = [id for id, _ in holders if id not in found.asked]
            places = (ring.find_place(id) for id in away)
            return [near.root for near, id in zip(places, away, strict=True) if near.root.id == id]
    return []


def _beside(ring: Ring, found: Survey) -> list[Contact]:
    """The leaf sets of the outermost nodes that were asked."""
    ids = sorted(found.asked, key=lambda id: (id - found.near.root.id) % (1 << 128))
    middle = len(ids) // 2
    outermost = {id: found.asked[id].address for id in ids[max(0, middle - 1) : middle + 1]}
    views = ring.at_all(outermost, lambda ring, address: ring.look(address), seconds=ASKED)
    return [
        each.contact
        for view in views.values()
        if not isinstance(view, AnabranchError)
        for each in view.leaves
    ]


def read_label(ring: Ring, piece: Piece) -> Label:
    """The label of a piece. A StoreError or CheckpointError if it cannot be read."""
    store, name = ring.store(piece.node.address), str(piece.name)
    return Label.read(
        lambda offset, size: store.get(name, offset, size), store.size(name), name=name
    )

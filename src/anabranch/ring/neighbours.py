"""The nodes that a peer knows, and which of them it has heard.

Only nodes that were heard themselves are in the leaf set and the routing table. What others say is
a hint, and such a node is asked first. So a failed node disappears, although others still name it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from anabranch.ring.ids import NodeId, clockwise
from anabranch.ring.leafset import LeafSet
from anabranch.ring.messages import Address, Came, Contact, Settings, Went
from anabranch.ring.table import RoutingTable


@dataclass(slots=True)
class _Known:
    """What was heard from a node."""

    contact: Contact
    beat: int
    heard: int
    load: int = 0
    probes: int = 0
    """Unanswered ones."""
    gone: bool = False
    """It said that it ends."""
    leaves: tuple[Contact, ...] = ()
    looked: int = -1
    """The removals at the time when its leaves were last looked at."""


@dataclass(slots=True)
class _Asked:
    """A node that others have named, and that has not answered yet."""

    contact: Contact
    since: int
    times: int = 1


class Neighbours:
    """The leaf set and the routing table of a peer, and the time since it heard each node."""

    def __init__(self, me: NodeId, settings: Settings, alive: Iterable[Contact] = ()) -> None:
        self.leaves, self.table = LeafSet(me, settings.leaves), RoutingTable(me)
        self.settings = settings
        self.period = 0
        self.lost: dict[NodeId, Contact] = {}
        """Nodes that failed, the oldest first: they may be in another part of a cut ring."""
        self.unreachable: set[NodeId] = set()
        """Leaves that a message could not be sent to; routes avoid them until they are heard."""
        self.changes: list[Came | Went] = []
        self._known: dict[NodeId, _Known] = {}
        self._asked: dict[NodeId, _Asked] = {}
        self._removals = 0
        self._contacts: tuple[Contact, ...] | None = None
        # When the leaf set was last full: in one that is not, the far nodes are on both sides.
        self._sides: tuple[list[NodeId], list[NodeId]] | None = None
        for contact in alive:
            self._known[contact.id] = _Known(contact, -1, 0)
            self.leaves.add(contact.id)
            self.table.add(contact.id)

    def contact(self, id: NodeId) -> Contact:
        """Where a node of the leaf set or the routing table is reached."""
        return self._known[id].contact

    def contacts(self) -> tuple[Contact, ...]:
        """The leaf set, clockwise."""
        if self._contacts is None:
            self._contacts = tuple(self._known[id].contact for id in self.leaves)
        return self._contacts

    def load(self, id: NodeId) -> int:
        """How full a node said it is."""
        return self._known[id].load

    def heard(self, sender: Contact, beat: int, load: int = 0) -> bool:
        """Note a message of a node. Return False if it is older than another one."""
        id, known = sender.id, self._known.get(sender.id)
        if known is None:
            known = self._known[id] = _Known(sender, beat, self.period, load)
        else:
            before = known.contact
            if sender == before and (known.gone or beat <= known.beat):
                return False
            if sender.age < before.age:
                return False
            known.beat, known.heard, known.load, known.probes = beat, self.period, load, 0
            known.gone = False
            if sender != before:
                known.contact = sender
                if id in self.leaves:
                    self._contacts = None
                    self.changes += [Went(before, failed=True), Came(sender)]
        if self.leaves.wants(id):
            self._contacts = None
            self.changes.append(Came(sender))
            if (out := self.leaves.add(id)) is not None:
                self.changes.append(Went(self._known[out].contact, failed=False))
        self.table.add(id)
        self._asked.pop(id, None)
        self.lost.pop(id, None)
        self.unreachable.discard(id)
        return True

    def newer(self, sender: Contact) -> tuple[Contact, ...]:
        """What a node has to know if the ring takes it for a former process: the last one."""
        known = self._known.get(sender.id)
        if known is None or known.contact.age < sender.age:
            return ()
        if known.contact != sender:
            return (known.contact,)
        # It ended or failed, and has begun again to count its messages: its clock showed the same
        # time at both starts.
        is_over = known.gone or sender.id in self.lost
        return (replace(sender, incarnation=sender.incarnation + 1),) if is_over else ()

    def hints(
        self, by: NodeId, leaves: tuple[Contact, ...], others: Iterable[Contact] = ()
    ) -> list[Contact]:
        """The nodes to ask, of those that a node has named; and this node, as others know it."""

        def is_news(named: Contact) -> bool:
            """Whether it is, in this incarnation, neither a leaf nor asked."""
            known, asked = self._known.get(named.id), self._asked.get(named.id)
            if known is not None:
                if named.age < known.contact.age:
                    return False
                if named == known.contact and (known.gone or named.id in self.leaves):
                    return False
            return asked is None or asked.contact.age < named.age

        known = self._known.get(by)
        found: list[Contact] = []
        if known is None or known.looked != self._removals or known.leaves != leaves:
            if known is not None:
                known.looked, known.leaves = self._removals, leaves
            news = [each for each in leaves if is_news(each)]
            # Failed nodes that others still name must not keep live ones from being asked.
            live = (id for id, asked in self._asked.items() if asked.times < self.settings.missed)
            ids = (*live, *(each.id for each in news))
            best = self.leaves.best(id for id in ids if id not in self.lost)
            best |= {id for id in ids if id in self.lost and self.leaves.wants(id)}
            found += [each for each in news if each.id in best or self._has_place(each)]
        found += [each for each in others if is_news(each) and self._has_place(each)]
        for contact in found:
            if contact.id != self.leaves.center:
                self._asked[contact.id] = _Asked(contact, self.period)
        return found

    def _has_place(self, named: Contact) -> bool:
        """Whether it is a leaf or in the table in a former incarnation, or its place is free."""
        id = named.id
        if id == self.leaves.center or id in self.leaves:
            return True
        is_former = id in self.table and named.age > self._known[id].contact.age
        return is_former or self.table.wants(id)

    def ended(self, sender: Contact, beat: int) -> bool:
        """Note that a node says it ends. Return False if that is old."""
        known = self._known.get(sender.id)
        if known is not None and (known.contact.age, known.beat) >= (sender.age, beat):
            return False
        if known is None:
            known = self._known[sender.id] = _Known(sender, beat, self.period)
        known.beat, known.gone = beat, True
        return True

    def silent(self) -> list[NodeId]:
        """The leaves that have missed too many keep-alives."""
        oldest = self.period - self.settings.missed
        return [id for id in self.leaves if self._known[id].heard < oldest]

    def remove(self, ids: Collection[NodeId]) -> list[Contact]:
        """Remove nodes that failed or ended. Return whom to ask for others in their places.

        These are the farthest live leaves on the sides of the removed ones. If no leaf is left on a
        side, it is the next node of the routing table in this direction.
        """
        sides = self.leaves.clockwise, self.leaves.counter_clockwise
        if len(self.leaves) == self.leaves.size:
            self._sides = sides
        for id in ids:
            known = self._known[id]
            if self.leaves.remove(id):
                self._contacts = None
                self.changes.append(Went(known.contact, failed=True))
            self.table.remove(id)
            self.unreachable.discard(id)
            if known.gone:
                self.lost.pop(id, None)
            else:
                self.lost[id] = known.contact
        if ids:
            self._removals += 1
        while len(self.lost) > self.settings.remembered:
            del self.lost[next(iter(self.lost))]
        asked = []
        for side, sign in zip(self._sides or sides, (1, -1), strict=True):
            if any(id in ids for id in side):
                live = [id for id in side if id in self.leaves]
                if live:
                    asked.append(live[-1])
                elif len(self.table):
                    me = self.leaves.center
                    asked.append(min(self.table, key=lambda id: clockwise(0, sign * (id - me))))
        return [self._known[id].contact for id in dict.fromkeys(asked)]

    def cannot_reach(self, address: Address) -> None:
        """Note that a message could not be sent: nothing listens there now."""
        for asked in self._asked.values():
            if asked.contact.address == address:
                asked.times = self.settings.missed
                self._removals += 1
        there = [id for id in {*self.leaves, *self.table} if self.contact(id).address == address]
        self.unreachable |= {id for id in there if id in self.leaves}
        self.remove([id for id in there if id not in self.leaves])

    def unanswered(self) -> list[Contact]:
        """The nodes to ask once more in a new period. Those that never answer rest for a while."""
        again = []
        for id, asked in list(self._asked.items()):
            if self.period - asked.since > self.settings.patience:
                del self._asked[id]
                self._removals += 1
            elif asked.times < self.settings.missed:
                asked.times += 1
                again.append(asked.contact)
                if asked.times == self.settings.missed:
                    # Those that were farther away are needed now.
                    self._removals += 1
        return again

    def is_settled(self) -> bool:
        """Whether some node is known, and all that belong in the leaf set have answered."""
        waiting = (
            self.leaves.wants(id) and asked.times < self.settings.missed
            for id, asked in self._asked.items()
        )
        return len(self.leaves) > 0 and not any(waiting)

    def probes(self) -> list[Contact]:
        """The nodes of the routing table to check in a period. Silent ones are removed."""
        far = sorted(
            (id for id in self.table if id not in self.leaves), key=lambda id: self._known[id].heard
        )
        chosen = far[: self.settings.probes]
        dead = [id for id in chosen if self._known[id].probes >= self.settings.missed]
        self.remove(dead)
        for id in chosen:
            self._known[id].probes += 1
        if len(self._known) > 2 * (self.settings.remembered + self.settings.leaves):
            out = [id for id in self._known if id not in self.leaves and id not in self.table]
            out.sort(key=lambda id: self._known[id].heard, reverse=True)
            for id in out[self.settings.remembered :]:
                del self._known[id]
        return [self._known[id].contact for id in chosen if id not in dead]

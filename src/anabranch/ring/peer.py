"""A node of the ring, as a state machine: messages and periods in, messages and news out.

It uses no clock, thread, network or chance. The one who runs it calls :meth:`Peer.tick` once in a
period, hands over what was received, and sends what is returned.

**Join.** A newcomer sends a :class:`Join` with its own id to any node. It is routed to the closest
one, and on the way collects rows of routing tables. The closest one answers with its leaf set. The
newcomer asks the nodes that it was told of, and so they hear it too.

**Keep-alive.** In every period each node tells all of its leaves that it lives, and what its leaf
set is. Who was not heard for three periods is failed.

**Repair.** Once a leaf failed, the farthest live leaf on its side is asked for its leaf set. If a
whole side failed, the next node of the routing table is asked, and then those that it names.

**Rings that were cut apart.** In every period a node sends a :class:`Join` with its own id to one
of the nodes that it lost, and now and then to a node that it first joined by. Once the network is
whole again, these are routed in the other ring, and the answers tell of its neighbours there. The
keep-alives of those who know both rings then spread the news along both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum

from anabranch.ring.ids import shared_digits
from anabranch.ring.messages import (
    Address,
    Contact,
    Found,
    Join,
    KeepAlive,
    Kind,
    Leaving,
    Lookup,
    Message,
    NotFound,
    Output,
    Send,
    Settings,
    Welcome,
)
from anabranch.ring.neighbours import Neighbours
from anabranch.ring.routing import next_hop

MOST_HOPS = 64
"""A message that was passed on so often is dropped. It may circle while a ring is repaired."""
_MOST_HELD = 64


class Status(Enum):
    """What a peer is."""

    JOINING = "joining"
    JOINED = "joined"
    LEFT = "left"
    REPLACED = "replaced"
    """A later process has the id of this one: it must end."""


class Peer:
    """A node of the ring.

    Every method returns what to do: messages to send, answers to searches, and changes of the leaf
    set. Without ``seeds`` the node is the first of a ring. ``load`` is told to its neighbours.

    >>> from anabranch.ring.ids import NodeId
    >>> first = Peer(Contact(NodeId.of("a"), "a", "a:1"))
    >>> second = Peer(Contact(NodeId.of("b"), "b", "b:1"), seeds=["a:1"])
    >>> peers, todo = {"a:1": first, "b:1": second}, first.start() + second.start()
    >>> while todo:
    ...     match todo.pop(0):
    ...         case Send(to, message):
    ...             todo += peers[to].receive(message)
    >>> second.status, [contact.host for contact in first.neighbours.contacts()]
    (<Status.JOINED: 'joined'>, ['b'])
    """

    def __init__(
        self,
        me: Contact,
        settings: Settings | None = None,
        seeds: Sequence[Address] = (),
        alive: Iterable[Contact] = (),
    ) -> None:
        settings = Settings() if settings is None else settings
        self.me = me
        self.neighbours = Neighbours(me.id, settings, alive)
        self.load = 0
        self._seeds = [seed for seed in seeds if seed != me.address]
        alone = not self._seeds and not len(self.neighbours.leaves)
        self.status = Status.JOINED if alone or len(self.neighbours.leaves) else Status.JOINING
        self._refusals = 0
        self._beat = 0
        self._out: list[Output] = []
        self._held: list[Lookup] = []
        self._searches: dict[int, int] = {}
        self._rival: tuple[Contact, int] | None = None

    def start(self) -> list[Output]:
        """Begin to join. The first node of a ring has nothing to do."""
        if self.status is Status.JOINING:
            self._out += _joining(self.me, self._seeds)
        return self._done()

    def receive(self, message: Message) -> list[Output]:
        """Take a message. In any order, late or again, it does no harm."""
        if self.status in (Status.LEFT, Status.REPLACED):
            return []
        match message:
            case KeepAlive():
                self._keep_alive(message)
            case Join():
                self._join(message)
            case Lookup():
                self._look_up(message)
            case Found():
                if self._searches.pop(message.key, None) is not None:
                    self._out.append(message)
            case Welcome(sender, beat, leaves, others):
                if sender.id != self.me.id:
                    self.neighbours.heard(sender, beat)
                    newer = self.neighbours.newer(sender)
                    if newer or self.status is Status.JOINING:
                        # It has heard of this node, but not from it.
                        self._tell([sender], others=newer)
                self._ask_hinted(sender, leaves, others)
            case Leaving(sender, beat, leaves):
                near = self.neighbours
                if sender.id != self.me.id and near.ended(sender, beat):
                    self._tell(near.remove([sender.id]))
                    self._ask_hinted(sender, leaves)
        return self._done()

    def undelivered(self, send: Send) -> list[Output]:
        """Take note that a message could not be sent, and route it another way.

        This is only for what is known not to have arrived: that a connection was refused. It makes
        routes shorter after failures, but they are found without it too.
        """
        if self.status in (Status.LEFT, Status.REPLACED):
            return []
        self.neighbours.cannot_reach(send.to)
        match send.message:
            case Lookup():
                self._look_up(send.message)
            case Join(newcomer=newcomer) if newcomer.id != self.me.id:
                self._join(send.message)
            case Join() if self.status is Status.JOINING and self._refusals < len(self._seeds):
                # Most of the nodes that it knew may be gone: the next one is asked at once.
                self._refusals += 1
                self._out += _joining(self.me, self._seeds)
        return self._done()

    def tick(self) -> list[Output]:
        """A period is over."""
        if self.status in (Status.LEFT, Status.REPLACED):
            return []
        near = self.neighbours
        near.period += 1
        self._refusals = 0
        if self._rival is not None and near.period - self._rival[1] > near.settings.missed:
            # It was a former process of this node, and its clock was ahead.
            self.me = replace(self.me, incarnation=self._rival[0].incarnation + 1)
            self._rival = None
        self._tell(near.remove(near.silent()))
        self._tell(near.unanswered())
        if self.status is Status.JOINING:
            self._out += _joining(self.me, self._seeds)
        elif near.lost:
            id, contact = next(iter(near.lost.items()))
            near.lost[id] = near.lost.pop(id)
            self._out += _joining(self.me, [contact.address])
        if near.period % near.settings.patience == 0:
            self._out += _joining(self.me, self._seeds)
        self._tell(near.contacts(), Kind.PERIODIC)
        for contact in near.probes():
            self._tell([contact], row=shared_digits(self.me.id, contact.id))
        for key, periods in list(self._searches.items()):
            self._searches[key] = periods + 1
            if periods + 1 > near.settings.patience:
                del self._searches[key]
                self._out.append(NotFound(key))
            else:
                self._look_up(Lookup(key, self.me.address))
        return self._done()

    def find(self, key: int) -> list[Output]:
        """Search the node that is closest to a key. :class:`Found` or :class:`NotFound` follows."""
        self._searches[key] = 0
        self._look_up(Lookup(key, self.me.address))
        return self._done()

    def know(self, seeds: Iterable[Address]) -> list[Output]:
        """Take other seeds in place of the present ones, and ask those that are new at once.

        Nodes that began at the same time, or apart from each other, find each other so.
        """
        if self.status in (Status.LEFT, Status.REPLACED):
            return []
        before, met = set(self._seeds), {each.address for each in self.neighbours.contacts()}
        self._seeds = [seed for seed in seeds if seed != self.me.address]
        for seed in self._seeds:
            if seed not in before and seed not in met:
                self._out.append(Send(seed, Join(self.me)))
        return self._done()

    def leave(self) -> list[Output]:
        """End. Neighbours repair their leaf sets at once, not after three missed keep-alives."""
        self._beat += 1
        near = self.neighbours
        leaving = Leaving(self.me, self._beat, near.contacts())
        ids = dict.fromkeys([*near.leaves, *near.table])
        self.status = Status.LEFT
        return [Send(near.contact(id).address, leaving) for id in ids]

    def _done(self) -> list[Output]:
        near = self.neighbours
        if self.status is Status.JOINING and near.is_settled():
            self.status = Status.JOINED
            held, self._held = self._held, []
            for message in held:
                self._look_up(message)
        out, self._out = [*near.changes, *self._out], []
        near.changes = []
        return out

    def _tell(
        self,
        contacts: Iterable[Contact],
        kind: Kind = Kind.ASKING,
        row: int | None = None,
        others: tuple[Contact, ...] = (),
    ) -> None:
        """Send a keep-alive to each of some nodes."""
        self._beat += 1
        leaves = self.neighbours.contacts()
        message = KeepAlive(self.me, self._beat, leaves, kind, row, others, self.load)
        self._out += [Send(each.address, message) for each in contacts]

    def _ask_hinted(
        self, sender: Contact, leaves: tuple[Contact, ...], others: tuple[Contact, ...] = ()
    ) -> None:
        for contact in self.neighbours.hints(sender.id, leaves, others):
            if contact.id != self.me.id:
                self._tell([contact])
            elif contact != self.me:
                self._meet(contact)

    def _keep_alive(self, message: KeepAlive) -> None:
        sender, near = message.sender, self.neighbours
        if sender.id == self.me.id:
            self._meet(sender, answered=message.kind is Kind.ANSWER)
            if message.kind is Kind.ASKING:
                self._tell([sender], Kind.ANSWER)
            return
        near.heard(sender, message.beat, message.load)
        self._ask_hinted(sender, message.leaves, message.others)
        # Who is a neighbour of a node that is not its neighbour has to learn of nearer ones.
        is_one_sided = message.kind is Kind.PERIODIC and sender.id not in near.leaves
        newer = () if message.kind is Kind.ANSWER else near.newer(sender)
        if message.kind is Kind.ASKING or is_one_sided or newer:
            row = () if message.row is None else near.table.row(message.row)
            others = (*map(near.contact, row), *newer)
            self._tell([sender], Kind.ANSWER, others=others)

    def _join(self, message: Join) -> None:
        newcomer, near = message.newcomer, self.neighbours
        if newcomer.id == self.me.id:
            if newcomer == self.me:
                return
            self._meet(newcomer)
        shared = shared_digits(self.me.id, newcomer.id)
        rows = [row for row in near.table.rows() if message.row <= row <= shared]
        more = [near.contact(id) for row in rows for id in near.table.row(row)]
        avoid = near.unreachable | {newcomer.id}
        hop = next_hop(newcomer.id, near.leaves, near.table, avoid)
        others = (*message.others, *more)
        if hop is None or message.hops >= MOST_HOPS:
            self._beat += 1
            others = (*others, *near.newer(newcomer))
            welcome = Welcome(self.me, self._beat, near.contacts(), others)
            self._out.append(Send(newcomer.address, welcome))
        else:
            join = Join(newcomer, max(message.row, shared + 1), others, message.hops + 1)
            self._out.append(Send(near.contact(hop).address, join))

    def _look_up(self, message: Lookup) -> None:
        near = self.neighbours
        if self.status is Status.JOINING:
            if message not in self._held:
                self._held = [*self._held, message][-_MOST_HELD:]
            return
        hop = next_hop(message.key, near.leaves, near.table, near.unreachable)
        if hop is not None:
            if message.hops < MOST_HOPS:
                passed = replace(message, hops=message.hops + 1)
                self._out.append(Send(near.contact(hop).address, passed))
            return
        found = Found(message.key, self.me, near.contacts(), message.hops)
        if message.asker != self.me.address:
            self._out.append(Send(message.asker, found))
        elif self._searches.pop(message.key, None) is not None:
            self._out.append(found)

    def _meet(self, other: Contact, *, answered: bool = False) -> None:
        """Hear of another process with this id. The newer one stays."""
        if other.age <= self.me.age:
            return
        if other.address == self.me.address or self.status is Status.JOINING:
            self.me = replace(self.me, incarnation=other.incarnation + 1)
        elif answered:
            self.status = Status.REPLACED
        elif self._rival is None:
            self._rival = (other, self.neighbours.period)
            self._tell([other])


def _joining(me: Contact, addresses: list[Address]) -> list[Output]:
    """A join by the first address, which is then the last one."""
    if not addresses:
        return []
    addresses.append(addresses.pop(0))
    return [Send(addresses[-1], Join(me))]

"""Backups as erasure-coded fragments, at the nodes beside the owner of a slice on a ring."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from anabranch.backup.policy import NodeLimits, limits_of
from anabranch.errors import PlanError
from anabranch.fragments import Adapt, Choice, Holder, Measured, check_shape, choose, spread
from anabranch.fragments.layout import row_of_stripe
from anabranch.nodes.standing.store import where
from anabranch.ring import NodeId, Settings, distance
from anabranch.state.part import Part, Shape
from anabranch.stores.address import StoreAddress
from anabranch.stores.peers import AT_PEERS
from anabranch.units import Duration, Size, byte_count


@dataclass(frozen=True)
class Fragments:
    """Spread every checkpoint over nodes as fragments, any ``data`` of which bring it back.

    A part is coded into ``data + parity`` fragments, each on another node: the nearest neighbours
    of the node of its slice on a ring. The state survives the loss of that node and of any
    ``parity`` others at once, and takes ``1 + parity / data`` times its size on disks. Lost
    fragments are made again on other nodes. On a cluster with fewer other nodes ``data`` is less,
    and ``parity`` is kept; with one there are plain copies. Fragments stay on the disks of their
    nodes when the query stops.

    With ``adapt`` the first checkpoints have ``data`` and ``parity``, and later ones what suits
    best by then. Each part keeps those that it was stored with, and survives what they promise.

    With ``ring``, the path of a ring's file, they are at standing nodes instead, which serve many
    queries and outlive the driver and all executors: start some with ``anabranch node``. They are
    next to the place of the slice's node on that ring.

    >>> Fragments(data=4, parity=2).shape(6).needed
    4
    >>> Fragments(adapt=Adapt(overhead=0.5)).adapt.prefer
    <Prefer.RECOVERY: 'recovery'>
    """

    data: int = 4
    parity: int = 2
    capacity: Size | None = None
    """How much one node keeps for others at most, such as ``"64 GiB"``. None: the free space of its
    disk, minus 5 % of the disk."""
    timeout: Duration = "30 seconds"
    """How long a node may be silent, or a transfer stall, before the request counts as failed."""
    stripe: Size | None = None
    """How many bytes of a part are coded at a time, such as ``"1 MiB"``. None: rows of 128 KiB in
    each fragment, or less where there are many."""
    adapt: Adapt | None = None
    """Choose ``data``, ``parity`` and ``stripe`` for each checkpoint from what was measured."""
    ring: str | None = None
    """The file of a ring of standing nodes. The driver reads it; executors need no copy."""

    def __post_init__(self) -> None:
        check_shape(self.data, self.parity)
        if self.ring is None:
            Settings().check(self.data + self.parity)
        elif self.capacity is not None:
            raise PlanError(
                "Fragments: capacity= is for the nodes of the query; each standing node of a ring "
                "has its own: anabranch node --capacity"
            )
        else:
            # Another process that opens the file may have another working directory.
            object.__setattr__(self, "ring", str(Path(self.ring).absolute()))
        if self.stripe_bytes == 0:
            raise PlanError(f"Fragments: stripe={self.stripe!r}: give a size, such as '1 MiB'")
        if self.adapt is not None and not isinstance(self.adapt, Adapt):
            raise PlanError(
                f"Fragments: adapt={self.adapt!r}: give an Adapt, such as Adapt(overhead=0.5), or "
                "None"
            )
        limits_of("Fragments", self.capacity, self.timeout)

    def holders(
        self, owner: str, key: str, nodes: Collection[str], senders: Collection[str]
    ) -> tuple[str, ...]:
        """The nodes nearest to the owner on the ring, or its own if there is no other.

        None if they are standing nodes: these are not the query's.
        """
        if self.ring is not None:
            return ()
        others = set(nodes) - {owner}
        return _nearest(owner, others, self.data + self.parity, self.parity) or (owner,)

    @property
    def coding(self) -> Fragments:
        """As this policy says."""
        return self

    def shape(self, holders: int) -> Shape:
        """All but ``parity`` of the holders are needed. A ring has holders of its own."""
        if self.ring is not None:
            return Shape(self.data, self.parity, self._row(self.data))
        needed = max(1, holders - self.parity)
        return Shape(needed, self.parity, self._row(needed))

    def adapted(self, measured: Measured) -> tuple[Fragments, Choice] | None:
        """The policy with what suits best for what was measured, and why.

        It is this policy if nothing else is better by a tenth. None without ``adapt``, or if there
        are fewer than two nodes for fragments.
        """
        if self.adapt is None or measured.nodes < 2:
            return None
        room = replace(measured, nodes=min(measured.nodes, Settings().leaves - 1))
        now = self.data, self.parity
        choice = choose(room, self.adapt, now=now, row=self._row(self.data))
        data, parity, stripe = choice.data, choice.parity, choice.stripe
        if (data, parity, stripe) == (self.data, self.parity, self.stripe_bytes):
            return self, choice
        return replace(self, data=data, parity=parity, stripe=stripe), choice

    def survives(self, part: Part, owner: str, nodes: Collection[str]) -> bool:
        """Whether it can be read without the owner and ``parity`` others, whichever they are.

        It is the parity of the part that counts. Of a few nodes only so many others that one is
        left. Standing nodes see to that themselves.
        """
        if self.ring is not None:
            return True
        others = set(nodes) - {owner}
        lost = min(part.parity, len(others) - 1)
        left = sum(host in others for host in part.holders)
        return left - lost >= part.needed or bool(self.substitutes(part, (owner,), nodes))

    def substitutes(
        self, part: Part, owners: Collection[str], nodes: Collection[str]
    ) -> tuple[str, ...]:
        """As many other nodes as fragments are lost; none if they are at standing nodes."""
        if self.ring is not None:
            return ()
        missing = part.needed + part.parity - sum(host in nodes for host in part.holders)
        others = set(nodes) - set(part.holders) - set(owners)
        if missing <= 0 or not part.available(nodes):
            return ()
        return _nearest(part.holders[0], others, missing, part.parity)

    @property
    def stripe_bytes(self) -> int | None:
        """``stripe`` as a number."""
        return None if self.stripe is None else byte_count(self.stripe, what="Fragments: stripe")

    def _row(self, data: int) -> int | None:
        stripe = self.stripe_bytes
        return None if stripe is None else row_of_stripe(stripe, data)

    @property
    def where(self) -> StoreAddress:
        """The nodes of the query, or the standing nodes of the ring."""
        if self.ring is not None:
            return where(self.ring, self.data, self.parity, self._row(self.data))
        return AT_PEERS

    @property
    def limits(self) -> NodeLimits:
        """As the user has said."""
        return limits_of("Fragments", self.capacity, self.timeout)


def _nearest(host: str, others: Collection[str], count: int, parity: int) -> tuple[str, ...]:
    place = NodeId.of(host)
    near = sorted(others, key=lambda other: distance(place, NodeId.of(other)))
    return tuple(
        each.host for each in spread([Holder(other, other) for other in near], count, parity)
    )

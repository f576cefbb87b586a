"""The backup axis: which nodes hold the parts of which slice, and which store has their bytes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from anabranch.errors import PlanError
from anabranch.fragments import Adapt, Choice, Measured
from anabranch.state.part import Part, Shape
from anabranch.stores.address import StoreAddress
from anabranch.units import Duration, Size, byte_count, microseconds


@dataclass(frozen=True)
class NodeLimits:
    """What a node may keep for others, and how long it may be silent."""

    capacity: int | None = None
    """The most bytes that one node keeps for others. None: what its disk has free, less a reserve
    of a twentieth of the disk."""
    silence: float = 30.0
    """Seconds for which a node may be silent, or a transfer stand still, before it has failed."""


def limits_of(policy: str, capacity: Size | None, timeout: Duration) -> NodeLimits:
    """The limits that a policy of this name was given. PlanError if they make no sense."""
    silence = microseconds(timeout, what=f"{policy}: timeout") / 1e6
    if not 0.1 <= silence <= 3600:
        raise PlanError(f"{policy}: timeout={timeout!r}: it must be from 0.1 seconds to 1 hour")
    most = None if capacity is None else byte_count(capacity, what=f"{policy}: capacity")
    return NodeLimits(most, silence)


class Coding(Protocol):
    """How a policy codes parts into fragments: the first m of them are data, and k are parity."""

    @property
    def data(self) -> int:
        """m, where there are enough nodes."""
        ...

    @property
    def parity(self) -> int:
        """k."""
        ...

    @property
    def stripe_bytes(self) -> int | None:
        """How many bytes of a part are coded at a time, if that was chosen."""
        ...

    @property
    def adapt(self) -> Adapt | None:
        """What m, k and the stripe are chosen by, if they follow what is measured."""
        ...

    def adapted(self, measured: Measured) -> tuple[Backup, Choice] | None:
        """The policy with what suits best for what was measured, and why.

        It is the present policy if nothing else is clearly better. None if there is no choice.
        """
        ...


class Backup(Protocol):
    """A backup policy: a plain value that says where the parts of a query are stored."""

    @property
    def where(self) -> StoreAddress:
        """The store that has the parts; every process of the query can open it."""
        ...

    @property
    def limits(self) -> NodeLimits:
        """What is asked of the nodes; ``NodeLimits()`` suits a store that is elsewhere."""
        ...

    @property
    def coding(self) -> Coding | None:
        """How parts are coded into fragments; None if each holder has a copy."""
        ...

    def holders(
        self, owner: str, key: str, nodes: Collection[str], senders: Collection[str]
    ) -> tuple[str, ...]:
        """The nodes that store a part of a slice. Empty for a store that survives all nodes.

        ``key`` identifies the slice, and ``owner`` is its node. ``nodes`` are all nodes, and
        ``senders`` are those that send rows to the slice.
        """
        ...

    def shape(self, holders: int) -> Shape:
        """How a part is divided over so many holders, from now on.

        Parts that were stored before keep the shape that they have.
        """
        ...

    def survives(self, part: Part, owner: str, nodes: Collection[str]) -> bool:
        """Whether a part will outlive what the policy promises to survive, with these nodes alive.

        That is the loss of the node of the slice, ``owner``, if nothing more is promised. It is
        true too if substitutes will make it so.
        """
        ...

    def substitutes(
        self, part: Part, owners: Collection[str], nodes: Collection[str]
    ) -> tuple[str, ...]:
        """The nodes that are to hold a part too, while only these nodes are alive.

        ``owners`` have the state itself. Empty if there are as many holders as there should be, or
        if the state is captured again instead.
        """
        ...

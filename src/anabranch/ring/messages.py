"""What peers send to each other, what they want done, and their settings.

Messages may be lost, repeated, late and out of order. What one says of its sender is a proof that
the sender lives; what it says of others is a hint, and is checked before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from anabranch.errors import PlanError
from anabranch.ring.ids import NodeId

Address = str
"""Where a node is reached, such as ``"10.0.3.7:7070"``."""


@dataclass(frozen=True, slots=True)
class Contact:
    """A node, and where it is reached.

    A node that returns after its disk was lost, or at another address, has the same id and another
    incarnation: the microseconds at its start, say. If the clock went back and the ring knows a
    later one, it takes the next.
    """

    id: NodeId
    host: str
    address: Address
    incarnation: int = 0

    @property
    def age(self) -> tuple[int, Address]:
        """Orders the processes that had an id. The address decides if clocks do not."""
        return self.incarnation, self.address

    def __str__(self) -> str:
        return f"{self.host} at {self.address} ({self.id})"


class Kind(Enum):
    """Why a node says that it lives."""

    PERIODIC = "periodic"
    ASKING = "asking"
    """It wants to hear the same of the other one, at once."""
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The sender lives, and this is its leaf set."""

    sender: Contact
    beat: int
    """Grows from message to message of a sender, so one that is repeated is no sign of life."""
    leaves: tuple[Contact, ...]
    kind: Kind = Kind.PERIODIC
    row: int | None = None
    """The row of the routing table that the sender wants to have."""
    others: tuple[Contact, ...] = ()
    """The row that was asked for, and the newest incarnation of the receiver, if it is another."""
    load: int = 0
    """How full the sender is."""


@dataclass(frozen=True, slots=True)
class Join:
    """A node wants to be part of the ring, or checks its place. Goes to the closest other node."""

    newcomer: Contact
    row: int = 0
    """The first row of the newcomer's routing table that nobody on the way has given."""
    others: tuple[Contact, ...] = ()
    hops: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a newcomer: the leaf set of the closest node, and rows from the way to it."""

    sender: Contact
    beat: int
    leaves: tuple[Contact, ...]
    others: tuple[Contact, ...]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Who is closest to a key? Goes to that node."""

    key: int
    asker: Address
    hops: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The node that is closest to a key, and its leaf set."""

    key: int
    root: Contact
    leaves: tuple[Contact, ...]
    hops: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """The sender ends, and this was its leaf set."""

    sender: Contact
    beat: int
    leaves: tuple[Contact, ...]


Message = KeepAlive | Join | Welcome | Lookup | Found | Leaving


@dataclass(frozen=True, slots=True)
class Send:
    """A message has to be sent. Nobody waits for it."""

    to: Address
    message: Message


@dataclass(frozen=True, slots=True)
class Came:
    """A node is in the leaf set now."""

    node: Contact


@dataclass(frozen=True, slots=True)
class Went:
    """A node is not in the leaf set any more: failed, gone, replaced or not among the nearest."""

    node: Contact
    failed: bool


@dataclass(frozen=True, slots=True)
class NotFound:
    """The search for a key was not answered."""

    key: int


Output = Send | Found | NotFound | Came | Went


@dataclass(frozen=True, slots=True)
class Settings:
    """How a ring is kept together. All of its nodes have the same settings."""

    leaves: int = 32
    """Size of the leaf set, half of it on each side. It must be larger than the number of fragments
    of a state: they are stored there."""
    period: float = 30.0
    """Seconds between keep-alives: 1 on a local cluster."""
    missed: int = 3
    """A node is failed after so many missed keep-alives."""
    probes: int = 4
    """Nodes of the routing table that are checked in a period."""
    patience: int = 10
    """Periods after which a search is given up, and a silent node is asked again."""
    remembered: int = 256
    """Nodes that are remembered although they are not neighbours, to find a ring again that was
    cut apart."""

    def __post_init__(self) -> None:
        if self.leaves < 2 or self.leaves % 2:
            raise PlanError(f"leaves={self.leaves}: half of the leaf set is on each side")
        if self.period <= 0 or min(self.missed, self.probes, self.patience, self.remembered) < 1:
            raise PlanError(f"{self}: all settings must be positive")

    def check(self, fragments: int) -> None:
        """Raise :class:`~anabranch.errors.PlanError` if a leaf set has no room for the fragments.

        >>> Settings(leaves=24).check(24)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        anabranch.errors.PlanError: 24 fragments do not fit in a leaf set of 24 nodes: ...
        """
        if fragments >= self.leaves:
            raise PlanError(
                f"{fragments} fragments do not fit in a leaf set of {self.leaves} nodes: make "
                "fewer of them, or give the ring a larger leaf set"
            )

"""The requests that only standing nodes take: about the ring that they form."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.nodes import codec
from anabranch.nodes.requests import Epoch, Request
from anabranch.nodes.standing import messages
from anabranch.nodes.wire import check_signer
from anabranch.ring import Contact, Message, NodeId


@dataclass(frozen=True)
class Place:
    """The node that is closest to a key, its leaf set, and how many nodes passed the search on."""

    root: Contact
    leaves: tuple[Contact, ...]
    hops: int


@dataclass(frozen=True)
class Neighbour:
    """A node as another one knows it."""

    contact: Contact
    load: int
    """How much of its room is used, in thousandths."""


@dataclass(frozen=True)
class View:
    """A node, and what it knows of the ring."""

    me: Contact
    joined: bool
    leaves: tuple[Neighbour, ...]
    """Its leaf set."""
    load: int
    fragments: int
    used: int
    limit: int
    failures: int
    """How many requests it has refused, or failed to carry out."""
    repaired: int
    """How many fragments it has made again since it started."""


@dataclass(frozen=True, kw_only=True)
class Tell(Request[None]):
    """Take a message of the ring. It is not answered here, but by messages."""

    message: Message


@dataclass(frozen=True, kw_only=True)
class Find(Request[Place]):
    """Find the node that is closest to a key, by the routing of the ring."""

    key: NodeId


@dataclass(frozen=True, kw_only=True)
class Describe(Request[View]):
    """What the node knows of the ring, and how full it is."""


@dataclass(frozen=True, kw_only=True)
class Reigning(Request[Epoch]):
    """The greatest epoch of a query that the node has seen; 0 if none."""

    query: str

    def __post_init__(self) -> None:
        check_signer(self.query)


codec.define(Message, "a message of a ring", messages.read, messages.write)
codec.define(Contact, "a contact", messages.read_contact, messages.write_contact)
codec.define(NodeId, "a place on a ring", messages.read_id, lambda id: f"{int(id):032x}")

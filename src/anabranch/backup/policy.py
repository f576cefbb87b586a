"""What a query asks of its backup policy: which nodes hold a part, and which store has it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from anabranch.state.part import Part
from anabranch.stores.store import BackupStore


class Backup(Protocol):
    """A backup policy: a plain value that says where, and opens the store wherever it is sent."""

    def open(self) -> BackupStore:
        """The store, ready to use in this process."""

    def holders(
        self, owner: str, key: str, nodes: Collection[str], senders: Collection[str]
    ) -> tuple[str, ...]:
        """The nodes to store a part of a slice at; none: the store outlives all nodes.

        ``key`` says which slice it is, ``owner`` is its node. ``nodes`` are all that there are, and
        ``senders`` those of them that send rows to it.
        """

    def available(self, part: Part, nodes: Collection[str]) -> bool:
        """Whether a part can be had from these nodes."""

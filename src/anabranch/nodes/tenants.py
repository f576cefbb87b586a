"""Who may do what at a node: one query everything, or many queries each with its own backups.

A standing node serves many queries. The backups of each are in a part of the vault of its own, and
it has a fence of its own. The requests that concern the ring itself need the ring's own key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from anabranch.errors import Refused
from anabranch.nodes.fence import Fence
from anabranch.nodes.requests import Request
from anabranch.nodes.vault import Incoming, Vault


class Shelf:
    """The backups of one query in a vault that many share; no name leads out of it.

    >>> import pathlib, tempfile
    >>> vault = Vault(pathlib.Path(tempfile.mkdtemp()), None)
    >>> Shelf(vault, "words").put("parts/1", b"x")
    >>> Shelf(vault, "others").list(), Shelf(vault, "words").list(), vault.list()
    ([], ['parts/1'], ['words/parts/1'])
    """

    def __init__(self, vault: Vault, query: str) -> None:
        self._vault = vault
        self._own = f"{query}/"

    @property
    def used(self) -> int:
        """The bytes of all backups in the vault: they share its room."""
        return self._vault.used

    @property
    def limit(self) -> int:
        """See :attr:`Vault.limit`."""
        return self._vault.limit

    def receiving_all(
        self, sizes: Collection[tuple[str, int]]
    ) -> AbstractContextManager[list[Incoming]]:
        """See :meth:`Vault.receiving_all`."""
        return self._vault.receiving_all([(self._own + name, size) for name, size in sizes])

    def opened(self, name: str) -> AbstractContextManager[tuple[int, int]]:
        """See :meth:`Vault.opened`."""
        return self._vault.opened(self._own + name)

    def list(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`anabranch.stores.BackupStore.list`."""
        start = len(self._own)
        return [name[start:] for name in self._vault.list(self._own + prefix)]

    def size(self, name: str) -> int:
        """See :meth:`anabranch.stores.BackupStore.size`."""
        return self._vault.size(self._own + name)

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`anabranch.stores.BackupStore.put`."""
        self._vault.put(self._own + name, data)

    def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
        """See :meth:`anabranch.stores.BackupStore.put_all`."""
        self._vault.put_all({self._own + name: data for name, data in blocks.items()})

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """See :meth:`anabranch.stores.BackupStore.get`."""
        return self._vault.get(self._own + name, offset, length)

    def delete(self, name: str) -> None:
        """See :meth:`anabranch.stores.BackupStore.delete`."""
        self._vault.delete(self._own + name)

    def delete_all(self, names: Collection[str]) -> None:
        """See :meth:`anabranch.stores.BackupStore.delete_all`."""
        self._vault.delete_all([self._own + name for name in names])


Backups = Vault | Shelf
"""Where a server keeps what a signer gives it."""


@dataclass(frozen=True)
class Tenant:
    """What one signer can use at a node."""

    backups: Backups
    fence: Fence
    verbs: frozenset[type[Request[Any]]] | None = None
    """The requests that it may send; None: all."""

    def check(self, request: type[Request[Any]], by: str) -> None:
        """Refused if the signer may not send such a request."""
        if self.verbs is None or request in self.verbs:
            return
        who = f"the key of query {by}" if by else "the ring's own key"
        raise Refused(
            f"a standing node does not take the request {request.verb!r} with {who}; it takes "
            f"{sorted(each.verb for each in self.verbs)}"
        )


Tenants = Callable[[str], Tenant]
"""The tenant that signs as a query, or with the node's own key if that is empty."""


def alone(vault: Vault, fence: Fence) -> Tenants:
    """One query has all of the node. Others never get so far: their signature is refused."""
    tenant = Tenant(vault, fence)
    return lambda by: tenant

"""Backups that the nodes of a cluster keep for each other."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

import pyarrow as pa

from anabranch.errors import CheckpointNotFound, DidNotHappen
from anabranch.state.part import peer_name as peer_name
from anabranch.stores.address import NodeStores, StoreAddress
from anabranch.stores.store import BackupStore

AT_PEERS = StoreAddress("anabranch.stores.peers:PeerStore", at_nodes=True)
"""The store below, for whoever is to open it."""


class PeerStore:
    """A store whose names start with the node that has the bytes: ``host/name``.

    ``nodes`` gives the stores of the nodes that are alive, by host.
    """

    def __init__(self, nodes: NodeStores) -> None:
        self._nodes = nodes

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`BackupStore.put`."""
        host, rest = _split(name)
        node = self._nodes().get(host)
        if node is None:
            raise DidNotHappen(f"cannot store {name}: node {host} was lost")
        node.put(rest, data)

    def get(self, name: str) -> pa.Buffer:
        """See :meth:`BackupStore.get`."""
        return self._holder(name).get(_split(name)[1])

    def list(self, prefix: str = "") -> Sequence[str]:
        """The names at all nodes that are alive."""
        return sorted(
            name
            for host, node in self._nodes().items()
            for name in (peer_name(host, rest) for rest in node.list())
            if name.startswith(prefix)
        )

    def delete(self, name: str) -> None:
        """Delete a name. Nothing happens if its node was lost."""
        host, rest = _split(name)
        node = self._nodes().get(host)
        if node is not None:
            node.delete(rest)

    def size(self, name: str) -> int:
        """See :meth:`BackupStore.size`."""
        return self._holder(name).size(_split(name)[1])

    def _holder(self, name: str) -> BackupStore:
        host, _ = _split(name)
        node = self._nodes().get(host)
        if node is None:
            raise CheckpointNotFound(f"backup {name} was lost with node {host}")
        return node


def _split(name: str) -> tuple[str, str]:
    host, slash, rest = name.partition("/")
    if not slash:
        raise ValueError(f"{name!r} does not name the node that has it")
    return unquote(host), rest

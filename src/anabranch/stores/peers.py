"""Backups that the nodes of a cluster keep for each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa

from anabranch.errors import DidNotHappen
from anabranch.state.part import peer_name as peer_name
from anabranch.stores.address import NodeStores, StoreAddress
from anabranch.stores.store import BackupStore, check_name
from anabranch.stores.together import at_once, check_all_stored

AT_PEERS = StoreAddress("anabranch.stores.peers:PeerStore", at_nodes=True)
"""The store below, for whoever is to open it."""


class PeerStore:
    """A store whose names start with the node that has the bytes: ``host/name``.

    ``nodes`` gives the stores of the nodes that have an agent now, by host. Any other node counts
    as silent. It may still have its parts when its agent is replaced, or when it returns.
    """

    def __init__(self, nodes: NodeStores) -> None:
        self._nodes = nodes

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`BackupStore.put`."""
        host, rest = _split(name)
        self._holder(host, f"store {name}").put(rest, data)

    def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
        """See :meth:`BackupStore.put_all`: one request to each node, all at once."""
        by_host: dict[str, dict[str, pa.Buffer | bytes]] = {}
        for name, data in blocks.items():
            host, rest = _split(name)
            by_host.setdefault(host, {})[rest] = data
        nodes = {
            host: self._holder(host, f"store {peer_name(host, next(iter(some)))}")
            for host, some in by_host.items()
        }
        failed = at_once(by_host, lambda host: nodes[host].put_all(by_host[host]))
        check_all_stored(failed, len(by_host))

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """See :meth:`BackupStore.get`."""
        host, rest = _split(name)
        return self._holder(host, f"read {name}").get(rest, offset, length)

    def list(self, prefix: str = "") -> Sequence[str]:
        """The names at all nodes that can be asked."""
        return sorted(
            name
            for host, node in self._nodes().items()
            for name in (peer_name(host, rest) for rest in node.list())
            if name.startswith(prefix)
        )

    def delete(self, name: str) -> None:
        """Delete a name. A node without an agent drops it when it has one again."""
        self.delete_all([name])

    def delete_all(self, names: Collection[str]) -> None:
        """Delete names: one request to each node that has an agent, all at once."""
        by_host: dict[str, list[str]] = {}
        for name in names:
            host, rest = _split(name)
            by_host.setdefault(host, []).append(check_name(rest))
        nodes = self._nodes()
        there = [host for host in by_host if host in nodes]
        for error in at_once(there, lambda host: nodes[host].delete_all(by_host[host])):
            raise error

    def size(self, name: str) -> int:
        """See :meth:`BackupStore.size`."""
        host, rest = _split(name)
        return self._holder(host, f"look up {name}").size(rest)

    def _holder(self, host: str, doing: str) -> BackupStore:
        node = self._nodes().get(host)
        if node is None:
            raise DidNotHappen(f"cannot {doing}: node {host} has no agent now", host=host)
        return node


def _split(name: str) -> tuple[str, str]:
    host, slash, rest = name.partition("/")
    if not slash:
        raise ValueError(f"{name!r} does not name the node that has it")
    return unquote(host), rest

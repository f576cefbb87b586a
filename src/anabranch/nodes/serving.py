"""The node of an agent: the tables on its machine, and the backups of its query."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabranch.nodes.chunks import TIMEOUT
from anabranch.nodes.claims import Claim
from anabranch.nodes.fence import Fence, FencedStore
from anabranch.nodes.local import LocalNode
from anabranch.nodes.node import Deadline, Node
from anabranch.nodes.remote import NodeStore, RemoteNode
from anabranch.nodes.requests import Address, Backed
from anabranch.nodes.standing.names import under_owner
from anabranch.nodes.standing.store import is_in_ring
from anabranch.nodes.sweep import sweep
from anabranch.nodes.tickets import Secret, Signer
from anabranch.nodes.vault import Vault
from anabranch.stores.address import StoreAddress
from anabranch.stores.store import BackupStore


def make(context: Mapping[str, Any], vault: Vault, fence: Fence) -> Node:
    """The node of an agent with a vault and a fence.

    ``context`` has the ``root`` folder of the query's state, which is claimed, and whether to
    ``keep`` it. ``store`` is the address of the parts, and ``host`` what this node is known as. If
    the parts are at the nodes, the context has the ``secret`` of all, the certificate that is
    ``trusted``, and the ``timeout`` after which one of them counts as silent.
    """
    root = Path(context["root"])
    state = root.parent.parent  # <state folder>/<host>/<query>
    claim = Claim(state, root)
    claim.mark_kept(bool(context.get("keep", False)))
    sweep(state, spare=[root.name])
    where = StoreAddress.from_json(context["store"])
    if not where.at_nodes:
        store = where.open()
        # The fragments of what is stored here are next to this host's place on the ring.
        below = under_owner(context["host"]) if is_in_ring(where) else ""
        return LocalNode(root, lambda request, deadline: store, below=below)
    trusted = context.get("trusted")
    peers = _Peers(
        where,
        context["host"],
        vault,
        fence,
        Signer(Secret.from_hex(context["secret"])),
        float(context.get("timeout", TIMEOUT)),
        None if trusted is None else Path(trusted).read_bytes(),
    )
    return LocalNode(root, peers.store, host=context["host"], keep=vault.adopt)


class _Peers:
    """The nodes that keep backups for each other, of which this is one."""

    def __init__(
        self,
        where: StoreAddress,
        host: str,
        vault: Vault,
        fence: Fence,
        signer: Signer,
        silence: float,
        trusted: bytes | None,
    ) -> None:
        self._where = where
        self._host = host
        self._vault = vault
        self._fence = fence
        self._signer = signer
        self._silence = silence
        self._trusted = trusted
        self._nodes: dict[tuple[str, str], RemoteNode] = {}
        """By host and address."""
        self._lock = threading.Lock()

    def store(self, request: Backed[Any], deadline: Deadline) -> BackupStore:
        """The store of all backups at the nodes, for the duration of a request."""
        stores: dict[str, BackupStore] = {
            host: NodeStore(node, request.epoch, lambda: deadline)
            for host, node in self._at(request.peers).items()
        }
        # What is here need not come through the network.
        stores[self._host] = FencedStore(self._vault, self._fence, request.epoch, deadline)
        return self._where.open(lambda: stores)

    def _at(self, peers: Mapping[str, Address]) -> Mapping[str, RemoteNode]:
        """The nodes at these addresses, by host. Nodes at other addresses are dropped."""
        with self._lock:
            wanted = set(peers.items())
            for gone in self._nodes.keys() - wanted:
                self._nodes.pop(gone).close()
            for host, address in wanted - self._nodes.keys():
                self._nodes[host, address] = RemoteNode(
                    address,
                    self._signer,
                    host=host,
                    silence=self._silence,
                    tls_root=self._trusted,
                )
            return {host: self._nodes[host, address] for host, address in peers.items()}

"""The work of an agent: :class:`~anabranch.nodes.workbench.Workbench`, asked for in JSON."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from anabranch.backup.files import Files
from anabranch.backup.manifests import OperatorManifest
from anabranch.backup.merging import merged
from anabranch.backup.peers import PeerStore
from anabranch.backup.store import BackupStore
from anabranch.nodes import fields
from anabranch.nodes.captures import CAPTURES, capture_folders
from anabranch.nodes.chunks import TIMEOUT
from anabranch.nodes.claims import Claim
from anabranch.nodes.client import NodeStore
from anabranch.nodes.server import Handler
from anabranch.nodes.sweep import sweep
from anabranch.nodes.tickets import Refused, Secret, Signer
from anabranch.nodes.workbench import Workbench

Request = dict[str, Any]


def make(context: Request, vault: BackupStore) -> Mapping[str, Handler]:
    """The actions of an agent; ``context`` names the root folder, the secret and the store."""
    return Actions(context, vault).named()


class Actions:
    """Each method is one action: a request in, an answer out."""

    def __init__(self, context: Request, vault: BackupStore) -> None:
        self._vault = vault
        self._root = Path(context["root"])
        state = self._root.parent.parent  # <state folder>/<host>/<query>
        self._claim = Claim(state, self._root)
        sweep(state, spare=[self._root.name])
        self._signer = Signer(Secret.from_hex(context["secret"]))
        self._files = context.get("files")
        trusted = context.get("trusted")
        self._trusted = None if trusted is None else Path(trusted).read_bytes()
        self._timeout = float(context.get("timeout", TIMEOUT))
        self._peers: dict[str, NodeStore] = {}
        self._lock = threading.Lock()

    def named(self) -> Mapping[str, Handler]:
        """The actions by their names."""
        return {
            "usable": self._usable,
            "create": self._create,
            "restore": self._restore,
            "advance": self._advance,
            "capture": self._capture,
            "offer": self._offer,
            "store": self._store,
            "shorten": self._shorten,
            "rename": self._rename,
            "keep_only": self._keep_only,
        }

    def _usable(self, request: Request) -> Request:
        table, layout = self._table(request), fields.layout(request)
        return {"usable": self._bench(request).usable(table, layout, fields.version(request))}

    def _create(self, request: Request) -> Request:
        table, layout = self._table(request), fields.layout(request)
        self._bench(request).create(table, layout, fields.version(request))
        return {}

    def _restore(self, request: Request) -> Request:
        table, layout = self._table(request), fields.layout(request)
        saved, groups = fields.saved(request), fields.groups(request, layout.key.key_groups)
        return {"bytes": self._bench(request).restore(table, layout, saved, groups)}

    def _advance(self, request: Request) -> Request:
        layout = fields.layout(request)
        self._bench(request).advance(
            self._table(request),
            layout,
            fields.saved(request, "changes"),
            fields.groups(request, layout.key.key_groups),
            fields.version(request, "since"),
            fields.number(request, "fence"),
        )
        return {}

    def _capture(self, request: Request) -> Request:
        layout = fields.layout(request)
        file = self._bench(request).capture(
            self._table(request),
            layout,
            fields.operator(request),
            fields.instance(request),
            fields.groups(request, layout.key.key_groups),
            fields.version(request),
            fields.version_or_none(request, "base"),
        )
        return {"file": file}

    def _offer(self, request: Request) -> Request:
        file = self._mine(request)
        name = f"{CAPTURES}/{quote(file.name, safe='')}"
        with pa.memory_map(str(file)) as mapped:
            self._vault.put(name, mapped.read_buffer())
        file.unlink()
        return {"name": name}

    def _store(self, request: Request) -> Request:
        file, under = self._mine(request), fields.prefix(request, "under")
        return {"part": self._bench(request).store(str(file), under).to_json()}

    def _shorten(self, request: Request) -> Request:
        saved, under = fields.saved(request), fields.prefix(request, "under")
        return {"part": merged(self._backups_of(request), saved, under).to_json()}

    def _rename(self, request: Request) -> Request:
        table, to = self._table(request), self._table(request, "to")
        self._bench(request).rename(table, to)
        return {}

    def _keep_only(self, request: Request) -> Request:
        self._bench(request).keep_only(fields.tables(request))
        return {}

    def _table(self, request: Request, field: str = "table") -> str:
        table = fields.table(request, field)
        Workbench(self._root, self._vault).path(table)
        return table

    def _mine(self, request: Request) -> Path:
        """The field ``file``: a capture of this query."""
        text = fields.text(request, "file")
        folders = capture_folders(self._root)
        for folder in folders if "\0" not in text else ():
            path = folder / Path(text).name
            # A link may lead anywhere.
            if text == str(path) and path.resolve() == folder.resolve() / path.name:
                return path
        places = " or ".join(map(str, folders))
        raise Refused(f"{fields.cut(text)} is no capture of this query, which are in {places}")

    def _bench(self, request: Request) -> Workbench:
        return Workbench(self._root, self._backups_of(request))

    def _backups_of(self, request: Request) -> BackupStore:
        peers = fields.peers(request)
        if self._files is not None:
            return Files(self._files).open()
        nodes = self._nodes_at(peers)
        return PeerStore(lambda: nodes)

    def _nodes_at(self, peers: Mapping[str, str]) -> Mapping[str, NodeStore]:
        """The nodes at these addresses, by host. Those at other addresses are gone."""
        with self._lock:
            wanted = set(peers.values())
            for address in self._peers.keys() - wanted:
                self._peers.pop(address).close()
            for address in wanted - self._peers.keys():
                self._peers[address] = NodeStore(
                    address, self._signer, timeout=self._timeout, tls_root=self._trusted
                )
            return {host: self._peers[address] for host, address in peers.items()}


def saved_to_json(saved: OperatorManifest) -> Request:
    """An operator's part of a manifest, for a request."""
    return {"schema": saved.schema.to_json(), "parts": [part.to_json() for part in saved.parts]}

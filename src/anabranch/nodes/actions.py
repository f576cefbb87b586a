"""The work of an agent: :class:`~anabranch.nodes.workbench.Workbench`, asked for in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabranch.backup.files import Files
from anabranch.backup.manifests import OperatorManifest, Part
from anabranch.backup.merging import merged
from anabranch.backup.peers import PeerStore
from anabranch.backup.store import BackupStore
from anabranch.nodes.captures import CAPTURES, capture_folders
from anabranch.nodes.claims import Claim
from anabranch.nodes.client import NodeStore
from anabranch.nodes.server import Handler
from anabranch.nodes.sweep import sweep
from anabranch.nodes.tickets import Secret, Signer
from anabranch.nodes.workbench import Workbench
from anabranch.state import layouts
from anabranch.state.capture import CheckpointSchema
from anabranch.state.groups import KeyGroups
from anabranch.units import Version

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
        self._peers: dict[str, NodeStore] = {}

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
        table, layout = request["table"], layouts.from_json(request["layout"])
        return {"usable": self._bench(request).usable(table, layout, Version(request["version"]))}

    def _create(self, request: Request) -> Request:
        layout = layouts.from_json(request["layout"])
        self._bench(request).create(request["table"], layout, Version(request["version"]))
        return {}

    def _restore(self, request: Request) -> Request:
        read = self._bench(request).restore(
            request["table"],
            layouts.from_json(request["layout"]),
            saved_from_json(request["saved"]),
            KeyGroups.parse(request["groups"]),
        )
        return {"bytes": read}

    def _advance(self, request: Request) -> Request:
        self._bench(request).advance(
            request["table"],
            layouts.from_json(request["layout"]),
            saved_from_json(request["changes"]),
            KeyGroups.parse(request["groups"]),
            Version(request["since"]),
            request["fence"],
        )
        return {}

    def _capture(self, request: Request) -> Request:
        file = self._bench(request).capture(
            request["table"],
            layouts.from_json(request["layout"]),
            request["operator"],
            request["instance"],
            KeyGroups.parse(request["groups"]),
            Version(request["version"]),
            None if request["base"] is None else Version(request["base"]),
        )
        return {"file": file}

    def _offer(self, request: Request) -> Request:
        file = self._mine(request["file"])
        name = f"{CAPTURES}/{file.name}"
        self._vault.put(name, file.read_bytes())
        file.unlink()
        return {"name": name}

    def _store(self, request: Request) -> Request:
        file = self._mine(request["file"])
        return {"part": self._bench(request).store(str(file), request["under"]).to_json()}

    def _shorten(self, request: Request) -> Request:
        saved = saved_from_json(request["saved"])
        return {"part": merged(self._backups_of(request), saved, request["under"]).to_json()}

    def _rename(self, request: Request) -> Request:
        self._bench(request).rename(request["table"], request["to"])
        return {}

    def _keep_only(self, request: Request) -> Request:
        self._bench(request).keep_only(request["tables"])
        return {}

    def _mine(self, file: str) -> Path:
        path = Path(file).resolve()
        if not any(path.is_relative_to(f.resolve()) for f in capture_folders(self._root)):
            raise ValueError(f"{file} is no capture of this query")
        return path

    def _bench(self, request: Request) -> Workbench:
        return Workbench(self._root, self._backups_of(request))

    def _backups_of(self, request: Request) -> BackupStore:
        peers: Mapping[str, str] = request.get("peers", {})
        if self._files is not None:
            return Files(self._files).open()
        return PeerStore(lambda: {host: self._peer(address) for host, address in peers.items()})

    def _peer(self, address: str) -> NodeStore:
        if address not in self._peers:
            self._peers[address] = NodeStore(address, self._signer, tls_root=self._trusted)
        return self._peers[address]


def saved_to_json(saved: OperatorManifest) -> Request:
    """An operator's part of a manifest, for a request."""
    return {"schema": saved.schema.to_json(), "parts": [part.to_json() for part in saved.parts]}


def saved_from_json(value: Request) -> OperatorManifest:
    """What :func:`saved_to_json` wrote."""
    parts = tuple(Part.from_json(part) for part in value["parts"])
    return OperatorManifest(CheckpointSchema.from_json(value["schema"]), parts)

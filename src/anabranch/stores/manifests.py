"""Manifests: the files that make up the state of a query at a version.

A manifest names every file that its version needs, including files of earlier versions. It is
written after them; until then the version does not exist. File names have the query's id and a
checksum: a repeated batch never changes a file that a manifest names, and queries that share a
store never touch each other's files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from anabranch.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    DidNotHappen,
)
from anabranch.state.capture import CheckpointSchema
from anabranch.state.chains import leading_to, needed
from anabranch.state.groups import KeyGroups
from anabranch.state.part import Part
from anabranch.stores.address import StoreAddress
from anabranch.stores.files import open_files
from anabranch.stores.sealed import seal, unseal
from anabranch.stores.store import BackupStore
from anabranch.units import Version

_log = logging.getLogger("anabranch")
_MANIFESTS, _PARTS = "manifests/", "parts/"
_MANIFEST = re.compile(rf"{_MANIFESTS}(\d{{12}})\.json")


QUERY = "query.json"
"""The file that says whose checkpoint folder it is."""


def part_name(operator: str, instance: int, version: Version, full: bool, checksum: str) -> str:
    """The name of a checkpoint file."""
    kind = "full" if full else "changes"
    return f"{_PARTS}{version:012d}-{quote(operator, safe='')}-{instance}-{kind}-{checksum}.arrow"


@dataclass(frozen=True)
class OperatorManifest:
    """The state of one operator: its columns, and the files it is in, oldest first.

    ``info`` has other data for a restart, such as the watermark, as any JSON.
    """

    schema: CheckpointSchema
    parts: tuple[Part, ...]
    info: Mapping[str, Any] = field(default_factory=dict)

    def extended(self, parts: Sequence[Part], info: Mapping[str, Any]) -> OperatorManifest:
        """The manifest with new files, without those that they replace."""
        kept = [part for part, _ in needed([*self.parts, *parts])]
        return replace(self, parts=tuple(kept), info=info)


@dataclass(frozen=True)
class Manifest:
    """The state of all operators of a query at one version, by their names."""

    version: Version
    operators: Mapping[str, OperatorManifest]
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, operator in self.operators.items():
            every = KeyGroups.all(operator.schema.key_groups)
            try:
                leading_to(operator.parts, every, self.version)
            except CheckpointError as error:
                raise CheckpointError(f"operator {name!r}: {error}") from error

    def to_bytes(self) -> bytes:
        """The bytes of the manifest file: JSON with a checksum."""
        operators = {
            name: {
                "schema": operator.schema.to_json(),
                "parts": [part.to_json() for part in operator.parts],
                "info": dict(operator.info),
            }
            for name, operator in self.operators.items()
        }
        body = {"version": self.version, "operators": operators, "info": dict(self.info)}
        return seal("manifest", body)

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str) -> Manifest:
        """Read a manifest file. CheckpointCorrupt if its bytes are not those that were written."""
        body = unseal("manifest", data, name=name)
        try:
            operators = {
                operator: OperatorManifest(
                    CheckpointSchema.from_json(value["schema"]),
                    tuple(Part.from_json(part, operator) for part in value["parts"]),
                    value["info"],
                )
                for operator, value in body["operators"].items()
            }
            return cls(Version(body["version"]), operators, body["info"])
        except (ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
            raise CheckpointCorrupt(f"{name}: not a manifest as written: {error}") from error

    @property
    def files(self) -> frozenset[str]:
        """The names of all files that are needed for this version."""
        return frozenset(
            name for of in self.operators.values() for part in of.parts for name in part.names
        )


class Manifests:
    """The manifests in a store, and the files they name, in the same or in another one.

    One process at a time may put, drop and sweep; any number may read.
    """

    def __init__(self, store: BackupStore, parts: BackupStore | None = None) -> None:
        self._store = store
        self._parts = store if parts is None else parts

    def put(self, manifest: Manifest) -> None:
        """Write the manifest of a version. All of its files must be in the store already."""
        self._store.put(_manifest_name(manifest.version), manifest.to_bytes())

    def get(self, version: Version) -> Manifest:
        """The manifest of a version. CheckpointNotFound names the existing versions."""
        name = _manifest_name(version)
        try:
            data = self._store.get(name)
        except CheckpointNotFound as error:
            raise CheckpointNotFound(
                f"there is no checkpoint of version {version}; there are {list(self.versions())}"
            ) from error
        manifest = Manifest.from_bytes(data.to_pybytes(), name=name)
        if manifest.version != version:
            raise CheckpointCorrupt(f"{name} has the manifest of version {manifest.version}")
        return manifest

    def versions(self) -> list[Version]:
        """The existing versions, oldest first."""
        found = (_MANIFEST.fullmatch(name) for name in self._store.list(_MANIFESTS))
        return sorted(Version(int(match[1])) for match in found if match)

    def latest(self, *, upto: Version | None = None) -> Manifest | None:
        """The newest manifest that can be read, with ``upto`` the newest not after it."""
        for version in reversed(self.versions()):
            if upto is None or version <= upto:
                try:
                    return self.get(version)
                except CheckpointError as error:
                    _log.warning("Checkpoint %s is damaged; skipping it: %s", version, error)
        return None

    def drop(self, version: Version) -> None:
        """Delete the manifest of a version. Its files stay."""
        self._store.delete(_manifest_name(version))

    def forget_after(self, version: Version) -> None:
        """Delete the manifests of all later versions."""
        for later in reversed(self.versions()):
            if later > version:
                self._store.delete(_manifest_name(later))

    def sweep(self, own: str) -> None:
        """Delete the files below this query's prefix that no manifest names.

        If a manifest cannot be read, nothing is deleted, as it may name any of them.
        """
        manifests = [self._readable(version) for version in self.versions()]
        used = {name for manifest in manifests if manifest for name in manifest.files}
        if None not in manifests:
            names = self._parts.list(own)
            self._parts.delete_all(
                [name for name in names if f"/{_PARTS}" in f"/{name}" and name not in used]
            )

    def _readable(self, version: Version) -> Manifest | None:
        try:
            return self.get(version)
        except CheckpointError as error:
            _log.warning("Checkpoint %s is damaged; skipping it: %s", version, error)
            return None


def open_manifests(folder: str) -> Manifests:
    """The manifests of a query. ``folder`` is the checkpoint folder of ``start()``."""
    return Manifests(open_files(folder))


def open_checkpoints(folder: str) -> tuple[Manifests, BackupStore]:
    """The manifests of a query, and the store of the files that they name.

    The folder has the address of another store, if any. DidNotHappen, which says what to do, if the
    nodes of the query keep the files, as other programs do not reach them.
    """
    manifests, address = Manifests(open_files(folder)), files_of(folder)
    if address.at_nodes:
        latest = manifests.latest()
        parts = [p for of in latest.operators.values() for p in of.parts] if latest else []
        raise DidNotHappen(
            f"the nodes of the query have the checkpoint files of {folder}"
            f"{f': {whereabouts(parts)}' if parts else ''}. They give them only to the query: call "
            "query.state(operator) where it runs, or start it again on these nodes and call it then"
        )
    return manifests, address.open()


def files_of(folder: str) -> StoreAddress:
    """The address of the files that the manifests in a checkpoint folder name."""
    try:
        data = open_files(folder).get(QUERY).to_pybytes()
    except CheckpointNotFound:
        return StoreAddress.of_files(folder)
    backup = unseal("query", data, name=QUERY).get("backup")
    return StoreAddress.of_files(folder) if backup is None else StoreAddress.from_json(backup)


def whereabouts(parts: Sequence[Part]) -> str:
    """How many nodes have parts, and how many of them each part needs; empty if none are at nodes.

    >>> part = Part("p", "words", Version(3), None, KeyGroups.all(8), ("a", "b", "c"), needed=2)
    >>> whereabouts([part])
    '3 nodes, any 2 of 3 for each file (a, b, c)'
    """
    hosts = sorted({host for part in parts for host in part.holders})
    shapes = sorted({(part.needed, len(part.holders)) for part in parts if part.holders})
    if not hosts:
        return ""
    needed = " or ".join(f"any {needed} of {of}" for needed, of in shapes)
    return f"{len(hosts)} nodes, {needed} for each file ({', '.join(hosts)})"


def _manifest_name(version: Version) -> str:
    return f"{_MANIFESTS}{version:012d}.json"

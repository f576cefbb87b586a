"""Which files make up the state of a query at a version.

A manifest names every file that is needed for its version, those written for earlier versions
included, so that it can be used alone. It is put into the store after them; until then the version
does not exist. Files are named after their checksum, so that a repeated batch never changes a
file that a manifest names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from urllib.parse import quote

import xxhash

from anabranch.backup.store import BackupStore
from anabranch.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from anabranch.state.capture import CheckpointSchema
from anabranch.state.chains import Chain, follow, needed
from anabranch.state.groups import KeyGroups
from anabranch.units import Version

_MANIFESTS, _PARTS = "manifests/", "parts/"
_NAME = re.compile(r"(?:.*/)?(?:manifests|parts)/(\d{12})[.-].*")


@dataclass(frozen=True)
class Part:
    """One checkpoint file of an operator: a pointer, by which to decide before bytes are moved."""

    name: str
    instance: int
    version: Version
    base: Version | None
    groups: KeyGroups
    rows: int
    bytes: int
    checksum: str

    def to_json(self) -> dict[str, Any]:
        """A value for :mod:`json`."""
        return asdict(self) | {"groups": str(self.groups)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Part:
        """The part that :meth:`to_json` wrote."""
        return cls(**value | {"groups": KeyGroups.parse(value["groups"])})


def part_name(operator: str, instance: int, version: Version, full: bool, checksum: str) -> str:
    """The name of a checkpoint file."""
    kind = "full" if full else "changes"
    return f"{_PARTS}{version:012d}-{quote(operator, safe='')}-{instance}-{kind}-{checksum}.arrow"


@dataclass(frozen=True)
class OperatorManifest:
    """The state of one operator: its columns, and the files it is in, oldest first.

    ``info`` is what else must be known to carry on, such as the watermark; any JSON will do.
    """

    schema: CheckpointSchema
    parts: tuple[Part, ...]
    info: Mapping[str, Any] = field(default_factory=dict)

    def extended(self, parts: Sequence[Part], info: Mapping[str, Any]) -> OperatorManifest:
        """The manifest after new files, without the ones that these make needless."""
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
            chain = follow(operator.parts)
            whole = Chain(self.version, None, KeyGroups.all(operator.schema.key_groups))
            if chain != whole:
                raise CheckpointError(f"the files of operator {name!r} are {chain}, not {whole}")

    def to_bytes(self) -> bytes:
        """The file of the manifest: JSON with a checksum."""
        operators = {
            name: {
                "schema": operator.schema.to_json(),
                "parts": [part.to_json() for part in operator.parts],
                "info": dict(operator.info),
            }
            for name, operator in self.operators.items()
        }
        body = {"version": self.version, "operators": operators, "info": dict(self.info)}
        return json.dumps({"manifest": body, "checksum": _digest(body)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str) -> Manifest:
        """The manifest in a file; CheckpointCorrupt if its bytes are not the ones written."""
        try:
            read = json.loads(data)
            body = read["manifest"]
            if read["checksum"] != _digest(body):
                raise ValueError(f"its checksum is {_digest(body)}, not {read['checksum']}")
            operators = {
                operator: OperatorManifest(
                    CheckpointSchema.from_json(value["schema"]),
                    tuple(Part.from_json(part) for part in value["parts"]),
                    value["info"],
                )
                for operator, value in body["operators"].items()
            }
            return cls(Version(body["version"]), operators, body["info"])
        except (ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
            raise CheckpointCorrupt(f"{name}: not a manifest as written: {error}") from error


def _digest(body: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode())


class Manifests:
    """The manifests in a store, and the files they name, in the same or in another one.

    One process at a time may put and prune; any number may read.
    """

    def __init__(self, store: BackupStore, parts: BackupStore | None = None) -> None:
        self._store = store
        self._parts = store if parts is None else parts

    def put(self, manifest: Manifest) -> None:
        """Make a version exist. All of its files must be in the store already."""
        self._store.put(_manifest_name(manifest.version), manifest.to_bytes())

    def get(self, version: Version) -> Manifest:
        """The manifest of a version; CheckpointNotFound says which there are."""
        name = _manifest_name(version)
        try:
            data = self._store.get(name)
        except CheckpointNotFound as error:
            raise CheckpointNotFound(
                f"there is no checkpoint of version {version}; there are {list(self.versions())}"
            ) from error
        return Manifest.from_bytes(data.to_pybytes(), name=name)

    def versions(self) -> list[Version]:
        """The versions that there are, oldest first."""
        return sorted(v for v, _ in _versioned(self._store.list(_MANIFESTS)))

    def latest(self, *, upto: Version | None = None) -> Manifest | None:
        """The manifest of the newest version, or the newest not after ``upto``, if there is one."""
        versions = [v for v in self.versions() if upto is None or v <= upto]
        return self.get(versions[-1]) if versions else None

    def prune(self, *, retain: int) -> None:
        """Drop all but the newest versions, and every file that none of the kept ones needs.

        Files of a version that is not in a manifest yet are left alone if they are newer than the
        newest manifest. If a kept manifest cannot be read nothing is dropped.
        """
        if retain < 1:
            raise ValueError(f"retain={retain}: at least one version must be kept")
        versions = self.versions()
        if not versions:
            return
        kept = [self.get(version) for version in versions[-retain:]]
        used = {p.name for manifest in kept for op in manifest.operators.values() for p in op.parts}
        files = [f for f in _versioned(self._parts.list()) if not f[1].startswith(_MANIFESTS)]
        # A manifest goes before its files: none ever names a file that is gone.
        for version in versions[:-retain]:
            self._store.delete(_manifest_name(version))
        for version, name in files:
            if name not in used and version < versions[-1]:
                self._parts.delete(name)


def _versioned(names: Sequence[str]) -> list[tuple[Version, str]]:
    matches = [(_NAME.fullmatch(name), name) for name in names]
    return [(Version(int(match[1])), name) for match, name in matches if match]


def _manifest_name(version: Version) -> str:
    return f"{_MANIFESTS}{version:012d}.json"

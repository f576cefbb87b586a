"""The file of a ring: its secret, its settings, and where some of its nodes are reached.

If the nodes encrypt, it has the certificate to trust, so that whoever has the file needs no other.

Every standing node and every driver has a copy of it. Who reads it can read, change and delete all
that the ring keeps, so it is for its user alone.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anabranch.durable import flush
from anabranch.errors import PlanError
from anabranch.nodes.tickets import Secret
from anabranch.ring import Settings

_log = logging.getLogger(__name__)

_FORMAT = 1
_MOST_NODES = 64
_LARGEST = 1 << 20


@dataclass(frozen=True)
class RingFile:
    """What a ring's file says.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "ring.json"
    >>> made = RingFile.create(path, Settings(leaves=24, period=1.0))
    >>> made.remember(["10.0.0.1:7070"])
    >>> RingFile.read(path).nodes, RingFile.read(path).secret == made.secret
    (('10.0.0.1:7070',), True)
    """

    path: Path
    secret: Secret = field(repr=False)
    settings: Settings
    nodes: tuple[str, ...] = ()
    """Addresses of nodes, those that were heard last first."""
    root: str = field(default="", repr=False)
    """The certificate to trust, as PEM text. Empty: the nodes do not encrypt."""

    @classmethod
    def create(cls, path: Path, settings: Settings, root: str = "") -> RingFile:
        """Write the file of a new ring, with a new secret. FileExistsError if there is one."""
        made = cls(path, Secret.new(), settings, root=root)
        try:
            partial = made._written(made)
        except OSError as error:
            raise PlanError(f"cannot write {path}, the file of a new ring: {error}") from error
        try:
            os.link(partial, path)  # unlike a rename, it replaces nothing
        finally:
            partial.unlink()
        flush(str(path.parent.absolute()))
        return made

    @classmethod
    def read(cls, path: Path) -> RingFile:
        """Read the file. PlanError if others can read it too, or it is no file of a ring."""
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
                    raise PlanError(
                        f"{path} has the secret of a ring, and other users can read or change it "
                        f"(mode {stat.S_IMODE(found.st_mode):04o}, user {found.st_uid}): run "
                        f"'chmod 600 {path}' as its user"
                    )
                data = file.read(_LARGEST)
        except OSError as error:
            raise PlanError(
                f"cannot read {path}, the file of a ring: {error.strerror}; 'anabranch node --ring "
                f"{path}' makes one for a new ring, and each node and driver needs a copy"
            ) from error
        try:
            value = json.loads(data)
            form = value["ring"]
            if form == _FORMAT:
                return cls._parse(path, value)
        except (ValueError, KeyError, TypeError, RecursionError):
            # The causes may have the secret in them.
            raise PlanError(
                f"{path} is no file of a ring; copy it again from a node of the ring"
            ) from None
        raise PlanError(
            f"{path} has the form {form!r:.20} of a ring's file, and this version reads "
            f"the form {_FORMAT}: install the same version everywhere"
        )

    def known(self) -> tuple[str, ...]:
        """The addresses in the file now; none if it cannot be read any more."""
        try:
            return self.read(self.path).nodes
        except PlanError as error:
            _log.debug("No addresses of nodes were read again: %s", error)
            return ()

    def remember(self, nodes: Iterable[str]) -> None:
        """Note addresses of nodes in the file, before those that it has."""

        def change(now: RingFile) -> RingFile:
            known = _one_of_each_host([*nodes, *now.nodes])[:_MOST_NODES]
            return now if set(known) == set(now.nodes) else replace(now, nodes=known)

        self._change(change)

    def trust(self, root: str) -> RingFile:
        """Write the certificate to trust to the file, in place of the one that it has."""
        if root == self.root:
            return self  # the file may be in a folder that is mounted to be read only
        try:
            return self._change(lambda now: replace(now, root=root))
        except OSError as error:
            raise PlanError(
                f"the certificate to trust cannot be written to {self.path}: {error}; copy the "
                "file from a node that has it"
            ) from error

    def _change(self, change: Callable[[RingFile], RingFile]) -> RingFile:
        # Nodes of one machine may share the file.
        with self._beside(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            now = self.read(self.path)
            changed = change(now)
            if changed != now:
                self._written(changed).rename(self.path)
            return changed

    def _written(self, value: RingFile) -> Path:
        partial = self._beside(f".{uuid.uuid4().hex}")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(value._to_json(), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            with suppress(FileNotFoundError):
                partial.unlink()
            raise
        return partial

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(f".{self.path.name}{ending}")

    def _to_json(self) -> dict[str, Any]:
        return {
            "ring": _FORMAT,
            "secret": self.secret.to_hex(),
            "leaves": self.settings.leaves,
            "period": self.settings.period,
            "nodes": list(self.nodes),
            "root": self.root,
        }

    @classmethod
    def _parse(cls, path: Path, value: Any) -> RingFile:
        nodes = value["nodes"]
        if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
            raise ValueError("no addresses")
        root = value.get("root", "")
        if not isinstance(root, str):
            raise ValueError("no certificate")
        settings = Settings(leaves=int(value["leaves"]), period=float(value["period"]))
        return cls(path, Secret.from_hex(value["secret"]), settings, tuple(nodes), root)


def _one_of_each_host(nodes: Iterable[str]) -> tuple[str, ...]:
    """The first address of each host: a node that has returned may have another port."""
    found: dict[str, str] = {}
    for node in nodes:
        found.setdefault(node.rpartition(":")[0], node)
    return tuple(found.values())

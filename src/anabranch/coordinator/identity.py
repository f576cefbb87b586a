"""The identity of a query across restarts, and the lock that admits one driver at a time."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.errors import CheckpointCorrupt, CheckpointNotFound, PlanError, SchemaChanged
from anabranch.nodes.claims import Claim
from anabranch.protocols.model import Role, Slice, SliceId
from anabranch.spark.bind import Bound
from anabranch.state.groups import KeyGroups, Routing
from anabranch.stores.manifests import QUERY
from anabranch.stores.sealed import seal, unseal
from anabranch.stores.store import BackupStore

_RUN_BITS = 32


@dataclass(frozen=True)
class Identity:
    """The query of a checkpoint folder: its id, its run number, and its operators' schemas."""

    query: str
    run: int
    operators: Mapping[str, Mapping[str, Any]]
    routing: Mapping[str, Routing]
    placement: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The hosts of each operator's instances, if it ran on a cluster."""
    asked: Mapping[str, int] = field(default_factory=dict)
    """How many instances the program asked for when that was last carried out."""
    boot: str | None = None
    """The boot of the host that ran the query last; None while it is being recovered."""
    backup: Any = None
    """The uri of the store that has the checkpoint files, if it is not the checkpoint folder."""
    arrangement: int = 0
    """The number of the division in slices below; see the commits."""
    slices: tuple[Slice, ...] = ()
    """The slices that served last."""
    folder: str | None = None
    """Where the checkpoint folder was when the query was last started."""

    @property
    def fence(self) -> int:
        """The smallest fencing token of this run, greater than all of earlier runs."""
        return self.run << _RUN_BITS


def load(store: BackupStore) -> Identity | None:
    """The query that a checkpoint folder belongs to, or None if the folder is new."""
    try:
        data = store.get(QUERY).to_pybytes()
    except CheckpointNotFound:
        return None
    value = unseal("query", data, name=QUERY)
    try:
        operators = value["operators"]
        return Identity(
            value["id"],
            int(value["run"]),
            operators,
            {name: Routing.from_json(each["routing"]) for name, each in operators.items()},
            {name: tuple(each["hosts"]) for name, each in operators.items()},
            {name: int(each["asked"]) for name, each in operators.items()},
            value["boot"],
            value["backup"],
            int(value.get("arrangement", 0)),
            tuple(_slice(each) for each in value.get("slices", ())),
            value.get("folder"),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{QUERY}: not the description of a query: {error}") from error


def new_query() -> str:
    """A new query id, short enough for file names."""
    return uuid.uuid4().hex[:12]


def save(store: BackupStore, identity: Identity) -> None:
    """Write the description of a query."""
    operators = {
        name: {
            **described,
            "routing": identity.routing[name].to_json(),
            "hosts": list(identity.placement.get(name, ())),
            "asked": identity.asked[name],
        }
        for name, described in identity.operators.items()
    }
    value = {
        "id": identity.query,
        "run": identity.run,
        "boot": identity.boot,
        "backup": identity.backup,
        "folder": identity.folder,
        "operators": operators,
        "arrangement": identity.arrangement,
        "slices": [
            {
                "id": each.id,
                "operator": each.operator,
                "instance": each.instance,
                "node": each.node,
                "groups": str(each.groups),
                "leaving": str(each.leaving),
            }
            for each in identity.slices
        ],
    }
    store.put(QUERY, seal("query", value))


def _slice(value: Mapping[str, Any]) -> Slice:
    return Slice(
        SliceId(str(value["id"])),
        str(value["operator"]),
        int(value["instance"]),
        str(value["node"]),
        KeyGroups.parse(value["groups"]),
        Role.SERVING,
        leaving=KeyGroups.parse(value["leaving"]),
    )


def describe(bound: Bound) -> dict[str, Any]:
    """The properties of an operator that must not change between two runs."""
    return {
        "keys": {field.name: str(field.type) for field in bound.layout.key.fields},
        "sub_keys": list(bound.layout.key.sub),
        "columns": {column.name: repr(column.type) for column in bound.layout.values},
        "key_groups": bound.node.key_groups,
        "timers": bound.layout.timers,
    }


def compare(before: Identity, now: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to start a query on the state of a different one."""
    missing, extra = before.operators.keys() - now.keys(), now.keys() - before.operators.keys()
    if missing or extra:
        raise PlanError(
            f"the checkpoint folder belongs to a query with the operators "
            f"{sorted(before.operators)}, this one has {sorted(now)}; keep the operators and "
            "their names, or start in a new folder"
        )
    for name, described in now.items():
        for what, value in described.items():
            was = before.operators[name].get(what)
            if was != value:
                raise SchemaChanged(
                    f"operator {name!r}: {what} was {was} when its state was written and is "
                    f"{value} now; change it back, or start in a new folder"
                )


class DriverLock:
    """The lock of the driver that runs a query on this machine; freed when its process dies.

    It is released together with the ``claim`` to the folder of the query's state, if there is one.
    """

    def __init__(self, folder: Path, claim: Claim | None = None) -> None:
        self._claim = claim
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "driver.lock"
        self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise PlanError(
                f"this query is running already, in process {holder}; "
                "stop it first, or use another checkpoint folder"
            ) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        """Release the lock, so that another driver can run the query."""
        if self._claim is not None:
            self._claim.close()
        self._file.close()

"""Checkpoint folders that were moved or copied.

A folder notes where it was when its query was last started. In another place it is either the same
folder, which was moved, and so is the query; or a copy, while the first one is still there. Two
queries must not have the same id: both would have the same tables, and the same checkpoint files.
So a copy becomes a query of its own, which begins with the checkpoints that were copied.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace

from anabranch.coordinator import identity
from anabranch.coordinator.folder import CheckpointFolder
from anabranch.coordinator.identity import Identity
from anabranch.errors import AnabranchError, CheckpointError, CheckpointNotFound, PlanError
from anabranch.spark.logs import SparkLogs
from anabranch.stores.address import StoreAddress
from anabranch.stores.manifests import Manifests
from anabranch.stores.store import BackupStore

_log = logging.getLogger("anabranch")


def original(folder: CheckpointFolder, noted: Identity) -> CheckpointFolder | None:
    """The folder that this one is a copy of; None if it is not, or was moved."""
    if noted.folder is None or noted.folder == folder.uri:
        return None
    before = CheckpointFolder(noted.folder)
    try:
        found = identity.load(before.store)
        if found is None or found.query != noted.query or _are_one(folder, before):
            return None
    except CheckpointError:
        return before  # it is there, and damaged
    except AnabranchError as error:
        _log.warning(
            "%s was in %s when its query was last started, which cannot be read now; taking it to "
            "have been moved: %s",
            folder.uri,
            before.uri,
            error,
        )
        return None
    return before


def separated(folder: CheckpointFolder, of: CheckpointFolder, noted: Identity) -> Identity:
    """The query that a copy becomes; PlanError if its checkpoint files are not among the copied."""
    elsewhere = _elsewhere(folder.store, noted)
    if elsewhere is not None:
        raise PlanError(
            f"{folder.uri} is a copy of {of.uri}, and its checkpoint files were not copied: they "
            f"are {elsewhere}, where each of two queries would remove what the other one needs. "
            f"Start the query in {of.uri}; or, if it is to go on here, remove {of.uri}"
        )
    return replace(noted, query=identity.new_query(), placement={}, slices=(), arrangement=0)


def settle(folder: CheckpointFolder, of: CheckpointFolder, query: str) -> None:
    """Let Spark, too, take the copy for another query; it lets none run twice."""
    SparkLogs(folder.spark).rename()
    _log.warning(
        "%s is a copy of %s, which is still there: it goes on as a query of its own, %s. Both run "
        "if both are started; give this one other sinks, or both write there.",
        folder.uri,
        of.uri,
        query,
    )


def _are_one(folder: CheckpointFolder, other: CheckpointFolder) -> bool:
    """Whether two names are of one folder: what is written under one is seen under the other."""
    name = f"same-{uuid.uuid4().hex}"
    folder.log.put(name, b"")
    try:
        other.log.size(name)
    except CheckpointNotFound:
        return False
    finally:
        folder.log.delete(name)
    return True


def _elsewhere(store: BackupStore, noted: Identity) -> str | None:
    """Where the checkpoint files of a query are, if they are not in its folder."""
    if noted.backup is not None:
        if isinstance(noted.backup, str):
            return f"in {noted.backup}"
        return f"in a store of {StoreAddress.from_json(noted.backup).opener}"
    manifests = Manifests(store)
    for version in manifests.versions():
        try:
            manifest = manifests.get(version)
        except CheckpointError:
            continue  # a start passes over it
        held = [part for of in manifest.operators.values() for part in of.parts if part.holders]
        if held:
            return f"at the nodes {', '.join(sorted({h for part in held for h in part.holders}))}"
    return None

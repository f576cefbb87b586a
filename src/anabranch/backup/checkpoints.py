"""The checkpoints of a query, found by its checkpoint folder."""

from __future__ import annotations

from anabranch.backup.files import Files
from anabranch.backup.manifests import Manifests
from anabranch.backup.sealed import unseal
from anabranch.backup.store import BackupStore
from anabranch.errors import CheckpointNotFound

QUERY = "query.json"
"""The file that says whose checkpoint folder it is."""


def open_checkpoints(folder: str) -> tuple[Manifests, BackupStore]:
    """The manifests of a query, and the store of the files that they name.

    ``folder`` is what was given to ``start()``; it says where the files are if they are elsewhere.
    """
    store = Files(folder).open()
    try:
        backup = unseal("query", store.get(QUERY).to_pybytes(), name=QUERY).get("backup")
    except CheckpointNotFound:
        backup = None
    return Manifests(store), store if backup is None else Files(backup).open()

"""Backups as files: in a local folder, on HDFS, in an object store, or any pyarrow file system."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from anabranch.backup.policy import NodeLimits
from anabranch.errors import PlanError
from anabranch.state.part import COPIES, Part, Shape
from anabranch.stores.address import StoreAddress
from anabranch.stores.store import BackupStore
from anabranch.uris import absolute


@dataclass(frozen=True)
class Files:
    """Keep backups as files.

    ``uri`` is a folder, or anything that :meth:`pyarrow.fs.FileSystem.from_uri` reads:
    ``s3://bucket/words``, ``gs://...``, ``abfs://...``, ``hdfs://...``, and with the ``fsspec``
    package installed ``fsspec+<protocol>://...``. Every process of the query must reach it.
    """

    uri: str

    def __post_init__(self) -> None:
        if not self.uri:
            raise PlanError("Files: the uri is empty; give a folder or a uri such as s3://bucket/x")
        # Another process that opens the store may have another working directory.
        object.__setattr__(self, "uri", absolute(self.uri))

    def holders(
        self, owner: str, key: str, nodes: Collection[str], senders: Collection[str]
    ) -> tuple[str, ...]:
        """None: the files survive the loss of every node."""
        return ()

    @property
    def coding(self) -> None:
        """Nothing is coded."""
        return None

    def shape(self, holders: int) -> Shape:
        """Each has a copy."""
        return COPIES

    def survives(self, part: Part, owner: str, nodes: Collection[str]) -> bool:
        """Always."""
        return True

    def substitutes(
        self, part: Part, owners: Collection[str], nodes: Collection[str]
    ) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def where(self) -> StoreAddress:
        """The files at the uri."""
        return StoreAddress.of_files(self.uri)

    @property
    def limits(self) -> NodeLimits:
        """Nodes keep nothing."""
        return NodeLimits()

    def open(self) -> BackupStore:
        """Open the store. The folder is made with the first backup."""
        return self.where.open()

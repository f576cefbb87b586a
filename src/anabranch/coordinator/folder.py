"""The checkpoint folder: checking it, and opening the stores in it."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path

from pyarrow import fs

from anabranch.backup.files import Files
from anabranch.errors import PlanError
from anabranch.stores.files import FileStore
from anabranch.stores.manifests import QUERY
from anabranch.uris import absolute, is_local, resolve

_OWN = frozenset({"commits", "epochs", "events", "manifests", "parts", "spark"})
"""The folders that a query has in its checkpoint folder."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder of one query, which outlives its drivers."""

    uri: str

    @classmethod
    def of(cls, given: str | Path) -> CheckpointFolder:
        """The folder with an absolute URI."""
        return cls(absolute(given))

    @property
    def store(self) -> FileStore:
        """The folder as a store that flushes what is written."""
        return FileStore(*resolve(self.uri), cached=False)

    @property
    def log(self) -> FileStore:
        """The folder as a store that does not flush, for files that can be written again."""
        return FileStore(*resolve(self.uri), flushed=False)

    @property
    def files(self) -> Files:
        """The default backup: checkpoint files in the checkpoint folder."""
        return Files(self.uri)

    @property
    def spark(self) -> str:
        """Where Spark keeps its own logs of the query."""
        return f"{self.uri}/spark"

    @property
    def is_local(self) -> bool:
        """Whether the folder is on a local file system."""
        return is_local(self.uri)

    @property
    def path(self) -> Path | None:
        """The path of the folder, if it is on a local file system."""
        return Path(resolve(self.uri)[1]) if self.is_local else None

    def check(self) -> None:
        """Refuse a folder among the files of another query, or with another query among its own.

        Any other folder below the one of a query is safe: no query looks beyond its own files.
        """
        filesystem, folder = resolve(self.uri)

        def is_query(path: str) -> bool:
            found = filesystem.get_file_info(posixpath.join(path, QUERY))
            return bool(found.type == fs.FileType.File)

        for own in sorted(_OWN):
            if is_query(posixpath.join(folder, own)):
                raise PlanError(
                    f"{self.uri} cannot be a checkpoint folder: {own}/ in it belongs to another "
                    "query; use another folder"
                )
        below = folder
        while (above := posixpath.dirname(below)) not in ("", below):
            if posixpath.basename(below) in _OWN and is_query(above):
                raise PlanError(
                    f"{self.uri} cannot be a checkpoint folder: it is among the files of the "
                    f"query in {above}; use another folder"
                )
            below = above

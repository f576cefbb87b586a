"""Spark's own logs of a streaming query: which offsets each batch had, and which are committed.

Rewinding takes batches back that Spark counts as done, so that it runs them again with exactly the
offsets they had.
"""

from __future__ import annotations

import json
import posixpath

from pyarrow import fs

from anabranch.errors import CheckpointCorrupt, CheckpointNotFound
from anabranch.places import resolve
from anabranch.units import NO_VERSION, Version


class SparkLogs:
    """The ``offsets`` and ``commits`` folders below a checkpoint location of Spark."""

    def __init__(self, location: str) -> None:
        self._fs, self._root = resolve(location)

    def committed(self) -> Version:
        """The last batch that Spark has committed."""
        return max(self._versions("commits"), default=NO_VERSION)

    def planned(self) -> list[Version]:
        """The batches whose offsets are known, oldest first."""
        return self._versions("offsets")

    def offsets(self, version: Version) -> str:
        """The offsets of a batch, as Spark wrote them."""
        path = self._path("offsets", version)
        try:
            with self._fs.open_input_file(path) as file:
                return str(file.read().decode())
        except FileNotFoundError as error:
            raise CheckpointNotFound(
                f"{path}: Spark's log no longer has the offsets of batch {version}"
            ) from error

    def batch_time(self, version: Version) -> int:
        """When a batch was planned, in microseconds since the epoch."""
        text = self.offsets(version)
        try:
            return int(json.loads(text.splitlines()[1])["batchTimestampMs"]) * 1000
        except (ValueError, KeyError, IndexError, TypeError) as error:
            path = self._path("offsets", version)
            raise CheckpointCorrupt(f"{path}: not an offset log of Spark: {error}") from error

    def put_offsets(self, version: Version, text: str) -> None:
        """Plan a batch with these offsets; Spark will run it next if the one before is done."""
        self._remove("offsets", version)
        with self._fs.open_output_stream(self._path("offsets", version)) as stream:
            stream.write(text.encode())

    def forget_after(self, version: Version) -> None:
        """Make Spark believe that this was the last batch it planned and committed."""
        for log in ("commits", "offsets"):
            for later in reversed(self._versions(log)):
                if later > version:
                    self._remove(log, later)

    def _versions(self, log: str) -> list[Version]:
        selector = fs.FileSelector(posixpath.join(self._root, log), allow_not_found=True)
        names = (info.base_name for info in self._fs.get_file_info(selector))
        return sorted(Version(int(name)) for name in names if name.isdigit())

    def _path(self, log: str, version: Version) -> str:
        return posixpath.join(self._root, log, str(version))

    def _remove(self, log: str, version: Version) -> None:
        # Hadoop keeps a checksum beside each local file and would refuse new contents.
        checksum = posixpath.join(self._root, log, f".{version}.crc")
        for path in (self._path(log, version), checksum):
            if self._fs.get_file_info(path).type != fs.FileType.NotFound:
                self._fs.delete_file(path)

"""Spark's own logs of a streaming query: which offsets each batch had, and which are committed.

Rewinding takes batches back that Spark counts as done, so that it runs them again with exactly the
offsets they had. Spark does not flush its logs; what must outlast a power failure is flushed here.
"""

from __future__ import annotations

import json
import posixpath
import re
import struct
import zlib
from typing import Any

import xxhash
from pyarrow import fs

from anabranch.durable import flush
from anabranch.errors import CheckpointCorrupt, CheckpointNotFound
from anabranch.places import resolve
from anabranch.units import NO_VERSION, Version

_COMPACTED, _SUMS = ".compact", ".crc"
_ENTRY = re.compile(rf"(\d+)({re.escape(_COMPACTED)})?")
_CRC_HEAD = struct.Struct(">4sI")


def digest(offsets: str) -> str:
    """A short text that differs when the offsets of a batch do."""
    return str(xxhash.xxh3_64_hexdigest(offsets.encode()))


class SparkLogs:
    """The logs below a checkpoint location of Spark: offsets, commits, and those of sources."""

    def __init__(self, location: str) -> None:
        self._fs, self._root = resolve(location)
        self._local = isinstance(self._fs, fs.LocalFileSystem)
        self._flushed: dict[int, int] = {}
        """The last entry of each source's log that is known to be flushed."""

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
                return str(file.read().decode(errors="replace"))
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

    def check(self, version: Version, expected: str | None) -> None:
        """Refuse to go on from a batch whose offsets are not the ones it was committed with.

        ``expected`` is their :func:`digest`. Spark would plan the batch anew, with other rows.
        """
        self.check_offsets(version, expected)
        for source, entry in self._entries(version).items():
            self._check_entries(source, entry)
        self._check_sums()

    def intact(self, version: Version) -> bool:
        """Whether the offsets of a batch, and what its sources logged, can be read."""
        if not self._sound(self._path("offsets", version)):
            return False
        for source, entry in self._entries(version).items():
            files = [path for number, path in self._entry_files(source) if number >= entry]
            if not files or not self._sound(files[0]):
                return False
        return True

    def check_offsets(self, version: Version, expected: str | None) -> None:
        """Refuse offsets that are not as Spark wrote them: others would give other rows."""
        path = self._path("offsets", version)
        text = self.offsets(version)
        if not self._sound(path) or (expected is not None and digest(text) != expected):
            raise CheckpointCorrupt(
                f"{path}: not the offsets with which batch {version} was run; restore the file, or "
                "start in a new folder"
            )

    def flush(self, version: Version) -> None:
        """Have everything on disk that a batch needs to be run again as it was."""
        if not self._local:
            return
        for source, entry in self._entries(version).items():
            since = self._flushed.get(source, -1)
            for number, path in self._entry_files(source):
                if number > since:
                    flush(path)
            flush(self._source(source))
            flush(posixpath.dirname(self._source(source)))
            self._flushed[source] = entry
        for path in (self._path("offsets", version), posixpath.join(self._root, "metadata")):
            if self._fs.get_file_info(path).type == fs.FileType.File:
                flush(path)
        flush(posixpath.join(self._root, "offsets"))
        flush(self._root)

    def repair(self, version: Version, text: str | None) -> None:
        """Make the logs whole again up to a batch, after a power failure spoiled their ends.

        ``text`` are the offsets of the batch, if they are known. Hadoop's checksum files may be
        spoiled where the logs are not: they go, and the logs are read without.
        """
        if text is not None:
            self.put_offsets(version, text)
        entries = self._entries(version) if version >= 0 else {}
        for source in self._sources():
            lost = False
            for number, path in self._entry_files(source):
                lost = lost or (number > entries.get(source, -1) and not self._sound(path))
                if lost:
                    self._fs.delete_file(path)
        metadata = posixpath.join(self._root, "metadata")
        if self._exists(metadata) and not self._sound(metadata):
            self._fs.delete_file(metadata)
        selector = fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        for info in self._fs.get_file_info(selector):
            if info.type == fs.FileType.File and info.base_name.endswith(_SUMS):
                self._fs.delete_file(info.path)

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

    def _check_entries(self, source: int, upto: int) -> None:
        """Refuse a source's log with an entry missing: its files would be read once more."""
        numbers = {number for number, _ in self._entry_files(source)}
        compacted = [n for n, path in self._entry_files(source) if path.endswith(_COMPACTED)]
        for number in range(max(compacted, default=0), upto + 1):
            if number not in numbers:
                raise CheckpointCorrupt(
                    f"{self._source(source)}/{number} is missing: it says which files were read; "
                    "restore it, or start in a new folder"
                )

    def _check_sums(self) -> None:
        """Refuse files that do not have the checksums that Hadoop wrote: Spark does not look."""
        selector = fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        for info in self._fs.get_file_info(selector):
            if info.type == fs.FileType.File and info.base_name.endswith(_SUMS):
                folder = posixpath.dirname(info.path)
                path = posixpath.join(folder, info.base_name[1 : -len(_SUMS)])
                if self._exists(path) and not _fits(self._read(path), self._read(info.path)):
                    raise CheckpointCorrupt(
                        f"{path}: its bytes are not the ones that Spark wrote; restore the file, "
                        "or start in a new folder"
                    )

    def _entries(self, version: Version) -> dict[int, int]:
        """The newest entry in the log of each source that keeps one, as of a batch."""
        lines = self.offsets(version).splitlines()[2:]
        found = {}
        for source, line in enumerate(lines):
            offset = _json(line)
            if isinstance(offset, dict) and isinstance(offset.get("logOffset"), int):
                found[source] = offset["logOffset"]
        return {source: entry for source, entry in found.items() if entry >= 0}

    def _sources(self) -> list[int]:
        folder = posixpath.join(self._root, "sources")
        found = self._fs.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        return sorted(int(info.base_name) for info in found if info.base_name.isdigit())

    def _source(self, source: int) -> str:
        return posixpath.join(self._root, "sources", str(source))

    def _entry_files(self, source: int) -> list[tuple[int, str]]:
        """The files of a source's log by their numbers, lowest first."""
        selector = fs.FileSelector(self._source(source), allow_not_found=True)
        found = [(_ENTRY.fullmatch(i.base_name), i.path) for i in self._fs.get_file_info(selector)]
        return sorted((int(match[1]), path) for match, path in found if match)

    def _sound(self, path: str) -> bool:
        """Whether a log file is there, has its checksum where there is one, and is JSON."""
        try:
            data = self._read(path)
        except FileNotFoundError:
            return False
        folder, name = posixpath.split(path)
        try:
            sums = self._read(posixpath.join(folder, f".{name}{_SUMS}"))
        except FileNotFoundError:
            sums = b""
        if not _fits(data, sums):
            return False
        lines = data.decode(errors="replace").splitlines()
        body = [line for line in lines if not re.fullmatch(r"v\d+|-", line)]
        return bool(body) and all(_json(line) is not None for line in body)

    def _read(self, path: str) -> bytes:
        with self._fs.open_input_file(path) as file:
            return bytes(file.read())

    def _exists(self, path: str) -> bool:
        return bool(self._fs.get_file_info(path).type != fs.FileType.NotFound)

    def _path(self, log: str, version: Version) -> str:
        return posixpath.join(self._root, log, str(version))

    def _remove(self, log: str, version: Version) -> None:
        # Hadoop keeps a checksum beside each local file and would refuse new contents.
        checksum = posixpath.join(self._root, log, f".{version}{_SUMS}")
        for path in (self._path(log, version), checksum):
            if self._exists(path):
                self._fs.delete_file(path)


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _fits(data: bytes, sums: bytes) -> bool:
    """Whether bytes have the checksums that Hadoop wrote for them.

    A file of sums that is no such file says nothing: it is lost more easily than the log itself.
    """
    if len(sums) < _CRC_HEAD.size:
        return True
    mark, piece = _CRC_HEAD.unpack_from(sums)
    if mark != b"crc\0" or piece <= 0:
        return True
    pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
    if len(sums) != _CRC_HEAD.size + 4 * len(pieces):
        return True
    return sums[_CRC_HEAD.size :] == b"".join(struct.pack(">I", zlib.crc32(p)) for p in pieces)

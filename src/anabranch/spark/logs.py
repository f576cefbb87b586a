"""Spark's own logs of a streaming query: the offsets of each batch, and its commits.

Rewinding deletes entries of these logs, so that Spark runs batches again with the same offsets.
Spark does not flush its logs. Entries that must survive a power failure are flushed here.
"""

from __future__ import annotations

import json
import posixpath
import re
import struct
import uuid
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from pyarrow import fs

from anabranch.durable import flush, flush_ancestors
from anabranch.errors import CheckpointCorrupt, CheckpointNotFound, DidNotHappen
from anabranch.units import NO_VERSION, Version
from anabranch.uris import resolve

_COMPACTED, _SUMS = ".compact", ".crc"
_ENTRY = re.compile(rf"(\d+)({re.escape(_COMPACTED)})?")
_CRC_HEAD, _CRC_MARK, _PIECE = struct.Struct(">4sI"), b"crc\0", 512


def digest(offsets: str) -> str:
    """A checksum of the offsets of a batch."""
    return str(xxhash.xxh3_64_hexdigest(offsets.encode()))


class SparkLogs:
    """The logs below a checkpoint location of Spark: offsets, commits, and those of sources."""

    def __init__(self, location: str, logs_of: Sequence[int] = ()) -> None:
        self._fs, self._root = resolve(location)
        self._logs_of = logs_of
        """For each source in the offsets of a batch the number of its log, if they differ."""
        self._local = isinstance(self._fs, fs.LocalFileSystem)
        self._flushed: dict[int, int] = {}
        """The last entry of each source's log that is known to be flushed."""
        self._reachable = False
        """Whether what Spark makes once, at the start of its query, is known to be flushed, and the
        folders that lead here."""

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
        except OSError as error:
            raise DidNotHappen(f"cannot read {path}: {error}") from error

    def batch_time(self, version: Version) -> int:
        """When a batch was planned, in microseconds since 1970."""
        text = self.offsets(version)
        try:
            return int(json.loads(text.splitlines()[1])["batchTimestampMs"]) * 1000
        except (ValueError, KeyError, IndexError, TypeError) as error:
            path = self._path("offsets", version)
            raise CheckpointCorrupt(f"{path}: not an offset log of Spark: {error}") from error

    def check(self, version: Version, expected: str | None) -> None:
        """Refuse to resume from a batch whose offsets are not those that it was committed with.

        ``expected`` is their :func:`digest`. Spark would plan the batch again, with other rows.
        """
        self.check_offsets(version, expected)
        if version > 0:
            self.check_offsets(Version(version - 1), None)  # Spark starts from where it ended
        for source, entry in self._entries(version).items():
            self._check_entries(source, entry)
        self._check_sums()

    def surviving(self, after: Version, known: Mapping[Version, str]) -> dict[Version, str]:
        """The offsets of the batches after one that can run again with the same rows.

        They end before the first batch whose offsets are damaged and not ``known`` otherwise, or
        whose source has lost its log of the files that it read.
        """
        since = self._entries_in(known.get(after) or self._readable(after) or "")
        whole = {source: self._whole(source, since.get(source, -1)) for source in self._sources()}
        found: dict[Version, str] = {}
        while True:
            version = Version(after + len(found) + 1)
            text = self._readable(version) or known.get(version)
            if text is None:
                return found
            entries = self._entries_in(text)
            if any(entry > whole.get(source, -1) for source, entry in entries.items()):
                return found
            found[version] = text

    def check_offsets(self, version: Version, expected: str | None) -> None:
        """Refuse offsets that were changed since Spark wrote them."""
        path = self._path("offsets", version)
        text = self.offsets(version)
        if not self._sound(path) or (expected is not None and digest(text) != expected):
            raise CheckpointCorrupt(
                f"{path}: not the offsets that batch {version} ran with; restore the file, or "
                "start in a new folder"
            )

    def flush(self, version: Version) -> None:
        """Flush everything that a batch needs to run again with the same rows."""
        if not self._local:
            return
        try:
            self._flush(version)
        except OSError as error:
            raise DidNotHappen(
                f"Spark's logs in {self._root} are not flushed up to batch {version}: {error}"
            ) from error

    def _flush(self, version: Version) -> None:
        for source, entry in self._entries(version).items():
            since = self._flushed.get(source, -1)
            for number, path in self._entry_files(source):
                if number > since:
                    self._flush_with_sums(path)
            flush(self._source(source))
            if source not in self._flushed:
                flush(posixpath.dirname(self._source(source)))
            self._flushed[source] = entry
        offsets = self._path("offsets", version)
        if self._exists(offsets):
            self._flush_with_sums(offsets)
        flush(posixpath.join(self._root, "offsets"))
        if not self._reachable:
            self._flush_lasting()

    def _flush_lasting(self) -> None:
        """Flush what Spark makes once, at the start of its query, and what leads to it."""
        metadata = posixpath.join(self._root, "metadata")
        if self._exists(metadata):
            self._flush_with_sums(metadata)
        flush(self._root)
        flush_ancestors(self._root)
        self._reachable = True

    def newest_offsets(self, version: Version) -> dict[Version, str]:
        """The offsets that Spark needs to resume after a batch: its own, and those before."""
        needed = [Version(v) for v in (version - 1, version) if v >= 0]
        return {each: self.offsets(each) for each in needed}

    def repair(self, version: Version, offsets: Mapping[Version, str]) -> None:
        """Repair the logs up to a batch after a power failure.

        ``offsets`` are the :meth:`newest_offsets` of that batch.
        """
        # What is removed here, Spark makes anew.
        self._flushed, self._reachable = {}, False
        for log in ("commits", "offsets"):
            for before in self._versions(log):
                if not self._survived(self._path(log, before)):
                    self._remove(log, before)
        for each, text in offsets.items():
            self.put_offsets(each, text)
        entries = self._entries_in(offsets.get(version, ""))
        for source in self._sources():
            # What comes after an entry that is lost would be taken for all that there is.
            whole = self._whole(source, entries.get(source, -1))
            for number, path in self._entry_files(source):
                if number > whole:
                    self._fs.delete_file(path)
        metadata = posixpath.join(self._root, "metadata")
        if self._exists(metadata) and not self._sound(metadata):
            self._fs.delete_file(metadata)
        self._renew_sums()

    def _renew_sums(self) -> None:
        """Write checksum files of logs anew: they may be spoiled where the logs are not.

        No log is without its checksums for a moment: whoever dies here would have them count as
        lost the next time.
        """
        selector = fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        found = [info for info in self._fs.get_file_info(selector) if info.is_file]
        finished = [
            i.path for i in found if i.base_name == "metadata" or _ENTRY.fullmatch(i.base_name)
        ]
        needed = set(map(_sums_path, finished))
        for info in found:
            if info.base_name.endswith(_SUMS) and info.path not in needed:
                self._fs.delete_file(info.path)
        for path in finished:
            data = self._read(path)
            if not _fits(data, self._sums(path)):
                self._write_sums(path, data)
            if self._local:
                self._flush_with_sums(path)
        folders = [i.path for i in self._fs.get_file_info(selector) if not i.is_file]
        for folder in [*folders, self._root] if self._local and self._exists(self._root) else ():
            flush(folder)

    def _write_sums(self, path: str, data: bytes) -> None:
        """Write the checksum file that Hadoop would write."""
        if self._local:
            partial = f"{_sums_path(path)}.partial"
            with self._fs.open_output_stream(partial) as stream:
                stream.write(_CRC_HEAD.pack(_CRC_MARK, _PIECE) + _sums_of(data, _PIECE))
            self._fs.move(partial, _sums_path(path))

    def put_offsets(self, version: Version, text: str) -> None:
        """Plan a batch with these offsets. Spark runs it next, if the batch before is committed."""
        path = self._path("offsets", version)
        self._remove("offsets", version)
        with self._fs.open_output_stream(path) as stream:
            stream.write(text.encode())
        self._write_sums(path, text.encode())
        if self._local:
            flush(path)
            flush(_sums_path(path))
            flush(posixpath.dirname(path))

    def extend(self, offsets: Mapping[Version, str]) -> None:
        """Plan batches with these offsets where the log does not have them."""
        planned = self.planned()
        for version in sorted(offsets.keys() - set(planned)):
            self.put_offsets(version, offsets[version])

    def rename(self) -> None:
        """Give Spark's query another id, if it has one: Spark does not run two with one id."""
        path = posixpath.join(self._root, "metadata")
        if not self._exists(path):
            return
        data = json.dumps({"id": str(uuid.uuid4())}).encode()
        with self._fs.open_output_stream(f"{path}.partial") as stream:
            stream.write(data)
        # Without a checksum file it counts as sound, so a process may die after each step.
        if self._exists(_sums_path(path)):
            self._fs.delete_file(_sums_path(path))
        self._fs.move(f"{path}.partial", path)
        self._write_sums(path, data)
        if self._local:
            self._flush_with_sums(path)

    def forget_after(self, version: Version) -> None:
        """Cut the logs, so that this is the last batch that Spark planned and committed."""
        for log in ("commits", "offsets"):
            for later in reversed(self._versions(log)):
                if later > version:
                    self._remove(log, later)

    def _versions(self, log: str) -> list[Version]:
        selector = fs.FileSelector(posixpath.join(self._root, log), allow_not_found=True)
        names = (info.base_name for info in self._fs.get_file_info(selector))
        return sorted(Version(int(name)) for name in names if name.isdigit())

    def _check_entries(self, source: int, upto: int) -> None:
        """Refuse a source's log with a missing entry, whose files would be read again."""
        numbers = {number for number, _ in self._entry_files(source)}
        compacted = [n for n, path in self._entry_files(source) if path.endswith(_COMPACTED)]
        for number in range(max(compacted, default=0), upto + 1):
            if number not in numbers:
                raise CheckpointCorrupt(
                    f"{self._source(source)}/{number} is missing: it lists the files that were "
                    "read; restore it, or start in a new folder"
                )

    def _check_sums(self) -> None:
        """Refuse files without the checksums that Hadoop wrote. Spark does not check them."""
        selector = fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        for info in self._fs.get_file_info(selector):
            name = info.base_name[1 : -len(_SUMS)]
            # What is not finished has another name, and is read by nobody.
            finished = name == "metadata" or _ENTRY.fullmatch(name)
            if info.base_name.endswith(_SUMS) and finished:
                path = posixpath.join(posixpath.dirname(info.path), name)
                if self._exists(path) and not _fits(self._read(path), self._read(info.path)):
                    raise CheckpointCorrupt(
                        f"{path} was changed after Spark wrote it; restore the file, or start in "
                        "a new folder"
                    )

    def _readable(self, version: Version) -> str | None:
        """The offsets of a batch, if their file exists and is undamaged."""
        if version < 0 or not self._survived(self._path("offsets", version)):
            return None
        return self.offsets(version)

    def _whole(self, source: int, since: int) -> int:
        """The last entry of a source's log without a missing or damaged one since another."""
        for number, path in self._entry_files(source):
            if number == since + 1 and self._survived(path):
                since = number
        return since

    def _entries(self, version: Version) -> dict[int, int]:
        return self._entries_in(self.offsets(version))

    def _entries_in(self, offsets: str) -> dict[int, int]:
        """The newest entry in the log of each source that keeps one, as of a batch."""
        found = {}
        for at, line in enumerate(offsets.splitlines()[2:]):
            offset = _json(line)
            if isinstance(offset, dict) and isinstance(offset.get("logOffset"), int):
                source = self._logs_of[at] if at < len(self._logs_of) else at
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
        """Whether a log file exists, is JSON, and matches its checksums, if they exist.

        A killed process may leave a log without its checksums, which Hadoop writes last.
        """
        try:
            data = self._read(path)
        except FileNotFoundError:
            return False
        sums = self._sums(path)
        if sums and not _fits(data, sums):
            return False
        lines = data.decode(errors="replace").splitlines()
        body = [line for line in lines if not re.fullmatch(r"v\d+|-", line)]
        return bool(body) and all(_json(line) is not None for line in body)

    def _survived(self, path: str) -> bool:
        """Whether a log file is complete after a power failure, which may leave parts of files."""
        return self._sound(path) and (not self._local or bool(self._sums(path)))

    def _sums(self, path: str) -> bytes:
        try:
            return self._read(_sums_path(path))
        except FileNotFoundError:
            return b""

    def _flush_with_sums(self, path: str) -> None:
        flush(path)
        if self._exists(_sums_path(path)):
            flush(_sums_path(path))

    def _read(self, path: str) -> bytes:
        with self._fs.open_input_file(path) as file:
            return bytes(file.read())

    def _exists(self, path: str) -> bool:
        return bool(self._fs.get_file_info(path).type != fs.FileType.NotFound)

    def _path(self, log: str, version: Version) -> str:
        return posixpath.join(self._root, log, str(version))

    def _remove(self, log: str, version: Version) -> None:
        # Hadoop keeps a checksum beside each local file and would refuse new contents.
        path = self._path(log, version)
        for each in (path, _sums_path(path)):
            if self._exists(each):
                self._fs.delete_file(each)


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _sums_path(path: str) -> str:
    """The path of Hadoop's checksums of a local file."""
    folder, name = posixpath.split(path)
    return posixpath.join(folder, f".{name}{_SUMS}")


def _sums_of(data: bytes, piece: int) -> bytes:
    pieces = [data[at : at + piece] for at in range(0, len(data), piece)]
    return b"".join(struct.pack(">I", zlib.crc32(each)) for each in pieces)


def _fits(data: bytes, sums: bytes) -> bool:
    """Whether bytes have exactly the checksums that Hadoop wrote for them."""
    if len(sums) < _CRC_HEAD.size:
        return False
    mark, piece = _CRC_HEAD.unpack_from(sums)
    return mark == _CRC_MARK and piece > 0 and sums[_CRC_HEAD.size :] == _sums_of(data, piece)

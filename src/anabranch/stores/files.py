"""A store of files: in a local folder, on HDFS, in an object store, or any pyarrow file system."""

from __future__ import annotations

import mmap
import os
import posixpath
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from anabranch.durable import flush
from anabranch.errors import (
    CheckpointNotFound,
    DidNotHappen,
    MayHaveHappened,
    StoreError,
)
from anabranch.mounts import file_system, is_shared
from anabranch.stores.store import check_name
from anabranch.uris import resolve

PARTIAL = ".partial"
ABANDONED = timedelta(hours=1)
MAPPED_FROM = 1 << 20
"""Files of so many bytes are not read into memory."""
_PIECE = 1 << 20
_AT_ONCE = 8
"""How many files are written or deleted at the same time."""
OBJECT_STORES = frozenset({"s3", "gcs", "abfs"})


def open_files(uri: str) -> FileStore:
    """The store in a folder, or at a URI that :meth:`pyarrow.fs.FileSystem.from_uri` reads."""
    return FileStore(*resolve(uri), cached=False)


class FileStore:
    """A store in a folder of a file system; :func:`open_files` makes one.

    A file is written under another name and then renamed, so that readers see only complete files.
    On a local disk it is flushed before the rename, unless ``flushed`` is false: after a power
    failure the files stored last may then be lost or empty. Object stores show only complete
    objects. Incomplete files of a killed process are never listed, and are removed when they are
    an hour old. Unless ``cached``, files on a local disk are dropped from the page cache: frequent
    checkpoints would fill it, and batches would wait for memory to be freed. :meth:`get` maps large
    files of a local disk: they are not read into memory as a whole, and a buffer stays as it is
    when its name is replaced or deleted.
    """

    def __init__(
        self, filesystem: fs.FileSystem, root: str, *, flushed: bool = True, cached: bool = True
    ) -> None:
        self._fs = filesystem
        self._flushes = flushed
        self._cached = cached
        self._root = root.rstrip("/")
        self._local = isinstance(filesystem, fs.LocalFileSystem)
        self._swept = False
        self._own_disk: bool | None = None

    def __repr__(self) -> str:
        return f"FileStore({self._fs.type_name}, {self._root!r})"

    def put(self, name: str, data: pa.Buffer | bytes) -> None:
        """See :meth:`BackupStore.put`."""
        self.put_all({name: data})

    def put_all(self, blocks: Mapping[str, pa.Buffer | bytes]) -> None:
        """See :meth:`BackupStore.put_all`. Several files are written, and flushed, at once."""
        paths = {self._path(name): data for name, data in blocks.items()}
        if self._fs.type_name in OBJECT_STORES:
            self._at_all(lambda path: self._put_object(path, paths[path]), list(paths))
            return
        partials = {path: posixpath.join(self._root, PARTIAL, uuid.uuid4().hex) for path in paths}
        try:
            self._at_all(lambda path: self._prepare(partials[path], path, paths[path]), list(paths))
            for path, partial in partials.items():
                with self._failing(MayHaveHappened, "write", path):
                    self._fs.move(partial, path)
            for folder in {posixpath.dirname(path) for path in paths}:
                with self._failing(MayHaveHappened, "write", next(iter(paths))):
                    self._flush(folder)
        except StoreError:
            for partial in partials.values():
                with suppress(OSError):
                    self._fs.delete_file(partial)
            raise

    def _put_object(self, path: str, data: pa.Buffer | bytes) -> None:
        with self._failing(MayHaveHappened, "write", path):
            self._write(path, data)

    def _prepare(self, partial: str, path: str, data: pa.Buffer | bytes) -> None:
        with self._failing(DidNotHappen, "write", path):
            self._sweep()
            self._make_folder(posixpath.dirname(partial))
            self._make_folder(posixpath.dirname(path))
            self._write(partial, data)
            self._flush(partial)
            self._let_go(partial)

    def _at_all(self, work: Callable[[str], None], paths: Sequence[str]) -> None:
        """Work at paths, at some at once. The first error is raised when all are done."""
        if len(paths) == 1:
            work(paths[0])
            return
        with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(paths))), "anabranch-files") as pool:
            pending = [pool.submit(work, path) for path in paths]
        for each in pending:
            each.result()

    @property
    def creates_once(self) -> bool:
        """Whether a name can be made only once here; see :meth:`create`."""
        return self._local

    def create(self, name: str, data: bytes) -> bool:
        """Store bytes under a new name. False if the name exists already.

        Exactly one of several writers gets True. Only a local disk supports this.
        """
        if not self.creates_once:
            raise DidNotHappen(f"{self} cannot make {name} only once")
        path = self._path(name)
        with self._failing(MayHaveHappened, "write", path):
            partial = posixpath.join(self._root, PARTIAL, uuid.uuid4().hex)
            self._make_folder(posixpath.dirname(partial))
            self._make_folder(posixpath.dirname(path))
            try:
                self._write(partial, data)
                self._flush(partial)
                os.link(partial, path)
            except FileExistsError:
                return False
            finally:
                with suppress(OSError):
                    self._fs.delete_file(partial)
            self._flush(posixpath.dirname(path))
            return True

    def get(self, name: str, offset: int = 0, length: int | None = None) -> pa.Buffer:
        """See :meth:`BackupStore.get`."""
        path = self._path(name)
        with self._failing(DidNotHappen, "read", path):
            if self._is_mapped(path, offset, length):
                return _mapped(path, offset, length, None if self._cached else self._let_go)
            with self._fs.open_input_file(path) as file:
                file.seek(min(offset, file.size()))
                data = file.read_buffer(length)
            self._let_go(path)
        return data

    def list(self, prefix: str = "") -> Sequence[str]:
        """See :meth:`BackupStore.list`."""
        inside = posixpath.dirname(prefix)
        folder = self._path(inside) if inside else self._root
        with self._failing(DidNotHappen, "list", folder):
            found = self._fs.get_file_info(
                fs.FileSelector(folder, recursive=True, allow_not_found=True)
            )
        names = (
            info.path[len(self._root) :].lstrip("/")
            for info in found
            if info.type == fs.FileType.File
        )
        return sorted(n for n in names if n.startswith(prefix) and not n.startswith(PARTIAL))

    def delete(self, name: str) -> None:
        """See :meth:`BackupStore.delete`."""
        self.delete_all([name])

    def delete_all(self, names: Collection[str]) -> None:
        """See :meth:`BackupStore.delete_all`."""
        self._at_all(self._delete, [self._path(name) for name in names])

    def _delete(self, path: str) -> None:
        with suppress(CheckpointNotFound), self._failing(MayHaveHappened, "delete", path):
            self._fs.delete_file(path)

    def size(self, name: str) -> int:
        """See :meth:`BackupStore.size`."""
        path = self._path(name)
        with self._failing(DidNotHappen, "look up", path):
            info = self._fs.get_file_info(path)
            if info.type != fs.FileType.File:
                raise FileNotFoundError(path)
        return int(info.size)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, check_name(name))

    @contextmanager
    def _failing(self, kind: type[StoreError], doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if doing == "write":
                raise kind(f"cannot {doing} {path} ({self._fs.type_name}): {error}") from error
            raise CheckpointNotFound(f"there is no backup {path} ({self._fs.type_name})") from error
        except (OSError, pa.ArrowException) as error:
            raise kind(f"cannot {doing} {path} ({self._fs.type_name}): {error}") from error

    def _write(self, path: str, data: pa.Buffer | bytes) -> None:
        with self._fs.open_output_stream(path, compression=None) as stream:
            stream.write(data)

    def _is_mapped(self, path: str, offset: int, length: int | None) -> bool:
        """Whether much of a file is read, and it is on a disk of this machine.

        Nobody changes one in place: it is renamed when it is whole. Where another machine can
        remove it, what is mapped of it would be gone.
        """
        if not self._local or (length is not None and length < MAPPED_FROM):
            return False
        if Path(path).stat().st_size - offset < MAPPED_FROM:
            return False
        if self._own_disk is None:
            self._own_disk = not is_shared(file_system(Path(self._root)))
        return self._own_disk

    def _make_folder(self, folder: str) -> None:
        if not self._local:
            self._fs.create_dir(folder, recursive=True)
            return
        path = Path(folder)
        missing = [p for p in (path, *path.parents) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for made in missing:
            self._flush(str(made.parent))

    def _flush(self, path: str) -> None:
        """Flush a local file or folder to disk."""
        if self._local and self._flushes:
            flush(path)

    def _let_go(self, path: str) -> None:
        """Drop a local file from the page cache, except bytes that are not on disk yet."""
        if self._cached or not self._local or not hasattr(os, "posix_fadvise"):
            return
        with suppress(FileNotFoundError), _opened(path) as descriptor:  # deleted meanwhile
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _sweep(self) -> None:
        """Remove incomplete files of killed writers, once for each store that writes."""
        if self._swept:
            return
        self._swept = True
        folder = posixpath.join(self._root, PARTIAL)
        before = datetime.now(UTC) - ABANDONED
        for info in self._fs.get_file_info(fs.FileSelector(folder, allow_not_found=True)):
            if info.mtime is not None and info.mtime < before:
                with suppress(OSError):
                    self._fs.delete_file(info.path)


class _Map(mmap.mmap):
    """A map of a file, which says when nobody uses it any more."""

    unused: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unused is not None:
            self.madvise(mmap.MADV_DONTNEED)  # pages that are mapped are not let go of
            self.unused()


def _mapped(
    path: str, offset: int, length: int | None, let_go: Callable[[str], None] | None
) -> pa.Buffer:
    """Bytes of a file as it is now. ``let_go`` is called with its path when nobody uses them."""
    with Path(path).open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        end = size if length is None else min(size, offset + length)
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        # A disk that fails is an error here. On a map it would end the process.
        piece = memoryview(bytearray(_PIECE))
        at = file.seek(begin)
        while at < end and (came := file.readinto(piece[: end - at])):
            at += came
        mapped = _Map(file.fileno(), end - begin, access=mmap.ACCESS_READ, offset=begin)
    if let_go is not None:
        mapped.unused = partial(let_go, path)
    return pa.py_buffer(mapped).slice(offset - begin)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

"""Folders, given as a path or as the URI of any pyarrow file system."""

from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from anabranch.errors import PlanError


def absolute(folder: str | Path) -> str:
    """The same folder as an absolute path or URI."""
    text = str(folder)
    if not text:
        raise PlanError("the folder is empty; give a path or a URI such as s3://bucket/words")
    is_uri = "://" in text or text.startswith("file:")
    return text if is_uri else str(Path(text).expanduser().absolute())


def resolve(folder: str | Path) -> tuple[fs.FileSystem, str]:
    """The file system of a folder, and the folder's path in it."""
    try:
        filesystem, path = fs.FileSystem.from_uri(absolute(folder))
    except (pa.ArrowException, OSError, ImportError, ValueError) as error:
        raise PlanError(f"cannot open {str(folder)!r}: {error}") from error
    return filesystem, path


def is_local(folder: str | Path) -> bool:
    """Whether a folder is on a disk of this machine."""
    return isinstance(resolve(folder)[0], fs.LocalFileSystem)

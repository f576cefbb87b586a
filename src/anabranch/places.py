"""Folders, given as a path or as the URI of any file system that pyarrow reaches."""

from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from anabranch.errors import PlanError


def absolute(place: str | Path) -> str:
    """The same folder in a form that does not depend on the working directory."""
    text = str(place)
    if not text:
        raise PlanError("the folder is empty; give a path or a URI such as s3://bucket/words")
    is_uri = "://" in text or text.startswith("file:")
    return text if is_uri else str(Path(text).expanduser().absolute())


def resolve(place: str | Path) -> tuple[fs.FileSystem, str]:
    """The file system of a folder, and the folder's path in it."""
    try:
        filesystem, path = fs.FileSystem.from_uri(absolute(place))
    except (pa.ArrowException, OSError, ImportError, ValueError) as error:
        raise PlanError(f"cannot open {str(place)!r}: {error}") from error
    return filesystem, path


def is_local(place: str | Path) -> bool:
    """Whether a folder is on a disk of this machine."""
    return isinstance(resolve(place)[0], fs.LocalFileSystem)

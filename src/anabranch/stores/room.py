"""Room for bytes that come from elsewhere: in memory, or in a file that is mapped."""

from __future__ import annotations

import mmap
import os
import tempfile

from anabranch.errors import DidNotHappen

_IN_MEMORY = 32 << 20


def room(size: int) -> bytearray | mmap.mmap:
    """Writable room for so many bytes. Much of it is in a file, which the system can write out.

    DidNotHappen if the folder for temporary files has no room.
    """
    if size <= _IN_MEMORY:
        return bytearray(size)
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            _reserve(file.fileno(), size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise DidNotHappen(
            f"no room for {size} bytes in {tempfile.gettempdir()}: {error}"
        ) from error


def _reserve(descriptor: int, size: int) -> None:
    """Have the disk give a file its blocks now: a full one would end the process on the map."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)

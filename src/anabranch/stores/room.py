"""Room for bytes that come from elsewhere: in memory, or in a file that is mapped."""

from __future__ import annotations

import mmap
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
            file.truncate(size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise DidNotHappen(
            f"no room for {size} bytes in {tempfile.gettempdir()}: {error}"
        ) from error

"""Memory that an agent has used goes back to the system at once.

An agent works for seconds on blocks of megabytes, and then waits beside executors that need the
memory. By default the C library and Arrow keep such blocks for threads that may want them again.
"""

from __future__ import annotations

import ctypes
import sys

import pyarrow as pa

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
_LARGEST_KEPT = 1 << 18
_ARENAS = 4


def give_memory_back() -> None:
    """Let this process return freed blocks to the system, where glibc is used."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, _LARGEST_KEPT)
        set_option(_ARENA_MAX, _ARENAS)
        pa.set_memory_pool(pa.system_memory_pool())

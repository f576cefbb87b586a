"""Memory that a worker has used once, it keeps.

A batch takes and frees the same large arrays as the one before. By default they go back to the
system each time, and every page of them costs a fault when it is touched again: with batches of a
few hundred thousand rows half of a worker's time.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_KEPT = 1 << 25  # the most that the C library takes for it
_MOST_KEPT = 1 << 29
_STEP = 1 << 26


def keep_memory() -> None:
    """Let this process, and those forked from it, use freed memory again; where glibc is used."""
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, _LARGEST_KEPT)
        set_option(_TRIM_THRESHOLD, _MOST_KEPT)
        set_option(_TOP_PAD, _STEP)

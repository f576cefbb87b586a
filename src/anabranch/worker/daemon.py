"""The daemon that Python workers are forked from. It has the kernels loaded already.

Set it with ``spark.python.daemon.module=anabranch.worker.daemon``; :func:`anabranch.session` does.

Workers forked from it have the kernels in memory, and reuse freed memory. Every batch allocates and
frees large arrays of the same size. By default their memory goes back to the system each time, and
the page faults of the next batch take half of a worker's time with batches of a few hundred
thousand rows.
"""

import ctypes
import gc
import sys
from importlib import import_module
from pkgutil import iter_modules

from pyspark import daemon

import anabranch.operators
import anabranch.worker.steps  # every forked worker has it, and the operators, already
from anabranch.worker.warm import warm

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST_KEPT = 1 << 25  # the most that the C library takes for it
_MOST_KEPT = 1 << 29
_STEP = 1 << 26


def keep_memory() -> None:
    """Let this process, and those forked from it, reuse freed memory, where glibc is used."""
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, _LARGEST_KEPT)
        set_option(_TRIM_THRESHOLD, _MOST_KEPT)
        set_option(_TOP_PAD, _STEP)


def import_operators() -> None:
    """Import every operator, so that forked workers need not do it."""
    for module in iter_modules(anabranch.operators.__path__, "anabranch.operators."):
        import_module(module.name)


if __name__ == "__main__":
    keep_memory()
    import_operators()
    warm()
    # A worker collects garbage after every task. Everything imported so far is none, and looking
    # through it each time would cost more than a small task does.
    gc.collect()
    gc.freeze()
    daemon.manager()

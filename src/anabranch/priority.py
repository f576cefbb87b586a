"""Background work runs at a lower priority than batches.

A batch that waits for such work does not suffer: nothing else uses the processor then.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

_NICENESS, _LOWEST = 5, 19
_OF_THREADS = 15

_log = logging.getLogger("anabranch")


def process_gives_way(*, lowest: bool = False) -> None:
    """Lower the priority of this process and its session, with ``lowest`` as far as possible."""
    niceness = _LOWEST if lowest else _NICENESS
    os.nice(niceness)
    group = Path("/proc/self/autogroup")
    if group.exists():  # sessions share the processor first, and the processes of each then
        try:
            group.write_text(str(niceness))
        except OSError as error:
            _log.info("The autogroup priority of this process was not lowered: %s", error)


def thread_gives_way() -> None:
    """Lower the priority of this thread alone, where the system has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _OF_THREADS)

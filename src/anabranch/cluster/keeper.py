"""Waits for the process that runs a cluster to end, then removes what it has left.

Run as a file, with nothing but the standard library, so that waiting costs next to nothing::

    python keeper.py PID FOLDER GROUP

No process and no folder of the cluster stays, even if that process is killed with kill -9.
"""

import os
import select
import sys

_SWEEP = "from anabranch.cluster.sweep import main; main()"


def main(pid: int, *sweep: str) -> None:
    """Wait for the parent process with this id to end, then run the sweep."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        handle = None
    # If the parent was gone before, its id may be a stranger's by now.
    if handle is not None and os.getppid() == pid:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
    os.execv(sys.executable, [sys.executable, "-c", _SWEEP, *sweep])


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])

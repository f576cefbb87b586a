"""The daemon that Python workers are forked from, with the slow part of their start behind it.

Set with ``spark.python.daemon.module=anabranch.spark.daemon``; :func:`anabranch.session` does.
"""

import gc
import socket

from pyspark import daemon

import anabranch.spark.task  # noqa: F401  imported here so that every forked worker has it
from anabranch.spark.memory import keep_memory
from anabranch.spark.warm import warm

_run_tasks = daemon.worker


def _run_until_cut_off(sock: socket.socket, authenticated: bool) -> int:
    """Spark closes the connection of a task that it cancels, and a worker ends there quietly."""
    try:
        return _run_tasks(sock, authenticated)
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    daemon.worker = _run_until_cut_off
    keep_memory()
    warm()
    # A worker collects garbage after every task. Everything imported so far is none, and looking
    # through it each time would cost more than a small task does.
    gc.collect()
    gc.freeze()
    daemon.manager()

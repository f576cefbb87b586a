"""The daemon that Python workers are forked from, with the slow part of their start behind it.

Set with ``spark.python.daemon.module=anabranch.spark.daemon``; :func:`anabranch.session` does.
"""

import gc

from pyspark import daemon

import anabranch.spark.task  # noqa: F401  imported here so that every forked worker has it
from anabranch.spark.memory import keep_memory
from anabranch.spark.warm import warm

if __name__ == "__main__":
    keep_memory()
    warm()
    # A worker collects garbage after every task. Everything imported so far is none, and looking
    # through it each time would cost more than a small task does.
    gc.collect()
    gc.freeze()
    daemon.manager()

"""The daemon that Python workers are forked from, with the slow imports already done.

Set with ``spark.python.daemon.module=anabranch.spark.daemon``; :func:`anabranch.session` does.
"""

from pyspark import daemon

import anabranch.spark.task  # noqa: F401  imported here so that every forked worker has it

if __name__ == "__main__":
    daemon.manager()

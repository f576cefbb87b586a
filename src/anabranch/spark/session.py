"""A Spark session with the best settings for Anabranch, and the checks of any other session."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from anabranch.errors import PlanError
from anabranch.spark.nodes import is_local

_DEFAULTS = {
    "spark.python.daemon.module": "anabranch.worker.daemon",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.buffer.size": "1048576",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "WARN",
}
_ON_ONE_MACHINE = {
    # Shuffled rows never leave the machine: compressing them, or looking for what a network or a
    # remote disk has done to them, costs more than it saves.
    "spark.shuffle.compress": "false",
    "spark.shuffle.checksum.enabled": "false",
    # Rows pass between the JVM and its Python workers several times.
    "spark.python.unix.domain.socket.enabled": "true",
    # Packed rows are large and soon gone. The default collector keeps each in a region of its own
    # and looks through the heap again and again to find that it is gone.
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
}
_ON_A_CLUSTER = {
    # An instance runs where its state is, however long it has to wait for the node, and even if
    # another node has most of the rows. Jobs whose node is lost are ended by the coordinator.
    "spark.locality.wait": "365d",
    "spark.shuffle.reduceLocality.enabled": "false",
    # The stream waits for an executor that hangs until it counts as lost, by default for two or
    # three minutes. What it had is recovered in seconds.
    "spark.executor.heartbeatInterval": "5s",
    "spark.storage.blockManagerHeartbeatTimeoutMs": "40s",
    "spark.network.timeoutInterval": "5s",
}
_LEAST_WAIT_MS = 3_600_000
_EXCLUDING = (
    "spark.excludeOnFailure.enabled",
    "spark.excludeOnFailure.application.enabled",
    "spark.excludeOnFailure.taskAndStage.enabled",
    "spark.blacklist.enabled",
)
_EXCLUDED_RULES = "spark.sql.optimizer.excludedRules"
_NOTHING_FROM_NOTHING = "org.apache.spark.sql.catalyst.optimizer.PropagateEmptyRelation"
_PARTITIONS = "spark.sql.shuffle.partitions"
_RETAINED = "spark.sql.streaming.minBatchesToRetain"
BATCHES_IN_LOG = 200
"""The number of batches in Spark's offset log, unless the user sets another one."""
_STREAMS = "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution"
_DIRECT_FILES = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)


def session(
    master: str = "local[2]", *, app_name: str = "anabranch", **conf: str | int | bool
) -> SparkSession:
    """Start, or get, a Spark session with the best settings for Anabranch.

    Any other classic session works too. This one loads the compiled kernels before Python workers
    are forked, and runs the workers with the interpreter of this program. Give other settings by
    their names: ``session(**{"spark.ui.enabled": False})``.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName(app_name)
    defaults = _DEFAULTS | (_ON_ONE_MACHINE if master.startswith("local") else _ON_A_CLUSTER)
    for name, value in (defaults | conf).items():
        builder = builder.config(name, str(value).lower() if isinstance(value, bool) else value)
    return builder.getOrCreate()


def check(spark: SparkSession) -> None:
    """Refuse a session whose settings break the guarantees of Anabranch."""
    if not hasattr(spark, "_jsparkSession"):
        raise PlanError(
            "Spark Connect sessions are not supported: the coordinator runs in the driver. "
            "Create a classic session, for example with anabranch.session()"
        )
    if spark.conf.get("spark.speculation", "false") == "true":
        raise PlanError(
            "spark.speculation is on: two attempts of a task would change the same state. "
            "Set spark.speculation=false"
        )
    if is_local(spark):
        return
    _check_cluster(spark)


def _check_cluster(spark: SparkSession) -> None:
    if spark.sparkContext.getConf().get("spark.shuffle.reduceLocality.enabled", "true") != "false":
        raise PlanError(
            "spark.shuffle.reduceLocality.enabled is on: tasks would run where their rows are "
            "instead of where their state is. Start the session with anabranch.session(master), "
            "or set it to false before the session starts"
        )
    conf = spark.sparkContext._jsc.sc().conf()
    name = "spark.locality.wait.node"
    if not conf.contains(name):
        name = "spark.locality.wait"
    if conf.getTimeAsMs(name, "3s") < _LEAST_WAIT_MS:
        raise PlanError(
            f"{name} is {conf.get(name, '3s')}: a task that waits longer for its node would run on "
            "another node, without its state. Start the session with "
            f"anabranch.session(master), or set {name}=365d before the session starts"
        )
    for name in _EXCLUDING:
        if conf.get(name, "false") == "true":
            raise PlanError(
                f"{name} is on: tasks would wait forever if Spark excluded the node with their "
                f"state. Set {name}=false before the session starts"
            )


def chose_partitions(spark: SparkSession) -> bool:
    """Whether the user has set the number of shuffle partitions."""
    return bool(spark._jsparkSession.sessionState().conf().contains(_PARTITIONS))


def tune(spark: SparkSession, *, narrow: bool, local: bool, partitions: int | None = None) -> None:
    """Change the settings of the session that belongs to the query alone, for its batches.

    ``narrow`` says that no column has values of variable size, ``local`` that the driver runs all
    tasks itself. ``partitions`` is the number of shuffle partitions in transforms; without it the
    setting stays.
    """
    if partitions is not None:
        # Without an adaptive plan the default of 200 would stay, most of them without a row.
        spark.conf.set(_PARTITIONS, partitions)
    # A transform that can be seen to give no rows would take the operator after it out of the plan.
    rules = spark.conf.get(_EXCLUDED_RULES, None)
    excluded = rules.split(",") if rules else []
    if _NOTHING_FROM_NOTHING not in excluded:
        spark.conf.set(_EXCLUDED_RULES, ",".join([*excluded, _NOTHING_FROM_NOTHING]))
    # An adaptive plan would coalesce partitions that are instances of an operator.
    spark.conf.set("spark.sql.adaptive.enabled", "false")
    # A limit in bytes makes Spark add up the size of the batch after every row, which takes a
    # third of the time of handing rows to Python. Rows that can be large come in smaller batches.
    spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", str(2**31 - 1))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 131072 if narrow else 10000)
    if local:
        # What a batch has shuffled is not needed after it, and is written to disk if it stays. On a
        # cluster it is kept, to be sent again.
        spark.conf.set("spark.sql.classic.shuffleDependency.fileCleanup.enabled", "true")
        # No map output is ever lost and made again.
        spark.conf.set("spark.sql.shuffle.orderIndependentChecksum.enabled", "false")


def batches_in_log(spark: SparkSession) -> int:
    """The number of batches that Spark's logs keep for a query started in :func:`log_settings`."""
    return int(spark.conf.get(_RETAINED, None) or BATCHES_IN_LOG)


@contextmanager
def log_settings(spark: SparkSession, *, local: bool) -> Iterator[None]:
    """Let a streaming query that starts in the block write its logs faster and keep them longer.

    Spark's default manager starts a shell for every file on a local disk, which takes about 40 ms.
    If checkpoints are damaged, an older one needs more batches than Spark keeps by default. A query
    copies the settings when it starts, so the user's session does not change.
    """
    wanted = {_RETAINED: str(BATCHES_IN_LOG)}
    if local:
        wanted["spark.sql.streaming.checkpointFileManagerClass"] = _DIRECT_FILES
    chosen = spark._jsparkSession.sessionState().conf()
    added = {name: value for name, value in wanted.items() if not chosen.contains(name)}
    for name, value in added.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in added:
            spark.conf.unset(name)


@contextmanager
def stopping(spark: SparkSession) -> Iterator[None]:
    """Keep Spark from logging an error for the batch that a stopped stream cancels."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    logging = jvm.org.apache.logging.log4j
    before = logging.LogManager.getLogger(_STREAMS).getLevel()
    configurator = logging.core.config.Configurator
    configurator.setLevel(_STREAMS, logging.Level.OFF)
    try:
        yield
    finally:
        configurator.setLevel(_STREAMS, before)

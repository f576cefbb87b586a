"""Output buffers: the rows that were sent to an operator in a batch, kept for replay.

They are Spark's own shuffle files, which Spark keeps while their RDD is referenced. A replay is a
job that reads them and skips the stages before. Trimming a buffer deletes its files at once; the
garbage collector of the driver would delete them too late for the disks of the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from anabranch.spark.pinning import frame_of, pinned

_SHUFFLED = "ShuffledRowRDD"


class Buffer:
    """The rows that one batch sent to the instances of an operator. Partition i is for instance i.

    ``frame`` must end in the exchange that routes the rows.
    """

    def __init__(self, spark: SparkSession, frame: DataFrame) -> None:
        self._spark = spark
        self._schema = frame.schema
        self._frame = frame
        self._rdd = frame._jdf.queryExecution().toRdd()
        self._dependency = _exchange(self._rdd).dependencies().apply(0)
        self._given_up: set[int] = set()

    @property
    def senders(self) -> int:
        """How many tasks have sent rows."""
        return int(self._dependency.rdd().getNumPartitions())

    def pinned(self, hosts: Sequence[str]) -> DataFrame:
        """All rows, those for instance i on ``hosts[i]``."""
        return pinned(self._spark, self._rdd, self._schema, hosts)

    def unpinned(self) -> DataFrame:
        """All rows, on any nodes."""
        return frame_of(self._spark, self._rdd, self._schema)

    def computed_again(self) -> DataFrame:
        """All rows, computed from the sources again, without the shuffle files."""
        return self._frame.select("*")

    def lost(self) -> list[int]:
        """The senders whose shuffle files were lost with their executor."""
        text = str(self._tracker().findMissingPartitions(self._shuffle).get().mkString(","))
        return sorted(self._given_up | {int(sender) for sender in text.split(",") if sender})

    def part(self, instances: Sequence[int], without: Sequence[int] = ()) -> DataFrame:
        """The rows for some instances, without those from some senders: one partition each.

        If rows of other senders are lost, Spark computes them again.
        """
        self._give_up(without)
        jvm, gateway = self._jvm, self._gateway
        execution = jvm.org.apache.spark.sql.execution
        specs = [
            execution.PartialReducerPartitionSpec(instance, start, stop, 0)
            for instance in instances
            for start, stop in _runs(self.senders, without)
        ]
        array = gateway.new_array(execution.ShufflePartitionSpec, len(specs))
        for i, spec in enumerate(specs):
            array[i] = spec
        metrics = execution.metric.SQLShuffleReadMetricsReporter.createShuffleReadMetrics(
            self._spark.sparkContext._jsc.sc()
        )
        rdd = execution.ShuffledRowRDD(self._dependency, metrics, array)
        return frame_of(self._spark, rdd, self._schema)

    def trim(self) -> None:
        """Delete the files of the buffer on all nodes. It must not be used afterwards."""
        cleaner = self._spark.sparkContext._jsc.sc().cleaner()
        if cleaner.isDefined():
            cleaner.get().doCleanupShuffle(self._shuffle, False)

    def _give_up(self, senders: Sequence[int]) -> None:
        """Tell Spark that some senders sent nothing, so that it does not run their operators.

        Spark completes a shuffle before it reads any of it, even if it reads only other senders.
        """
        jvm, gateway = self._jvm, self._gateway
        nobody = jvm.scala.Option.empty()
        here = jvm.org.apache.spark.storage.BlockManagerId.apply("driver", "localhost", 1, nobody)
        targets = self._dependency.partitioner().numPartitions()
        statuses = getattr(jvm.org.apache.spark.scheduler, "MapStatus$").__getattr__("MODULE$")
        for sender in sorted(set(senders) - self._given_up):
            nothing = gateway.new_array(jvm.long, targets)
            status = statuses.apply(here, nothing, -1 - sender, 0)
            self._tracker().registerMapOutput(self._shuffle, sender, status)
            self._given_up.add(sender)

    @property
    def _shuffle(self) -> int:
        return int(self._dependency.shuffleId())

    @property
    def _jvm(self) -> Any:
        return self._spark.sparkContext._jvm

    @property
    def _gateway(self) -> Any:
        return self._spark.sparkContext._gateway

    def _tracker(self) -> Any:
        # SparkEnv, which has it too, cannot be reached: one of its classes is not among the jars.
        scheduler = self._spark.sparkContext._jsc.sc().dagScheduler()
        field = scheduler.getClass().getDeclaredField("mapOutputTracker")
        field.setAccessible(True)
        return field.get(scheduler)


def _exchange(rdd: Any) -> Any:
    while rdd.getClass().getSimpleName() != _SHUFFLED:
        dependencies = rdd.dependencies()
        if dependencies.size() != 1:
            raise TypeError(f"{rdd} is not the result of a shuffle exchange")
        rdd = dependencies.apply(0).rdd()
    return rdd


def _runs(count: int, without: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges of the numbers below a count, without some numbers."""
    runs: list[tuple[int, int]] = []
    for number in range(count):
        if number in without:
            continue
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs

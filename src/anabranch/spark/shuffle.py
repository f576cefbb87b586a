"""Routing: from a keyed DataFrame to one partition per instance, in a repeatable order."""

import json
from collections.abc import Sequence
from typing import Any

from pyspark import SparkContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from anabranch.operators.join import SIDE
from anabranch.spark.columns import column
from anabranch.spark.hashing import KeyHash
from anabranch.state.groups import Routing
from anabranch.worker.packing import SEQUENCE_BITS, TARGET
from anabranch.worker.task import HASH, SEQUENCE


class Router:
    """Sends rows to instances. Made once per operator and routing, as its columns are expensive.

    Shuffle blocks arrive in any order. Rows that need source order therefore get a sequence number
    before the shuffle, and are sorted by it afterwards.
    """

    def __init__(self, key: KeyHash, routing: Routing, *, ordered: bool) -> None:
        self.routing = routing
        self.ordered = ordered
        """Whether the operator has to see rows in the order of the source."""
        self._key = key
        self._added = [F.col("*")]
        if key.travels:
            self._added.append(key.column.alias(HASH))
        if ordered:
            self._added.append(F.monotonically_increasing_id().alias(SEQUENCE))
        hashed = F.col(HASH) if key.travels else key.column
        self._group = F.pmod(hashed, F.lit(routing.key_groups)).cast("int")
        self._instance = self._looked_up(routing.table().tolist())

    def routed(self, frame: DataFrame) -> DataFrame:
        """The frame with the rows of instance i in partition i."""
        return self.in_order(self.sent(frame))

    def sent(self, frame: DataFrame) -> DataFrame:
        """The same frame up to the exchange: the rows of a partition are not in order yet."""
        frame = self._key.normalised(frame)
        if len(self._added) > 1:
            frame = frame.select(*self._added)
        return frame.repartitionById(self.routing.instances, self._instance)

    def in_order(self, sent: DataFrame) -> DataFrame:
        """Rows that were sent, in the order for the operator."""
        return sent.sortWithinPartitions(SEQUENCE) if self.ordered else sent

    def addressed(self, sent: DataFrame, targets: Sequence[int]) -> DataFrame:
        """Rows that were sent before, under this or another routing, addressed to other partitions.

        The column ``TARGET`` is ``targets[group]``. Rows with -1 are dropped; see
        :meth:`sent_to`.
        """
        target = self._looked_up(targets)
        return sent.where(target >= 0).withColumn(TARGET, target)

    def as_from(self, frame: DataFrame, instances: Sequence[int]) -> DataFrame:
        """Rows that are not sent yet, as if partition ``instances[i]`` had sent partition i."""
        frame = self._key.normalised(frame)
        added = [F.col("*")]
        if self._key.travels:
            added.append(self._key.column.alias(HASH))
        if self.ordered:
            sender = F.element_at(_literals(instances), F.spark_partition_id() + 1).cast("long")
            position = F.monotonically_increasing_id().bitwiseAND((1 << SEQUENCE_BITS) - 1)
            added.append((F.shiftleft(sender, SEQUENCE_BITS) + position).alias(SEQUENCE))
        return frame.select(*added) if len(added) > 1 else frame

    def _looked_up(self, by_group: Sequence[int]) -> Column:
        return F.element_at(_literals(by_group), self._group + 1)


def sent_to(addressed: DataFrame, partitions: int) -> DataFrame:
    """Addressed rows in the partitions of their targets."""
    return addressed.repartitionById(partitions, F.col(TARGET))


def _literals(numbers: Sequence[int]) -> Column:
    # One value instead of a column for each of 128 groups: Spark analyses and optimizes the plan of
    # every batch, which takes as long as all columns in it. As text, because py4j calls the JVM for
    # each element of an array.
    context = SparkContext._active_spark_context
    assert context is not None
    jvm: Any = context._jvm
    kind = jvm.java.lang.Class.forName("[I")
    text = json.dumps([int(number) for number in numbers])
    return F.lit(jvm.com.fasterxml.jackson.databind.ObjectMapper().readValue(text, kind))


def both_sides(frames: Sequence[DataFrame], keys: Sequence[Sequence[str]]) -> DataFrame:
    """Two keyed inputs as one: the key by its left names, the side, then each side's columns."""
    sides = []
    for side, (frame, names) in enumerate(zip(frames, keys, strict=True)):
        key = [column(name).alias(as_) for name, as_ in zip(names, keys[0], strict=True)]
        rest = [column(name) for name in frame.columns if name not in names]
        sides.append(frame.select(*key, F.lit(side).cast("tinyint").alias(SIDE), *rest))
    return sides[0].unionByName(sides[1], allowMissingColumns=True)

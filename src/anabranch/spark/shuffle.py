"""Routing: from a keyed DataFrame to one partition per instance, in an order that repeats."""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from anabranch.spark.hashing import key_hash, normalised
from anabranch.spark.task import HASH, INPUT_SIDE, SEQUENCE
from anabranch.state.groups import Routing


def routed(frame: DataFrame, keys: Sequence[str], routing: Routing, *, ordered: bool) -> DataFrame:
    """The frame with partition i holding the rows of instance i.

    Shuffle blocks arrive in any order. Rows that must be seen in source order therefore carry the
    place they had before the shuffle, and are sorted by it after.
    """
    frame = normalised(frame, keys)
    frame = frame.withColumn(HASH, key_hash(frame, keys))
    if ordered:
        frame = frame.withColumn(SEQUENCE, F.monotonically_increasing_id())
    frame = frame.repartitionById(routing.instances, _instance(routing))
    return frame.sortWithinPartitions(SEQUENCE) if ordered else frame


def _instance(routing: Routing) -> Column:
    group = F.pmod(F.col(HASH), F.lit(routing.key_groups)).cast("int")
    owners = F.array(*[F.lit(int(instance)) for instance in routing.table()])
    return F.element_at(owners, group + 1)


def both_sides(frames: Sequence[DataFrame], keys: Sequence[Sequence[str]]) -> DataFrame:
    """Two keyed inputs as one: the key under the left names, the side, then each side's columns."""
    sides = []
    for side, (frame, names) in enumerate(zip(frames, keys, strict=True)):
        key = [F.col(f"`{name}`").alias(as_) for name, as_ in zip(names, keys[0], strict=True)]
        rest = [F.col(f"`{name}`") for name in frame.columns if name not in names]
        sides.append(frame.select(*key, F.lit(side).cast("tinyint").alias(INPUT_SIDE), *rest))
    return sides[0].unionByName(sides[1], allowMissingColumns=True)

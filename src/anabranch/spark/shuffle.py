"""Routing: from a keyed DataFrame to one partition per instance, in an order that repeats."""

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from anabranch.spark.hashing import KeyHash
from anabranch.spark.task import HASH, INPUT_SIDE, SEQUENCE
from anabranch.state.groups import Routing


class Router:
    """Sends rows to instances. Made once per operator and routing: its columns cost time to build.

    Shuffle blocks arrive in any order. Rows that must be seen in source order therefore carry the
    place they had before the shuffle, and are sorted by it after.
    """

    def __init__(self, key: KeyHash, routing: Routing, *, ordered: bool) -> None:
        self.routing = routing
        self._ordered = ordered
        self._key = key
        self._added = [F.col("*")]
        if key.travels:
            self._added.append(key.column.alias(HASH))
        if ordered:
            self._added.append(F.monotonically_increasing_id().alias(SEQUENCE))
        hashed = F.col(HASH) if key.travels else key.column
        group = F.pmod(hashed, F.lit(routing.key_groups)).cast("int")
        owners = F.array(*[F.lit(int(instance)) for instance in routing.table()])
        self._instance = F.element_at(owners, group + 1)

    def routed(self, frame: DataFrame) -> DataFrame:
        """The frame with partition i holding the rows of instance i."""
        frame = self._key.normalised(frame)
        if len(self._added) > 1:
            frame = frame.select(*self._added)
        frame = frame.repartitionById(self.routing.instances, self._instance)
        return frame.sortWithinPartitions(SEQUENCE) if self._ordered else frame


def both_sides(frames: Sequence[DataFrame], keys: Sequence[Sequence[str]]) -> DataFrame:
    """Two keyed inputs as one: the key under the left names, the side, then each side's columns."""
    sides = []
    for side, (frame, names) in enumerate(zip(frames, keys, strict=True)):
        key = [F.col(f"`{name}`").alias(as_) for name, as_ in zip(names, keys[0], strict=True)]
        rest = [F.col(f"`{name}`") for name in frame.columns if name not in names]
        sides.append(frame.select(*key, F.lit(side).cast("tinyint").alias(INPUT_SIDE), *rest))
    return sides[0].unionByName(sides[1], allowMissingColumns=True)

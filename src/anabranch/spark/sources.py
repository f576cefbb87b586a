"""Several streaming sources in one streaming query, and separating their rows in a batch."""

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

_SOURCE = "__source"


def combine(frames: Sequence[DataFrame]) -> DataFrame:
    """One streaming DataFrame with the rows of all sources.

    Spark then plans, logs and commits the offsets of all sources together, batch by batch.
    """
    if len(frames) == 1:
        return frames[0]
    tagged = [
        frame.select(F.lit(at).alias(_SOURCE), F.struct("*").alias(f"__{at}"))
        for at, frame in enumerate(frames)
    ]
    whole = tagged[0]
    for more in tagged[1:]:
        whole = whole.unionByName(more, allowMissingColumns=True)
    return whole


def logs_of(frame: DataFrame) -> tuple[int, ...]:
    """For each source in the offsets of a batch, the number of Spark's log of that source.

    Frames made from one streaming DataFrame have one source and one log. The offsets of a batch
    then have that source once for each frame.
    """
    found = []
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves().iterator()
    while leaves.hasNext():
        leaf = leaves.next()
        if leaf.isStreaming():
            found.append(leaf)
    different: list[object] = []
    for leaf in found:
        if leaf not in different:
            different.append(leaf)
    return tuple(different.index(leaf) for leaf in found)


def separate(batch: DataFrame, sources: int) -> list[DataFrame]:
    """The rows of each source in one batch of the combined frame."""
    if sources == 1:
        return [batch]
    return [batch.where(F.col(_SOURCE) == at).select(f"__{at}.*") for at in range(sources)]

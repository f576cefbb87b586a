"""The stream of the demo: endless sentences, the same in every run."""

from __future__ import annotations

import math

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

WORDS = (
    "the river and a water of bank it arm flows stream to delta leaves in channel joins again "
    "flood rain down is stone mouth valley sea fork lake sand bend spring reed with ford tide "
    "island on meadow mill source bridge gravel otter heron willow weir current drought from "
    "trout ferry eddy marsh anabranch oxbow braid shoal rapids estuary silt pebble confluence"
)
"""The words that come most often, the first most of all."""

_VOCABULARY = 100_000
_PER_SENTENCE = 8
_STEPS = 1 << 30


def generate(spark: SparkSession, per_batch: int) -> DataFrame:
    """A streaming DataFrame with a column ``text``, with this many sentences per micro-batch."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", per_batch)
    numbers = source.option("numPartitions", spark.sparkContext.defaultParallelism).load()
    return numbers.select(sentence(F.col("value")).alias("text"))


def sentence(number: Column) -> Column:
    """The sentence with this number; how often a word comes falls with its rank (Zipf)."""
    return F.concat_ws(" ", *(_word(F.xxhash64(number, F.lit(i))) for i in range(_PER_SENTENCE)))


def _word(hashed: Column) -> Column:
    fraction = F.pmod(hashed, F.lit(_STEPS)) / _STEPS
    rank = F.floor(F.exp(fraction * math.log(_VOCABULARY))).cast("int")
    common = F.try_element_at(F.split(F.lit(WORDS), " "), rank)
    return F.coalesce(common, F.concat(F.lit("w"), rank.cast("string")))

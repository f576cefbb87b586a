"""The query that is killed: a chain of two stateful operators, run to the end of its input.

Usage: program.py INPUT WORK CHECKPOINT_SECONDS; results in WORK/out, everything else in
WORK/checkpoint and WORK/state. Prints one line per committed batch.

A file is given to the stream once the one before is committed. Otherwise a kill at the right moment
would let Spark put two files into one batch, and updates are sent batch by batch.
"""

import os
import sys
from pathlib import Path

from pyspark.sql import functions as F

import anabranch as ab
from anabranch.query.running import RunningQuery


def build(source: Path, work: Path) -> ab.Query:
    conf = {
        "spark.ui.enabled": False,
        "spark.log.level": "ERROR",
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    }
    spark = ab.session("local[2]", **conf)
    rides = (
        spark.readStream.schema("at timestamp, user string, city int, fare double")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(work / "feed"))
    )
    per_user = (
        ab.stream(rides)
        .key_by("user")
        .aggregate(
            name="users",
            n=ab.count(),
            spent=ab.sum("fare"),
            city=ab.last("city"),
            most=ab.max("fare"),
        )
    )
    per_city = (
        per_user.transform(lambda df: df.where(F.col("n") % 3 != 0))
        .key_by("city")
        .aggregate(
            name="cities",
            updates=ab.count(),
            volume=ab.sum("spent"),
            newest=ab.last("user"),
        )
    )
    return ab.query(
        per_user.to_parquet(work / "out" / "users"), per_city.to_parquet(work / "out" / "cities")
    )


def main() -> None:
    source, work, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    feed = work / "feed"
    feed.mkdir(exist_ok=True)
    query: RunningQuery = build(source, work).start(
        work / "checkpoint", checkpointing=ab.Periodic(seconds), state_folder=work / "state"
    )
    for version, file in enumerate(sorted(source.iterdir())):
        if not (feed / file.name).exists():
            os.link(file, feed / file.name)
        while query.version < version:
            query.await_termination(0.01)
        print(f"committed {version}", flush=True)
    query.stop()


if __name__ == "__main__":
    main()

"""State that is lost, damaged or left half changed comes back, to the bit."""

import random
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.queries.running_query import RunningQuery
from anabranch.spark.jobs import Stages
from anabranch.spark.logs import SparkLogs
from anabranch.testing.feeds import Feed
from anabranch.units import Version
from anabranch.worker.reports import InstanceReport, Reports

# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = pa.schema([("k", pa.int64()), ("x", pa.float64())])


def batch(seed: int) -> pa.Table:
    numbers = np.random.default_rng(seed)
    return pa.table({"k": numbers.integers(0, 50, 200), "x": numbers.normal(size=200)})


def query_over(feed: Feed, spark: SparkSession) -> ab.Query:
    """Two operators; sums of floats show any change in the order of rows."""
    first = (
        ab.stream(feed.frame(spark))
        .key_by("k")
        .aggregate(name="one", n=ab.count(), total=ab.sum("x"))
    )
    second = (
        first.transform(lambda df: df.selectExpr("n % 5 as five", "total"))
        .key_by("five")
        .aggregate(name="two", n=ab.count(), total=ab.sum("total"), last=ab.last("total"))
    )
    return second.to_memory("out")


def undisturbed(spark: SparkSession, folder: Path, batches: int) -> list[dict[str, object]]:
    feed = Feed(folder / "input", ROWS)
    feed.add(*[batch(seed) for seed in range(batches)])
    query = query_over(feed, spark).start(folder / "ck", available_now=True)
    query.await_termination()
    rows: list[dict[str, object]] = query.memory_table("out").to_pylist()
    return rows


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    return Feed(tmp_path / "disturbed", ROWS)


def ordered(rows: list[dict[str, object]]) -> list[str]:
    return sorted(map(repr, rows))


def lose_everything(state: Path) -> None:
    shutil.rmtree(state)


def lose_one_table(state: Path) -> None:
    table = random.Random(0).choice(sorted(state.glob("*/tables/one/*")))
    shutil.rmtree(table)


@pytest.mark.parametrize("lose", [lose_everything, lose_one_table])
def test_lost_while_running(
    spark: SparkSession, feed: Feed, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    expected = undisturbed(spark, tmp_path / "undisturbed", 8)
    feed.add(*[batch(seed) for seed in range(5)])
    query = query_over(feed, spark).start(
        tmp_path / "ck",
        state_folder=tmp_path / "state",
        checkpointing=ab.Periodic("1 hour", at_most=3),
    )
    query.process_all_available()
    lose(tmp_path / "state")
    feed.add(*[batch(seed) for seed in range(5, 8)])
    query.process_all_available()
    assert query.status == "running"
    found = query.memory_table("out").to_pylist()
    query.stop()
    assert ordered(found) == ordered(expected)


def test_a_batch_on_which_an_instance_did_not_report_is_run_again(
    spark: SparkSession, feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that failed after Spark had kept its rows takes its report along."""
    feed.add(*[batch(seed) for seed in range(3)])
    took, lost = Reports.take, {"attempts": 0}

    def take(mail: Reports, version: Version) -> dict[tuple[str, int], InstanceReport]:
        reports = took(mail, version)
        # Spark has the rows, so the job that runs operators to their end does not report either.
        if version == 1 and lost["attempts"] < 2:
            lost["attempts"] += 1
            return {key: report for key, report in reports.items() if key != ("one", 0)}
        return reports

    monkeypatch.setattr(Reports, "take", take)
    query = query_over(feed, spark).start(tmp_path / "ck", available_now=True)
    query.await_termination()
    assert [progress.attempts for progress in query.recent_progress] == [1, 2, 1]
    found = query.memory_table("out").to_pylist()
    assert ordered(found) == ordered(undisturbed(spark, tmp_path / "calm", 3))


def test_lost_between_runs(spark: SparkSession, feed: Feed, tmp_path: Path) -> None:
    expected = undisturbed(spark, tmp_path / "undisturbed", 7)
    feed.add(*[batch(seed) for seed in range(4)])
    settings = {
        "state_folder": tmp_path / "state",
        "checkpointing": ab.Never(),
    }
    query = query_over(feed, spark).start(tmp_path / "ck", available_now=True, **settings)  # type: ignore[arg-type]
    query.await_termination()
    found = query.memory_table("out").to_pylist()
    shutil.rmtree(tmp_path / "state")
    feed.add(*[batch(seed) for seed in range(4, 7)])
    again = query_over(feed, spark).start(tmp_path / "ck", available_now=True, **settings)  # type: ignore[arg-type]
    again.await_termination()
    found += again.memory_table("out").to_pylist()
    assert ordered(found) == ordered(expected), "replayed batches are not delivered again"


def test_a_batch_that_was_not_committed_is_replaced(
    spark: SparkSession, feed: Feed, tmp_path: Path
) -> None:
    """The driver dies after its own work on a batch, before Spark notes the batch as done."""
    expected = undisturbed(spark, tmp_path / "undisturbed", 4)
    feed.add(*[batch(seed) for seed in range(4)])
    query = query_over(feed, spark).start(tmp_path / "ck", available_now=True)
    query.await_termination()
    found = query.memory_table("out").to_pylist()
    assert ordered(found) == ordered(expected)
    (tmp_path / "ck" / "spark" / "commits" / "3").unlink()
    (tmp_path / "ck" / "spark" / "commits" / ".3.crc").unlink(missing_ok=True)
    again = query_over(feed, spark).start(tmp_path / "ck", available_now=True)
    again.await_termination()
    assert again.memory_table("out").num_rows == 0, "what is committed is not delivered again"
    assert SparkLogs(str(tmp_path / "ck" / "spark")).committed() == 3


def test_offsets_that_are_gone_are_named(spark: SparkSession, feed: Feed, tmp_path: Path) -> None:
    feed.add(*[batch(seed) for seed in range(3)])
    settings = {"state_folder": tmp_path / "state", "checkpointing": ab.Never()}
    query = query_over(feed, spark).start(tmp_path / "ck", available_now=True, **settings)  # type: ignore[arg-type]
    query.await_termination()
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "ck" / "spark" / "offsets" / "0").unlink()
    with pytest.raises(ab.StateMissing, match="no longer has the offsets of batches 0 to 0"):
        query_over(feed, spark).start(tmp_path / "ck", **settings)  # type: ignore[arg-type]


def newest(folder: Path) -> Path:
    return max(folder.iterdir())


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def damage_a_part(checkpoints: Path) -> None:
    flip_a_bit(newest(next(checkpoints.glob("*/parts"))))


def lose_a_part(checkpoints: Path) -> None:
    newest(next(checkpoints.glob("*/parts"))).unlink()


def damage_a_manifest(checkpoints: Path) -> None:
    flip_a_bit(newest(checkpoints / "manifests"))


@pytest.mark.parametrize("damage", [damage_a_part, lose_a_part, damage_a_manifest])
def test_after_damage_the_checkpoint_before_is_used(
    spark: SparkSession, feed: Feed, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    expected = undisturbed(spark, tmp_path / "undisturbed", 8)
    settings = {"checkpointing": ab.Periodic("1 hour", at_most=2), "available_now": True}
    feed.add(*[batch(seed) for seed in range(6)])
    query = query_over(feed, spark).start(tmp_path / "ck", **settings)  # type: ignore[arg-type]
    query.await_termination()
    found = query.memory_table("out").to_pylist()
    damage(tmp_path / "ck")
    feed.add(*[batch(seed) for seed in range(6, 8)])
    again = query_over(feed, spark).start(tmp_path / "ck", **settings)  # type: ignore[arg-type]
    again.await_termination()
    assert ordered(found + again.memory_table("out").to_pylist()) == ordered(expected)
    (event,) = [event for event in again.events if event.kind == "checkpoint damaged"]
    assert event.details["version"] == 5


def test_a_query_whose_checkpoints_are_all_damaged_runs_everything_again(
    spark: SparkSession, feed: Feed, tmp_path: Path
) -> None:
    expected = undisturbed(spark, tmp_path / "undisturbed", 4)
    feed.add(*[batch(seed) for seed in range(3)])
    query = query_over(feed, spark).start(tmp_path / "ck", available_now=True)
    query.await_termination()
    found = query.memory_table("out").to_pylist()
    for manifest in (tmp_path / "ck" / "manifests").iterdir():
        flip_a_bit(manifest)
    feed.add(batch(3))
    again = query_over(feed, spark).start(tmp_path / "ck", available_now=True)
    again.await_termination()
    assert ordered(found + again.memory_table("out").to_pylist()) == ordered(expected)


@pytest.mark.parametrize("file", ["offsets/2", "offsets/1", "sources/0/2"])
@pytest.mark.parametrize("lost", [False, True], ids=["damaged", "missing"])
def test_damaged_logs_of_spark_are_refused_by_name(
    spark: SparkSession, feed: Feed, tmp_path: Path, file: str, lost: bool
) -> None:
    feed.add(*[batch(seed) for seed in range(3)])
    settings = {"checkpointing": ab.Never(), "state_folder": tmp_path / "state"}
    query = query_over(feed, spark).start(tmp_path / "ck", available_now=True, **settings)  # type: ignore[arg-type]
    query.await_termination()
    shutil.rmtree(tmp_path / "state")  # so that all batches are needed again
    path = tmp_path / "ck" / "spark" / file
    if lost:
        path.unlink()
    else:
        flip_a_bit(path)
    feed.add(batch(3))
    with pytest.raises(ab.AnabranchError, match=path.name):
        query_over(feed, spark).start(
            tmp_path / "ck",
            available_now=True,
            **settings,  # type: ignore[arg-type]
        ).await_termination()


def test_after_a_power_failure_results_are_made_once_more(
    spark: SparkSession, feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything after the checkpoint of version 3 is spoiled as a disk may spoil it."""
    checkpoints, out = tmp_path / "ck", tmp_path / "out"
    settings = {"checkpointing": ab.Periodic("1 hour", at_most=3), "available_now": True}
    given: dict[int, list[int]] = {}

    def run() -> RunningQuery:
        counted = ab.stream(feed.frame(spark)).key_by("k").aggregate(name="one", n=ab.count())
        query = ab.query(
            counted.to_parquet(out),
            counted.for_each_batch(
                lambda df, version: given.update({version: sorted(r.n for r in df.collect())})
            ),
        ).start(checkpoints, **settings)  # type: ignore[arg-type]
        query.await_termination()
        return query

    feed.add(*[batch(seed) for seed in range(8)])
    before = run()
    first = dict(given)
    for manifest in (checkpoints / "manifests").iterdir():
        if int(manifest.stem) > 3:
            manifest.unlink()
    for file in out.glob(f"part-{before.id}-0000000007-*"):
        file.write_bytes(file.read_bytes()[:100])
    for file in out.glob(f"part-{before.id}-0000000006-*"):
        file.unlink()
    shutil.rmtree(checkpoints / "spark" / "commits")
    (checkpoints / "spark" / "offsets" / "3").write_bytes(b"")
    (checkpoints / "spark" / "offsets" / ".4.crc").unlink()
    monkeypatch.setattr("anabranch.coordinator.assembly.boot_id", lambda: "f" * 32)
    feed.add(batch(8))
    with pytest.raises(ab.StateMissing, match="offsets of batch 4"):
        run()  # batch 7 was given to the function, so 4 must have been whole
    sums = checkpoints / "spark" / "offsets"
    SparkLogs(str(checkpoints / "spark")).put_offsets(Version(4), (sums / "4").read_text())
    again = run()
    (event,) = [event for event in again.events if event.kind == "power failure"]
    assert event.details == {"restored": 3, "again": 4}
    assert {version: given[version] for version in first} == first
    counts: dict[int, int] = {}
    expected = []
    for seed in range(9):
        keys = batch(seed)["k"].to_pylist()
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        expected += [(seed, key, counts[key]) for key in set(keys)]
    found = [
        (int(file.name.split("-")[2]), row["k"], row["n"])
        for file in out.glob("part-*.parquet")
        for row in pq.read_table(file).to_pylist()
    ]
    assert sorted(found) == sorted(expected)


def test_an_error_of_the_user_is_told_as_it_was(
    spark: SparkSession, feed: Feed, tmp_path: Path
) -> None:
    feed.add(batch(0))
    query = (
        ab.stream(feed.frame(spark))
        .key_by("k")
        .per_key(explode, state=ab.schema(n=ab.int64), output=ab.schema(n=ab.int64), name="bad")
        .to_memory("out")
        .start(tmp_path / "ck")
    )
    with pytest.raises(ab.QueryFailed, match="the fuse was too short"):
        query.await_termination(60)
    assert query.status.startswith("failed")


def explode(key: object, rows: ab.Rows, state: object) -> None:
    raise RuntimeError("the fuse was too short")


def test_a_batch_with_tasks_that_run_on_is_not_committed_but_run_again(
    spark: SparkSession, tmp_path: Path, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Version, Collection[int]]] = []
    ended = Stages.ended

    def runs_on_once(self: Stages, stages: Collection[int]) -> bool:
        asked.append((query.version, stages))
        return len(asked) != 2 and ended(self, stages)

    feed.add(*[batch(seed) for seed in range(3)])
    query = query_over(feed, spark).start(tmp_path / "ck")
    try:
        query.process_all_available()
        monkeypatch.setattr(Stages, "ended", runs_on_once)
        feed.add(*[batch(seed) for seed in range(3, 6)])
        query.process_all_available()
        failed = [event.details for event in query.events if event.kind == "batch failed"]
        assert [(each["version"], each["attempt"]) for each in failed] == [(4, 1)]
        assert "still runs" in failed[0]["reason"]
        assert [version for version, _ in asked] == [2, 3, 3, 4], "before each commit"
        assert all(len(stages) >= 1 and min(stages) > 0 for _, stages in asked)
        expected = undisturbed(spark, tmp_path / "undisturbed", 6)
        assert query.memory_table("out").to_pylist() == expected
    finally:
        query.stop()

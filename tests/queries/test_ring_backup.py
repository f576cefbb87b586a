"""A query whose state is in fragments at standing nodes, which outlive it."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import anabranch as ab
from anabranch.cli import main
from anabranch.nodes.standing.survey import survey
from anabranch.testing import Feed, LocalRing
from anabranch.testing.rings import hosts

pytestmark = [pytest.mark.spark, pytest.mark.chaos]

WORDS = pa.schema([("word", pa.string())])
TEXTS = ["the river", "the sea", "a river", "the bank of a river", "a sea"]


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRing]:
    with LocalRing(tmp_path_factory.mktemp("ring"), hosts(5, start=90)) as ring:
        yield ring


def start(spark: SparkSession, feed: Feed, work: Path, backup: Any) -> ab.RunningQuery:
    counted = ab.stream(feed.frame(spark)).key_by("word").aggregate(name="counter", n=ab.count())
    folder = work / "memory"
    checkpoints = ab.Periodic(0.1)
    return counted.to_memory("out").start(
        work / "ck", backup=backup, checkpointing=checkpoints, state_folder=folder
    )


def counts(texts: list[str]) -> dict[str, int]:
    return dict(Counter(word for text in texts for word in text.split()))


def state_of(query: ab.RunningQuery) -> dict[str, int]:
    query.process_all_available()
    return {row["word"]: row["n_count"] for row in query.state_table("counter").to_pylist()}


def test_state_outlives_the_query_and_some_nodes(
    spark: SparkSession, ring: LocalRing, tmp_path: Path
) -> None:
    feed = Feed(tmp_path / "input", WORDS)
    backup = ab.Fragments(data=2, parity=2, ring=str(ring.file))
    query = start(spark, feed, tmp_path, backup)
    for text in TEXTS[:3]:
        feed.add([{"word": word} for word in text.split()])
        assert state_of(query)
        query.checkpoint()
    assert state_of(query) == counts(TEXTS[:3])
    query.stop()
    shutil.rmtree(tmp_path / "memory")
    assert list((tmp_path / "ck").glob("**/*.arrow")) == [], "no part is in the checkpoint folder"
    secret = ring.ring("").access.key.to_hex()
    for path in (tmp_path / "ck").rglob("*.json"):
        assert secret not in path.read_text(errors="replace"), "a manifest has no key"

    store = ring.store(2, 2, query=query.id)
    names = store.list()
    assert names
    assert all(name.startswith(f"{query.id}/") for name in names)
    pieces = survey(store.ring, query.id, names[-1]).pieces
    killed = [piece.node.host for piece in pieces[:2]]
    ring.kill(killed)

    read = spark.read.format("anabranch.state").load(str(tmp_path / "ck"))
    assert {row["word"]: row["n_count"] for row in read.collect()} == counts(TEXTS[:3])
    for command in (["state", "list"], ["state", "show"]):
        told = CliRunner().invoke(main, [*command, str(tmp_path / "ck")])
        assert told.exit_code == 0, told.output
        assert "counter" in told.output
    found = CliRunner().invoke(
        main, ["ring", "find", names[-1], "--ring", str(ring.file), "--query", query.id]
    )
    assert "enough" in found.output, found.output
    told = CliRunner().invoke(main, ["ring", "status", "--ring", str(ring.file)])
    assert told.exit_code == 0, told.output

    again = start(spark, feed, tmp_path, backup)
    for text in TEXTS[3:]:
        feed.add([{"word": word} for word in text.split()])
    assert state_of(again) == counts(TEXTS)
    again.stop()
    ring.start(killed)
    ring.wait_closed()
    kept = ring.store(2, 2, query=query.id).list()
    assert len(kept) < 12, "what no checkpoint needs is deleted"


def test_m_and_k_of_each_save_follow_what_was_measured(
    spark: SparkSession, ring: LocalRing, tmp_path: Path
) -> None:
    feed = Feed(tmp_path / "input", WORDS)
    adapt = ab.Adapt(prefer=ab.Prefer.STORAGE, reliability=0.9)
    backup = ab.Fragments(data=2, parity=2, ring=str(ring.file), adapt=adapt)
    query = start(spark, feed, tmp_path, backup)

    def adapted() -> bool:
        return any(event.kind == "fragments adapted" for event in query.events)

    def shapes() -> set[tuple[int, int]]:
        store = ring.store(2, 2, query=query.id)
        found = (survey(store.ring, query.id, name).newest() for name in store.list())
        return {(each[0].name.data, each[0].name.total) for each in found if each}

    texts: list[str] = []
    while len(texts) < 20 and not (adapted() and (4, 5) in shapes()):
        texts.append(TEXTS[len(texts) % len(TEXTS)])
        feed.add([{"word": word} for word in texts[-1].split()])
        assert state_of(query) == counts(texts)
        query.checkpoint()
    (told,) = (event for event in query.events if event.kind == "fragments adapted")
    assert (told.details["before"], told.details["data"], told.details["parity"]) == ([2, 2], 4, 1)
    assert (4, 5) in shapes()
    fragments = query.progress.fragments
    assert fragments is not None
    assert (fragments.data, fragments.parity) == (4, 1)
    query.stop()
    again = start(spark, feed, tmp_path, backup)
    assert state_of(again) == counts(texts)
    again.stop()


def test_a_ring_with_too_few_nodes_is_an_event(
    spark: SparkSession, ring: LocalRing, tmp_path: Path
) -> None:
    feed = Feed(tmp_path / "input", WORDS)
    query = start(spark, feed, tmp_path, ab.Fragments(data=4, parity=3, ring=str(ring.file)))
    for text in TEXTS[:3]:
        feed.add([{"word": word} for word in text.split()])
        assert state_of(query)
        query.checkpoint()
    (told,) = (event for event in query.events if event.kind == "fragments lowered")
    assert dict(told.details) == {"wanted": [4, 3], "data": 2, "parity": 3, "nodes": 5}
    assert "checkpoints are in 2 + 3 fragments" in str(told)
    query.stop()


def test_what_cannot_be_is_refused_before_anything_starts(
    spark: SparkSession, ring: LocalRing, tmp_path: Path
) -> None:
    feed = Feed(tmp_path / "input", WORDS)
    for backup, why in (
        (ab.Fragments(2, 2, ring=str(tmp_path / "none")), "cannot read"),
        (ab.Fragments(20, 12, ring=str(ring.file)), "do not fit in a leaf set of 32"),
    ):
        with pytest.raises(ab.PlanError, match=why):
            start(spark, feed, tmp_path, backup)
    with pytest.raises(ab.PlanError, match="--capacity"):
        ab.Fragments(2, 2, ring=str(ring.file), capacity="1 GB")
    assert not (tmp_path / "ck").exists()
    assert not (tmp_path / "memory").exists()

"""The order in which a batch is brought to its end, and what a store that fails costs it."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest

from anabranch.coordinator.commits import Commit, CommitLog
from anabranch.coordinator.completion import Completion
from anabranch.coordinator.epochs import Reign
from anabranch.coordinator.failures import lost_worker
from anabranch.coordinator.folder import CheckpointFolder
from anabranch.coordinator.identity import Identity
from anabranch.coordinator.ledger import Ledger
from anabranch.errors import Deposed, DidNotHappen, MayHaveHappened, StoreError
from anabranch.protocols.orders import RunBatch
from anabranch.spark.logs import SparkLogs, digest
from anabranch.spark.sinks.simple import FunctionSink, MemorySink
from anabranch.spark.sinks.sink import Delivery, Sink
from anabranch.testing import FaultyStore, MemoryStore
from anabranch.units import Version

OFFSETS = 'v1\n{"batchTimestampMs": 1}\n{"at": 1}'


class Story:
    """What was done, in its order."""

    def __init__(self, folder: Path) -> None:
        self.done: list[str] = []
        self.fails: dict[str, Exception] = {}
        at = CheckpointFolder.of(folder)
        known = Identity("q", 0, {}, {}, asked={}, boot="b")
        reign = Reign.begin(at.store, "test")
        (folder / "spark" / "offsets").mkdir(parents=True)
        for version in range(9):
            (folder / "spark" / "offsets" / str(version)).write_text(OFFSETS)
        logs = SparkLogs(at.spark)
        self.ledger = Ledger(
            at.store, at.log, at.store, reign, known, {}, logs, logs.newest_offsets
        )
        self.watch(reign, "check")
        self.watch(logs, "flush")
        self.watch(self.ledger.commits, "append")

    def watch(self, thing: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(thing, name)

        def watched(*args: Any) -> Any:
            self.done.append(name)
            if name in self.fails:
                raise self.fails.pop(name)
            return real(*args)

        setattr(thing, name, watched)

    def sink(self, name: str, *, outside: bool = False) -> Sink:
        sink: Any = FunctionSink(print) if outside else MemorySink(name)
        told = self

        class Watched(type(sink)):  # type: ignore[misc]
            def commit(self, delivery: Delivery) -> None:
                told.done.append(name)
                if name in told.fails:
                    raise told.fails.pop(name)

        return Watched(print) if outside else Watched(name)  # type: ignore[no-any-return]


def run(version: int, *, deliver: bool = True) -> RunBatch:
    return RunBatch(Version(version), 1, 7, {}, (), (), deliver=deliver)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_results_are_shown_once_the_query_is_known_to_be_ours_and_then_committed(
    story: Story,
) -> None:
    completion = Completion("q", [story.sink("a"), story.sink("b")], story.ledger)
    delivery = completion.begin(run(0))
    assert story.done == []
    commit = completion.end(run(0), delivery, {"op": (5,)})
    assert story.done == ["check", "a", "b", "check", "append"]
    assert commit == Commit(Version(0), {"op": (5,)}, digest(OFFSETS), 7)
    assert story.ledger.commits.latest() == commit


def test_a_sink_outside_is_given_nothing_before_its_offsets_are_flushed(story: Story) -> None:
    sinks = [story.sink("a"), story.sink("outside", outside=True)]
    completion = Completion("q", sinks, story.ledger)
    delivery = completion.begin(run(0))
    assert story.done == ["flush"]
    completion.end(run(0), delivery, {})
    assert story.done == ["flush", "check", "a", "outside", "check", "append"]


def test_the_flush_of_an_attempt_is_over_when_the_attempt_is(story: Story) -> None:
    completion = Completion("q", [story.sink("outside", outside=True)], story.ledger)
    logs, flushing, go_on = story.ledger.spark, Event(), Event()
    flush = logs.flush

    def slow(version: Version) -> None:
        flushing.set()
        assert go_on.wait(60)
        flush(version)

    logs.flush = slow  # type: ignore[method-assign]
    with suppress(ZeroDivisionError), completion.begun(run(0)):
        assert flushing.wait(60)
        assert story.done == []
        Timer(0.1, go_on.set).start()
        raise ZeroDivisionError
    assert story.done == ["flush"]
    with completion.begun(run(0)) as delivery:
        assert delivery() is delivery()
        assert story.done == ["flush", "flush"]


def test_offsets_that_cannot_be_flushed_keep_a_batch_from_its_sinks(story: Story) -> None:
    completion = Completion("q", [story.sink("outside", outside=True)], story.ledger)
    story.fails["flush"] = DidNotHappen("full")
    with completion.begun(run(0)) as delivery, pytest.raises(DidNotHappen, match="full"):
        delivery()


def test_what_was_delivered_before_is_committed_alone(story: Story) -> None:
    completion = Completion("q", [story.sink("outside", outside=True)], story.ledger)
    order = run(0, deliver=False)
    completion.end(order, completion.begin(order), {})
    assert story.done == ["check", "append"]


def test_sinks_look_for_results_of_attempts_that_may_have_come_half_way(story: Story) -> None:
    completion = Completion("q", [story.sink("a"), story.sink("b")], story.ledger)

    def attempt(version: int, *, deliver: bool = True) -> bool:
        order = run(version, deliver=deliver)
        delivery = completion.begin(order)
        completion.end(order, delivery, {})
        return delivery.first

    attempt(0, deliver=False)
    assert attempt(1), "an earlier run may have died"
    assert not attempt(2)
    for failing in ["b", "append"]:
        story.fails = {failing: DidNotHappen("full")}
        with pytest.raises(DidNotHappen):
            attempt(3)
        assert completion.begin(run(3)).first
    story.fails = {"check": DidNotHappen("no answer")}
    with pytest.raises(DidNotHappen):
        attempt(3)
    assert attempt(3)
    assert not attempt(4)
    completion.begin(run(5))  # its jobs fail: no sink has seen anything
    assert not attempt(5)


def test_a_driver_that_was_deposed_shows_nothing(story: Story, tmp_path: Path) -> None:
    completion = Completion("q", [story.sink("a")], story.ledger)
    delivery = completion.begin(run(0))
    Reign.begin(CheckpointFolder.of(tmp_path).store, "another")
    with pytest.raises(Deposed):
        completion.end(run(0), delivery, {})
    assert story.done == ["check"]


def test_what_another_run_has_delivered_is_taken_over(story: Story, tmp_path: Path) -> None:
    taken: list[tuple[str, int]] = []

    class Taking(MemorySink):
        def resume(self, query: str, after: Version) -> None:
            taken.append((query, after))

    sinks = [Taking("a"), FunctionSink(print), Taking("b")]
    Completion("q", sinks, story.ledger).take_over(Version(4))
    assert taken == [("q", 4), ("q", 4)]


# A store that fails


def commit(version: int) -> Commit:
    return Commit(Version(version), {"op": (version,)}, "x", 1)


class Unreliable(MemoryStore):
    """Fails with an error, before or after it has done what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, StoreError] = {}
        self.after: dict[str, StoreError] = {}

    def _fail(self, errors: dict[str, StoreError], doing: str) -> None:
        if doing in errors:
            raise errors[doing]

    def put(self, name: str, data: Any) -> None:
        self._fail(self.before, "put")
        super().put(name, data)
        self._fail(self.after, "put")

    def get(self, name: str, offset: int = 0, length: int | None = None) -> Any:
        self._fail(self.before, "get")
        return super().get(name, offset, length)

    def delete(self, name: str) -> None:
        self._fail(self.before, "delete")
        super().delete(name)


def test_a_commit_that_may_have_happened_and_has_is_one() -> None:
    store = Unreliable()
    log = CommitLog(store)
    store.after = {"put": MayHaveHappened("no answer")}
    log.append(commit(0))
    assert log.latest() == commit(0)


@pytest.mark.parametrize("blind", [False, True])
def test_a_commit_of_which_nobody_knows_is_made_again(blind: bool) -> None:
    store = Unreliable()
    log = CommitLog(store)
    log.append(commit(0))
    if blind:
        store.after["put"] = store.before["get"] = DidNotHappen("no answer")
        store.after["put"] = MayHaveHappened("no answer")
    else:
        store.before["put"] = MayHaveHappened("no answer")
    with pytest.raises(MayHaveHappened) as failed:
        log.append(commit(1))
    assert lost_worker(failed.value), "it costs an attempt"
    store.before, store.after = {}, {}
    log.append(commit(1))
    assert log.latest() == commit(1)


def test_an_older_commit_in_the_same_place_is_not_taken_for_this_one() -> None:
    store = Unreliable()
    log = CommitLog(store)
    log.append(Commit(Version(0), {"op": (4,)}, "x", 1))
    store.before["put"] = MayHaveHappened("no answer")
    with pytest.raises(MayHaveHappened):
        log.append(commit(0))


def test_old_commits_that_cannot_be_removed_go_with_a_later_one() -> None:
    store = Unreliable()
    log = CommitLog(store, keep=3)
    for version in range(5):
        log.append(commit(version))
    store.before["delete"] = DidNotHappen("read-only")
    for version in range(5, 9):
        log.append(commit(version))
    assert log.latest() == commit(8)
    assert len(store.list("commits/")) == 7
    store.before = {}
    log.append(commit(9))
    assert len(store.list("commits/")) == 3
    assert log.latest() == commit(9)


def test_spark_logs_that_cannot_be_read_or_flushed_cost_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path)
    logs = story.ledger.spark

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("anabranch.spark.logs.flush", fail)
        with pytest.raises(DidNotHappen, match=r"Spark's logs .* batch 0: .*Input/output error"):
            logs.flush(Version(0))
    (tmp_path / "spark" / "offsets" / "0").unlink()
    (tmp_path / "spark" / "offsets" / "0").mkdir()
    with pytest.raises(DidNotHappen, match=r"cannot read .*offsets/0"):
        logs.offsets(Version(0))


@pytest.mark.parametrize("seed", range(30))
def test_through_a_store_that_fails_now_and_then_every_commit_gets_there(seed: int) -> None:
    store = FaultyStore(MemoryStore(), seed=seed, rate=0.4)
    log = CommitLog(store, keep=5)
    for version in range(40):
        for _ in range(60):
            with suppress(StoreError):
                log.append(commit(version))
                break
        assert CommitLog(store.store).latest() == commit(version)
    store.rate = 0.0
    log.append(commit(40))
    assert len(store.store.list("commits/")) == 5

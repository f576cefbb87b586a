"""How a query ends, and how what was begun in it is given up: loop, shell and stream together."""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from anabranch.coordinator import stream
from anabranch.errors import QueryFailed
from anabranch.nodes.local import LocalNode
from anabranch.nodes.requests import Capture, Make, Request
from anabranch.protocols.events import ReadState, Rebalance, Scale, TakeCheckpoint
from coordinator.mini import PATIENCE, Mini, PlayedSpark, expected, results


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Mini]:
    (tmp_path / "disk").mkdir()
    mini = Mini(tmp_path / "disk", tmp_path / "memory", None, every=3)
    mini.start()
    yield mini
    mini.end(killed=True)


def check_results(mini: Mini) -> None:
    found = results(mini.disk)
    assert found == expected(len(found))


class Held:
    """Requests of a kind are answered when a test lets them."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: type[Request[Any]]) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        ask = LocalNode.ask

        def held(node: LocalNode, request: Request[Any], deadline: Any) -> Any:
            answer = ask(node, request, deadline)
            if isinstance(request, kind):
                self.reached.set()
                assert self.go_on.wait(PATIENCE)
            return answer

        patch.setattr(LocalNode, "ask", held)


def captures(folder: Path) -> list[Path]:
    return list((folder / "memory").glob("*/captures/*"))


# Giving up


def test_a_scale_that_is_given_up_has_changed_nothing(
    query: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        query.step()
    loop = query.assembly.loop
    routed, slices = loop.query.routed, loop.query.slices
    with monkeypatch.context() as patch:
        held = Held(patch, Make)
        done = loop.command(lambda number: Scale(number, "op", 5))
        assert held.reached.wait(PATIENCE)
        assert done.cancel()
        held.go_on.set()
    with pytest.raises(CancelledError):
        done.result()
    assert (loop.query.routed, loop.query.slices, loop.query.moves) == (routed, slices, {})
    assert query.told("scale") == query.told("scale failed") == []
    for _ in range(3):
        query.step()
    query.scale(5)
    assert not loop.command(lambda number: Scale(number, "op", 5)).cancelled()
    query.step()
    check_results(query)


def test_a_scale_that_is_done_cannot_be_given_up(query: Mini) -> None:
    query.step()
    loop = query.assembly.loop
    done = loop.command(lambda number: Scale(number, "op", 3))
    done.result(PATIENCE)
    assert not done.cancel()
    assert loop.query.routed["op"].routing.instances == 3
    query.step()
    check_results(query)


@pytest.mark.parametrize("kind", [TakeCheckpoint, Rebalance])
def test_other_commands_are_given_up_likewise(
    query: Mini, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    query.step()
    loop = query.assembly.loop
    with monkeypatch.context() as patch:
        held = Held(patch, Make)
        scaled = loop.command(lambda number: Scale(number, "op", 3))  # which the others wait for
        assert held.reached.wait(PATIENCE)
        waiting = loop.command(kind)
        assert waiting.cancel()
        held.go_on.set()
    scaled.result(PATIENCE)
    query.step()
    check_results(query)


def test_nothing_is_left_of_a_read_that_is_given_up(
    query: Mini, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.step()
    loop = query.assembly.loop
    with monkeypatch.context() as patch:
        held = Held(patch, Capture)
        read = loop.command(lambda number: ReadState(number, "op"))
        assert held.reached.wait(PATIENCE)
        assert len(captures(tmp_path)) > 0
        assert read.cancel()
        held.go_on.set()
    query.step()
    query.end(killed=True)  # so that all orders are carried out
    assert captures(tmp_path) == []


# The end


def test_why_a_query_has_ended_is_told(query: Mini) -> None:
    query.step()
    query.end(killed=False)
    (told,) = query.told("query stopped")
    assert told == {"version": 0, "reason": "it was stopped", "failed": False}
    assert query.told("driver deposed") == []


def test_that_another_driver_has_taken_over_is_told(query: Mini, tmp_path: Path) -> None:
    query.step()
    elsewhere = Mini(query.disk, tmp_path / "elsewhere", None, every=1)
    elsewhere.start()
    try:
        with query.changed:
            assert query.changed.wait_for(lambda: query._over, PATIENCE)
        query.end(killed=True)
        (deposed,) = query.told("driver deposed")
        assert deposed["driver"] == 1
        assert deposed["reason"].startswith("driver 2 has taken the query over")
        (stopped,) = query.told("query stopped")
        assert stopped == {"version": 0, "reason": deposed["reason"], "failed": True}
    finally:
        elsewhere.end(killed=True)


def test_a_stop_does_not_wait_until_spark_has_started(
    query: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting, go_on = threading.Event(), threading.Event()
    start = PlayedSpark.start
    started: list[Any] = []

    def slow(spark: PlayedSpark, take: Any, *, once: bool) -> Any:
        starting.set()
        assert go_on.wait(PATIENCE)
        started.append(start(spark, take, once=once))
        return started[-1]

    query.step()
    monkeypatch.setattr(PlayedSpark, "start", slow)
    monkeypatch.setattr(stream, "_FIRST_PAUSE", 0.001)
    fail(query, 1)
    query._wanted += 1
    with query.changed:
        query.changed.notify_all()
    assert starting.wait(PATIENCE)
    stopped = threading.Thread(target=query.assembly.stream.stop)
    stopped.start()
    stopped.join(PATIENCE)
    assert not stopped.is_alive(), "Spark's query is being started all the while"
    query._wanted = 0  # so that it would wait for a batch, and not end by itself
    go_on.set()
    query._supervisor.join(PATIENCE)
    assert not query._supervisor.is_alive()
    assert [each._thread.is_alive() for each in started] == [False]


# Outages

OUTAGE = "java.io.IOException: the name node does not answer"


def fail(query: Mini, times: int, error: str = OUTAGE) -> list[float]:
    """Spark cannot plan its next batches, so many times; when it tried."""
    tried: list[float] = []
    plan = Mini._plan

    def failing(version: int, most: int = 5) -> None:
        tried.append(time.monotonic())
        if len(tried) <= times:
            raise RuntimeError(error)
        plan(query, version, most)

    query._plan = failing  # type: ignore[method-assign]
    return tried


@pytest.mark.parametrize(
    "error", [OUTAGE, "[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log."]
)
def test_an_outage_does_not_end_the_query(
    query: Mini, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """Spark's query is started again and again, after pauses that grow."""
    monkeypatch.setattr(stream, "_FIRST_PAUSE", 0.02)
    monkeypatch.setattr(stream, "_LONGEST_PAUSE", 0.3)
    query.step()
    tried = fail(query, 8, error)
    query.step()
    assert query.assembly.batches.committed == 1
    assert len(tried) == 9
    pauses = [later - before for before, later in itertools.pairwise(tried)]
    least = [0.02, 0.04, 0.08, 0.16, 0.3, 0.3, 0.3, 0.3]
    assert all(pause >= wanted for pause, wanted in zip(pauses, least, strict=True)), pauses
    query.step()
    check_results(query)


def test_an_outage_that_does_not_end_ends_the_query(
    query: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(stream, "_RESTART_SECONDS", 1.0)
    query.step()
    tried = fail(query, 1000)
    with pytest.raises(QueryFailed, match="the name node does not answer"):
        query.step()
    assert tried[-1] - tried[0] >= 1.0
    assert len(tried) > 3


def test_outages_with_a_long_time_between_them_do_not_add_up(
    query: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query that has nothing to do commits nothing for hours."""
    monkeypatch.setattr(stream, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(stream, "_RESTART_SECONDS", 0.5)
    query.step()
    time.sleep(0.6)  # longer than an outage may last
    fail(query, 3)
    query.step()
    assert query.assembly.batches.committed == 1


def test_an_error_that_comes_again_ends_the_query_at_once(query: Mini) -> None:
    query.step()
    tried = fail(query, 1000, "[UNRESOLVED_COLUMN] there is no column x")
    with pytest.raises(QueryFailed, match="there is no column x"):
        query.step()
    assert len(tried) == 1


def test_a_stop_does_not_wait_for_an_outage_to_end(
    query: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_FIRST_PAUSE", 100.0)
    query.step()
    tried = fail(query, 1000)
    query._wanted += 1
    with query.changed:
        query.changed.notify_all()
    while not tried:
        time.sleep(0.001)
    began = time.monotonic()
    query.assembly.stream.stop()
    query._supervisor.join(PATIENCE)
    assert time.monotonic() - began < 20
    assert query.failure is None

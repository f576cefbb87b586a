"""Loop, shell, ledger and tables together: checkpoints, merges, moves, losses and takeovers."""

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest

from anabranch.errors import (
    Deposed,
    DidNotHappen,
    MayHaveHappened,
    QueryFailed,
    StateFull,
    StateMissing,
)
from anabranch.nodes.captures import CAPTURES
from anabranch.nodes.local import TABLES
from anabranch.protocols.events import ReadState
from anabranch.worker import slices as worker
from coordinator.mini import KEYS, PATIENCE, QUERY, Killed, Mini, expected, results


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Mini]:
    """A query with a checkpoint after every second batch, and chains of at most three parts."""
    (tmp_path / "disk").mkdir()
    mini = Mini(tmp_path / "disk", tmp_path / "memory", None, every=1, longest_chain=3)
    mini.start()
    yield mini
    mini.end(killed=True)


def state_of(mini: Mini, version: int) -> Counter[int]:
    """The count of each key after a batch, from the results."""
    out = mini.disk / "out"
    upto = f"part-{QUERY}-{version + 1:010d}"
    files = [file for file in out.glob("part-*.parquet") if file.name < upto]
    numbers = [n for file in files for n in pq.read_table(file)["number"].to_pylist()]
    return Counter(number % KEYS for number in numbers)


def check_stored(mini: Mini) -> int:
    """The newest version, which has the state of then."""
    version, stored = mini.stored()
    assert stored == state_of(mini, version)
    return version


def wait_until(so: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for what other threads do."""
    until = time.monotonic() + seconds
    while not so():
        if time.monotonic() > until:
            raise TimeoutError(f"not so after {seconds:g} s")
        time.sleep(0.01)


def check_results(mini: Mini) -> None:
    found = results(mini.disk)
    assert found == expected(len(found))


def test_every_version_is_the_state_of_then_however_often_chains_are_merged(query: Mini) -> None:
    versions = set()
    while len(query.told("merge")) < 3:
        query.step()
        if query.assembly.loop.query.published:
            versions.add(check_stored(query))
    assert len(versions) > 3
    assert not query.told("checkpoint failed")
    check_results(query)


def test_files_that_no_version_needs_go(query: Mini) -> None:
    while len(query.told("merge")) < 2:
        query.step()
    query.step()
    query.step()
    query.end(killed=True)  # at rest, so all orders are carried out
    state = query.assembly.loop.query
    needed = {p.name for each in state.published for p in each.parts["op"]}
    needed |= {part.name for part in state.inventory["op"].parts}
    assert set(query.assembly.ledger.parts.list(f"{QUERY}/parts/")) == needed


def test_after_a_chain_that_cannot_be_merged_everything_is_saved_again(query: Mini) -> None:
    damaged: set[str] = set()
    while not query.told("merge failed"):
        query.step()
        for part in query.assembly.loop.query.inventory["op"].parts:
            # Which of its full parts a chain will have depends on how much changes meanwhile.
            if part.base is None and part.instance == 0 and part.name not in damaged:
                query.assembly.ledger.parts.put(part.name, b"something else")
                damaged.add(part.name)
    query.step()
    query.step()
    query.step()
    named = {part.name for part in query.assembly.loop.query.published[-1].parts["op"]}
    assert not damaged & named
    check_stored(query)


def test_a_capture_without_room_costs_a_checkpoint_and_no_batch(
    query: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    while not query.assembly.loop.query.published:
        query.step()
    before = query.assembly.loop.query.published[-1].version

    def no_room(*_: Any) -> Path:
        raise StateFull("no room for a capture")

    query.tolerant = True
    with monkeypatch.context() as patch:
        patch.setattr(worker, "write_capture", no_room)
        query.step()
        query.step()
    assert query.told("checkpoint failed")[0]["reason"] == "no room for a capture"
    assert query.checkpoint() > before
    check_stored(query)
    check_results(query)


def test_a_checkpoint_by_hand_beside_others(query: Mini) -> None:
    for _ in range(4):
        query.step()
        assert query.checkpoint() == check_stored(query)
    check_results(query)


@pytest.mark.parametrize("all_of_them", [True, False])
def test_tables_that_are_lost_while_it_runs_are_made_anew(
    query: Mini, tmp_path: Path, all_of_them: bool
) -> None:
    for _ in range(5):
        query.step()
    tables = sorted((tmp_path / "memory").glob(f"*/{TABLES}/op/*"))
    assert len(tables) == 2
    for table in tables if all_of_them else tables[:1]:
        shutil.rmtree(table)
    before = len(results(query.disk))
    query.step()
    query.step()
    assert len(results(query.disk)) > before
    check_results(query)
    assert query.told("going back")
    assert query.failure is None


def test_what_a_driver_that_was_killed_has_captured_is_dropped(query: Mini, tmp_path: Path) -> None:
    folder = tmp_path / "memory" / QUERY / CAPTURES
    for _ in range(3):
        query.step()

    def step() -> None:
        with suppress(Killed, QueryFailed):
            query.step()

    # The process is gone before its node has stored what the batches captured.
    with mock.patch.object(query.assembly.asking, "store", side_effect=Killed):
        stepping = threading.Thread(target=lambda: [step() for _ in range(2)])
        stepping.start()
        wait_until(lambda: folder.is_dir() and len(list(folder.iterdir())) == 2)
        query.end(killed=True)
    stepping.join(PATIENCE)
    left = set(folder.iterdir())
    again = Mini(query.disk, tmp_path / "memory", None, every=1)
    again.start()
    try:
        wait_until(lambda: not left & set(folder.iterdir()))
        again.step()
        wait_until(lambda: not any(folder.iterdir()))
        check_results(again)
    finally:
        again.end(killed=True)


def test_a_read_leaves_no_files(query: Mini, tmp_path: Path) -> None:
    folder = tmp_path / "memory" / QUERY / CAPTURES
    query.step()
    loop, asking = query.assembly.loop, query.assembly.asking
    found = loop.command(lambda number: ReadState(number, "op"))
    first, second = found.result(PATIENCE)
    assert asking.fetch(first).size > 0
    Path(second.file).unlink()
    with pytest.raises(StateMissing, match="there is no capture"):
        asking.fetch(second)
    query.step()  # for which the read is not waited
    found.release()
    wait_until(lambda: not any(folder.iterdir()))


def test_tables_in_place_are_used_by_the_next_driver(query: Mini, tmp_path: Path) -> None:
    for _ in range(5):
        query.step()
    slices = set(query.assembly.loop.query.slices)
    query.end(killed=True)
    again = Mini(query.disk, tmp_path / "memory", None, every=1)
    again.start()
    try:
        assert set(again.assembly.loop.query.slices) == slices
        again.step()
        check_results(again)
    finally:
        again.end(killed=True)


def test_a_query_that_was_stopped_gives_its_memory_back(query: Mini, tmp_path: Path) -> None:
    for _ in range(3):
        query.step()
    query.end(killed=False)
    assert not list((tmp_path / "memory").glob(f"*/{TABLES}/op/*"))
    assert query.assembly.loop.query.published[-1].version == 2
    again = Mini(query.disk, tmp_path / "memory", None, every=1)
    again.start()
    try:
        again.step()
        check_results(again)
    finally:
        again.end(killed=True)


@pytest.mark.parametrize("ways", [(4, 1), (1, 3), (3, 3), (8, 2, 5)])
def test_an_operator_is_divided_in_another_way_while_it_runs(
    query: Mini, ways: tuple[int, ...]
) -> None:
    for instances in ways:
        query.step()
        query.scale(instances)
        assert query.assembly.loop.query.routed["op"].routing.instances == instances
        for _ in range(3):
            query.step()
        check_stored(query)
    check_results(query)


def test_the_next_driver_goes_on_after_moves(query: Mini, tmp_path: Path) -> None:
    query.step()
    query.scale(5)
    query.step()
    query.end(killed=True)
    shutil.rmtree(tmp_path / "memory")
    again = Mini(query.disk, tmp_path / "memory", None, every=1)
    again.start()
    try:
        assert again.assembly.loop.query.routed["op"].routing.instances == 5
        again.step()
        check_results(again)
    finally:
        again.end(killed=True)


def test_a_driver_that_another_one_has_replaced_ends_though_nothing_comes(
    query: Mini, tmp_path: Path
) -> None:
    query.step()
    elsewhere = Mini(query.disk, tmp_path / "elsewhere", None, every=1)
    elsewhere.start()
    try:
        with query.changed:
            assert query.changed.wait_for(lambda: query._over, 60)
        assert isinstance(query.failure, Deposed)
        elsewhere.step()
        check_results(elsewhere)
    finally:
        elsewhere.end(killed=True)


def test_a_batch_that_a_deposed_driver_has_planned_is_run_as_planned(query: Mini) -> None:
    """Spark refuses to write what is there, and ends; it is started again."""
    for _ in range(3):
        query.step()

    def plan(version: int, most: int = 5) -> None:
        del query._plan  # type: ignore[attr-defined]
        query._plan(version, most)
        raise RuntimeError("[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log.")

    query._plan = plan  # type: ignore[method-assign]
    query.step()
    assert query.assembly.batches.committed == 3
    query.step()
    check_results(query)
    assert query.failure is None


def test_a_driver_that_another_one_has_replaced_delivers_nothing(
    query: Mini, tmp_path: Path
) -> None:
    """It was paused in the middle of a batch, before the sink's commit."""
    for _ in range(4):
        query.step()
    reached, go_on = threading.Event(), threading.Event()

    def paused(where: str) -> None:
        if where == "counted":
            reached.set()
            assert go_on.wait(60)

    query.may_die = paused  # type: ignore[method-assign]
    late: list[BaseException] = []

    def step() -> None:
        try:
            query.step()
        except BaseException as error:
            late.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    assert reached.wait(60)
    elsewhere = Mini(query.disk, tmp_path / "elsewhere", None, every=1)
    elsewhere.start()
    try:
        for _ in range(3):
            elsewhere.step()
        before = results(query.disk)
        go_on.set()
        thread.join(60)
        assert [type(each) for each in late] == [Deposed]
        assert results(query.disk) == before == expected(len(before))
        elsewhere.step()
        check_results(elsewhere)
    finally:
        elsewhere.end(killed=True)


@pytest.mark.parametrize("kind", [DidNotHappen, MayHaveHappened])
def test_a_commit_that_fails_costs_an_attempt_and_not_the_query(
    query: Mini, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    query.step()
    log, failures = query.assembly.ledger.log, [kind("no answer"), kind("no answer")]
    put = log.put

    def failing(name: str, data: Any) -> None:
        if failures:
            raise failures.pop()
        put(name, data)

    monkeypatch.setattr(log, "put", failing)
    query.step()
    query.step()
    told = query.told("batch failed")
    assert [(each["version"], each["attempt"], each["reason"]) for each in told] == [
        (1, 1, "no answer"), (1, 2, "no answer"),
    ]  # fmt: skip
    assert query.assembly.batches.committed == 2
    check_results(query)


def test_a_query_whose_commits_always_fail_ends(
    query: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(name: str, data: Any) -> None:
        raise DidNotHappen("the disk is full")

    monkeypatch.setattr("anabranch.protocols.batches._LONGEST_PAUSE", 1)
    monkeypatch.setattr(query.assembly.ledger.log, "put", failing)
    with pytest.raises((QueryFailed, DidNotHappen), match="the disk is full"):
        query.step()
    assert len(query.told("batch failed")) == 8
